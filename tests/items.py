"""One row per exported item: how the contract test builds and runs it. Exceptions live here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from models import Classifier, mlp

from lightning_perf import callbacks
from lightning_perf._item import PerfCallback


@dataclass(frozen=True)
class Row:
    """An item with the arguments and the state of the process in which it acts on a CPU."""

    cls: type[PerfCallback]
    arguments: dict[str, Any] = field(default_factory=dict)
    idle_model: Callable[[], LightningModule] | None = None
    """A model for which the item has a reason not to act, if it depends on the model."""
    before: Callable[[], None] = lambda: None
    """Puts the process into a state in which the item has something to do."""
    acts_on_cpu: bool = True
    tolerance: float = 0.0
    """Largest relative difference of the losses, for items that are not exact."""
    wrong: tuple[tuple[dict[str, Any], str], ...] = ()
    """Wrong arguments with a part of the message."""

    @property
    def id(self) -> str:
        return self.cls.__name__


def _leave_anomaly_mode_on() -> None:
    torch.autograd.set_detect_anomaly(True)


ROWS = [
    Row(callbacks.ChannelsLast, idle_model=lambda: Classifier(mlp()), tolerance=1e-4),
    Row(
        callbacks.Compile,
        {"backend": "eager"},
        tolerance=1e-4,
        wrong=(
            ({"regions": ["nett"], "backend": "eager"}, "net"),
            ({"mode": "fastest"}, "mode"),
            ({"backend": "inductr"}, "backend"),
        ),
    ),
    Row(
        callbacks.CudnnBenchmark,
        acts_on_cpu=False,
    ),
    Row(
        callbacks.DisableDebugAPIs,
        before=_leave_anomaly_mode_on,
    ),
    Row(callbacks.FusedOptimizer, tolerance=1e-4),
    Row(
        callbacks.MatmulPrecision,
        {"precision": "medium"},
        acts_on_cpu=False,
        wrong=(({"precision": "low"}, "highest"),),
    ),
    Row(
        callbacks.Threads,
        {"intra_op": 1},
        before=lambda: torch.set_num_threads(2),
        tolerance=1e-4,
        wrong=(({"intra_op": 0}, "intra_op"), ({"intra_op": "many"}, "auto")),
    ),
]
