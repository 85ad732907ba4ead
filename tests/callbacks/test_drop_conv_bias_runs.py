"""Runs of a Trainer without needless biases: optimizers, checkpoints, ranks, other callbacks."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from items import conv_net_with_biases
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from models import Classifier, images, trainer
from ranks import TORCHRUN, run_ranks
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_perf._item import statuses
from lightning_perf.callbacks import ChannelsLast, DropConvBias, FusedOptimizer

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging
except ImportError:  # Lightning below 2.6
    EMAWeightAveraging = None


class Biased(Classifier):
    """Its convolutions have biases; a function makes its optimizer."""

    def __init__(self, make: Any = lambda module: SGD(module.parameters(), lr=0.05)) -> None:
        torch.manual_seed(5)
        super().__init__(conv_net_with_biases())
        self.make = make
        self.val_losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return self.make(self)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_losses.append(self.loss(batch).item())

    @property
    def biases(self) -> list[nn.Parameter]:
        return [self.net[0].bias, self.net[3].bias]


class Save(Callback):
    """Saves in the middle of a run, as checkpoint callbacks do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def assert_same_weights(one: nn.Module, two: nn.Module) -> None:
    """Compare all but the biases, in which rounding adds up to nothing in particular."""
    for (name, mine), theirs in zip(
        one.state_dict().items(), two.state_dict().values(), strict=True
    ):
        if name not in ("net.0.bias", "net.3.bias"):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def compare(stock: Biased, item: Biased, *others: Any, **kwargs: Any) -> Any:
    """Train both, one of them with the item, and compare everything."""
    trainer(callbacks=copy.deepcopy(list(others)), max_epochs=3, **kwargs).fit(
        stock, images(), images()
    )
    callbacks = [DropConvBias(), *copy.deepcopy(others)]
    run = trainer(callbacks=callbacks, max_epochs=3, **kwargs)
    run.fit(item, images(), images())
    assert statuses(run)[0].active
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)
    assert item.val_losses == pytest.approx(stock.val_losses, rel=1e-3)
    return run


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")
def test_the_table_says_how_many_and_why_not_the_others() -> None:
    module = Biased()
    module.net[1].eval()
    run = trainer(callbacks=[DropConvBias()])
    run.fit(module, images())
    assert statuses(run)[0].text == (
        "1 bias; kept: 'net.0' (its norm 'net.1': it is in evaluation mode)"
    )


def test_training_and_evaluation_agree_and_the_bias_stays_as_it_was() -> None:
    stock, item = Biased(), Biased()
    before = [bias.detach().clone() for bias in item.biases]
    compare(stock, item)
    assert_same_weights(item, stock)
    for bias, value in zip(item.biases, before, strict=True):
        assert torch.equal(bias, value)
        assert bias.grad is None
        assert bias.requires_grad
    trainer().test(item, images(), verbose=False)
    trainer().test(stock, images(), verbose=False)
    assert item.test_losses == pytest.approx(stock.test_losses, rel=1e-4)


# --- optimizers and checkpoints


