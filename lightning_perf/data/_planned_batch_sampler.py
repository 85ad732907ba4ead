"""What the batch samplers share: ranks and epochs, also where Lightning builds them anew."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

from lightning_perf.data._balance import BatchReport, balance
from lightning_perf.data._plan import Layout, lay_out, naive_plan, plan_epoch


class PlannedBatchSampler(Sampler[list[int]]):
    """Batches of an epoch that every rank computes alike, and takes its part of.

    A subclass says how many items of a length make a batch.

    Args:
        lengths: The length of each item.
        shuffle: Bring other batches in each epoch; otherwise those of epoch 0 in each.
        seed: Together with the epoch what the order comes from.
        drop_last: Leave out the items that do not fill the last step.
        num_replicas: Number of ranks; by default those of the process group.
        rank: The rank of this process, in the same way.
        sampler: Set by Lightning where it builds this object anew.

    Raises:
        ValueError: Lengths that are no positive numbers, a negative seed, an impossible rank.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        num_replicas: int | None,
        rank: int | None,
        sampler: Any,
    ) -> None:
        # Not at the top: it imports Lightning, which loader workers that unpickle what is in this
        # package should be spared.
        from lightning_perf import _compat

        self.lengths = _checked_lengths(lengths)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"seed={seed!r} was asked for; it is an integer of at least 0.")
        _require_valid_rank(num_replicas, rank)
        # In overfitting and prediction Lightning asks for one order by this.
        self.shuffle = shuffle and not isinstance(sampler, SequentialSampler)
        self.seed = int(seed)
        self.drop_last = drop_last
        self._asked = (num_replicas, rank)
        self._ranks, self._rank = num_replicas, rank
        if isinstance(sampler, DistributedSampler) and num_replicas is None:
            # The strategy knows which ranks share data: with tensor parallelism not all do.
            self._ranks, self._rank = sampler.num_replicas, sampler.rank
        self._uneven = _compat.is_unrepeated(sampler)
        self._epoch = 0
        self._start = 0
        self._layouts: dict[int, Layout] = {}
        _compat.let_lightning_rebuild(type(self))

    @abstractmethod
    def _batch_size(self, length: float) -> int:
        """Return how many items of a length make a batch; not rising with the length."""

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of the constructor that this class adds."""

    def constructor_arguments(self) -> dict[str, Any]:
        """Return what makes an equal object, for whoever builds this one anew."""
        num_replicas, rank = self._asked
        return {
            "lengths": self.lengths,
            **self._arguments(),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "num_replicas": num_replicas,
            "rank": rank,
            "sampler": None,
        }

    def __repr__(self) -> str:
        added = "".join(f", {name}={value!r}" for name, value in self._arguments().items())
        return (
            f"{type(self).__name__}({len(self.lengths)} lengths{added}, shuffle={self.shuffle}, "
            f"seed={self.seed}, drop_last={self.drop_last})"
        )

    @property
    def sampler(self) -> PlannedBatchSampler:
        """Itself: Lightning tells the epoch to the sampler of a batch sampler, not to it."""
        return self

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration gives the batches of."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives the batches of; Lightning does it itself.

        Args:
            epoch: Its number, from 0.
        """
        self._epoch = epoch

    def start_at(self, batch: int) -> None:
        """Let the next iteration, and only that, begin later; the length stays that of an epoch.

        Args:
            batch: Batches of this rank to pass over.
        """
        self._start = batch

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share the batches."""
        # Asked late: this object may be older than the process group.
        return self._ranks or (dist.get_world_size() if _in_a_group() else 1)

    @property
    def rank(self) -> int:
        """The rank whose batches are given."""
        if self._rank is not None:
            return self._rank
        return dist.get_rank() if _in_a_group() else 0

    def __len__(self) -> int:
        """Return the batches of this rank in each epoch."""
        return self._layout().batches_of(self.rank)

    def __iter__(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        rank, layout = self.rank, self._layout()
        plan = plan_epoch(layout, self.lengths, self.seed, self._epoch if self.shuffle else 0)
        for step in range(start, layout.batches_of(rank)):
            yield plan.batch(step, rank)

    def report(self, epoch: int = 0) -> BatchReport:
        """Return padding and balance of all ranks in an epoch, against random batches.

        Args:
            epoch: The number of the epoch.
        """
        layout = self._layout()
        plan = plan_epoch(layout, self.lengths, self.seed, epoch if self.shuffle else 0)
        share, imbalance, largest = balance(plan, self.lengths)
        batches = int(np.count_nonzero(np.diff(plan.offsets)))
        size = max(1, round(len(plan.items) / max(1, batches)))
        naive = naive_plan(len(self.lengths), size, layout.ranks, self.seed, epoch)
        share_before, imbalance_before, _ = balance(naive, self.lengths)
        return BatchReport(
            batches=layout.batches_of(self.rank),
            padding_share=share,
            padding_share_before=share_before,
            imbalance=imbalance,
            imbalance_before=imbalance_before,
            largest_batch=largest,
            left_out=layout.left_out,
            repeated=layout.repeated,
        )

    def _layout(self) -> Layout:
        ranks = self.num_replicas
        if ranks not in self._layouts:
            self._layouts[ranks] = lay_out(
                self.lengths,
                self._batch_size,
                ranks,
                drop_last=self.drop_last,
                uneven=self._uneven,
            )
        return self._layouts[ranks]


def _checked_lengths(lengths: npt.ArrayLike) -> npt.NDArray[Any]:
    array = np.asarray(lengths)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iuf":
        raise ValueError(
            f"lengths of the shape {array.shape} and the type {array.dtype} were given; they are "
            "one number for each item of the dataset."
        )
    if not np.isfinite(array).all() or array.min() <= 0:
        item = int(np.argmin(np.where(np.isfinite(array), array, -np.inf)))
        raise ValueError(
            f"Item {item} has the length {array[item]}; lengths are positive. Leave such items out "
            "of the dataset."
        )
    # Signed, as they are compared and subtracted.
    return array.astype(np.int64) if array.dtype.kind == "u" else array


def _require_valid_rank(num_replicas: int | None, rank: int | None) -> None:
    if (num_replicas is None) != (rank is None):
        raise ValueError(
            f"num_replicas={num_replicas} and rank={rank} were asked for; give both or none."
        )
    if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
        raise ValueError(f"rank={rank} was asked for; with {num_replicas=} it is below that.")


def _in_a_group() -> bool:
    return dist.is_available() and dist.is_initialized()
