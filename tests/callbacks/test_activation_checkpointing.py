"""Blocks of every kind compute, draw, count and learn the same when they are recomputed."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from lightning_perf.callbacks.activation_checkpointing import checkpointed, recomputed_blocks

POLICIES = ["full", 1.0]
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


def trained(net: nn.Module, loss: Callable[[], Tensor], steps: int = 3, **autocast: Any) -> Any:
    """Train a few steps from the same random numbers; return all that is to see."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", **{"dtype": torch.bfloat16, "enabled": False, **autocast}):
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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_training_is_the_same_bit_for_bit(kind: str, policy: Any, autocast: bool) -> None:
    plain, recomputed = twins(lambda: Net(KINDS[kind]))
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x), enabled=autocast)
    with checkpointed(recomputed, ["blocks"], policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x), enabled=autocast), expected)


class Structured(Block):
    """Takes and gives structures, fills a list of the caller, and may get no gradient."""

    def forward(
        self, x: Tensor, *, scale: dict[str, Tensor], losses: list[Tensor]
    ) -> dict[str, Any]:
        y = super().forward(x) * scale["by"]
        losses.append(y.mean())
        return {"out": (y, [y + 1]), "none": None}


class StructuredNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            scale = {"by": x.mean(1, keepdim=True)}
            x = block(x, scale=scale, losses=losses)["out"][1][0]
        assert len(losses) == 3
        return x.mean() + torch.stack(losses).sum()


@pytest.mark.parametrize("policy", POLICIES)
def test_structures_and_keyword_arguments(policy: Any) -> None:
    plain, recomputed = twins(StructuredNet)
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x))
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x)), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_keyword_argument_changed_afterwards_is_noticed(policy: Any) -> None:
    """Autograd watches what it saved, and so does a recomputation."""
    net, x = nn.ModuleList([Structured(), Structured()]), torch.randn(4, WIDTH)
    with checkpointed(net, policy=policy):
        net[0](x, scale={"by": torch.ones(1)}, losses=[])["out"][0].sum().backward()
        scale = torch.ones(1)
        loss = net[0](x, scale={"by": scale}, losses=[])["out"][0].sum()
        scale.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_shared_weights_and_a_cached_cast(policy: Any) -> None:
    """Autocast casts a shared weight once in the forward pass."""

    class Shared(Net):
        def __init__(self) -> None:
            super().__init__(Block)
            for block in self.blocks:
                block.first = self.blocks[0].first

    plain, recomputed = twins(Shared)
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x), enabled=True)
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x), enabled=True), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_blocks_and_inputs_without_gradient(policy: Any) -> None:
    def make() -> Net:
        net = Net(KINDS["dropout"])
        for block in list(net.blocks)[:2]:
            block.requires_grad_(False)
        return net

    plain, recomputed = twins(make)
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x))
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x)), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_inside_of_the_step(policy: Any) -> None:
    """A penalty on the gradient goes backward through blocks twice."""

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value = net(x)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.square().sum()

    plain, recomputed = twins(lambda: Net(KINDS["batch norm"]))
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: loss(plain, x))
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: loss(recomputed, x)), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_backward_pass(policy: Any) -> None:
    plain, recomputed = twins(lambda: Net(KINDS["counters"]))
    x, grads = torch.randn(4, WIDTH), []
    for net in (plain, recomputed):
        with checkpointed(net, policy=policy) if net is recomputed else torch.enable_grad():
            loss = net(x)
            loss.backward(retain_graph=True)
            loss.backward()
        grads.append([p.grad for p in net.parameters()])
    assert same(*grads)


def test_settings_changed_between_forward_and_backward() -> None:
    """The recomputation sees the block as the forward pass saw it."""
    plain, recomputed = twins(lambda: Net(KINDS["dropout"]))
    x, grads = torch.randn(4, WIDTH), []
    for net in (plain, recomputed):
        torch.manual_seed(0)
        with checkpointed(net) if net is recomputed else torch.enable_grad():
            loss = net(x)
            net.eval()
            loss.backward()
        assert not any(part.training for part in net.modules())
        grads.append([p.grad for p in net.parameters()])
    assert same(*grads)


