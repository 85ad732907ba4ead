"""Batch normalization folded into the layer before it, in validation, testing and prediction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_perf._attributes import instance_attribute
from lightning_perf._conv_norm import Flow
from lightning_perf._item import Moment, PerfCallback
from lightning_perf.inference.fold import describe, foldable, folded_pairs


class FuseConvBN(PerfCallback):
    """Compute batch normalization together with the convolution or linear layer before it.

    Acts in ``trainer.validate``, ``test`` and ``predict``. The data flow of the model's `forward`
    methods is traced. A layer whose output goes only to one BatchNorm is computed with weights that
    do the work of both, and the norm passes its input on. The first batch compares each folded
    output with the separate one. Weights, checkpoints and later training are as without it.

    Do not use it where a step writes other weights through ``parameter.data``, as some averages of
    weights do: such a change is not seen.

    Args:
        strict: See `PerfCallback`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.callbacks import FuseConvBN
        >>> trainer = Trainer(callbacks=[FuseConvBN()], accelerator="cpu", logger=False)
    """

    guide: ClassVar[str] = "K 7.2"
    changes: ClassVar[frozenset[str]] = frozenset({"model"})
    exact: ClassVar[bool] = False
    moment: ClassVar[Moment] = "after_wrap"
    functions: ClassVar[frozenset[str]] = frozenset({"validate", "test", "predict"})

    def __init__(self, *, strict: bool | None = None) -> None:
        super().__init__(strict=strict)
        self._flow: Flow | None = None

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason when nothing can be folded."""
        if trainer.strategy.restore_checkpoint_after_setup:
            return (
                f"{type(trainer.strategy).__name__} shards the weights. Evaluate with a strategy "
                "that keeps whole weights, such as 'ddp' or a single device."
            )
        flow = foldable(module)
        self._flow = flow  # found in seconds, so not twice
        return None if flow.pairs else describe(module, flow)

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Fold for the length of the run."""
        flow, self._flow = self._flow or foldable(module), None
        with folded_pairs(module, flow) as folding, _first_batch_uncompiled(trainer):
            yield describe(module, flow)
        late = [name for name in folding.folded if name not in folding.verified]
        if late:
            self.say(
                f"{len(late)} of {len(flow.pairs)} ran unfolded, because their layer was not "
                "called by the forward that was traced, or in training mode, with gradients, or "
                f"with hooks: {', '.join(late)}."
            )


@contextmanager
def _first_batch_uncompiled(trainer: Trainer) -> Iterator[None]:
    """Run the first batch without compiled code, in which no output can be compared."""
    strategy, batches = trainer.strategy, count()

    def uncompiled(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            first = next(batches) == 0
            with ExitStack() as stack:
                if first and "torch._dynamo" in sys.modules:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                return step(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for name in ("validation_step", "test_step", "predict_step"):
            step = uncompiled(getattr(strategy, name))
            stack.enter_context(instance_attribute(strategy, name, step))
        yield
