"""Seeing every loader before its first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader

from lightning_perf._attributes import instance_attribute


@contextmanager
def every_loader(trainer: Trainer, look: Callable[[DataLoader[Any]], None]) -> Iterator[None]:
    """Show each DataLoader of each loop to ``look``, once it is final and before its workers start.

    ``strategy.process_dataloader`` is the one place that loaders pass, whoever made them.

    Args:
        trainer: The trainer of the run.
        look: Takes the loader; other iterables are not shown.
    """
    process = trainer.strategy.process_dataloader

    def process_dataloader(dataloader: object) -> object:
        loader = process(dataloader)
        if isinstance(loader, DataLoader):
            look(loader)
        return loader

    with instance_attribute(trainer.strategy, "process_dataloader", process_dataloader):
        yield


def short_last_batch(loader: DataLoader[Any]) -> int:
    """Return the samples in the last batch if they are fewer than in the others, else 0."""
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or batches.drop_last:
        return 0
    try:
        samples = len(batches.sampler)  # type: ignore[arg-type]  # may lack it
    except TypeError:  # a sampler without a length
        return 0
    return samples % batches.batch_size
