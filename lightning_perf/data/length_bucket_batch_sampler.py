"""Batches of items of like lengths, of one size."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy.typing as npt

from lightning_perf.data._planned_batch_sampler import PlannedBatchSampler


class LengthBucketBatchSampler(PlannedBatchSampler):
    """Put items of like lengths together in batches of one size, alike on all ranks.

    A batch sampler: ``DataLoader(dataset, batch_sampler=...)``. The batches of an epoch come from
    the seed and the epoch. All ranks have the same number of them, each step has items of like
    lengths on all ranks, and an epoch holds every item once. Where fewer items than ranks remain at
    the end, some of the longest are in two batches. Lightning tells it the epoch without a call of
    yours; in your own loop call `set_epoch`, as with PyTorch's `DistributedSampler`.

    Do not use it where lengths hardly differ. Where they differ much, batches of long items need
    far more memory than those of short ones: `TokenBudgetBatchSampler` evens that out.

    Args:
        lengths: The length of each item of the dataset, a positive number.
        batch_size: Items of a batch, for each rank.
        shuffle: Bring other batches in each epoch; otherwise those of epoch 0 in each.
        seed: Together with the epoch what the order comes from; the same on all ranks.
        drop_last: Leave out the items that do not fill the last step, instead of smaller batches.
        num_replicas: Number of ranks; by default those of the process group.
        rank: The rank of this process, in the same way.
        sampler: Set by Lightning, which builds batch samplers anew; leave it out.

    Raises:
        ValueError: A batch size below 1, lengths that are no positive numbers, an impossible rank.

    Example:
        >>> lengths = [3, 50, 7, 50, 3, 60, 7, 60]
        >>> sampler = LengthBucketBatchSampler(lengths, batch_size=2)
        >>> sorted(sorted(batch) for batch in sampler)
        [[0, 4], [1, 3], [2, 6], [5, 7]]

    Source: tuning guide, "load balance"; ten techniques, 4.2.
    """

    guide: ClassVar[str] = "T load balance; K 4.2"
    """Section of the tuning guides."""

    def __init__(
        self,
        lengths: npt.ArrayLike,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        sampler: Any = None,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r} was asked for; it is at least 1.")
        super().__init__(
            lengths,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_replicas=num_replicas,
            rank=rank,
            sampler=sampler,
        )
        self.batch_size = batch_size

    def _batch_size(self, length: float) -> int:
        return self.batch_size

    def _arguments(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size}
