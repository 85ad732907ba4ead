from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark.learning_tasks import (
    NETS,
    AtStart,
    BeforeEachStep,
    Build,
    Task,
    batchnorm_momentum,
    build,
    channels_last,
    freeze_a_layer,
    images,
    mlp,
    scale_gradients,
)
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Accuracy

from lightning_perf.benchmark.learning import (
    PERTURBATIONS,
    LearningRecord,
    LearningVerdict,
    judge,
    record,
)

STEPS = 12


def recorded(parts: Build, name: str = "b", *, seed: int = 0, **options: Any) -> LearningRecord:
    options.setdefault("steps", STEPS)
    return record(parts, seed=seed, update=Path(f"{name}.npz"), **options)


def perturbed(parts: Build, seed: int = 0, name: str = "a") -> list[LearningRecord]:
    return [
        recorded(parts, f"{name}-perturbed{number}", seed=seed, perturb=size, perturb_seed=number)
        for size, number in PERTURBATIONS
    ]


Against = Callable[..., LearningVerdict]


@pytest.fixture(scope="module")
def against_plain(tmp_path_factory: pytest.TempPathFactory) -> Against:
    """Judge a variant of a network against its plain training, which is recorded only once."""
    folder = tmp_path_factory.mktemp("baselines")
    baselines: dict[Any, tuple[LearningRecord, list[LearningRecord]]] = {}

    def verdict(net: str, variant: dict[str, Any], *, seed: int = 0, **options: Any) -> Any:
        if (net, seed) not in baselines:
            name = f"{folder}/{net}{seed}"
            runs = recorded(build(net), name, seed=seed), perturbed(build(net), seed, name)
            baselines[net, seed] = runs
        a, yardstick = baselines[net, seed]
        b = recorded(build(net, **variant), seed=seed, **options)
        return judge(a, b, yardstick, exact=False)

    return verdict


@pytest.mark.parametrize("net", NETS)
def test_a_run_repeated_is_bit_identical(net: str) -> None:
    verdict = judge(recorded(build(net), "a"), recorded(build(net)), [], exact=True)
    assert verdict.agree
    assert verdict.identical
    assert verdict.first_difference is None
    assert "bit-identical" in verdict.summary


HARMLESS = [
    *[(net, {"precision": "bf16-mixed"}) for net in NETS],
    ("conv", {"callbacks": [AtStart(channels_last)]}),
    ("attention", {"callbacks": [AtStart(channels_last)]}),
]
FAULTS = [
    *[(net, {"callbacks": [BeforeEachStep(scale_gradients)]}) for net in NETS],
    *[(net, {"lr": 0.051}) for net in NETS],
    *[(net, {"lr": 0.051, "precision": "bf16-mixed"}) for net in NETS],
    *[(net, {"callbacks": [AtStart(freeze_a_layer)]}) for net in NETS],
    *[(net, {"reverse": True}) for net in NETS],
    *[(net, {"momentum": 0.0}) for net in ("mlp", "conv")],
    *[("conv", {"callbacks": [AtStart(batchnorm_momentum(m))]}) for m in (0.2, 0.09)],
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("net", "change"), HARMLESS)
def test_harmless_changes_pass(
    against_plain: Against, net: str, change: dict[str, Any], seed: int
) -> None:
    verdict = against_plain(net, change, seed=seed)
    assert verdict.agree, verdict.summary


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("net", NETS)
def test_rounding_passes(against_plain: Against, net: str, seed: int) -> None:
    verdict = against_plain(net, {}, seed=seed, perturb=1e-7)
    assert verdict.agree, verdict.summary
    assert not verdict.identical
    assert 0 < verdict.max_relative_difference < verdict.allowed_max


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("net", "change"), FAULTS)
def test_faults_are_found(
    against_plain: Against, net: str, change: dict[str, Any], seed: int
) -> None:
    verdict = against_plain(net, change, seed=seed)
    assert verdict.agree is False, verdict.summary
    assert "does not learn the same" in verdict.summary


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"callbacks": [BeforeEachStep(scale_gradients)]}, "momentum_buffer is 1.02 times"),
        ({"lr": 0.051}, "change of the parameters is 1.02 times"),
        ({"callbacks": [AtStart(freeze_a_layer)]}, r"missing in B: .*momentum_buffer of net\.0"),
        ({"momentum": 0.0}, "missing in B: momentum_buffer of"),
        (
            {"callbacks": [AtStart(batchnorm_momentum(0.2))]},
            r"other change of a buffer: net.1.running_mean \(2 times\)",
        ),
    ],
)
def test_findings_name_the_fault(
    against_plain: Against, change: dict[str, Any], finding: str
) -> None:
    verdict = against_plain("conv", change)
    assert any(re.search(finding, line) for line in verdict.update_findings)


