"""The largest batch that a loader can give, found without taking anything from its iterator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_perf._batches import map_tensors
from lightning_perf._preserve_state import preserve_loader

Sizes = npt.NDArray[Any]
Say = Callable[[str], None]

# Read first: where all of so many items have one size, the others are taken to have it too.
_PROBES = 64
_SECONDS_BETWEEN_REPORTS = 10.0


class NoLargestBatchError(Exception):
    """The reason why the largest batch of a loader cannot be known."""


@dataclass(frozen=True)
class Batch:
    """Items that may meet in one batch, the longest first."""

    items: list[Any]
    longest: float

    def __str__(self) -> str:
        if len(self.items) == 1:
            return f"1 item of size {self.longest:,}"
        padded = len(self.items) * self.longest
        return f"{len(self.items)} items of up to {self.longest:,} (padded {padded:,})"


@dataclass(frozen=True)
class Largest:
    """The heaviest batch and, if that is another one, the one with the longest item."""

    batches: tuple[Batch, ...]
    how: str


@dataclass(frozen=True)
class _Plan:
    """Which items come together: those of a group, or so many of the only group, but any."""

    groups: list[Sequence[Any]]
    so_many: int | None = None


def find_largest(
    loader: DataLoader[Any], *, epoch: float = math.inf, max_reads: int, say: Say
) -> Largest:
    """Find the largest batch of a loader from the lengths of its items.

    Size is that of the padded batch: the number of items times the longest. Where the order is
    fixed, or a batch sampler of whatever kind makes the batches, those of one epoch are compared.
    Where items are shuffled, any of them may meet: the worst case is a batch of the longest.

    Args:
        loader: Has a map-style dataset. Its iterator and its workers are not touched, and its
            order and all random numbers stay as they are.
        epoch: How many batches an epoch takes of it.
        max_reads: How many items to read at most where lengths are not known.
        say: Tells the user a line.

    Raises:
        NoLargestBatchError: The loader cannot be looked ahead.
    """
    kind = type(loader.dataset).__name__
    if isinstance(loader.dataset, IterableDataset):
        raise NoLargestBatchError(
            f"{kind} is an IterableDataset, and what it will give is not known beforehand."
        )
    if sized_len(loader.dataset) is None:
        raise NoLargestBatchError(f"{kind} has no length, so its items are not known.")
    with preserve_loader(loader):
        plan = _plan(loader, epoch)
        lengths, how = known_lengths(loader)
        if lengths is None or not _are_indices(plan.groups[0]):
            plan, sizes, how = _read(loader, plan, max_reads, say)
        else:
            sizes = [lengths[np.asarray(group)] for group in plan.groups]
    if plan.so_many:
        batch = _batch(plan.groups[0], sizes[0], plan.so_many)
        return Largest((batch,), f"{how}, as any items may meet")
    return Largest(
        _heaviest_and_longest(plan.groups, sizes), f"{how}, among the batches of an epoch"
    )


def fetch(loader: DataLoader[Any], items: Sequence[Any]) -> Any:
    """Return the batch of these items, made as the loader makes its batches.

    Args:
        loader: Its iterator and its workers are not touched.
        items: Indices of its dataset.
    """
    if loader.batch_sampler is None:
        chosen: dict[str, Any] = {"batch_size": None, "sampler": list(items)}
    else:
        chosen = {"batch_sampler": [list(items)]}
    (batch,) = _another_loader(
        loader,
        # The dataset may be usable only where `worker_init_fn` has run.
        num_workers=min(1, loader.num_workers),
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory and torch.cuda.is_available(),
        **chosen,
    )
    return batch


def known_lengths(loader: DataLoader[Any]) -> tuple[Sizes | None, str]:
    """Return the lengths that the loader's samplers or its dataset have, and whose they are."""
    dataset: Any = loader.dataset
    batches = loader.batch_sampler
    for owner in (batches, getattr(batches, "sampler", None), loader.sampler):
        if (lengths := _lengths(owner, len(dataset))) is not None:
            return lengths, f"the lengths of {type(owner).__name__}"
    return _dataset_lengths(dataset), f"the lengths of {type(dataset).__name__}"


def item_size(item: Any) -> int:
    """Return how many numbers or characters an item, any nested structure, holds."""
    if isinstance(item, Mapping):
        return sum(map(item_size, item.values()))
    if isinstance(item, list | tuple):
        return sum(map(item_size, item))
    if isinstance(item, str | bytes):
        return len(item)
    if isinstance(item, int | float):
        return 1
    if isinstance(item, np.ndarray | np.generic):
        return int(item.size)
    numbers = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal numbers
        numbers += tensor.numel()
        return tensor

    map_tensors(item, count)
    return numbers


def _dataset_lengths(dataset: Any) -> Sizes | None:
    if isinstance(dataset, Subset):
        inner = _dataset_lengths(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=int)]
    if isinstance(dataset, ConcatDataset):
        inners = [known for d in dataset.datasets if (known := _dataset_lengths(d)) is not None]
        return np.concatenate(inners) if len(inners) == len(dataset.datasets) else None
    return _lengths(dataset, len(dataset))


def _lengths(owner: Any, count: int) -> Sizes | None:
    """Return ``owner.lengths`` where it is one number for each item of the dataset."""
    lengths = getattr(owner, "lengths", None)
    if lengths is None or callable(lengths):
        return None
    try:
        array = np.asarray(lengths)
    except ValueError:  # several lengths for each item
        return None
    return array if array.shape == (count,) and array.dtype.kind in "iuf" else None


