from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from models import Classifier, images, trainer
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_perf.benchmark.gate import Gate, without_interruptions

FINISH = {"do": "finish"}


def turn(steps: int, cap: float = 1000.0) -> dict[str, Any]:
    return {"do": "turn", "steps": steps, "cap": cap}


def fit(commands: list[dict[str, Any]], *, module=None, data=None, callbacks=(), **kwargs):
    """Fit under a gate that is given these commands; return the reports and the gate."""
    reports: list[dict[str, Any]] = []
    remaining = iter(commands)

    def exchange(report: dict[str, Any]) -> dict[str, Any]:
        reports.append(report)
        return next(remaining)

    gate = Gate(exchange, lambda command, trainer: {"event": "answer", "step": trainer.global_step})
    arguments = {"max_epochs": -1, "limit_val_batches": 0, **kwargs}
    runner = trainer(callbacks=[*callbacks, gate], **arguments)
    runner.fit(Classifier() if module is None else module, images() if data is None else data)
    return reports, gate, runner


def test_runs_the_steps_it_is_told_and_reports_each():
    reports, gate, runner = fit([turn(1), turn(3), turn(6), FINISH])
    assert [report["event"] for report in reports] == ["ready", "turn", "turn", "turn"]
    assert reports[0] == {"event": "ready", "device": "cpu", "batch_size": 4}
    assert [len(report["times"]) for report in reports[1:]] == [1, 3, 6]
    for report in reports[1:]:
        assert all(time > 0 for time in report["times"])
        assert 0 < report["gap"] <= report["seconds"] * 1.01
        assert sum(report["times"]) <= report["seconds"] * 1.01
        assert report["graphs"] == reports[1]["graphs"], "nothing is compiled here"
    assert gate.reached
    assert gate.finished
    # The step at whose gate it was told to finish is the last.
    assert runner.global_step == 11


def test_a_cap_ends_a_turn_early():
    reports, _, _ = fit([turn(5, cap=0.0), FINISH])
    assert len(reports[1]["times"]) == 1


def test_other_commands_are_answered_at_the_gate():
    reports, _, _ = fit([turn(2), {"do": "describe"}, {"do": "describe"}, turn(1), FINISH])
    assert reports[2:4] == [{"event": "answer", "step": 2}] * 2
    assert len(reports[4]["times"]) == 1


class Slow(Callback):
    """Waits outside the gate's own view."""

    def on_train_epoch_start(self, trainer, pl_module):
        self.epochs = trainer.current_epoch


def test_goes_on_over_the_ends_of_epochs():
    slow = Slow()
    reports, _, _ = fit([turn(10), FINISH], callbacks=[slow])
    assert len(reports[1]["times"]) == 10
    assert slow.epochs == 2


class Empty(IterableDataset):
    def __iter__(self):
        return iter(())


def test_a_loader_that_gives_nothing_does_not_go_on_for_ever():
    with pytest.raises(ValueError, match="gave no batch in a whole epoch"):
        fit([], data=DataLoader(Empty()))


class Plateau(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss")
def test_a_schedule_that_needs_a_validation_does_not_end_the_run():
    reports, _, _ = fit([turn(10), FINISH], module=Plateau())
    assert len(reports[1]["times"]) == 10


class Stopping(Classifier):
    def configure_callbacks(self):
        return [EarlyStopping("val_loss"), LearningRateMonitor()]


def test_what_the_module_brings_cannot_end_the_run():
    reports, _, runner = fit([turn(10), FINISH], module=Stopping(), logger=True)
    assert len(reports[1]["times"]) == 10
    kinds = {type(callback).__name__ for callback in runner.callbacks}
    assert "EarlyStopping" not in kinds
    assert "LearningRateMonitor" in kinds


def test_interruptions_are_named():
    kept = LearningRateMonitor()
    callbacks = [ModelCheckpoint(), kept, Timer(), EarlyStopping("loss")]
    assert without_interruptions(callbacks) == (
        [kept],
        ["ModelCheckpoint", "Timer", "EarlyStopping"],
    )


class Odd(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch.inner, batch_idx)


class Strange:
    """A batch that holds no tensor anybody can see."""

    def __init__(self, samples):
        self.inner = default_collate(samples)


def test_an_unknown_batch_size_is_none():
    loader = DataLoader(images().dataset, batch_size=4, collate_fn=Strange)
    reports, _, _ = fit([turn(1), FINISH], module=Odd(), data=loader)
    assert reports[0]["batch_size"] is None