def test_a_wrong_buffer_is_found_though_all_losses_are_identical(
    against_plain: Against,
) -> None:
    verdict = against_plain("conv", {"callbacks": [AtStart(batchnorm_momentum(0.2))]})
    assert verdict.identical
    assert verdict.agree is False


def test_exact_changes_must_be_bit_identical() -> None:
    a, b = recorded(build("mlp"), "a"), recorded(build("mlp"), perturb=1e-7)
    verdict = judge(a, b, [], exact=True)
    assert verdict.agree is False
    assert verdict.first_difference == 1
    assert "from batch 1 on, though its changes claim to be exact" in verdict.summary
    assert any("not bit-identical" in finding for finding in verdict.update_findings)


def test_exact_changes_may_differ_on_a_gpu_as_far_as_inexact_ones() -> None:
    a, b = recorded(build("mlp"), "a"), recorded(build("mlp"), perturb=1e-7)
    a.device = b.device = "cuda"
    verdict = judge(a, b, perturbed(build("mlp")), exact=True)
    assert verdict.agree
    assert not verdict.identical


def test_other_weights_are_not_comparable() -> None:
    verdict = judge(recorded(build("mlp"), "a"), recorded(build("mlp"), seed=1), [], exact=True)
    assert verdict.agree is None
    assert verdict.summary == "not comparable: the two start from different weights"


def test_another_order_says_where_it_begins() -> None:
    a = recorded(build("mlp"), "a")
    b = recorded(build("mlp"))
    b.batches[4] = "another"
    verdict = judge(a, b, [], exact=True)
    assert verdict.agree is False
    assert "other data, in order or contents, from batch 5 on" in verdict.summary


@pytest.mark.parametrize("change", ["strides", "precision", "weights in bfloat16"])
def test_hashes_do_not_depend_on_the_layout(change: str) -> None:
    class Other(Task):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            pictures, labels = batch
            if change == "strides":
                return pictures.to(memory_format=torch.channels_last), labels.int()
            return pictures.double(), labels

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            pictures, labels = batch
            return super().training_step((pictures.to(self.dtype), labels.long()), batch_idx)

    def other() -> Any:
        precision = "bf16-true" if change == "weights in bfloat16" else "32-true"
        return Other(mlp()), images(), {"accelerator": "cpu", "precision": precision}

    a, b = recorded(build("mlp"), "a", steps=3), recorded(other, steps=3)
    assert a.initial_weights == b.initial_weights
    assert a.batches == b.batches


def test_losses_are_those_before_the_division_by_accumulation() -> None:
    plain = recorded(build("mlp", lr=0.0), "a", steps=4)
    accumulated = recorded(build("mlp", lr=0.0, accumulate_grad_batches=3), steps=2)
    assert len(accumulated.losses) == 6
    assert accumulated.losses[:4] == pytest.approx(plain.losses)


