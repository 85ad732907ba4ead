"""The item in runs of a Trainer: same results, what it says, and where it stands aside."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from items import residual_net
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.cli import LightningArgumentParser
from models import Classifier, LateClassifier, images, mlp, trainer
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf._knobs import read_knobs
from lightning_perf.callbacks import (
    ActivationCheckpointing,
    ChannelsLast,
    Compile,
    FusedOptimizer,
)
from lightning_perf.callbacks.activation_checkpointing import checkpointed, recomputed_blocks

POLICIES = ["full", "selective", 1.0]


class Block(nn.Module):
    """Draws random numbers, counts, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = nn.functional.dropout(self.norm(self.first(x)).relu_(), 0.2, self.training)
        return x + self.last(y) * (1 + random.random())


def network(block: Any = Block) -> nn.Sequential:
    """Three blocks on 3x8x8 images."""
    blocks = nn.Sequential(*(block() for _ in range(3)))
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), blocks, nn.Linear(32, 4))


def fit(*callbacks: Callback, module: Classifier | None = None, **options: Any) -> Classifier:
    """Train from the same weights and random numbers each time."""
    seed_everything(3, verbose=False)
    module = Classifier(network()) if module is None else module
    run = trainer(callbacks=list(callbacks), **{"max_epochs": 2, **options})
    run.fit(module, images(), images())
    return module


def assert_same(mine: Classifier, theirs: Classifier) -> None:
    assert mine.losses == theirs.losses
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    calls = [[b.calls for b in m.modules() if isinstance(b, Block)] for m in (mine, theirs)]
    assert calls[0] == calls[1]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "clipping": {"gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_runs_are_the_same_bit_for_bit(options: dict[str, Any], policy: Any) -> None:
    assert_same(fit(ActivationCheckpointing(policy=policy), **options), fit(**options))


class Manual(Classifier):
    """Optimizes by hand, with a penalty on the gradient: backward through the blocks twice."""

    def __init__(self) -> None:
        super().__init__(network(), lr=0.001)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        inputs = inputs.clone().requires_grad_()
        loss = self.loss((inputs, labels))
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss + gradient.square().mean())
        optimizer.step()
        self.losses.append(loss.item())


@pytest.mark.parametrize("policy", POLICIES)
def test_manual_optimization_with_a_gradient_penalty(policy: Any) -> None:
    recomputed = fit(ActivationCheckpointing(policy=policy), module=_seeded(Manual))
    assert_same(recomputed, fit(module=_seeded(Manual)))


def _seeded(make: Any) -> Any:
    seed_everything(5, verbose=False)
    return make()


def test_layers_of_configure_model_and_other_items() -> None:
    def late() -> LateClassifier:
        return LateClassifier(residual_net)

    others = [ChannelsLast(), FusedOptimizer()]
    recomputed = fit(ActivationCheckpointing(policy="selective"), *others, module=late())
    assert recomputed.losses == fit(*others, module=late()).losses


class Average(Callback):
    """Averages the weights in a copy, and evaluates it in the middle of the run."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        copied = copy.deepcopy(pl_module.net)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(0.5)
            self.outputs.append(copied.eval()(batch[0]))


def test_weight_averaging_evaluates_its_own_weights() -> None:
    class Still(Classifier):
        """Its blocks draw no random numbers outside of training."""

        def __init__(self) -> None:
            super().__init__(residual_net())

    averages = [Average(), Average()]
    fit(ActivationCheckpointing(), averages[0], module=_seeded(Still))
    fit(averages[1], module=_seeded(Still))
    assert all(map(torch.equal, averages[0].outputs, averages[1].outputs))


def test_evaluation_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path of `nn.TransformerEncoder` stays."""
    fast, calls = torch._transformer_encoder_layer_fwd, []

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return fast(*args)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x.flatten(1).unflatten(1, (24, 8))).mean(1))

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    fit(module=_seeded(lambda: Classifier(Words())))
    plain = len(calls)
    fit(ActivationCheckpointing(), module=_seeded(lambda: Classifier(Words())))
    assert plain > 0
    assert len(calls) == 2 * plain


