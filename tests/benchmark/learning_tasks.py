"""Small tasks, and faults to put into them, for tests of the learning check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Parts = tuple[LightningModule, Any, dict[str, Any]]
Build = Callable[[], Parts]


class Attention(nn.Module):
    """One encoder layer over the four rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(24, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.outputs = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.permute(0, 2, 1, 3).flatten(2)
        return self.outputs(self.encoder(self.inputs(rows)).mean(1))


def conv() -> nn.Module:
    # The bias before BatchNorm has a gradient of nothing but rounding noise.
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 4))


class Task(LightningModule):
    """A network on images whose class can be learned from the mean colours."""

    def __init__(self, net: nn.Module, *, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__()
        self.net = net
        self.lr = lr
        self.momentum = momentum

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if isinstance(self.net, Attention):
            return torch.optim.AdamW(self.parameters(), lr=self.lr / 20)
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def images(samples: int = 256, batch_size: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    data = torch.randn(samples, 3, 8, 8, generator=generator)
    data[:, 0] += labels[:, None, None] * 0.3
    return DataLoader(TensorDataset(data, labels), batch_size=batch_size, shuffle=True)


NETS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "conv": conv, "attention": Attention}


class _Fault(Callback):
    def __init__(self, hook: Callable[[LightningModule], None]) -> None:
        self.hook = hook


class AtStart(_Fault):
    """Changes the module when training starts."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.hook(pl_module)


class BeforeEachStep(_Fault):
    """Changes the module before each optimizer step."""

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: LightningModule, optimizer: Any
    ) -> None:
        self.hook(pl_module)


def scale_gradients(module: LightningModule) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1.02)


def freeze_a_layer(module: LightningModule) -> None:
    layers = [m for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    layers[0].requires_grad_(False)


def batchnorm_momentum(value: float) -> Callable[[LightningModule], None]:
    def change(module: LightningModule) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = value

    return change


def channels_last(module: LightningModule) -> None:
    module.to(memory_format=torch.channels_last)


def build(
    net: str,
    *,
    lr: float = 0.05,
    momentum: float = 0.9,
    reverse: bool = False,
    **trainer: Any,
) -> Build:
    """Return what `record` takes: a function that makes module, data and Trainer arguments."""

    def parts() -> Parts:
        module = Task(NETS[net](), lr=lr, momentum=momentum)
        data = images()
        if reverse:
            data = DataLoader(data.dataset, batch_size=16)
        return module, data, {"accelerator": "cpu", "devices": 1, **trainer}

    return parts
