"""What the measurements in docs/results train. Images are random: only the time is of interest.

Use with ``lightning-perf bench`` or ``lightning_perf.benchmark.compare``::

    compare("benchmarks/tasks.py:resnet50", a="none", b="auto", budget_s=600)
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchvision import models


class TextClassifier(nn.Module):
    """A transformer encoder over tokens, and a linear layer on the mean of what it returns."""

    def __init__(
        self,
        layers: int,
        *,
        width: int,
        heads: int,
        tokens: int,
        classes: int = 10,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(tokens, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))


class ImageClassifier(LightningModule):
    """Cross-entropy on images, with SGD for convolutional networks and AdamW for transformers."""

    def __init__(self, net: nn.Module, optimizer: type[torch.optim.Optimizer], **options: Any):
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.options = options

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), **self.options)


class HandWrittenLoop(Callback):
    """Trains with the loop one would write without Lightning, for `compare` to measure.

    Args:
        bf16: Run the forward pass under bfloat16 autocast.
        channels_last: Lay out weights and images NHWC.
        fused: Use the fused implementation of the optimizer.
    """

    def __init__(self, bf16: bool = False, channels_last: bool = False, fused: bool = False):
        self.bf16 = bf16
        self.channels_last = channels_last
        self.fused = fused

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from lightning_perf.benchmark.gate import Gate

        gate = next(callback for callback in trainer.callbacks if isinstance(callback, Gate))
        net, memory_format = pl_module.net, torch.preserve_format
        if self.channels_last:
            memory_format = torch.channels_last
            net = net.to(memory_format=memory_format)
        optimizer = pl_module.optimizer(net.parameters(), **pl_module.options, fused=self.fused)
        step = count()
        while not gate.finished:
            for pixels, labels in trainer.train_dataloader:
                batch = pixels.to(memory_format=memory_format), labels
                gate.on_train_batch_start(trainer, pl_module, batch, 0)
                if gate.finished:
                    break
                autocast = torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext()
                with autocast:
                    loss = nn.functional.cross_entropy(net(batch[0]), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                gate.on_train_batch_end(trainer, pl_module, loss, batch, next(step))
        trainer.should_stop = True


def images(size: int, batch_size: int, *, samples: int = 256, classes: int = 10) -> DataLoader[Any]:
    """Random images, in an epoch of many passes, so that its end is not a part of the timing."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(samples, 3, size, size, generator=generator)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    dataset = TensorDataset(data, labels)
    sampler = RandomSampler(dataset, num_samples=1000 * batch_size)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def resnet50() -> tuple[LightningModule, DataLoader[Any]]:
    """ResNet-50, batch 16, 160x160."""
    net = models.resnet50(num_classes=10)
    return ImageClassifier(net, torch.optim.SGD, lr=0.01, momentum=0.9), images(160, 16)


def convnet() -> tuple[LightningModule, DataLoader[Any]]:
    """Four convolutions of 32 to 64 channels, batch 32, 64x64: much memory for little work."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return ImageClassifier(net, torch.optim.SGD, lr=0.01, momentum=0.9), images(64, 32)


def mobilenet() -> tuple[LightningModule, DataLoader[Any]]:
    """MobileNetV2, whose convolutions are depthwise-separable, batch 16, 96x96."""
    net = models.mobilenet_v2(num_classes=10)
    return ImageClassifier(net, torch.optim.SGD, lr=0.01, momentum=0.9), images(96, 16)


def resnext() -> tuple[LightningModule, DataLoader[Any]]:
    """ResNeXt-50 32x4d, whose convolutions are grouped, batch 8, 96x96."""
    net = models.resnext50_32x4d(num_classes=10)
    return ImageClassifier(net, torch.optim.SGD, lr=0.01, momentum=0.9), images(96, 8)


def vit() -> tuple[LightningModule, DataLoader[Any]]:
    """A small vision transformer, batch 16, 128x128."""
    net = models.VisionTransformer(
        image_size=128,
        patch_size=16,
        num_layers=8,
        num_heads=6,
        hidden_dim=384,
        mlp_dim=1536,
        num_classes=10,
    )
    return ImageClassifier(net, torch.optim.AdamW, lr=1e-4), images(128, 16)


def texts(batch_size: int) -> DataLoader[Any]:
    """Random texts of 128 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, (256, 128), generator=generator)
    dataset = TensorDataset(tokens, torch.randint(0, 10, (256,), generator=generator))
    sampler = RandomSampler(dataset, num_samples=1000 * batch_size)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def encoder() -> tuple[LightningModule, DataLoader[Any]]:
    """A transformer encoder of 12 layers, width 256, on 8 texts of 128 tokens."""
    net = TextClassifier(12, width=256, heads=4, tokens=1000)
    return ImageClassifier(net, torch.optim.AdamW, lr=1e-4), texts(8)


def encoder24() -> tuple[LightningModule, DataLoader[Any]]:
    """BERT-large's 24 layers at half of its width, on 4 texts of 128 tokens."""
    net = TextClassifier(24, width=512, heads=8, tokens=1000)
    return ImageClassifier(net, torch.optim.AdamW, lr=1e-4), texts(4)


def encoder24nodropout() -> tuple[LightningModule, DataLoader[Any]]:
    """The same without dropout, whose random numbers take long on a CPU."""
    net = TextClassifier(24, width=512, heads=8, tokens=1000, dropout=0.0)
    return ImageClassifier(net, torch.optim.AdamW, lr=1e-4), texts(4)


class Layers(LightningModule):
    """Four linear layers as attributes of their own, on random numbers: nothing for any item."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.third, self.last = nn.Linear(width, width), nn.Linear(width, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, labels = batch
        x = self.third(self.second(self.first(x).relu()).relu()).relu()
        loss = nn.functional.cross_entropy(self.last(x), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The author's own choice, which FusedOptimizer leaves alone.
        return torch.optim.SGD(self.parameters(), lr=0.01, foreach=False)


def layers() -> tuple[LightningModule, DataLoader[Any]]:
    """Four linear layers of width 256, batch 256: steps of some milliseconds."""
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(4096, 256, generator=generator),
        torch.randint(0, 10, (4096,), generator=generator),
    )
    sampler = RandomSampler(dataset, num_samples=10_000 * 256)
    return Layers(), DataLoader(dataset, batch_size=256, sampler=sampler)