def test_accumulation_over_more_batches_is_found() -> None:
    verdict = judge(
        recorded(build("mlp"), "a", steps=4),
        recorded(build("mlp", accumulate_grad_batches=2), steps=4),
        [],
        exact=False,
    )
    assert verdict.agree is False
    assert "trains on 8 batches where A trains on 4" in verdict.summary


class ByHand(Task):
    """Optimizes by hand, and may or may not return its loss."""

    def __init__(self, returns_loss: bool) -> None:
        super().__init__(mlp())
        self.automatic_optimization = False
        self.returns_loss = returns_loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss if self.returns_loss else None


def test_optimization_by_hand_is_compared_if_it_returns_the_loss() -> None:
    def parts() -> Any:
        return ByHand(returns_loss=True), images(), {"accelerator": "cpu"}

    verdict = judge(recorded(build("mlp"), "a"), recorded(parts), [], exact=True)
    assert verdict.agree, verdict.summary
    assert len(verdict.losses_b) == STEPS


def test_without_a_loss_nothing_is_comparable() -> None:
    def parts() -> Any:
        return ByHand(returns_loss=False), images(), {"accelerator": "cpu"}

    verdict = judge(recorded(build("mlp"), "a"), recorded(parts), [], exact=True)
    assert verdict.agree is None
    assert "B: the training step returns no loss. Return it" in verdict.summary


def test_layers_made_late_metrics_and_validation() -> None:
    class Late(Task):
        def __init__(self) -> None:
            super().__init__(nn.Identity())
            self.accuracy = Accuracy("multiclass", num_classes=4)

        def configure_model(self) -> None:
            if isinstance(self.net, nn.Identity):
                self.net = mlp()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pictures, labels = batch
            self.accuracy(self.net(pictures), labels)
            self.log("accuracy", self.accuracy)

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return images()

        def val_dataloader(self) -> Any:
            return DataLoader(images().dataset, batch_size=16)

    def parts() -> Any:
        return Late(), Data(), {"accelerator": "cpu", "limit_val_batches": 2}

    a, b = recorded(parts, "a", validate=True), recorded(parts, validate=True)
    verdict = judge(a, b, [], exact=True)
    assert verdict.agree, verdict.summary
    assert 0 <= verdict.metrics_a["accuracy"] <= 1
    assert verdict.metrics_a == verdict.metrics_b
    assert recorded(parts).metrics == {}


def test_validation_is_left_out_where_there_is_none() -> None:
    assert recorded(build("mlp"), validate=True).metrics == {}


def test_an_empty_loader_is_not_comparable() -> None:
    def parts() -> Any:
        return Task(mlp()), [], {"accelerator": "cpu", "max_epochs": 1}

    with pytest.warns(UserWarning, match="is zero"):
        empty = recorded(parts)
    verdict = judge(recorded(build("mlp"), "a"), empty, [], exact=True)
    assert verdict.agree is None
    assert "Is the training loader empty?" in verdict.summary


def test_a_run_that_ends_sooner_is_shorter() -> None:
    assert len(recorded(build("mlp", max_steps=5)).losses) == 5


def test_steps_that_float16_skips_do_not_count() -> None:
    # Lightning has no float16 on a CPU, but its plugin for it can be talked into it.
    plugin = MixedPrecision("bf16-mixed", "cpu")
    plugin.precision = "16-mixed"
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    skipped = CountSkippedSteps()

    def parts() -> Any:
        module, data, arguments = build("mlp", callbacks=[skipped])()
        plugin.scaler.load_state_dict({**plugin.scaler.state_dict(), "scale": 2.0**22})
        return module, data, arguments | {"plugins": [plugin]}

    a, yardstick = recorded(build("mlp"), "a"), perturbed(build("mlp"))
    verdict = judge(a, recorded(parts), yardstick, exact=False)
    assert verdict.agree, verdict.summary
    first, second = skipped.runs
    assert first > 0
    assert second == 0


