"""Batches of items of like lengths that need about the same memory each."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lightning_perf.data._planned_batch_sampler import PlannedBatchSampler


class TokenBudgetBatchSampler(PlannedBatchSampler):
    """Fill each batch with items of like lengths up to a number of tokens, padding included.

    A batch sampler: ``DataLoader(dataset, batch_sampler=...)``. Short items come in many, long ones
    in few, so that all batches need about the same memory and time. The batches of an epoch come
    from the seed and the epoch. All ranks have the same number of them, each step has items of like
    lengths on all ranks, and an epoch holds every item once. Where fewer items than ranks remain at
    the end, some of the longest are in two batches. Lightning tells it the epoch without a call of
    yours; in your own loop call `set_epoch`, as with PyTorch's `DistributedSampler`.

    Do not use it where the loss is a mean over the batch and every item shall weigh the same:
    batches hold different numbers of items. `ExactAccumulation(weight="tokens")` weighs tokens.

    Args:
        lengths: The length of each item of the dataset, a positive number. Where the batch is
            padded to more than its longest item, the length after that: `pad_collate.padded`.
        max_tokens: The most that the items of a batch times the longest of them may be, for each
            rank.
        shuffle: Bring other batches in each epoch; otherwise those of epoch 0 in each.
        seed: Together with the epoch what the order comes from; the same on all ranks.
        drop_last: Leave out the items that do not fill the last step, instead of smaller batches.
        num_replicas: Number of ranks; by default those of the process group.
        rank: The rank of this process, in the same way.
        sampler: Set by Lightning, which builds batch samplers anew; leave it out.
        too_long: What to do with items longer than the budget: ``"error"``, or ``"alone"`` for a
            batch of their own, which needs more than the budget.

    Raises:
        ValueError: An item is longer than the budget, lengths that are no positive numbers, an
            impossible rank.

    Example:
        >>> lengths = [3, 50, 4, 49, 3, 52]
        >>> sampler = TokenBudgetBatchSampler(lengths, max_tokens=60)
        >>> sorted(sorted(batch) for batch in sampler)
        [[0, 2, 4], [1], [3], [5]]

    Source: tuning guide, "load balance"; ten techniques, 4.2.
    """

    guide: ClassVar[str] = "T load balance; K 4.2"
    """Section of the tuning guides."""

    def __init__(
        self,
        lengths: npt.ArrayLike,
        max_tokens: float,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        sampler: Any = None,
        too_long: Literal["error", "alone"] = "error",
    ) -> None:
        if too_long not in ("error", "alone"):
            raise ValueError(f"too_long={too_long!r} was asked for; it is 'error' or 'alone'.")
        super().__init__(
            lengths,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_replicas=num_replicas,
            rank=rank,
            sampler=sampler,
        )
        longest = int(np.argmax(self.lengths))
        if too_long == "error" and self.lengths[longest] > max_tokens:
            count = int((self.lengths > max_tokens).sum())
            raise ValueError(
                f"max_tokens={max_tokens} was asked for, but {count} of {len(self.lengths)} items "
                f"are longer: item {longest} has the length {self.lengths[longest]}. Allow more "
                "tokens, cut such items, or pass too_long='alone' for batches of their own."
            )
        # No number of numpy's, which a checkpoint could not be loaded with.
        self.max_tokens = int(max_tokens) if max_tokens == int(max_tokens) else float(max_tokens)
        self.too_long = too_long

    def _batch_size(self, length: float) -> int:
        return max(1, int(self.max_tokens // length))

    def _arguments(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "too_long": self.too_long}
