"""Runs that note which items each step was given."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_perf.data import LengthBucketBatchSampler, TokenBudgetBatchSampler

ITEMS = 53
LENGTHS = np.arange(ITEMS) % 13 + 1

Seen = list[tuple[int, tuple[int, ...]]]


def sampler(kind: str = "budget", **options: Any) -> Any:
    """Return a batch sampler of a few batches; the items of a data set are their own numbers."""
    if kind == "bucket":
        return LengthBucketBatchSampler(LENGTHS, 4, **options)
    return TokenBudgetBatchSampler(LENGTHS, 40, **options)


class Notes(LightningModule):
    """Notes epoch and items of every step of every loop."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: dict[str, Seen] = {"fit": [], "validate": [], "test": [], "predict": []}

    def note(self, loop: str, batch: Any) -> None:
        items = tuple(int(item) for item in batch)
        self.seen[loop].append((self.current_epoch, items))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("fit", batch)
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validate", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("predict", batch)
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAndStop(Callback):
    """Saves a checkpoint after so many steps, and stops there."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class SaveInValidation(SaveAndStop):
    """The same at the end of the validation after so many steps."""

    on_train_batch_end = Callback.on_train_batch_end

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        super().on_train_batch_end(trainer, module)


def epochs_of(seen: Seen) -> list[list[tuple[int, ...]]]:
    """Return the batches of each epoch."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for epoch, items in seen:
        found.setdefault(epoch, []).append(items)
    return list(found.values())


def times(seen: Seen) -> Counter[int]:
    """Count how often each item came."""
    return Counter(item for _, items in seen for item in items)