def with_decay(module: Biased) -> Optimizer:
    """Weights decay, biases and norms do not, as in many recipes."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return AdamW(
        [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


OPTIMIZERS = {
    "SGD": lambda m: SGD(m.parameters(), lr=0.05),
    "fused SGD with momentum": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda m: Adam([p for p in m.parameters() if p.requires_grad], lr=0.01),
    "AdamW in groups": with_decay,
    "RMSprop": lambda m: RMSprop(m.parameters(), lr=0.001, momentum=0.5),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "two": lambda m: [Adam(m.net[:4].parameters()), SGD(m.net[4:].parameters(), lr=0.1)],
}


class Manual(Biased):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize("saved_with_it", [True, False])
@pytest.mark.parametrize("loaded_with_it", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_way_of_saving_and_resuming_agrees(
    name: str, saved_with_it: bool, loaded_with_it: bool, tmp_path: Path
) -> None:
    def fit(module: Biased, with_it: bool, epochs: int, *others: Any, **kwargs: Any) -> Any:
        items = [DropConvBias()] if with_it else []
        run = trainer(callbacks=[*items, *others], max_epochs=epochs)
        run.fit(module, images(), **kwargs)
        return run

    kind = Manual if name == "two" else Biased
    straight, first, resumed = (kind(OPTIMIZERS[name]) for _ in range(3))
    plain = fit(straight, False, 2)
    fit(first, saved_with_it, 1, Save(tmp_path / "x.ckpt"))
    run = fit(resumed, loaded_with_it, 2, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.losses == pytest.approx(straight.losses[4:], rel=1e-4)
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["optimizer_states"]
    for state, mine, theirs in zip(saved, run.optimizers, plain.optimizers, strict=True):
        assert [len(g["params"]) for g in state["param_groups"]] == [
            len(g["params"]) for g in theirs.param_groups
        ]
        assert [len(g["params"]) for g in mine.param_groups] == [
            len(g["params"]) for g in theirs.param_groups
        ]
        states = theirs.state_dict()["state"]
        assert state["state"].keys() == states.keys()
        assert all(state["state"][index].keys() == states[index].keys() for index in states)


def test_step_counts_in_a_checkpoint_are_not_shared() -> None:
    """Two parameters that count their steps in one tensor would count twice as fast."""
    run = trainer(callbacks=[DropConvBias()])
    run.fit(Biased(OPTIMIZERS["Adam"]), images())
    seen: list[Any] = []

    class Look(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            saved = trainer.strategy.optimizer_state(trainer.optimizers[0])
            seen.extend(state["step"] for state in saved["state"].values())

    module = Biased(OPTIMIZERS["Adam"])
    trainer(callbacks=[DropConvBias(), Look()]).fit(module, images())
    assert len(seen) == len(list(module.parameters()))
    assert len({id(step) for step in seen}) == len(seen)


def test_pretrained_weights_with_biases_are_loaded_in_the_middle() -> None:
    pretrained = Biased().state_dict()

    class Load(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                pl_module.load_state_dict(pretrained)

    compare(Biased(), Biased(), Load())


# --- other callbacks


@pytest.mark.parametrize("starts", [None, 6], ids=["at once", "after validation"])
@pytest.mark.skipif(EMAWeightAveraging is None, reason="Lightning 2.6 has it")
def test_averages_of_weights_agree(starts: int | None) -> None:
    """They are copied before the item acts, and written into the model for each validation."""
    stock, item = Biased(), Biased()
    compare(stock, item, EMAWeightAveraging(decay=0.7, update_starting_at_step=starts))
    assert_same_weights(item, stock)


def test_stochastic_weight_averaging_agrees() -> None:
    stock, item = Biased(), Biased()
    compare(stock, item, StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1))
    assert_same_weights(item, stock)


def test_finetuning_adds_the_groups_it_always_did() -> None:
    class Tuned(Biased):
        def __init__(self) -> None:
            super().__init__(lambda m: SGD([p for p in m.parameters() if p.requires_grad], lr=0.1))
            self.backbone, self.net = self.net[:4], self.net[4:]

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss((self.backbone(batch[0]), batch[1]))

    def groups(run: Any) -> list[int]:
        return [len(group["params"]) for group in run.optimizers[0].param_groups]

    stock, item = Tuned(), Tuned()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False)
    plain = trainer(callbacks=[finetuning], max_epochs=3)
    plain.fit(stock, images())
    run = trainer(callbacks=[DropConvBias(strict=False), copy.deepcopy(finetuning)], max_epochs=3)
    run.fit(item, images())
    assert groups(run) == groups(plain)
    assert item.losses == pytest.approx(stock.losses, rel=1e-3)


@pytest.mark.parametrize("order", [1, -1])
def test_with_items_that_look_at_the_convolutions(order: int) -> None:
    """Hooks of ours do not bring the bias back."""
    stock, item = Biased(OPTIMIZERS["Adam"]), Biased(OPTIMIZERS["Adam"])
    trainer(max_epochs=2).fit(stock, images())
    items = [DropConvBias(), ChannelsLast(), FusedOptimizer()][::order]
    run = trainer(callbacks=items, max_epochs=2)
    run.fit(item, images())
    assert all(status.active for status in statuses(run))
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)
    assert all(bias.grad is None for bias in item.biases)


# --- what only the run shows


class CallsDirectly(Biased):
    """Uses the output of a convolution that the network gives to a norm only."""

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + self.net[0](batch[0]).square().mean()


class FreezesNorms(Biased):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[4].eval()


@pytest.mark.parametrize(("kind", "name"), [(CallsDirectly, "net.0"), (FreezesNorms, "net.3")])
def test_a_bias_that_is_needed_after_all_is_learned_and_named(
    kind: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stock, item = kind(), kind()
    with caplog.at_level(logging.INFO):
        compare(stock, item)
    for mine, theirs in zip(item.state_dict().values(), stock.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    (message,) = [r.message for r in caplog.records if "used in training after all" in r.message]
    assert message.startswith("lightning_perf: DropConvBias: 1 of 2 biases were used")
    assert message.endswith(f"{name}.")


def test_layers_of_the_lightning_module_itself() -> None:
    class Flat(Classifier):
        def __init__(self) -> None:
            torch.manual_seed(1)
            super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.norm(self.conv(x)))

        def loss(self, batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

    stock, item = Flat(), Flat()
    trainer(max_epochs=2).fit(stock, images())
    run = trainer(callbacks=[DropConvBias()], max_epochs=2)
    run.fit(item, images())
    assert statuses(run)[0].text == "1 bias"
    assert item.conv.bias.grad is None
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)
    assert "forward" not in vars(item)


def test_layers_called_by_the_steps_only_are_kept() -> None:
    class Steps(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

        def loss(self, batch: Any) -> torch.Tensor:
            y = self.net(self.norm(self.conv(batch[0])))
            return nn.functional.cross_entropy(y, batch[1])

    run = trainer(callbacks=[DropConvBias(strict=False)])
    run.fit(Steps(), images())
    assert statuses(run)[0].text == (
        "Steps has no bias that only a norm after it sees: 'conv' (no forward above it calls it)."
    )


def test_sharding_strategies_are_left_alone() -> None:
    run = trainer()
    run.strategy.__class__ = type(
        "ShardingStrategy", (type(run.strategy),), {"restore_checkpoint_after_setup": True}
    )
    assert "ShardingStrategy shards" in DropConvBias().why_not(run, Biased())


# --- two processes

RANKS = """
import sys
import warnings