# --- where it does nothing


class Calls:
    """Counts the calls of a module's layers."""

    def __init__(self, net: nn.Module) -> None:
        self.count = 0
        for part in net.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_hook(self.called)

    def called(self, *_: Any) -> None:
        self.count += 1


def test_layers_run_twice_with_gradients_and_once_without() -> None:
    net, x = Net(Block), torch.randn(4, WIDTH)
    calls = Calls(net)
    with checkpointed(net):
        net(x).backward()
        assert calls.count == 16
        for mode in (torch.no_grad(), torch.inference_mode()):
            calls.count = 0
            with mode:
                net(x)
            assert calls.count == 8


def test_a_frozen_network_is_not_recomputed() -> None:
    net = Net(Block).requires_grad_(False)
    calls = Calls(net)
    with checkpointed(net):
        assert not net(torch.randn(4, WIDTH)).requires_grad
    assert calls.count == 8


def test_hooks_of_a_block_run_once() -> None:
    net, seen = Net(Block), []
    block = net.blocks[1]
    block.register_forward_pre_hook(lambda *_: seen.append("pre"))
    block.register_forward_hook(lambda *_: seen.append("post"))
    block.register_full_backward_hook(lambda *_: seen.append("backward"))
    block.first.register_full_backward_hook(lambda *_: seen.append("inner"))
    with checkpointed(net):
        net(torch.randn(4, WIDTH)).backward()
    assert seen == ["pre", "post", "inner", "backward"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_tracing_sees_the_block_itself() -> None:
    net, x = Net(Block), torch.randn(4, WIDTH)
    with checkpointed(net):
        traced = torch.jit.trace(net, x)
        symbolic = torch.fx.symbolic_trace(net)
    assert torch.equal(traced(x), net(x))
    assert torch.equal(symbolic(x), net(x))


# --- copies


def test_a_copy_uses_its_own_weights() -> None:
    """Weight averaging copies the module in the middle of a run."""
    net, x = Net(KINDS["batch norm"]), torch.randn(4, WIDTH)
    plain = copy.deepcopy(net)
    with checkpointed(net):
        copied = copy.deepcopy(net)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        assert torch.equal(copied(x), plain(x))
        calls = Calls(copied)
        copied(x).backward()
        assert calls.count == 8
        assert list(recomputed_blocks(net)) == ["blocks.0", "blocks.1", "blocks.2"]
        assert not recomputed_blocks(copied)
    assert not recomputed_blocks(net)


def test_a_pickle_needs_nothing_from_here() -> None:
    net, x = Net(Block), torch.randn(4, WIDTH)
    with checkpointed(net):
        pickled, file = pickle.dumps(net), io.BytesIO()
        torch.save(net, file)
    assert b"lightning_perf" not in pickled
    again = pickle.loads(pickled)
    file.seek(0)
    for loaded in (again, torch.load(file, weights_only=False)):
        assert torch.equal(loaded(x), net(x))


def test_nothing_is_left_behind() -> None:
    net, x = Net(Block), torch.randn(4, WIDTH)
    before = [sorted(vars(part)) for part in net.modules()]
    keys = list(net.state_dict())
    with checkpointed(net):
        loss = net(x)
        assert list(net.state_dict()) == keys
    assert [sorted(vars(part)) for part in net.modules()] == before
    loss.backward()  # a graph from inside still works
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_an_error_in_a_block_is_the_users() -> None:
    class Raises(Block):
        def between(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    net = Net(Raises)
    with pytest.raises(KeyError, match="mine"), checkpointed(net):
        net(torch.randn(4, WIDTH))
    assert not any("forward" in vars(part) for part in net.modules())


# --- together with checkpointing of others


class Recomputes(Block):
    """Recomputes itself."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpointing_inside_of_a_block(policy: Any) -> None:
    plain, recomputed = twins(lambda: Net(Recomputes))
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x))
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x)), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpointing_around_a_block(policy: Any, reentrant: bool) -> None:
    class Outside(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x.square().mean()

    plain, recomputed = twins(lambda: Outside(KINDS["dropout"]))
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x))
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x)), expected)
