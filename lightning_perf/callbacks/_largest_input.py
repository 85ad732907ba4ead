"""Batches for a rehearsal: found in the loaders, or made from what the user says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from lightning_perf import _compat
from lightning_perf._batches import map_tensors
from lightning_perf.callbacks._largest_batch import (
    NoLargestBatchError,
    Say,
    fetch,
    find_largest,
)

HOOK = "largest_batch"
"""Method of a LightningModule or LightningDataModule that returns its largest batch."""


@dataclass(frozen=True)
class Input:
    """A batch to run, which can be made smaller unless its size is 1."""

    text: str
    size: int
    unit: str
    make: Callable[[int], Any]
    """Takes a size; returns a batch that is ready to be moved to the device."""
    how: str = ""
    """What it was found by, if it was searched for."""


def names(inputs: list[Input]) -> str:
    """Return in words what the inputs are, and how they were found."""
    hows = dict.fromkeys(each.how for each in inputs if each.how)
    found = f", found by {' and '.join(hows)}" if hows else ""
    return " and ".join(dict.fromkeys(each.text for each in inputs)) + found


def searched_inputs(
    trainer: Trainer, module: LightningModule, *, max_reads: int, say: Say
) -> list[Input]:
    """Return the largest batches that the loaders can give.

    Several loaders are taken to give their largest batches at the same time.

    Raises:
        NoLargestBatchError: Some loader cannot be looked ahead.
    """
    loaders, _ = _loaders(trainer)
    epoch = trainer.num_training_batches
    found = [find_largest(each, epoch=epoch, max_reads=max_reads, say=say) for each in loaders]
    hows = " and ".join(dict.fromkeys(each.how for each in found))
    inputs = []
    for number in range(max(len(each.batches) for each in found)):
        batches = [each.batches[min(number, len(each.batches) - 1)] for each in found]
        text = " with ".join(map(str, batches))
        items = [batch.items for batch in batches]
        inputs.append(_of_items(trainer, module, items, text, hows))
    return inputs


def input_of_items(trainer: Trainer, module: LightningModule, indices: list[int]) -> Input:
    """Return the batch of given items of the dataset.

    Raises:
        ValueError: The loaders have no such items.
    """
    loaders, _ = _loaders(trainer)
    count = len(loaders[0].dataset) if len(loaders) == 1 else 0  # type: ignore[arg-type]  # map-style
    if not all(0 <= index < count for index in indices):
        raise ValueError(
            f"Preallocate(indices=...) names items up to {max(indices)}, and there is "
            + (f"a dataset of {count}." if len(loaders) == 1 else "not one loader but several.")
        )
    return _of_items(trainer, module, [indices], f"the items {', '.join(map(str, indices))}")


def input_of_hook(trainer: Trainer, module: LightningModule) -> Input | None:
    """Return what `largest_batch` of the module or the data module gives, if there is one."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # public, but not declared
    owners = [each for each in (module, datamodule) if callable(getattr(each, HOOK, None))]
    if not owners:
        return None
    owner = owners[0]

    @lru_cache(maxsize=1)
    def make(size: int) -> Any:
        return _before(trainer, module, getattr(owner, HOOK)())

    return Input(f"what {type(owner).__name__}.{HOOK} returns", 1, "", make)


def input_of_length(batch: Any, max_length: int, dim: int) -> Input:
    """Return a batch that is tiled along one dimension, to be as long as said.

    Args:
        batch: A real one. Tensors are tiled whose size in that dimension is that of the first.
        max_length: The length.
        dim: The dimension, counted from the end if negative.

    Raises:
        ValueError: No tensor has that dimension, or the batch is longer already.
    """
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        if -tensor.dim() <= dim < tensor.dim():
            sizes.append(tensor.shape[dim])
        return tensor

    map_tensors(batch, note)
    if not sizes or not 0 < sizes[0] <= max_length:
        raise ValueError(
            f"Preallocate(max_length={max_length}, dim={dim}) was asked for, and the first batch "
            + (f"is {sizes[0]} long there" if sizes else "has no tensor with such a dimension")
            + f": its shapes are {shapes(batch)}."
        )
    text = f"the first batch, tiled in dimension {dim} from {sizes[0]} to {max_length}"
    return Input(text, max_length, "positions", partial(_tiled, batch, dim, sizes[0]))


def shapes(batch: Any) -> str:
    """Return the shapes of the tensors in a batch, in words."""
    found: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(str(tuple(tensor.shape)))
        return tensor

    map_tensors(batch, note)
    shown = found if len(found) <= 6 else [*found[:6], f"and {len(found) - 6} more"]
    return ", ".join(shown) or "none"


def kind(value: Any) -> Any:
    """Return what batches of one loader have in common, whatever their sizes."""
    if isinstance(value, Tensor):
        return (value.dtype, value.dim())
    if isinstance(value, Mapping):
        return (type(value), {key: kind(part) for key, part in value.items()})
    if isinstance(value, list | tuple):
        # As many parts as items, perhaps: boxes of detection.
        return (type(value), *sorted({str(kind(part)) for part in value}))
    return type(value)


def _of_items(
    trainer: Trainer, module: LightningModule, items: list[list[Any]], text: str, how: str = ""
) -> Input:
    """Return the batch made of these items of each loader's dataset."""

    @lru_cache(maxsize=1)
    def make(size: int) -> Any:
        loaders, structure = _loaders(trainer)
        parts = [fetch(each, its[:size]) for each, its in zip(loaders, items, strict=True)]
        return _before(trainer, module, tree_unflatten(parts, structure))

    return Input(text, max(map(len, items)), "items", make, how)


def _loaders(trainer: Trainer) -> tuple[list[DataLoader[Any]], Any]:
    """Return the loaders, and the structure in which they were given."""
    loaders, structure = tree_flatten(trainer.train_dataloader)
    for loader in loaders:
        if not isinstance(loader, DataLoader):
            raise NoLargestBatchError(
                f"{type(loader).__name__} is no DataLoader, and what it will give is not known "
                "beforehand."
            )
    return loaders, structure


def _before(trainer: Trainer, module: LightningModule, batch: Any) -> Any:
    return _compat.before_transfer(module, trainer.precision_plugin.convert_input(batch))


def _tiled(batch: Any, dim: int, length: int, size: int) -> Any:
    def tile(tensor: Tensor) -> Tensor:
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != length:
            return tensor
        return tensor.index_select(dim, torch.arange(size, device=tensor.device) % length)

    return map_tensors(batch, tile)