import torch
from models import images, trainer
from test_drop_conv_bias_runs import Biased, CallsDirectly, assert_same_weights

from lightning_perf._item import statuses
from lightning_perf.callbacks import DropConvBias

if __name__ == "__main__":
    kind = {"Biased": Biased, "CallsDirectly": CallsDirectly}[sys.argv[1]]
    stock, item = kind(), kind()
    ranks = {"strategy": "ddp", "devices": 2, "max_epochs": 2}
    for extra in ({}, {"accumulate_grad_batches": 2}):
        trainer(**ranks, **extra).fit(stock, images())
        run = trainer(**ranks, **extra, callbacks=[DropConvBias()])
        run.fit(item, images())
        assert statuses(run)[0].active
        if kind is Biased:
            torch.testing.assert_close(item.losses, stock.losses, rtol=1e-4, atol=0)
            assert_same_weights(item, stock)
            assert all(bias.grad is None for bias in item.biases)
    print(f"rank {run.global_rank} agrees")
"""


@pytest.mark.slow
def test_two_ranks_wait_for_no_gradient_of_a_bias(tmp_path: Path) -> None:
    output = run_ranks(RANKS, tmp_path, "Biased", launcher=TORCHRUN)
    assert output.count("agrees") == 2
    assert "used in training" not in output


@pytest.mark.slow
def test_ranks_are_warned_of_a_bias_that_ddp_does_not_know(tmp_path: Path) -> None:
    output = run_ranks(RANKS, tmp_path, "CallsDirectly", launcher=TORCHRUN)
    assert output.count("agrees") == 2
    assert "the bias of 'net.0' is used in training" in output
