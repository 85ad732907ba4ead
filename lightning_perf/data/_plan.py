"""Which items come together in an epoch: batches of like lengths, the same number for each rank.

Only numpy and the lengths: no loader, no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

# Items of a bucket differ by so much at most, and within it they mix: batches that are padded to
# their longest item then hold about half as much padding.
_SPREAD = 1.05


@dataclass(frozen=True)
class Bucket:
    """Items of like lengths: a range in the order of lengths, and the batches made of them."""

    start: int
    stop: int
    batch_size: int
    full_steps: int
    """Steps in which each rank has a full batch."""
    more: tuple[int, ...]
    """Sizes of the batches after those. What remains joins the next bucket."""


@dataclass(frozen=True)
class Layout:
    """What all epochs have in common: how many batches of which size each bucket gives.

    Args:
        order: The items from the shortest to the longest.
        buckets: From the shortest to the longest.
        ranks: How many processes share the batches.
        left_out: Items that no batch of an epoch holds.
        repeated: Items that an epoch holds once more than the others.
    """

    order: Indices
    buckets: tuple[Bucket, ...]
    ranks: int
    left_out: int
    repeated: int

    def batches_of(self, rank: int) -> int:
        """Return how many batches a rank has in each epoch."""
        full = sum(bucket.full_steps for bucket in self.buckets)
        return full + sum(len(bucket.more[rank :: self.ranks]) for bucket in self.buckets)


@dataclass(frozen=True)
class Plan:
    """The batches of one epoch: ``items[offsets[i]:offsets[i + 1]]``, step by step, rank by rank.

    Args:
        items: Numbers of the items.
        offsets: Where each batch begins.
        steps: In which order the steps are taken.
        ranks: How many batches a step has; the last one in ``offsets`` may have fewer.
    """

    items: Indices
    offsets: Indices
    steps: Indices
    ranks: int

    def batch(self, step: int, rank: int) -> list[int]:
        """Return the items of a rank in a step, none where the step has no batch for it."""
        batch = int(self.steps[step]) * self.ranks + rank
        found: list[int] = self.items[slice(*self.offsets[batch : batch + 2])].tolist()
        return found


def lay_out(
    lengths: Lengths,
    batch_size: Callable[[float], int],
    ranks: int,
    *,
    drop_last: bool,
    uneven: bool = False,
) -> Layout:
    """Put items into buckets, and settle the number and the sizes of the batches of all epochs.

    Args:
        lengths: The length of each item.
        batch_size: Says how many items of a length make a batch; not rising with the length.
        ranks: How many processes share the batches.
        drop_last: Leave out the items that do not fill the last step.
        uneven: Let some ranks have a batch more instead of repeating items.
    """
    order = np.argsort(lengths, kind="stable")
    ranges = list(_ranges(lengths[order]))
    sizes = [batch_size(longest) for _, _, longest in ranges]
    buckets: list[Bucket] = []
    carried = left_out = repeated = 0
    for (start, stop, _), size, next_size in zip(ranges, sizes, [*sizes[1:], None], strict=True):
        full, carried = divmod(carried + stop - start, size * ranks)
        more: tuple[int, ...] = ()
        if next_size is None:
            full, more, left_out, repeated = _end(full, carried, size, ranks, drop_last, uneven)
        elif carried >= ranks and carried > next_size * ranks:
            # They would make more than one step of the next bucket.
            more, carried = _even(carried, ranks), 0
        buckets.append(Bucket(start, stop, size, full, more))
    return Layout(order, tuple(buckets), ranks, left_out, repeated)


def plan_epoch(layout: Layout, lengths: Lengths, seed: int, epoch: int) -> Plan:
    """Return the batches of an epoch, the same wherever they are computed.

    Args:
        layout: From `lay_out`.
        lengths: Those that it was made from.
        seed: Together with the epoch what the order comes from.
        epoch: The number of the epoch.
    """
    random = np.random.default_rng((seed, epoch))
    blocks: list[Indices] = []
    sizes: list[Indices] = []
    rest = np.empty(0, np.int64)
    for bucket in layout.buckets:
        pool = np.concatenate([rest, layout.order[bucket.start : bucket.stop]])
        if bucket is layout.buckets[-1]:
            # Any, not always the longest.
            pool = random.permutation(pool)[layout.left_out :]
        pool = pool[np.argsort(lengths[pool] * random.uniform(1, _SPREAD, len(pool)))]
        taken = bucket.full_steps * bucket.batch_size * layout.ranks
        rows = pool[:taken].reshape(bucket.full_steps, bucket.batch_size * layout.ranks)
        blocks.append(_dealt(rows, lengths, layout.ranks).ravel())
        sizes.append(np.full(bucket.full_steps * layout.ranks, bucket.batch_size))
        sizes.append(np.asarray(bucket.more, np.int64))
        end = taken + sum(bucket.more)
        blocks.append(pool[taken:end])
        rest = pool[end:]
    if layout.repeated:
        # Those that are most like the last ones.
        blocks.append(np.resize(pool[::-1], layout.repeated))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    steps, without_a_batch = divmod(len(offsets) - 1, layout.ranks)
    order = random.permutation(steps)
    if without_a_batch:
        # Uneven: it stays the last one, and ends where the ranks without a batch begin.
        order = np.append(order, steps)
        offsets = np.append(offsets, np.repeat(offsets[-1], layout.ranks - without_a_batch))
    return Plan(np.concatenate(blocks), offsets, order, layout.ranks)


def naive_plan(count: int, batch_size: int, ranks: int, seed: int, epoch: int) -> Plan:
    """Return the batches of items in random order, whatever their lengths: for comparison.

    Args:
        count: Number of items.
        batch_size: Items of a batch.
        ranks: How many processes share the items.
        seed: Together with the epoch what the order comes from.
        epoch: The number of the epoch.
    """
    order = np.random.default_rng((seed, epoch)).permutation(count)
    per_step = batch_size * ranks
    full = count // per_step * per_step
    # As `DistributedSampler` shares them out: the items of a step in turn.
    items = order[:full].reshape(-1, batch_size, ranks).transpose(0, 2, 1).ravel()
    tail = _even(count - full, min(ranks, count - full)) if count > full else ()
    sizes = [*(batch_size,) * (full // batch_size), *tail]
    steps = -(-len(sizes) // ranks)
    sizes += [0] * (steps * ranks - len(sizes))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Plan(np.concatenate([items, order[full:]]), offsets, np.arange(steps), ranks)


def _ranges(ordered: Lengths) -> Iterator[tuple[int, int, float]]:
    """Yield where each bucket begins and ends, and its longest length."""
    start = 0
    while start < len(ordered):
        stop = int(np.searchsorted(ordered, ordered[start] * _SPREAD, side="right"))
        yield start, stop, ordered[stop - 1]
        start = stop


def _end(
    full: int, remaining: int, size: int, ranks: int, drop_last: bool, uneven: bool
) -> tuple[int, tuple[int, ...], int, int]:
    """Settle what becomes of the items that the last bucket's full steps do not hold.

    Returns:
        Full steps, sizes of the batches after them, items left out, items repeated.
    """
    if not remaining:
        return full, (), 0, 0
    if drop_last:
        return full, (), remaining, 0
    if remaining >= ranks:
        return full, _even(remaining, ranks), 0, 0
    if full and size > 1:
        # Too few for all ranks: the last full step shares its items with one more step.
        return full - 1, _even(remaining + size * ranks, 2 * ranks), 0, 0
    if uneven:
        return full, (1,) * remaining, 0, 0
    return full, (1,) * ranks, 0, ranks - remaining


def _even(items: int, batches: int) -> tuple[int, ...]:
    """Return sizes of batches that differ by one at most."""
    size, more = divmod(items, batches)
    return (size + 1,) * more + (size,) * (batches - more)


def _dealt(rows: Indices, lengths: Lengths, ranks: int) -> Indices:
    """Return the items of each step, a row, such that those of a rank lie together.

    They are dealt from the longest to the shortest, in turn forwards and backwards, so that all
    ranks have about as much to compute.
    """
    if ranks == 1 or not rows.size:
        return rows
    ranked = np.take_along_axis(rows, np.argsort(-lengths[rows], axis=1, kind="stable"), axis=1)
    turns = np.arange(rows.shape[1]).reshape(-1, ranks)
    turns[1::2] = turns[1::2, ::-1].copy()
    return ranked[:, turns.T.ravel()]
