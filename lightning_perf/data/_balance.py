"""What a plan of batches saves: padding, and ranks that wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_perf.data._plan import Lengths, Plan


@dataclass(frozen=True)
class BatchReport:
    """Padding and balance of an epoch, and of random batches of as many items for comparison.

    Batches are taken to be padded to their longest item.
    """

    batches: int
    """Batches of each rank in an epoch."""
    padding_share: float
    """Share of what is computed that is padding, from 0 to 1."""
    padding_share_before: float
    imbalance: float
    """Tokens of the rank with the most, over the mean of all ranks, of all steps: 1 is even."""
    imbalance_before: float
    largest_batch: float
    """Tokens of the largest batch, padding included."""
    left_out: int
    """Items that are in no batch."""
    repeated: int
    """Items that are in two batches."""

    def __str__(self) -> str:
        rest = f"{self.left_out:,} items left out" if self.left_out else "no item left out"
        if self.repeated:
            rest += f", {self.repeated:,} repeated"
        return (
            f"{self.batches:,} batches for each rank of up to {self.largest_batch:,} tokens: "
            f"padding {self.padding_share:.1%} ({self.padding_share_before:.1%} in random "
            f"batches), imbalance {self.imbalance:.3f} ({self.imbalance_before:.3f}), {rest}"
        )


def balance(plan: Plan, lengths: Lengths) -> tuple[float, float, float]:
    """Return the padding share, the imbalance and the tokens of the largest batch of a plan.

    Args:
        plan: The batches of an epoch.
        lengths: The length of each item.
    """
    sizes = np.diff(plan.offsets)
    if not sizes.any():
        return 0.0, 1.0, 0.0
    chosen = lengths[plan.items]
    padded = np.zeros(len(sizes))
    # Empty batches are at the end only, where `reduceat` may not begin.
    full = np.flatnonzero(sizes)
    padded[full] = np.maximum.reduceat(chosen, plan.offsets[full]) * sizes[full]
    by_step = padded.reshape(-1, plan.ranks)
    share = 1 - chosen.sum() / padded.sum()
    imbalance = by_step.max(1).sum() / by_step.mean(1).sum()
    return float(share), float(imbalance), float(padded.max())
