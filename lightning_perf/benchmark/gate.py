"""The callback that lets a variant run a given number of steps, then waits for the next turn."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_perf import _compat

Message = dict[str, Any]

# They end the run, write files, or act at some steps only.
_INTERRUPTIONS = (Checkpoint, EarlyStopping, ModelSummary, ProgressBar, Timer)


def without_interruptions(callbacks: list[Callback]) -> tuple[list[Callback], list[str]]:
    """Return the callbacks that a timed run can have, and the names of the others."""
    kept = [callback for callback in callbacks if not isinstance(callback, _INTERRUPTIONS)]
    return kept, [type(callback).__name__ for callback in callbacks if callback not in kept]


class Gate(Callback):
    """Blocks before a training step until it is told to go on.

    A step lasts from one gate to the next, so it contains the fetch of the next batch, but no
    waiting at the gate.

    Args:
        exchange: Sends a report and returns the next command. ``turn`` runs ``steps`` steps, or
            fewer when ``cap`` seconds are over; ``finish`` ends the training.
        answer: Answers any other command.
    """

    def __init__(
        self, exchange: Callable[[Message], Message], answer: Callable[[Message, Trainer], Message]
    ) -> None:
        self.reached = False
        self.finished = False
        self._exchange, self._answer = exchange, answer
        self._marks: list[Any] = []
        self._steps, self._deadline = 0, 0.0
        self._step_ended, self._gap = 0.0, 0.0
        self._usage = (0, 0)
        self._batches = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove what the module's own `configure_callbacks` may have brought."""
        # A new list: Lightning is going through the old one.
        kept, _ = without_interruptions(_compat.callbacks(trainer))
        trainer.callbacks = kept  # type: ignore[attr-defined]  # public, but not declared

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let schedulers do without the metric that only a validation would log."""
        for config in trainer.lr_scheduler_configs:
            config.strict = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notice a loader that gives nothing, which would go on for ever."""
        if self._batches == 0:
            raise ValueError(
                "the training loader gave no batch in a whole epoch. Check the length of the data "
                "set, and `drop_last` and the batch size of the loader."
            )
        self._batches = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note when the step is over and the wait for data begins."""
        self._step_ended = perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End the turn if it is time, and wait for the next one."""
        self._batches += 1
        if self.finished:
            return
        device = trainer.strategy.root_device
        now = perf_counter()
        if self.reached:
            self._gap += now - self._step_ended
            self._marks.append(_mark(device))
            if len(self._marks) <= self._steps and now < self._deadline:
                return
            report = self._turn_report(device, now)
        else:
            self.reached = True
            report = {
                "event": "ready",
                "device": device.type,
                "batch_size": _batch_size(batch),
            }
        command = self._exchange(report)
        while command["do"] not in ("turn", "finish"):
            command = self._exchange(self._answer(command, trainer))
        if command["do"] == "finish":
            self.finished = trainer.should_stop = True
            return
        self._steps, self._gap = command["steps"], 0.0
        self._usage = _usage()
        self._started = perf_counter()
        self._deadline = self._started + command["cap"]
        self._marks = [_mark(device)]

    def _turn_report(self, device: torch.device, now: float) -> Message:
        usage = _usage()
        return {
            "event": "turn",
            "times": _differences(self._marks),
            "seconds": now - self._started,
            "gap": self._gap,
            "faults": usage[0] - self._usage[0],
            "switches": usage[1] - self._usage[1],
            "graphs": _compiled_graphs(),
        }


def _mark(device: torch.device) -> Any:
    """Take the time of this point of the program, on the GPU's own clock where there is one."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # no types in torch
        event.record()
        return event
    if device.type == "mps":
        torch.mps.synchronize()
    return perf_counter()


def _differences(marks: list[Any]) -> list[float]:
    pairs = list(pairwise(marks))
    if isinstance(marks[0], float):
        return [round(b - a, 7) for a, b in pairs]
    # Waits for the GPU, so that nothing of this turn runs during the next.
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in pairs]


def _batch_size(batch: Any) -> int | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return int(extract_batch_size(batch))
        except Exception:
            # It raises its own error for batches without tensors; then the size is unknown.
            return None


def _usage() -> tuple[int, int]:
    """Return the minor page faults and involuntary switches so far; zero on Windows."""
    if sys.platform == "win32":
        return 0, 0
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_nivcsw


def _compiled_graphs() -> int:
    """Count what torch.compile has compiled so far, without importing it where it is not used."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
