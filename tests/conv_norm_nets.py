"""Networks in which a convolution is followed by a norm, more or less."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

ONE_PAIR = {"conv": "norm"}


@dataclass(frozen=True)
class Case:
    """A network with the pairs in it, and with what is said about the other layers."""

    make: Callable[[], nn.Module]
    pairs: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    shape: tuple[int, ...] = (4, 3, 6, 6)


class Net(nn.Module):
    """A convolution and a norm; subclasses differ in what they do with them."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, **norm)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.conv(x))


# --- one pair


def chain(conv: nn.Module, norm: nn.Module) -> Callable[[], nn.Module]:
    """Make a sequence with some activations around the pair."""

    def make() -> nn.Module:
        layers = {"tanh": nn.Tanh(), "conv": conv, "norm": norm, "relu": nn.ReLU(inplace=True)}
        net = nn.Sequential()
        for name, layer in layers.items():
            net.add_module(name, copy.deepcopy(layer))
        return net

    return make


class AsksForShape(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.norm(y)
        return functional.interpolate(z, size=y.shape[2:]).view(y.size(0), -1)


class ThroughIdentity(Net):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.nothing(self.conv(x)))


class Counts(Net):
    """Changes itself in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z = self.norm(self.conv(x))
        self.seen.append(z)
        return z


class Wrapped(nn.Module):
    """The convolution is returned by one module and given to the norm by another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Tanh(), nn.Conv2d(3, 3, 1))
        self.second = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Checkpointed(nn.Module):
    """A recomputed block: recomputation ends with an exception once it has what it needs."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.block = Net(**norm)
        self.head = nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


class CheckpointedInstances(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.block.norm = nn.InstanceNorm2d(3, track_running_stats=True)


class CheckpointedLonger(Checkpointed):
    """Has something to recompute after the norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.block = Net()
        self.block.norm = norm
        self.block = nn.Sequential(self.block, nn.Tanh(), nn.Conv2d(3, 3, 1), nn.Tanh())


class DecidesByValue(nn.Module):
    """Cannot be traced, but its block can."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Net()
        self.other = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.norm(self.other(x)) + self.block(x)
        return self.other(x) + self.block(x)


class BlockTwice(nn.Module):
    """Calls a block of a pair twice: each time the norm follows the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


class NotInEvaluation(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) if self.training else x


# --- none


class ConvTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.conv(x.tanh())


class NormTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.norm(self.other(x))


class Residual(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class Returns(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.norm(y), y


class Stores(Net):
    """Its convolution's output is read from an attribute by somebody."""

    kept: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.conv(x)]
        return self.norm(self.kept[0])


class ReturnsInTraining(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return (self.norm(y), y) if self.training else self.norm(y)


class OnDemand(Net):
    def forward(self, x: Tensor, features: Tensor | None = None) -> Any:
        y = self.conv(x)
        return self.norm(y) if features is None else self.norm(y) + features * y


class ByFlag(Net):
    def forward(self, x: Tensor, features: bool = False) -> Any:
        y = self.conv(x)
        return (self.norm(y), y) if features else self.norm(y)


class ChangesInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y.clamp_(min=0)
        return self.norm(y)


class Between(Net):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.between(self.conv(x)))


class Reshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm1d(18)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x).flatten(1, 2))


class FunctionalNorm(Net):
    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return functional.batch_norm(
            self.conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training
        )


class FunctionalConv(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(functional.conv2d(x, self.conv.weight, self.conv.bias))


class SharesStatistics(Net):
    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.conv(x))
        return z + self.norm.running_mean.view(-1, 1, 1)


class ReadsBias(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.conv.bias.square().sum()


class MyConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).abs()


class Subclassed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.conv = MyConv(3, 3, 1)


class LoopsOverBlock(nn.Module):
    """Takes the outputs of single layers out of a block that has a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for layer in self.block:
            x = layer(x)
            total = total + x
        return total


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, reversed(self.norms), strict=True):
            x = norm(conv(x))
        return x


class Alternates(NormTwice):
    """Another convolution in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x) if self.training else self.other(x))


