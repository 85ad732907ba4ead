"""One forward and backward at the largest input, before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_perf._attributes import instance_attribute
from lightning_perf._batches import batches_unseen
from lightning_perf._item import Moment, PerfCallback
from lightning_perf._preserve_state import preserve_loader, preserve_model
from lightning_perf.callbacks._largest_batch import NoLargestBatchError, fetch, find_largest
from lightning_perf.callbacks._largest_input import (
    HOOK,
    Input,
    input_of_hook,
    input_of_items,
    input_of_length,
    kind,
    names,
    searched_inputs,
)
from lightning_perf.callbacks._out_of_memory import largest_fitting, memory_in_use
from lightning_perf.callbacks._rehearsal import Run, everyone, rehearsal, run_inputs

_INSTEAD = (
    f"Give Preallocate `max_length` and `dim`, or the LightningModule a method `{HOOK}` that "
    "returns a batch."
)


class Preallocate(PerfCallback):
    """Run one forward and backward at the largest input before the first step.

    Memory allocators then have blocks for the largest batch, instead of freeing and allocating
    again whenever a longer one comes; and a batch that does not fit fails at once, with a report of
    what would. Optimizers and schedulers do not step. Whatever else the step did is undone, random
    numbers and the order of the data included.

    The largest batch is found from the ``lengths`` (one number for each item) that the loader's
    sampler, batch sampler or dataset has, otherwise by reading items. If the module or the data
    module has a method ``largest_batch()``, what that returns is taken.

    Do not use it where all batches have one size: the first step allocates as much.

    Args:
        max_length: Instead of searching, tile the first batch to this length ...
        dim: ... in this dimension, all its tensors that are as long there as the first one.
        indices: Instead of searching, the items of the dataset that make the largest batch.
        max_reads: Where lengths are not known, read so many items at most.
        strict: See `PerfCallback`.

    Raises:
        ValueError: Arguments that do not go together, or do not fit the batch.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.callbacks import Preallocate
        >>> trainer = Trainer(callbacks=[Preallocate()], accelerator="cpu", logger=False)

    Source: PyTorch tuning guide, "Preallocate memory in case of variable input length".
    """

    guide: ClassVar[str] = "T preallocate memory in case of variable input length"
    changes: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True
    moment: ClassVar[Moment] = "after_wrap"
    functions: ClassVar[frozenset[str]] = frozenset({"fit"})

    def __init__(
        self,
        *,
        max_length: int | None = None,
        dim: int | None = None,
        indices: list[int] | None = None,
        max_reads: int = 10_000,
        strict: bool | None = None,
    ) -> None:
        super().__init__(strict=strict)
        _require_consistent(max_length, dim, indices, max_reads)
        self.max_length = max_length
        self.dim = dim
        self.indices = indices
        self.max_reads = max_reads

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason when no step can be rehearsed."""
        if not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
            return (
                f"{type(trainer.strategy).__name__} may shard the model, and what a step leaves in "
                "the shards cannot be undone. Use one device or DDP."
            )
        if getattr(trainer.strategy.model, "static_graph", False):
            return (
                "DDP with static_graph=True takes the first backward as the plan for all that "
                "follow, and so it has to be a step of training. Remove one of the two."
            )
        return batches_unseen(module)

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Act when the first training batch is about to be moved to the device."""
        transfer = trainer.strategy.batch_to_device
        seen: Any = None
        done: Any = None

        def batch_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal seen, done
            if trainer.training and trainer.train_dataloader is not seen:
                seen = trainer.train_dataloader
                # Again only for other data or another batch size, as a search for it tries them.
                if (sizes := _sizes(seen)) != done:
                    done = sizes
                    self._act(trainer, module, batch)
            return transfer(batch, *args, **kwargs)

        with instance_attribute(trainer.strategy, "batch_to_device", batch_to_device):
            yield "before the first step, at the largest batch"

    def _act(self, trainer: Trainer, module: LightningModule, first: Any) -> None:
        if any(map(is_lazy, chain(module.parameters(), module.buffers()))):
            self.has_no_effect("the model has lazy layers whose shapes are not known yet.")
            return
        with rehearsal(trainer, module) as step:
            inputs, reason = self._inputs(trainer, module, first)
            plans = everyone((reason, len(inputs), max((i.size for i in inputs), default=0)))
            reason = next((theirs for theirs, _, _ in plans if theirs), None)
            if reason is None:
                # Every rank runs as many: a step may wait for the others.
                runs = max(number for _, number, _ in plans)
                inputs += inputs[-1:] * (runs - len(inputs))
                try:
                    run = run_inputs(trainer, step, inputs)
                except Exception:
                    self.say(f"training_step failed, or its batch, at {names(inputs)}.")
                    raise
        if reason is not None:
            self.has_no_effect(reason)
        elif not run.fits:
            too_large = max(size for _, _, size in plans)
            raise _out_of_memory(trainer, module, inputs, run, too_large) from run.error
        elif run.without_loss:
            self.has_no_effect(f"training_step returned no loss for {names(inputs)}.")
        else:
            self.say(_report(trainer, module, inputs, run))

    def _inputs(
        self, trainer: Trainer, module: LightningModule, first: Any
    ) -> tuple[list[Input], str | None]:
        """Return what to run, or the reason why it cannot be known."""
        if self.max_length is not None and self.dim is not None:
            return [input_of_length(first, self.max_length, self.dim)], None
        try:
            if self.indices is not None:
                inputs = [input_of_items(trainer, module, self.indices)]
            elif (given := input_of_hook(trainer, module)) is not None:
                inputs = [given]
            else:
                inputs = searched_inputs(trainer, module, max_reads=self.max_reads, say=self.say)
        except NoLargestBatchError as error:
            return [], f"{error} {_INSTEAD}"
        theirs, ours = kind(first), kind(inputs[0].make(inputs[0].size))
        if ours != theirs:
            return [], (
                f"the loader gives batches of the kind {theirs}, and this is another: "
                f"{names(inputs)}, of the kind {ours}. {_INSTEAD}"
            )
        return inputs, None


def preallocate(
    model: nn.Module, step: Callable[[], Any], optimizers: Iterable[Optimizer] = ()
) -> None:
    """Run one forward and backward, and undo all of it but for what allocators keep.

    Args:
        model: The model.
        step: Runs forward and backward at the largest input, without an update.
        optimizers: Optimizers that the step may touch.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> preallocate(model, lambda: model(torch.randn(512, 4)).sum().backward())
        >>> model.weight.grad is None
        True
    """
    with preserve_model(model, optimizers):
        step()


def largest_batch(loader: DataLoader[Any], *, max_reads: int = 10_000) -> Any:
    """Return the heaviest batch that a loader can give; its order stays as it is.

    Args:
        loader: Reads a map-style dataset. Where neither its samplers nor the dataset have
            ``lengths``, items are read.
        max_reads: How many items to read at most.

    Raises:
        ValueError: The loader cannot be looked ahead.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> texts = [[1, 2], [1, 2, 3, 4], [1]]
        >>> largest_batch(DataLoader(texts, batch_size=2, shuffle=True, collate_fn=list))
        [[1, 2, 3, 4], [1, 2]]
    """
    try:
        found = find_largest(loader, max_reads=max_reads, say=rank_zero_info)
    except NoLargestBatchError as error:
        raise ValueError(f"The largest batch is not known: {error}") from None
    with preserve_loader(loader):
        return fetch(loader, found.batches[0].items)


def _report(trainer: Trainer, module: LightningModule, inputs: list[Input], run: Run) -> str:
    manual = (
        ""
        if module.automatic_optimization
        else (
            " Optimization is manual: the backward passes were those of training_step; steps of "
            "optimizers and schedulers in it were left out."
        )
    )
    return (
        f"ran {names(inputs)}; shapes {' and '.join(run.shapes)}. Memory then: "
        f"{memory_in_use(trainer.strategy.root_device)}.{manual}"
    )


def _out_of_memory(
    trainer: Trainer, module: LightningModule, inputs: list[Input], failed: Run, too_large: int
) -> torch.OutOfMemoryError:
    """Return the error to raise, once it is known what would fit."""
    tried: list[str] = []

    def fits(size: int) -> bool:
        with rehearsal(trainer, module) as step:
            run = run_inputs(trainer, step, inputs, size)
        tried.append(f"{size} {'fitted' if run.fits else 'did not'}")
        return run.fits

    most = largest_fitting(fits, too_large)
    unit = inputs[0].unit
    if most:
        advice = f"{most} {unit} fit ({', '.join(tried)}): take no more in a batch"
    elif tried:
        advice = f"Not even {tried[-1].split()[0]} of the {unit} fitted: leave out what is so long"
    else:
        advice = "It cannot be divided: leave out, or cut, what is so long"
    if failed.error is None:
        where = "Another rank ran out of memory"
    else:
        where = f"Out of memory; then {failed.memory}"
    return torch.OutOfMemoryError(
        f"Preallocate: the largest input does not fit, {names(inputs)}; shapes "
        f"{' and '.join(failed.shapes)}. {where}. {advice}, or save memory with "
        "precision='bf16-mixed', ActivationCheckpointing, or smaller batches and "
        f"accumulate_grad_batches. [{failed.error}]"
    )


def _sizes(loaders: Any) -> list[tuple[Any, Any]]:
    return [(getattr(each, "batch_size", None), sized_len(each)) for each in tree_leaves(loaders)]


def _require_consistent(
    max_length: int | None, dim: int | None, indices: list[int] | None, max_reads: int
) -> None:
    if (max_length is None) != (dim is None):
        raise ValueError(
            f"Preallocate(max_length={max_length}, dim={dim}) was asked for: a length needs the "
            "dimension in which it is meant, and the other way round. Give both."
        )
    if max_length is not None and indices is not None:
        raise ValueError(
            "Preallocate was given `indices` and `max_length`: each says what the largest batch "
            "is. Give one of them."
        )
    for name, value in (("max_length", max_length), ("max_reads", max_reads)):
        if value is not None and value < 1:
            raise ValueError(f"Preallocate({name}={value}) was asked for; it must be at least 1.")
    if indices is not None and not indices:
        raise ValueError("Preallocate(indices=[]) was asked for; a batch has at least one item.")
