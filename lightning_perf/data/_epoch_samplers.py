"""Orders that follow from the epoch, so that any of them can be had again."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import RandomSampler, SequentialSampler


class ShuffledByEpoch(RandomSampler):
    """A random order that comes from a seed and the epoch.

    PyTorch's comes from a generator that has moved on when a run is resumed. It is still one of
    that class, so Lightning puts a distributed sampler in its place.

    Args:
        dataset: Its length counts.
        seed: Together with the epoch what the order comes from.
    """

    def __init__(self, dataset: Sized, seed: int) -> None:
        super().__init__(dataset)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration gives."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        # Neighbouring seeds of neighbouring epochs must not give one order twice.
        generator.manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        yield from torch.randperm(len(self.data_source), generator=generator).tolist()


class InOrder(SequentialSampler):
    """The order of the dataset, which knows the epoch it is in."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Note the epoch."""
        self.epoch = epoch
