"""Sequences of several lengths, and a small model that trains on them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LENGTHS = [3, 9, 4, 1, 5, 9, 2, 6, 5, 30, 5, 8]


class Texts(Dataset[Any]):
    """Sequences of several lengths with a target each."""

    def __init__(self, lengths: list[int] = LENGTHS) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.arange(self.lengths[index]) % 7, torch.tensor(index % 3)


def pad(items: list[Any]) -> list[Tensor]:
    sequences, labels = zip(*items, strict=True)
    return [nn.utils.rnn.pad_sequence(list(sequences), batch_first=True), torch.stack(labels)]


def texts(dataset: Any = None, **kwargs: Any) -> DataLoader[Any]:
    dataset = Texts() if dataset is None else dataset
    return DataLoader(dataset, **{"batch_size": 3, "collate_fn": pad, **kwargs})


class Net(LightningModule):
    """Classifies sequences, and notes in a list of the test which batches it was given."""

    def __init__(self, ran: list[Any] | None = None) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 8), nn.Linear(8, 3)
        self.note = (ran if ran is not None else []).append  # no state of the module

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sequences, labels = batch
        self.note(tuple(sequences.shape))
        return nn.functional.cross_entropy(self.out(self.embed(sequences).mean(1)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
