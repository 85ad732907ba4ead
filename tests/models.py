"""Small models and data that tests train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def conv_net() -> nn.Sequential:
    """Two convolutions with BatchNorm on 3x8x8 images, four classes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def mlp() -> nn.Sequential:
    """Flatten and two linear layers on 3x8x8 images, four classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 4))


class Residual(nn.Module):
    """Two convolutions with biases and BatchNorm, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


def residual_net() -> nn.Sequential:
    """Repeated blocks on 3x8x8 images, four classes: something to do for every item."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Sequential(Residual(8), Residual(8)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class Classifier(LightningModule):
    """Trains a network on labelled images and keeps every loss of training and testing."""

    def __init__(self, net: nn.Module | None = None, *, lr: float = 0.05) -> None:
        super().__init__()
        self.net = conv_net() if net is None else net
        self.lr = lr
        self.losses: list[float] = []
        self.test_losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.test_losses.append(loss.item())
        self.log("test_loss", loss)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, _ = batch
        return self.net(images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class LateClassifier(Classifier):
    """The same, but its network is made in `configure_model`."""

    def __init__(self, make: Callable[[], nn.Module] = conv_net) -> None:
        super().__init__(net=nn.Identity())
        self.make = make

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            torch.manual_seed(1)
            self.net = self.make()


def images(samples: int = 16, batch_size: int = 4) -> DataLoader[Any]:
    """Random 3x8x8 images with labels, always the same, in order."""
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(samples, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    return DataLoader(TensorDataset(data, labels), batch_size=batch_size)


def trainer(**kwargs: Any) -> Trainer:
    """A quiet CPU trainer of a few steps that writes nothing, unless told otherwise."""
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **kwargs,
        }
    )
