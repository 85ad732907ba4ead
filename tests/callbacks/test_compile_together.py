"""Compile around what other items put into a network: one graph per region still."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import Block, deep, fit, graphs, odd
from models import Classifier, residual_net
from torch import nn
from torch._dynamo.utils import counters

from lightning_perf._item import PerfCallback, statuses
from lightning_perf.callbacks import ChannelsLast, DropConvBias, KeepInFP32
from lightning_perf.callbacks._checkpoint.forward import recomputed_blocks
from lightning_perf.callbacks._regions import staged
from lightning_perf.callbacks.activation_checkpointing import ActivationCheckpointing, checkpointed
from lightning_perf.callbacks.compile import Compile

pytestmark = pytest.mark.usefixtures("no_compiled_code")


class Dropping(Block):
    """A block with dropout, whose mask a recomputation must draw again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(nn.functional.dropout(torch.relu(self.linear(x)), 0.3, self.training))


def deep_with_dropout() -> nn.Sequential:
    net = deep(0)
    net[1] = nn.Sequential(*[Dropping() for _ in range(3)])
    return net


INSIDE = [
    pytest.param(lambda: ActivationCheckpointing(), deep, {}, id="checkpointing"),
    pytest.param(
        lambda: ActivationCheckpointing(policy="selective"), deep, {}, id="checkpointing-selective"
    ),
    pytest.param(
        lambda: KeepInFP32(["LayerNorm"]), deep, {"precision": "bf16-mixed"}, id="KeepInFP32"
    ),
    pytest.param(lambda: DropConvBias(), residual_net, {}, id="DropConvBias"),
    pytest.param(lambda: ChannelsLast(), residual_net, {}, id="ChannelsLast"),
]


@pytest.mark.parametrize("regions", ["auto", "whole"])
@pytest.mark.parametrize(("item", "net", "kwargs"), INSIDE)
def test_an_item_inside_a_region_breaks_no_graph_and_compiles_none_again(
    item: Any, net: Any, kwargs: dict[str, Any], regions: str
) -> None:
    seen: list[int] = []

    class Counting(Classifier):
        def on_train_epoch_end(self) -> None:
            seen.append(graphs())

    inside: PerfCallback = item()
    plain, module = Classifier(net(), lr=0.01), Counting(net(), lr=0.01)
    module.load_state_dict(plain.state_dict())
    fit(plain, item(), data=odd(), max_epochs=2, **kwargs)
    compile_it = Compile(regions, backend="aot_eager", fullgraph=True)
    run = fit(module, compile_it, inside, data=odd(), max_epochs=2, **kwargs)
    assert all(status.active for status in statuses(run))
    assert not counters["graph_break"]
    own_code = isinstance(inside, KeepInFP32) and regions == "auto"
    assert seen[0] == seen[1] <= (6 if own_code else 2), "training and validation"
    assert module.losses == pytest.approx(plain.losses, rel=0.02 if kwargs else 1e-3)


def test_blocks_that_must_stay_eager_are_left_alone() -> None:
    plain, module = Classifier(residual_net(), lr=0.01), Classifier(residual_net(), lr=0.01)
    module.load_state_dict(plain.state_dict())
    fit(plain)
    run = fit(module, Compile(backend="eager", strict=False), ActivationCheckpointing())
    (compile_it,) = [status for status in statuses(run) if status.item == "Compile"]
    assert not compile_it.active
    assert compile_it.text == (
        "net.3.0, net.3.1: excluded by torch.compiler.disable, and left alone."
    )
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)


def test_a_network_around_blocks_that_must_stay_eager_is_compiled_in_parts() -> None:
    module = Classifier(residual_net())
    fit(module, Compile("whole", backend="eager"), ActivationCheckpointing())
    assert counters["graph_break"]


def test_many_blocks_with_code_of_their_own_do_not_reach_the_recompile_limit() -> None:
    module = Classifier(deep(12))
    fit(module, Compile(backend="eager"), KeepInFP32(["LayerNorm"]), precision="bf16-mixed")
    assert not [reason for reason in counters["unimplemented"] if "limit" in reason]
    assert graphs() >= 2


def test_recomputation_in_compiled_blocks_draws_the_same_dropout() -> None:
    def grads(*, compile_it: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*[Dropping() for _ in range(3)]).double()
        with checkpointed(net):
            if compile_it:
                for block in net:
                    block.compile(backend="aot_eager", fullgraph=True)
            torch.manual_seed(1)
            net(torch.randn(8, 16, dtype=torch.float64, requires_grad=True)).sum().backward()
        return [parameter.grad for parameter in net.parameters()]

    for mine, theirs in zip(grads(compile_it=True), grads(compile_it=False), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_recomputed_blocks_of_stages_share_one_forward_and_are_still_seen_to_differ() -> None:
    net = nn.ModuleList([Block(4), Block(4), Block(8), Block(8)])
    blocks = {f"{i}": block for i, block in enumerate(net)}
    assert list(staged(blocks)) == list(blocks)
    with checkpointed(net, ["0", "2"]):
        assert len(recomputed_blocks(net)) == 2
        assert list(staged({name: blocks[name] for name in ("0", "2")})) == ["0", "2"]