class Skips(Net):
    """Calls its layers now and then, as layer drop does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) if random.random() < 0.5 else x


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv2d(3, 3, 1)


def two_places() -> nn.Module:
    """The convolution of the pair is used by somebody else, under another name."""
    net = nn.Sequential(Net(), nn.Tanh())
    net.append(net[0].conv)
    return net


def alias() -> nn.Module:
    """The block of the pair has a second name."""
    net = nn.Sequential(Net(), nn.Tanh())
    net[1].same = net[0]
    return net


def shared_bias() -> nn.Module:
    net = nn.Sequential(Net(), nn.Conv2d(3, 3, 1))
    net[1].bias = net[0].conv.bias
    return net


def parametrized(function: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net()
        function(net.conv)
        return net

    return make


def hooked(name: str, register: str) -> Callable[[], nn.Module]:
    """Something looks at one of the layers."""

    def make() -> nn.Module:
        net = nn.Sequential(Net(), nn.Tanh())
        getattr(net.get_submodule(name), register)(lambda *args: None)
        return net

    return make


def evaluating() -> nn.Module:
    net = nn.Sequential(Net(), Net())
    net[1].norm.eval()
    return net


def frozen() -> nn.Module:
    net = Net()
    net.conv.requires_grad_(False)
    return net


def replaced(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = nn.Sequential(Net(), nn.Tanh())
        module = net.get_submodule(name)
        forward = module.forward
        module.forward = lambda x: forward(x) * 2
        return net

    return make


SAME_FOR_ALL = {
    "crossed": Case(Listed, {"convs.0": "norms.1", "convs.1": "norms.0"}),
    "asks for shapes": Case(AsksForShape, ONE_PAIR),
    "identity between": Case(ThroughIdentity, ONE_PAIR),
    "changes itself": Case(Counts, ONE_PAIR),
    "in two modules": Case(Wrapped, {"first.1": "second.0"}),
    "checkpointed": Case(Checkpointed, {"block.conv": "block.norm"}),
    "values decide": Case(
        DecidesByValue, {"block.conv": "block.norm"}, {"other": "DecidesByValue.forward cannot be"}
    ),
    "block called twice": Case(BlockTwice, {"block.conv": "block.norm"}),
    "training only": Case(NotInEvaluation, ONE_PAIR),
    "skipped at random": Case(Skips, None),
    "one unused": Case(Unused, ONE_PAIR, {"other": "no forward above it calls it"}),
    "parent with hooks": Case(
        hooked("0", "register_forward_hook"), {"0.conv": "0.norm"}, shape=(4, 3, 6, 6)
    ),
    "convolution twice": Case(ConvTwice, {}, {"conv": "calls it 2 times"}),
    "norm twice": Case(NormTwice, {}, {"conv": "its norm 2 times", "other": "its norm 2 times"}),
    "norm of two": Case(
        Alternates, {}, {"conv": "follows several layers", "other": "follows several layers"}
    ),
    "residual": Case(Residual, {}, {"conv": "'norm' .BatchNorm2d. and add"}),
    "returned": Case(Returns, {}, {"conv": "the return value of Returns.forward"}),
    "stored": Case(Stores, {}, {"conv": "Stores.forward stores its output"}),
    "returned in training": Case(ReturnsInTraining, {}, {"conv": "depends on how"}),
    "another argument": Case(OnDemand, {}, {"conv": "depends on how OnDemand.forward is called"}),
    "a flag": Case(ByFlag, {}, {"conv": "ByFlag.forward cannot be traced"}),
    "changed in place": Case(ChangesInPlace, {}, {"conv": "clamp_"}),
    "activation between": Case(lambda: Between(nn.ReLU(inplace=True)), {}, {"conv": "ReLU"}),
    "pooling between": Case(lambda: Between(nn.MaxPool2d(2)), {}, {"conv": "MaxPool2d"}),
    "reshape between": Case(Reshaped, {}, {"conv": "flatten"}),
    "functional norm": Case(FunctionalNorm, {}, {"conv": "batch_norm"}),
    "functional convolution": Case(FunctionalConv, {}, {"conv": "no forward above it calls it"}),
    "statistics read": Case(SharesStatistics, {}, {"conv": "reads the statistics of its norm"}),
    "bias read": Case(ReadsBias, {}, {"conv": "reads its bias"}),
    "two places": Case(two_places, {}, {"0.conv": "several parents"}),
    "an alias of the block": Case(alias, {"0.conv": "0.norm"}),
    "hook on the convolution": Case(
        hooked("0.conv", "register_forward_hook"), {}, {"0.conv": "it has hooks"}
    ),
    "hook on the norm": Case(
        hooked("0.norm", "register_forward_pre_hook"), {}, {"0.conv": "its norm .*it has hooks"}
    ),
    "replaced convolution": Case(replaced("0.conv"), {}, {"0.conv": "its forward was replaced"}),
    "replaced norm": Case(replaced("0.norm"), {}, {"0.conv": "its norm .* was replaced"}),
    "replaced parent": Case(replaced("0"), {}, {"0.conv": "Net: .* replaced by replaced"}),
    "layers taken one by one": Case(
        LoopsOverBlock, {"block.0": "block.1"}, {"block.2": "LoopsOverBlock.forward|BatchNorm|add"}
    ),
}
"""What `DropConvBias` and `FuseConvBN` say alike."""

PARAMETRIZED = {
    "weight norm": Case(
        parametrized(parametrizations.weight_norm), {}, {"conv": "ParametrizedConv2d"}
    ),
    "spectral norm": Case(
        parametrized(parametrizations.spectral_norm), {}, {"conv": "ParametrizedConv2d"}
    ),
    "old weight norm": Case(
        parametrized(lambda m: nn.utils.spectral_norm(m)), {}, {"conv": "it has hooks"}
    ),
    "subclassed": Case(Subclassed, {}, {"conv": "MyConv is not a convolution of torch.nn"}),
}


def randomized(net: nn.Module) -> nn.Module:
    """Return a net in float64 with numbers that show every mistake."""
    generator = torch.Generator().manual_seed(3)
    net = net.double()
    with torch.no_grad():
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator).double())
            if name.endswith("running_var"):
                tensor.abs_().add_(0.3)
    return net


def batch(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).double()


def total(output: Any) -> Tensor:
    """Return a scalar that depends on every number of an output."""
    parts = output if isinstance(output, tuple) else (output,)
    weights = [torch.linspace(0.1, 1, p.numel(), dtype=p.dtype).view(p.shape) for p in parts]
    return sum((p.square() * w).sum() for p, w in zip(parts, weights, strict=True))
