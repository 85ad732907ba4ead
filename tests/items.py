"""One row per exported item: how the contract test builds and runs it. Exceptions live here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from models import Classifier, LateClassifier, conv_net, images, mlp, trainer
from torch import nn

from lightning_perf import callbacks
from lightning_perf._item import PerfCallback
from lightning_perf._knobs import knobs


@dataclass(frozen=True)
class Row:
    """An item with the arguments and the state of the process in which it acts on a CPU."""

    cls: type[PerfCallback]
    arguments: dict[str, Any] = field(default_factory=dict)
    net: Callable[[], nn.Module] = conv_net
    """Makes a network on which it acts; takes 3x8x8 images, gives four classes."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer with which it acts."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Puts the process into a state in which the item has something to do."""
    idle_model: Callable[[], LightningModule] | None = None
    """A model for which the item has a reason not to act, if it depends on the model."""
    acts_on_cpu: bool = True
    changes_learning: bool = False
    """Whether it is there to change what is learned."""
    tolerance: float = 0.0
    """Largest relative difference of the losses, for items that are not exact."""
    wrong: tuple[tuple[dict[str, Any], str], ...] = ()
    """Wrong arguments with a part of the message."""

    @property
    def id(self) -> str:
        return self.cls.__name__

    def item(self, **arguments: Any) -> PerfCallback:
        """Build the item."""
        return self.cls(**self.arguments, **arguments)

    def model(self, *, late: bool = False) -> Classifier:
        """Make a model on which it acts; ``late`` ones get their layers in `configure_model`."""
        return LateClassifier(self.net) if late else Classifier(self.net())

    def run(self, module: LightningModule, *others: Callback, **kwargs: Any) -> Trainer:
        """Train with ``others`` as callbacks, or test if that is what the item is made for."""
        run = trainer(**{**self.trainer, "callbacks": list(others), **kwargs})
        if "fit" in self.cls.stages:
            run.fit(module, images(), images())
        else:
            run.test(module, images(), verbose=False)
        return run


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
        around=lambda: knobs(anomaly_mode=True),
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
        around=lambda: knobs(intra_op_threads=2),
        tolerance=1e-4,
        wrong=(({"intra_op": 0}, "intra_op"), ({"intra_op": "many"}, "auto")),
    ),
]

REFUSED: dict[tuple[str, str], str] = {}
"""Pairs of items that cannot act together, with a part of what is said; all other pairs can."""
