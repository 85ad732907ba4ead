"""A network with norm and softmax, and what is looked at under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BF16 = {"precision": "bf16-mixed"}


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 16), nn.LayerNorm(16), nn.Linear(16, 4), nn.Softmax(dim=-1)
    )


class Dtypes:
    """Notes what a module gets and gives, as a hook of the user's does."""

    def __init__(self, module: nn.Module) -> None:
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []
        self.handle = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.seen.append((inputs[0].dtype, output.dtype))