# --- what it says


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """Return the lines of the item, without its name."""
    caplog.set_level(logging.INFO)
    start = "lightning_perf: ActivationCheckpointing: "

    def lines() -> list[str]:
        return [
            r.message.removeprefix(start) for r in caplog.records if r.message.startswith(start)
        ]

    return lines


def test_one_line_tells_bytes_flops_and_time(said: Any) -> None:
    fit(ActivationCheckpointing())
    (line,) = said()
    assert line.startswith("3 blocks keep 1.5 KiB for the backward pass instead of ")
    assert "% FLOPs and +" in line
    assert line.endswith("% time to forward and backward.")


def test_the_line_comes_after_short_runs_too(said: Any) -> None:
    fit(ActivationCheckpointing(every_n=3), max_epochs=1, limit_train_batches=1)
    (line,) = said()
    assert line.startswith("1 block keeps ")
    assert "time" not in line


def test_the_line_can_be_switched_off(said: Any) -> None:
    fit(ActivationCheckpointing(report=False))
    assert said() == []


def test_the_numbers_are_those_of_a_comparison(said: Any) -> None:
    from lightning_perf.callbacks.activation_checkpointing import checkpointing_cost

    def net() -> nn.Sequential:
        return _seeded(lambda: network(lambda: nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))))

    batch = next(iter(images()))
    module = Classifier(net())
    cost = checkpointing_cost(module.net, lambda: module.loss(batch), turns=1)
    fit(ActivationCheckpointing(), module=module)
    assert f"{cost.extra_flops:+.1%} FLOPs" in said()[0]


def test_frozen_blocks_have_nothing_to_tell(said: Any) -> None:
    module = Classifier(network())
    module.net[:3].requires_grad_(False)
    fit(ActivationCheckpointing(), module=module)
    assert said() == ["no block was called with gradients in the first step: nothing is spared."]


class Recomputes(Block):
    """Recomputes a part of itself, which a recomputation of the rest runs as well."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(checkpoint(self.first, x, use_reentrant=False).relu())


class Layers(nn.Sequential):
    """Like a network of others that has checkpointing of its own."""

    gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block.__call__, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def own_outside() -> nn.Sequential:
    net = network(lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)))
    net[2] = Layers(*net[2])
    return net


def test_blocks_that_the_model_recomputes_are_left_alone(said: Any) -> None:
    def make() -> Classifier:
        return Classifier(_seeded(own_outside))

    assert fit(ActivationCheckpointing(), module=make()).losses == fit(module=make()).losses
    (line,) = said()
    assert line == (
        "the model recomputes net.2.0, net.2.1, net.2.2 by itself, as the first step showed; "
        "left alone from now on."
    )


def test_only_blocks_that_recompute_themselves_are_left_alone(said: Any) -> None:
    module = Classifier(_seeded(lambda: network(Recomputes)))
    module.net[2][0] = Block()
    fit(ActivationCheckpointing(["Block", "Recomputes"]), module=module)
    lines = said()
    assert lines[0].startswith("the model recomputes net.2.1, net.2.2 by itself")
    assert lines[1].startswith("1 block keeps ")


# --- where it stands aside


def test_a_network_without_blocks() -> None:
    run = trainer(callbacks=[ActivationCheckpointing(strict=False)])
    run.fit(Classifier(mlp()), images())
    (status,) = statuses(run)
    assert not status.active
    assert "Classifier has no repeated blocks" in status.text


def test_sharding_strategies_have_their_own() -> None:
    run = trainer()
    run.strategy.__class__ = type(
        "ShardingStrategy", (type(run.strategy),), {"restore_checkpoint_after_setup": True}
    )
    reason = ActivationCheckpointing().why_not(run, Classifier(network()))
    assert "ShardingStrategy wraps layers itself" in reason
    assert "activation_checkpointing_policy" in reason


@pytest.mark.parametrize(("text", "policy"), [("full", "full"), ("0.25", 0.25), ("1", 1)])
def test_policies_from_yaml(text: str, policy: Any, tmp_path: Path) -> None:
    parser = LightningArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--item", type=Callback)
    (tmp_path / "item.yaml").write_text(
        "item:\n"
        "  class_path: lightning_perf.callbacks.ActivationCheckpointing\n"
        f"  init_args: {{policy: {text}, blocks: [Block], every_n: 2, report: false}}\n"
    )
    config = parser.parse_args(["--config", str(tmp_path / "item.yaml")])
    item = getattr(parser, "instantiate", parser.instantiate_classes)(config).item  # renamed
    assert (item.policy, item.blocks, item.every_n, item.report) == (policy, ["Block"], 2, False)


# --- together with torch.compile


class Plain(nn.Module):
    """Without buffers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.tanh(self.first(self.norm(x)).relu_()).exp())


