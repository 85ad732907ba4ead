"""Blocks of every kind that a recomputation must not disturb, and a training to compare."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

WIDTH = 8


class Block(nn.Module):
    """Two layers, and between them what a subclass does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)).sigmoid()).sigmoid()

    def between(self, x: Tensor) -> Tensor:
        return x


class Layer(Block):
    """With a layer between, of those that change buffers or draw random numbers."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = make()

    def between(self, x: Tensor) -> Tensor:
        return self.layer(x)


class MovingAverage(Block):
    """A buffer that the forward pass moves, and that its result depends on."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(size, WIDTH))

    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean(0))
        return x * (1 + self.average[0].square())


class NewBuffer(MovingAverage):
    """The same, but the buffer becomes another tensor each time."""

    def between(self, x: Tensor) -> Tensor:
        self.average = self.average * 0.5 + x.detach().mean(0)
        return x * (1 + self.average[0].square())


class PlainTensor(Block):
    """A tensor that is an attribute, changed in place; and one that is kept from the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last_mean = torch.zeros(1), None

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        before, self.last_mean = self.last_mean, x.detach().mean()
        x = x * self.calls.clone()
        return x if before is None else x * before


class Counters(Block):
    """Counts in a number, a list and a dictionary, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.named = 0, [], {"inner": {"calls": 0}}

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.named["inner"]["calls"] += 1
        self.named[self.calls] = len(self.seen)
        return x * (1 + len(self.seen)) * (1 + len(self.named))


class Draws(Block):
    """Goes this way or that as a random number has it."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def between(self, x: Tensor) -> Tensor:
        return x * 2 if self.draw() < 0.5 else torch.tanh(x) * x


class OwnGenerators(Block):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.Generator().manual_seed(1)
        self.numpy, self.python = np.random.default_rng(1), random.Random(1)

    def between(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=self.torch) < 0.5
        return x * mask * self.numpy.random() * (1 + self.python.random())


class InPlace(Block):
    """Changes results, and its input, in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.mul_(2).relu_()).relu_()).sigmoid_()


class Unused(Block):
    """Has a part that no result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Block,
    "batch norm": lambda: Layer(lambda: nn.BatchNorm1d(WIDTH)),
    "cumulative batch norm": lambda: Layer(lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
    "frozen batch norm": lambda: Layer(lambda: nn.BatchNorm1d(WIDTH).eval()),
    "dropout": lambda: Layer(lambda: nn.Dropout(0.3)),
    "spectral norm": lambda: Layer(lambda: spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "moving average": MovingAverage,
    "large moving average": lambda: MovingAverage(2**14),
    "new buffer": NewBuffer,
    "plain tensor": PlainTensor,
    "counters": Counters,
    "random numbers of Python": lambda: Draws(random.random),
    "random numbers of NumPy": lambda: Draws(np.random.rand),
    "random numbers of torch": lambda: Draws(lambda: torch.rand(1).item()),
    "own generators": OwnGenerators,
    "in place": InPlace,
    "unused part": Unused,
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
}
KINDS["old spectral norm"] = lambda: Layer(lambda: old_spectral_norm(nn.Linear(WIDTH, WIDTH)))


class Net(nn.Module):
    """Calls its blocks one after the other, and the first once more at the end."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x * 1)
        return x.square().mean()


def observed(module: nn.Module) -> list[Any]:
    """What a training changes in a module: parameters, gradients, buffers and its own state."""
    found: list[Any] = [parameter.grad for parameter in module.parameters()]
    found += module.state_dict().values()
    for part in module.modules():
        for name in ("calls", "seen", "named", "last_mean"):
            found.append(copy.deepcopy(getattr(part, name, None)))
    return found


def trained(
    net: nn.Module, loss: Callable[[], Tensor], steps: int = 3, device: str = "cpu", **autocast: Any
) -> Any:
    """Train a few steps from the same random numbers; return all that is to see."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, **{"dtype": torch.bfloat16, "enabled": False, **autocast}):
            value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, observed(net), torch.rand(2), random.random(), np.random.rand()


def same(mine: Any, theirs: Any) -> bool:
    """Compare bit by bit."""
    if isinstance(mine, Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return mine == theirs


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two networks with the same weights and the same state."""
    torch.manual_seed(1)
    first = make()
    torch.manual_seed(1)
    return first, make()
