"""Accumulated gradients that are those of one big batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS

from lightning_perf import _compat
from lightning_perf._attributes import instance_attribute
from lightning_perf._batches import batches_unseen
from lightning_perf._item import Moment, PerfCallback
from lightning_perf.callbacks._gradient_window import (
    GradientWindow,
    Number,
    as_weight,
    has_gradients,
)
from lightning_perf.callbacks._loss_weights import counter, function_of, sizes
from lightning_perf.callbacks.cuda_graph import CUDAGraph

__all__ = ["ExactAccumulation", "GradientWindow"]


class ExactAccumulation(PerfCallback):
    """Make accumulated gradients those of one big batch: short windows, unequal micro-batches.

    Lightning divides each loss by ``accumulate_grad_batches`` and lets each micro-batch count the
    same. That is wrong for the shorter last window of an epoch, whose step becomes too small, and
    for micro-batches that hold different numbers of samples or tokens, on one device or on several.
    Here each micro-batch counts by its weight, before gradients are clipped and before any hook
    sees them at the optimizer step. Means over an epoch of what ``training_step`` logs without a
    ``batch_size`` use the same weights, but for ``"batches"``, where Lightning's stay.

    The loss must be a mean: over micro-batches of one size, over samples, or over tokens. Do not
    use it for a loss that is a sum, nor expect one big batch of models that mix the samples of a
    batch: BatchNorm, contrastive losses.

    Args:
        weight: ``"batches"``: all micro-batches count the same. ``"samples"``: by the first
            dimension of the tensors in the batch. ``"tokens"``: by the number that a
            cross-entropy was divided by, in which ignored targets are left out; where the loss does
            not show one, by the entries of the batch's ``labels`` that are not -100, or of its
            ``attention_mask`` that are not 0. Or a callable that takes the batch and returns a
            number or a tensor of one; or, in YAML, its dotted path.
        strict: See `PerfCallback`.

    Raises:
        ValueError: ``weight`` is none of these, or the number cannot be found in a batch.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.callbacks import ExactAccumulation
        >>> trainer = Trainer(
        ...     callbacks=[ExactAccumulation("tokens")], accumulate_grad_batches=4, logger=False
        ... )

    Source: Lightning issue 19987 on short windows, Transformers issue 34242 on tokens.
    """

    guide: ClassVar[str] = "K 4.1"
    changes: ClassVar[frozenset[str]] = frozenset({"optimizer"})
    exact: ClassVar[bool] = False
    moment: ClassVar[Moment] = "after_wrap"
    functions: ClassVar[frozenset[str]] = frozenset({"fit"})

    def __init__(
        self, weight: str | Callable[[Any], Any] = "batches", *, strict: bool | None = None
    ) -> None:
        function_of(weight)
        super().__init__(strict=strict)
        self.weight = weight

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason when nothing is accumulated, or not by Lightning on whole gradients."""
        strategy = type(trainer.strategy).__name__
        if not module.automatic_optimization:
            return (
                f"{type(module).__name__} optimizes manually, so Lightning accumulates nothing. "
                "Use GradientWindow in training_step."
            )
        if trainer.strategy.handles_gradient_accumulation:
            return f"{strategy} accumulates gradients itself, out of reach. Use 'ddp'."
        if trainer.strategy.restore_checkpoint_after_setup:
            return f"{strategy} shards gradients. Use a strategy that keeps them whole: 'ddp'."
        if trainer.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
            return f"{strategy} communicates without torch.distributed. Use 'ddp'."
        if any(isinstance(c, CUDAGraph) and c.scope == "step" for c in _compat.callbacks(trainer)):
            return (
                "CUDAGraph(scope='step') replays training steps, past what weighs them. "
                "Use CUDAGraph(scope='network')."
            )
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            return "LBFGS computes the last micro-batch of a window several times in each step."
        if not _accumulates(trainer) and (self.weight == "batches" or trainer.world_size == 1):
            several = " and one process" if self.weight != "batches" else ""
            return (
                f"With accumulate_grad_batches=1{several} each step has one batch. "
                "Set accumulate_grad_batches, or remove ExactAccumulation."
            )
        return batches_unseen(module)

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Weigh losses and correct gradients for the length of the run."""
        run = _Run(trainer, self.weight, self.say)
        with run.installed():
            yield self._detail(module)
        for line in run.report():
            self.say(line)

    def _detail(self, module: LightningModule) -> str:
        kind = self.weight if isinstance(self.weight, str) else _name(self.weight)
        mixing = [
            name
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and layer.training
        ]
        if not mixing:
            return f"by {kind}"
        return (
            f"by {kind}; not one big batch for BatchNorm, which sees micro-batches: "
            f"{', '.join(mixing)}"
        )


class _Run:
    """One run: weighs each loss before its backward, and corrects before each optimizer step."""

    def __init__(
        self, trainer: Trainer, weight: str | Callable[[Any], Any], say: Callable[[str], None]
    ) -> None:
        self._trainer = trainer
        self._alike = weight == "batches"
        self._say = say
        self._count = counter(weight, say)
        self._window = GradientWindow(usual=1 if self._alike else None)
        self._weight: Number = 1.0
        self._logs = _HeldLogs(_compat.training_results(trainer).log)
        self._sizes = _Sizes()
        self._clears = True
        self._told = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Act on the strategy's methods, which automatic optimization calls for each batch."""
        strategy = self._trainer.strategy
        self._batch_start, self._step = strategy.on_train_batch_start, strategy.training_step
        self._backward, self._optimizer_step = strategy.backward, strategy.optimizer_step
        with ExitStack() as stack:
            for name in ("on_train_batch_start", "training_step", "backward", "optimizer_step"):
                stack.enter_context(instance_attribute(strategy, name, getattr(self, name)))
            if not self._alike:
                results = _compat.training_results(self._trainer)
                stack.enter_context(instance_attribute(results, "log", self._logs.log))
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start a window where Lightning does, and where the gradients of one are gone."""
        self._clears = batch_idx % self._trainer.accumulate_grad_batches == 0
        if self._clears or not has_gradients(self._trainer.optimizers[0]):
            self._window.forget()
            self._sizes.end_window()
        if self._alike:
            self._sizes.see(batch)
        self._batch_start(batch, batch_idx)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step and find the weight of its loss."""
        of_loss = self._count(batch)
        with self._logs.held():
            output = self._step(batch, *args, **kwargs)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor):
                self._weight = as_weight(of_loss(loss))
                self._logs.weight = self._weight
        return output

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run backward on the weighed loss. What has no backward does not count."""
        if self._window.empty and not self._clears:
            # Lightning clears gradients at the first batch of a window only. If the loader gave
            # None there, or the run starts in mid-window, those of an earlier window are left.
            self._trainer.optimizers[0].zero_grad()
        return self._backward(self._window.weigh(loss, self._weight), *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kw: Any
    ) -> Any:
        """Correct the gradients between the last backward of a window, and clipping and step."""

        def corrected() -> Any:
            result = closure()
            if not self._window.empty:
                self._tell_of_long_window()
            # Only windows that end with the epoch can have different lengths on different ranks.
            alike = self._alike and not self._epoch_ends()
            divisor = self._trainer.accumulate_grad_batches
            self._window.correct(optimizer, divisor=divisor, alike=alike)
            self._sizes.end_window()
            return result

        return self._optimizer_step(optimizer, corrected, *args, **kw)

    def report(self) -> Iterator[str]:
        """Give what to say at the end."""
        if self._window.summary.windows:
            yield f"{self._window.summary}."
        if self._sizes.uneven:
            yield (
                f"windows with unequal micro-batches: {self._sizes.uneven}; those of "
                f"{min(self._sizes.seen)} and of {max(self._sizes.seen)} samples counted the same. "
                "weight='samples' counts samples."
            )

    def _epoch_ends(self) -> bool:
        trainer = self._trainer
        return trainer.is_last_batch or self._ready == trainer.num_training_batches

    @property
    def _ready(self) -> int:
        """Number of batches of this epoch, the one under way included."""
        return self._trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def _tell_of_long_window(self) -> None:
        batches, wanted = self._ready, self._trainer.accumulate_grad_batches
        if batches < wanted and not self._told:
            self._told = True
            self._say(
                f"accumulate_grad_batches={wanted} is more than the {batches} batches of an epoch: "
                f"each window ends with the epoch, after {batches}."
            )


class _HeldLogs:
    """Values logged in a training step, kept until the weight of the step is known."""

    def __init__(self, log: Callable[..., None]) -> None:
        self._log = log
        self._held: list[Callable[..., None]] | None = None
        self.weight: Number | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Log at the end of the block what has no batch size of its own, with ``weight``."""
        self._held, self.weight = [], None
        try:
            yield
            held, weight = self._held, self.weight
        finally:
            self._held = None
        for log in held:
            log(batch_size=weight if weight is None else _batch_size(weight))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types here
    def log(self, *args: Any, batch_size: Any = None, **kwargs: Any) -> None:
        """Stand in for the ``log`` of the results."""
        if self._held is None or batch_size is not None or not kwargs.get("on_epoch"):
            self._log(*args, batch_size=batch_size, **kwargs)
        else:
            self._held.append(partial(self._log, *args, **kwargs))


class _Sizes:
    """Numbers of samples of micro-batches that count the same, where they differ in a window."""

    def __init__(self) -> None:
        self.uneven = 0
        self.seen: set[int] = set()
        self._window: set[int] = set()

    def see(self, batch: Any) -> None:
        """Note the size of a micro-batch, if its tensors agree on it."""
        if len(found := sizes(batch)) == 1:
            self._window |= found

    def end_window(self) -> None:
        """Compare the sizes in a window."""
        if len(self._window) > 1:
            self.uneven += 1
            self.seen |= self._window
        self._window.clear()


def _accumulates(trainer: Trainer) -> bool:
    return trainer.accumulate_grad_batches > 1 or any(
        isinstance(callback, GradientAccumulationScheduler)
        and callback.going_to_accumulate_grad_batches()
        for callback in _compat.callbacks(trainer)
    )


def _batch_size(weight: Number) -> Any:
    """Return a weight as Lightning adds it up: whole numbers, where they are known, stay whole."""
    return int(weight) if isinstance(weight, float) and weight.is_integer() else weight


def _name(function: Callable[[Any], Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
