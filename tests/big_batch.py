"""Models that compare the gradients of each step with those of one big batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

Batch = tuple[Tensor, Tensor]


class Big(LightningModule):
    """Regression in float64, on rows whose loss is a mean over samples.

    At each step ``errors`` gets the relative difference between the gradients and those of one big
    batch of all micro-batches of the window, which ``batches_of`` puts together.
    """

    def __init__(self, *, out: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        self.out = out or (lambda loss: loss)
        self.window: list[Batch] = []
        self.errors: list[float] = []
        self.norms: list[float] = []
        self.logged: list[float] = []

    def loss(self, batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def together(self, batches: list[Batch]) -> Tensor:
        """Loss of one big batch."""
        return self.loss(tuple(torch.cat(parts) for parts in zip(*batches, strict=True)))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.window.append(batch)
        return self.out(loss)

    def all_batches(self) -> list[Batch]:
        """Micro-batches of the window, of all ranks."""
        return self.window

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not self.all_batches():
            assert not any(parameter.grad is not None for parameter in self.parameters())
            return
        with torch.autocast("cpu", enabled=False):
            expected = torch.autograd.grad(self.together(self.all_batches()), self.parameters())
        mine = [parameter.grad for parameter in self.parameters()]
        self.norms.append(torch.cat([grad.flatten() for grad in mine]).norm().item())
        self.errors.append(
            max(
                ((a - b).abs().max() / b.abs().max()).item()
                for a, b in zip(mine, expected, strict=True)
            )
        )
        self.window = []

    def on_train_epoch_end(self) -> None:
        self.window = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class BigTokens(Big):
    """Classification of padded tokens; the loss is a mean over those that are not padding."""

    def __init__(self, *, ignore: int = -100, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore = ignore

    def loss(self, batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(
            self.net(x).flatten(0, -2), y.flatten(), ignore_index=self.ignore
        )

    def together(self, batches: list[Batch]) -> Tensor:
        flat = [(x.flatten(0, -2), y.flatten()) for x, y in batches]
        return super().together(flat)


def rows(sizes: list[int], seed: int = 0) -> list[Batch]:
    """Micro-batches of so many samples."""
    generator = torch.Generator().manual_seed(seed)
    options = {"dtype": torch.float64, "generator": generator}
    return [(torch.randn(n, 3, **options), torch.randn(n, 5, **options)) for n in sizes]


def tokens(lengths: list[list[int]], seed: int = 0, ignore: int = -100) -> list[Batch]:
    """Padded micro-batches of sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for micro_batch in lengths:
        shape = (len(micro_batch), max(micro_batch))
        x = torch.randn(*shape, 3, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 5, shape, generator=generator)
        y[torch.arange(shape[1])[None] >= torch.tensor(micro_batch)[:, None]] = ignore
        batches.append((x, y))
    return batches


def loader(batches: list[Any]) -> DataLoader[Any]:
    """Give the batches as they are, in order."""
    return DataLoader(batches, batch_size=None)


class Stream(IterableDataset[Any]):
    """Batches of which nobody knows how many there are."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches
