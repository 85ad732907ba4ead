"""The item in runs of a Trainer: same results, what it says, and where it stands aside."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import DrawingBlock, fit, network, seeded
from items import residual_net
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser
from models import Classifier, LateClassifier, images, mlp, trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf.callbacks import (
    ActivationCheckpointing,
    ChannelsLast,
    FusedOptimizer,
)
from lightning_perf.callbacks.activation_checkpointing import recomputed_blocks

POLICIES = ["full", "selective", 1.0]


def assert_same(mine: Classifier, theirs: Classifier) -> None:
    assert mine.losses == theirs.losses
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    calls = [[b.calls for b in m.modules() if isinstance(b, DrawingBlock)] for m in (mine, theirs)]
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
    recomputed = fit(ActivationCheckpointing(policy=policy), module=seeded(Manual))
    assert_same(recomputed, fit(module=seeded(Manual)))


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
    fit(ActivationCheckpointing(), averages[0], module=seeded(Still))
    fit(averages[1], module=seeded(Still))
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
    fit(module=seeded(lambda: Classifier(Words())))
    plain = len(calls)
    fit(ActivationCheckpointing(), module=seeded(lambda: Classifier(Words())))
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
        return seeded(lambda: network(lambda: nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))))

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


class Recomputes(DrawingBlock):
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
        return Classifier(seeded(own_outside))

    assert fit(ActivationCheckpointing(), module=make()).losses == fit(module=make()).losses
    (line,) = said()
    assert line == (
        "the model recomputes net.2.0, net.2.1, net.2.2 by itself, as the first step showed; "
        "left alone from now on."
    )


def test_only_blocks_that_recompute_themselves_are_left_alone(said: Any) -> None:
    module = Classifier(seeded(lambda: network(Recomputes)))
    module.net[2][0] = DrawingBlock()
    fit(ActivationCheckpointing(["DrawingBlock", "Recomputes"]), module=module)
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


# --- other functions of the Trainer


def test_a_reason_not_to_act_is_a_warning() -> None:
    with pytest.warns(NoEffectWarning, match="ActivationCheckpointing has no effect here"):
        trainer(callbacks=[ActivationCheckpointing()]).fit(Classifier(mlp()), images())


def test_nothing_is_recomputed_outside_of_training() -> None:
    module = Classifier(network())
    run = trainer(callbacks=[ActivationCheckpointing()])
    for function in (run.validate, run.test, run.predict):
        function(module, images())
        assert not recomputed_blocks(module)
        assert statuses(run) == ()
