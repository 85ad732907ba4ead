"""What a plain `DataLoader` cannot do for a batch sampler of this package, done by any item."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_perf._attributes import instance_attribute
from lightning_perf.data._planned_batch_sampler import PlannedBatchSampler
from lightning_perf.data.resumable_loader import ResumableLoader


@contextmanager
def followed_samplers(trainer: Trainer) -> Iterator[None]:
    """Let batch samplers in plain loaders begin where the run is, and not shuffle in overfitting.

    Lightning names the epoch to a sampler only after workers have begun with it, and never where a
    resumed run is within the epoch. Its own progress says both. `ResumableLoader` needs no help.

    Args:
        trainer: The trainer of the run.
    """
    process = trainer.strategy.process_dataloader
    with ExitStack() as stack:

        def process_dataloader(dataloader: object) -> object:
            loader = process(dataloader)
            if isinstance(loader, DataLoader) and not isinstance(loader, ResumableLoader):
                sampler = loader.batch_sampler
                if isinstance(sampler, PlannedBatchSampler):
                    if trainer.training:
                        _start(trainer, sampler)
                    if trainer.overfit_batches:  # type: ignore[attr-defined]  # not declared
                        stack.enter_context(instance_attribute(sampler, "shuffle", False))
            return loader

        stack.enter_context(
            instance_attribute(trainer.strategy, "process_dataloader", process_dataloader)
        )
        yield


def _start(trainer: Trainer, sampler: PlannedBatchSampler) -> None:
    loop: Any = trainer.fit_loop  # what it counts is typed for its base class only
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    if not loop.restarting:
        sampler.set_epoch(epochs.processed)
    elif batches.is_last_batch:
        # The checkpoint may be older than the end of its epoch is for the loop.
        sampler.set_epoch(epochs.started)
    else:
        sampler.set_epoch(epochs.processed)
        sampler.start_at(batches.current.processed)
