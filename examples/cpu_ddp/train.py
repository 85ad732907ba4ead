"""Train an embedding-bag model on CPUs, with a rank for each NUMA node, or as a YAML file says.

    python examples/cpu_ddp/train.py fit --config examples/cpu_ddp/numa.yaml

It learns which topic of Python's own documentation a few lines are from. Beside `numa.yaml` lie
`two_ranks.yaml`, for machines with one node, and `one_process.yaml`. With two ranks a
step sees 64 samples, as it does in one process there. To bind what a process does before
the strategy exists too, put `lightning-perf launch --preset cpu_ddp --` before the command.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pydoc_data.topics import topics
from zlib import crc32

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

LINES = 4


def hashed(text: str, buckets: int) -> Tensor:
    """The numbers of all words and pairs of neighbours in a text."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    grams = [*words, *(f"{a} {b}" for a, b in pairwise(words))]
    return torch.tensor([crc32(gram.encode()) % buckets for gram in grams])


def bags(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """All numbers of a batch in a row, where each sample starts, and the labels."""
    numbers, labels = zip(*samples, strict=True)
    starts = torch.tensor([0, *(len(n) for n in numbers[:-1])]).cumsum(0)
    return torch.cat(numbers), starts, torch.tensor(labels)


class Topics(LightningDataModule):
    """Every few lines of the longer topics of `pydoc_data`, a fifth of them for validation."""

    def __init__(self, batch_size: int = 32, buckets: int = 2**16) -> None:
        super().__init__()
        self.batch_size = batch_size
        long = {name: text.splitlines() for name, text in topics.items() if text.count("\n") > 100}
        self.names = sorted(long)
        samples = [
            (hashed(part, buckets), label)
            for label, name in enumerate(self.names)
            for start in range(0, len(long[name]), LINES)
            if len(part := " ".join(long[name][start : start + LINES])) > 80
        ]
        self.train = [sample for index, sample in enumerate(samples) if index % 5]
        self.val = samples[::5]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            self.train, self.batch_size, shuffle=True, drop_last=True, collate_fn=bags
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, collate_fn=bags)


class TopicClassifier(LightningModule):
    """One embedding bag and two layers: a step reads much memory and computes little."""

    def __init__(self, buckets: int = 2**16, width: int = 64, classes: int = 32) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(buckets, width)
        self.head = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, classes))
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def forward(self, numbers: Tensor, starts: Tensor) -> Tensor:
        return self.head(self.bag(numbers, starts))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        numbers, starts, labels = batch
        return nn.functional.cross_entropy(self(numbers, starts), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        numbers, starts, labels = batch
        self.accuracy(self(numbers, starts), labels)
        self.log("accuracy", self.accuracy, prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.print(f"epoch {self.current_epoch}: accuracy {self.accuracy.compute():.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    LightningCLI(TopicClassifier, Topics, seed_everything_default=0, save_config_callback=None)
