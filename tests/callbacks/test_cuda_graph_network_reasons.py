"""What a replay of a network would not do again is found, and the network stays eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from graph_runs import Dense, compare, graphed, plain, reason, train, warned
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Faulty(Dense):
    """Does something in its forward that a replay would not do."""

    def __init__(self, fault: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.fault = fault
        self.calls = 0
        self.seen: list[int] = []
        self.weights = [self[0].weight]

    def forward(self, x: Tensor) -> Tensor:
        changed = self.fault(self, x)
        return super().forward(x if changed is None else changed)


def count(net: Any, x: Tensor) -> None:
    net.calls += 1


def tapped(net: Any, x: Tensor) -> Tensor:
    return x + net.weights[0].sum()


FAULTS = {
    "item": (lambda net, x: x * x.sum().item(), "reads a value on the host"),
    "branch": (lambda net, x: x if x.sum() > 0 else -x, "reads a value on the host"),
    "nonzero": (lambda net, x: x + len(x.nonzero()), "depends on values (`nonzero`)"),
    "mask": (lambda net, x: x + x[x > 0].sum(), "selects with a mask (`index`)"),
    "unique": (lambda net, x: x + x.unique().sum(), "size depends on values"),
    "equal": (lambda net, x: x * torch.equal(x, x), "depends on values (`equal`)"),
    "counter": (count, "changes calls"),
    "list": (lambda net, x: net.seen.append(len(x)), "changes seen"),
    "attribute": (lambda net, x: setattr(net, "calls", x), "changes calls"),
    "random": (lambda net, x: x * random.random(), "from Python or NumPy"),
    "numpy": (lambda net, x: x * float(np.random.rand()), "from Python or NumPy"),
    "print": (lambda net, x: print("here"), "prints"),
    "in place": (lambda net, x: x.mul_(2), "changes its input in place"),
    "references": (tapped, "reaches parameters through references of its own"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_replay_would_not_do_again(fault: str) -> None:
    function, message = FAULTS[fault]
    assert message in reason(lambda: Faulty(function))


def test_a_masked_fill_is_no_reason() -> None:
    def fill(net: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[x < 0] = 0.0
        return x

    assert compare(lambda: Faulty(fill))[0].replays == 5


def test_sparse_gradients() -> None:
    class Embeds(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4))

    net = Embeds()
    with warned("sparse gradients"), graphed(net, strict=None):
        for _ in range(5):
            net(torch.arange(4)).sum().backward()


def test_hooks_on_layers_inside() -> None:
    def make() -> nn.Module:
        net = Dense()
        net[1].register_forward_hook(lambda *_: None)
        return net

    assert "its layer 1 has hooks" in reason(make)


def test_shapes_that_change_all_the_time() -> None:
    sizes = iter(range(1, 100))

    def step(net: nn.Module, x: Tensor) -> Tensor:
        return plain(net, x[:1].expand(next(sizes), 8))

    net = Dense()
    with warned("33 different ones"), graphed(net, strict=None) as graphs:
        train(net, step, 40)
    assert not graphs


def test_many_shapes_get_no_more_than_eight_graphs() -> None:
    def step(net: nn.Module, x: Tensor) -> None:
        for rows in range(1, 11):
            plain(net, x[:1].expand(rows, 8))

    assert len(compare(Dense, step, steps=5)) == 16


def test_tensors_elsewhere() -> None:
    class Elsewhere(Dense):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return super().forward(x)

    def step(net: nn.Module, x: Tensor) -> Tensor:
        out = net(x, torch.ones(4, device="meta"))
        out.sum().backward()
        return out

    assert "not on its device" in reason(Elsewhere, step)


def test_a_compiled_network_makes_its_own_graphs() -> None:
    net = Dense()
    net[0].compile(backend="eager")
    with warned("reduce-overhead"), graphed(net, strict=None):
        train(net, plain)


def test_activation_checkpointing_inside() -> None:
    class Saves(Dense):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            self.kwargs = kwargs

        def forward(self, x: Tensor) -> Tensor:
            inner = nn.Sequential(self[0], self[1])
            return self[2](checkpoint(inner, x, use_reentrant=False, **self.kwargs))

    assert "preserve_rng_state=False" in reason(Saves)
    assert compare(lambda: Saves(preserve_rng_state=False))[0].replays == 5