def test_recording_leaves_no_trace() -> None:
    class Careless(Task):
        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint(), EarlyStopping("accuracy")]

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }

        def on_train_start(self) -> None:
            self.logger.experiment.add_text("anything", "goes")

    def parts() -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        return Careless(mlp()), images(), {"accelerator": "cpu", "callbacks": ModelCheckpoint()}

    def state() -> list[Any]:
        return [
            random.getstate(),
            str(np.random.get_state()),
            torch.get_rng_state().tolist(),
            dict(os.environ),
        ]

    before = state()
    # More steps than an epoch has, so that the end of an epoch is part of it.
    recorded(parts, "only", steps=20)
    assert state() == before
    assert [path.name for path in Path.cwd().iterdir()] == ["only.npz"]


def test_an_error_of_the_module_is_raised_and_leaves_no_trace() -> None:
    class Failing(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise KeyError("my own error")
            return super().training_step(batch, batch_idx)

    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="my own error"):
        recorded(lambda: (Failing(mlp()), images(), {"accelerator": "cpu"}), "only")
    assert torch.equal(torch.get_rng_state(), before)
    assert [path.name for path in Path.cwd().iterdir()] == ["only.npz"]


class CountSkippedSteps(Callback):
    """Counts, in each run, how often the loss scale was lowered."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.runs.append(0)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.scale = trainer.precision_plugin.scaler.get_scale()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.runs[-1] += trainer.precision_plugin.scaler.get_scale() < self.scale


def with_losses(*losses: float) -> LearningRecord:
    return LearningRecord(list(losses), "weights", ["batch"] * len(losses))


def test_the_allowance_is_five_times_the_drift_of_the_perturbed_runs() -> None:
    a = with_losses(1.0, 1.0, 1.0, 1.0)
    yardstick = [with_losses(1.01, 0.99, 1.01, 0.99), with_losses(1.004, 1.004, 1.004, 1.004)]
    inside = judge(a, with_losses(1.02, 1.02, 1.02, 1.02), yardstick, exact=False)
    assert inside.agree
    assert inside.allowed_mean == pytest.approx(5 * 0.01 / math.sqrt(4))
    assert inside.allowed_max == pytest.approx(5 * 0.01)
    assert "the first update was not compared" in inside.summary
    mean = judge(a, with_losses(1.03, 1.03, 1.03, 1.03), yardstick, exact=False)
    assert mean.agree is False
    assert "off by +3% on average, 2.5% is allowed" in mean.summary
    largest = judge(a, with_losses(1.06, 0.94, 1.06, 0.94), yardstick, exact=False)
    assert largest.agree is False
    assert "off by up to 6%, 5% is allowed" in largest.summary


def test_without_a_yardstick_drift_cannot_be_judged() -> None:
    verdict = judge(with_losses(1.0), with_losses(1.1), [], exact=False)
    assert verdict.agree is None
    assert "no perturbed run" in verdict.summary


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_finite(bad: float) -> None:
    good = with_losses(1.0, 0.9)
    verdict = judge(good, with_losses(1.0, bad), [good], exact=False)
    assert verdict.agree is False
    assert "not finite at batch 2" in verdict.summary
    assert verdict.max_relative_difference == 0
    verdict = judge(with_losses(1.0, bad), good, [good], exact=False)
    assert verdict.agree is None
    assert "A's own loss is not finite at batch 2" in verdict.summary


def test_a_loss_near_zero_does_not_blow_up_its_relative_difference() -> None:
    verdict = judge(
        with_losses(1.0, 0.0), with_losses(1.0, 1e-6), [with_losses(1.0, 1e-6)], exact=False
    )
    assert verdict.max_relative_difference == pytest.approx(2e-3)
    assert verdict.agree


def test_verdicts_hold_what_a_report_shows() -> None:
    verdict = judge(with_losses(1.0), with_losses(1.0), [], exact=True)
    assert isinstance(verdict, LearningVerdict)
    assert (verdict.losses_a, verdict.losses_b) == ([1.0], [1.0])
