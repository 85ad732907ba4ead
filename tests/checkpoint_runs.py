"""Networks of repeated blocks, and runs of a Trainer to compare."""

from __future__ import annotations

import random
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from models import Classifier, images, trainer
from torch import Tensor, nn


class DrawingBlock(nn.Module):
    """Draws random numbers, counts, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = nn.functional.dropout(self.norm(self.first(x)).relu_(), 0.2, self.training)
        return x + self.last(y) * (1 + random.random())


def network(block: Any = DrawingBlock) -> nn.Sequential:
    """Three blocks on 3x8x8 images."""
    blocks = nn.Sequential(*(block() for _ in range(3)))
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), blocks, nn.Linear(32, 4))


def fit(*callbacks: Callback, module: Classifier | None = None, **options: Any) -> Classifier:
    """Train from the same weights and random numbers each time."""
    seed_everything(3, verbose=False)
    module = Classifier(network()) if module is None else module
    run = trainer(callbacks=list(callbacks), **{"max_epochs": 2, **options})
    run.fit(module, images(), images())
    return module


def seeded(make: Any) -> Any:
    seed_everything(5, verbose=False)
    return make()


class Plain(nn.Module):
    """Without buffers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.tanh(self.first(self.norm(x)).relu_()).exp())


class Shared(nn.Module):
    """One block under two names, called several times; and one that gets no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(192, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList([Plain(width), Plain(width)])
        self.blocks.append(self.blocks[0])
        self.unused = Plain(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in [*self.blocks, self.blocks[1]]:
            x = block(x)
        return self.last(x)