@pytest.fixture
def nothing_compiled() -> None:
    """Drop the code that other tests compiled of the same classes."""
    torch.compiler.reset()


def compiled_fit(item: ActivationCheckpointing, block: Any, regions: Any = "auto") -> Classifier:
    module = Classifier(_seeded(lambda: network(block)))
    fit(item, Compile(regions, backend="aot_eager"), module=module)
    return module


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("block", "regions"),
    [
        (Plain, "auto"),
        (Block, "whole"),
        pytest.param(Plain, "whole", marks=slow),
        pytest.param(Block, "auto", marks=slow),
    ],
)
def test_compiled_blocks_learn_the_same(block: Any, regions: str, said: Any) -> None:
    expected = fit(module=Classifier(_seeded(lambda: network(block))))
    module = compiled_fit(ActivationCheckpointing(), block, regions)
    if block is Plain:
        assert module.losses == pytest.approx(expected.losses, rel=1e-5)
    tracked = [b.norm.num_batches_tracked for b in module.modules() if isinstance(b, Block)]
    assert tracked == [8] * len(tracked)
    assert said() == ["nothing is measured: the compiler decides what its code recomputes."]


@pytest.mark.usefixtures("nothing_compiled")
def test_blocks_share_their_compiled_code(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    compiled_fit(ActivationCheckpointing(), Plain)
    # One with gradients, and one without for validation.
    assert "Compile: epoch 0: 2 graphs compiled" in caplog.text


class Breaks(Block):
    """torch.compile does not get through it."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch._dynamo.graph_break()
        return x + self.last(self.first(x).relu())


def test_a_graph_break_in_a_block_changes_nothing_twice() -> None:
    module = compiled_fit(ActivationCheckpointing(), Breaks)
    assert [b.calls for b in module.modules() if isinstance(b, Breaks)] == [8 + 2 + 8] * 3


def saved_bytes(share: float | str | None) -> int:
    """Return what autograd holds after a compiled forward pass with that memory budget."""
    held: dict[int, int] = {}

    class Look(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            def pack(tensor: Tensor) -> Tensor:
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            held.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return super().training_step(batch, batch_idx)

    module = Look(_seeded(lambda: network(Plain)))
    items = [] if share is None else [ActivationCheckpointing(policy=share)]
    before = read_knobs()
    fit(*items, Compile(backend="aot_eager"), module=module, limit_val_batches=0)
    assert read_knobs() == before
    return sum(held.values())


def test_a_share_is_the_compilers_memory_budget() -> None:
    """Also after the same code was compiled without it."""
    everything = saved_bytes(None)
    assert saved_bytes(0.1) < everything
    assert saved_bytes(None) == everything


@pytest.mark.parametrize(
    "compile_item", [None, Compile(["net.2.0"], backend="eager"), Compile("whole", strict=False)]
)
def test_without_compiled_code_a_share_is_kept_by_the_blocks(
    compile_item: Compile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lightning_perf.callbacks.compile.what_inductor_lacks", lambda device: "no compiler"
    )
    items = [ActivationCheckpointing(policy=0.3), *([compile_item] if compile_item else [])]
    run = trainer(callbacks=items)
    run.fit(Classifier(network()), images())
    assert statuses(run)[0].text == "3 blocks (net.2.0, net.2.1, net.2.2), at most 30% kept"


# --- several ranks


class Shared(nn.Module):
    """One block under two names, called several times; and one that gets no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(192, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList([Plain(width), Plain(width)])
        self.blocks.append(self.blocks[0])
        self.unused = Plain(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in [*self.blocks, self.blocks[1]]:
            x = block(x)
        return self.last(x)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone: the reducer of DDP works as with others."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("policy", ["full", 1.0])
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.usefixtures("one_rank")
def test_no_parameter_is_ready_twice(options: dict[str, bool], policy: Any) -> None:
    """As with reentrant checkpointing, shared weights and a search for unused parameters."""
    (pixels, labels), grads = next(iter(images())), []
    for recompute in (False, True):
        net = _seeded(lambda: Shared(32))
        ddp = nn.parallel.DistributedDataParallel(net, **options)
        with checkpointed(net, policy=policy) if recompute else nullcontext():
            for _ in range(3):
                nn.functional.cross_entropy(ddp(pixels), labels).backward()
        grads.append({name: parameter.grad for name, parameter in net.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


RANKS = """
import sys
from models import Classifier, images, trainer
from lightning.pytorch import seed_everything
from lightning_perf.callbacks import ActivationCheckpointing, Compile
from test_activation_checkpointing_runs import Shared, network


def fit(net, items, **options):
    seed_everything(3, verbose=False)
    module = Classifier(net())
    run = trainer(callbacks=items, devices=2, max_epochs=2, **options)
    run.fit(module, images(32))
    return module.losses


unused = "ddp_find_unused_parameters_true"
slow = "slow" in sys.argv
for policy, accumulate in (("full", 2), (1.0, 1), ("full", 1), (1.0, 2))[: 4 if slow else 1]:
    recompute = lambda: ActivationCheckpointing(policy=policy)
    options = {"strategy": unused, "accumulate_grad_batches": accumulate}
    plain = fit(lambda: Shared(32), [], **options)
    assert fit(lambda: Shared(32), [recompute()], **options) == plain, options
assert fit(network, [ActivationCheckpointing(policy=1.0)], strategy="ddp") == fit(
    network, [], strategy="ddp"
)
for width in (128, 256) if slow else ():
    for regions in ("auto", "whole"):
        make = lambda: Shared(width)
        compiled = [ActivationCheckpointing(), Compile(regions, backend="aot_eager")]
        mine, plain = fit(make, compiled, strategy=unused), fit(make, [], strategy=unused)
        assert all(abs(a - b) < 1e-5 for a, b in zip(mine, plain)), (width, regions)
print("agreed", flush=True)
"""


@pytest.mark.slow
def test_two_ranks_learn_the_same(tmp_path: Path) -> None:
    """Shared and unused weights, accumulation, running statistics."""
    assert run_ranks(RANKS, tmp_path).count("agreed") == 2


@pytest.mark.slow
def test_two_ranks_with_compiled_code(tmp_path: Path) -> None:
    assert run_ranks(RANKS, tmp_path, "slow", timeout=400).count("agreed") == 2


def test_a_strategy_that_does_not_agree_is_warned_about_once() -> None:
    with pytest.warns(NoEffectWarning, match="ActivationCheckpointing has no effect here"):
        trainer(callbacks=[ActivationCheckpointing()]).fit(Classifier(mlp()), images())


def test_nothing_is_recomputed_outside_of_training() -> None:
    module = Classifier(network())
    run = trainer(callbacks=[ActivationCheckpointing()])
    for function in (run.validate, run.test, run.predict):
        function(module, images())
        assert not recomputed_blocks(module)
        assert statuses(run) == ()