def _plan(loader: DataLoader[Any], epoch: float) -> _Plan:
    count = len(loader.dataset)  # type: ignore[arg-type]  # no IterableDataset comes here
    batches, sampler, so_many = loader.batch_sampler, loader.sampler, 1
    if isinstance(batches, BatchSampler):
        sampler, so_many = batches.sampler, batches.batch_size
    cut_from_a_sampler = batches is None or type(batches).__iter__ is BatchSampler.__iter__
    if cut_from_a_sampler and not _in_order(sampler):
        plan = _Plan([_possible_items(sampler, count)], so_many)
    else:
        # A batch sampler may never end.
        stop = int(epoch) if math.isfinite(epoch) else count
        order = islice(_repeatable(sampler if batches is None else batches), stop)
        plan = _Plan([[item] for item in order] if batches is None else [list(b) for b in order])
    if not all(map(len, plan.groups)) or not plan.groups:
        raise NoLargestBatchError("its sampler gives no items.")
    return plan


def _are_indices(items: Sequence[Any]) -> bool:
    """Return whether a dataset is asked for plain indices, and not for names, say, or pairs."""
    return isinstance(items[0], int | np.integer | Tensor)


def _in_order(sampler: Any) -> bool:
    if isinstance(sampler, DistributedSampler):
        return not sampler.shuffle
    return type(sampler) is SequentialSampler or isinstance(sampler, Sequence)


def _possible_items(sampler: Any, count: int) -> Sequence[Any]:
    """Return the items that a sampler may give, in whatever epoch."""
    if type(sampler) in (RandomSampler, DistributedSampler):
        return range(count)
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices)
    if type(sampler) is WeightedRandomSampler:
        return [int(item) for item in sampler.weights.nonzero().flatten()]
    # Of any other only one epoch can be known, which may never end.
    return list(dict.fromkeys(islice(_repeatable(sampler), count)))


def _repeatable(source: Iterable[Any]) -> Iterable[Any]:
    if iter(source) is source:
        raise NoLargestBatchError(
            f"its sampler is a {type(source).__name__}, which can be iterated only once."
        )
    return source


def _heaviest_and_longest(groups: list[Sequence[Any]], sizes: list[Sizes]) -> tuple[Batch, ...]:
    longest = np.array([size.max() for size in sizes])
    padded = longest * np.array([len(group) for group in groups])
    heaviest = int(padded.argmax())
    # Of several with an equally long item, the heaviest.
    most = int(np.lexsort((padded, longest))[-1])
    chosen = [heaviest] if longest[most] == longest[heaviest] else [heaviest, most]
    return tuple(_batch(groups[i], sizes[i], len(groups[i])) for i in chosen)


def _batch(items: Sequence[Any], sizes: Sizes, count: int) -> Batch:
    """Return the batch of the ``count`` longest of some items."""
    order = np.argsort(-sizes, kind="stable")[:count]
    return Batch([items[i] for i in order.tolist()], sizes[order[0]].item())


def _read(
    loader: DataLoader[Any], plan: _Plan, max_reads: int, say: Say
) -> tuple[_Plan, list[Sizes], str]:
    """Measure items by reading them; of too many, only some that lie evenly spread."""
    items = list(dict.fromkeys(chain.from_iterable(plan.groups)))
    total = len(items)
    known = _sizes(loader, _spread(items, min(_PROBES, max_reads)), say)
    if total > len(known) and len(set(known.values())) == 1:
        (size,) = set(known.values())
        how = f"reading {len(known)} of {total:,} items, all of one size"
        return plan, [np.full(len(group), size) for group in plan.groups], how
    if total > max_reads:
        plan = _thinned(plan, (max_reads - len(known)) / total)
        items = list(dict.fromkeys(chain.from_iterable(plan.groups)))
    known |= _sizes(loader, [item for item in items if item not in known], say)
    how = f"reading {len(known):,} of {total:,} items (`lengths` in the dataset would spare it)"
    return plan, [np.array([known[item] for item in group]) for group in plan.groups], how


def _thinned(plan: _Plan, share: float) -> _Plan:
    """Return a plan with a share of the items, or of the groups, but at least one batch."""
    if plan.so_many:
        (items,) = plan.groups
        return _Plan([_spread(items, max(plan.so_many, int(len(items) * share)))], plan.so_many)
    return _Plan(list(_spread(plan.groups, max(1, int(len(plan.groups) * share)))))


def _spread(things: Sequence[Any], number: int) -> Sequence[Any]:
    """Return at most so many things, evenly spread over all."""
    return things[:: math.ceil(len(things) / number)]


def _sizes(loader: DataLoader[Any], items: Sequence[Any], say: Say) -> dict[Any, int]:
    reader = _another_loader(
        loader,
        num_workers=loader.num_workers,
        collate_fn=item_size,  # in the workers: only a number leaves them
        batch_size=None,
        sampler=items,
    )
    sizes: dict[Any, int] = {}
    reported = time.monotonic()
    for item, size in zip(items, reader, strict=True):
        sizes[item] = size
        if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            say(
                f"reading items to find the longest: {len(sizes):,} of {len(items):,}. An "
                "attribute `lengths` of the dataset, a number for each item, would spare that."
            )
    return sizes


def _another_loader(loader: DataLoader[Any], *, num_workers: int, **options: Any) -> Iterable[Any]:
    """Return a loader of the same dataset, read in the same way."""
    return DataLoader(
        loader.dataset,
        num_workers=num_workers,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout if num_workers else 0,
        multiprocessing_context=loader.multiprocessing_context if num_workers else None,
        **options,
    )
