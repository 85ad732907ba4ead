"""Pairs of a layer and its norm that know of each other while the model runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_perf._attributes import instance_attribute
from lightning_perf._conv_norm import Pair

_TRANSPOSED: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.ConvTranspose1d: nn.functional.conv_transpose1d,
    nn.ConvTranspose2d: nn.functional.conv_transpose2d,
    nn.ConvTranspose3d: nn.functional.conv_transpose3d,
}


class Scope:
    """The module whose `forward` makes the calls of some pairs: whether it is running."""

    def __init__(self) -> None:
        self.running = False
        self.links: list[Link] = []


class Link(ABC):
    """One pair: what runs instead of the layer's and of the norm's own `forward`.

    Holds no more than plain attributes and modules, so that a copy of the model is linked itself.

    Args:
        holder: The module that has the norm as a child.
        name: The name of that child.
        scope: What calls both.
    """

    def __init__(self, holder: nn.Module, name: str, scope: Scope) -> None:
        self._holder = holder
        self._name = name
        self.scope = scope

    @property
    def norm(self) -> Any:
        """The norm as it is now: conversion to SyncBatchNorm puts another in its place."""
        return self._holder._modules[self._name]

    @abstractmethod
    def run_layer(self, layer: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run instead of the layer's `forward`."""

    def run_norm(self, norm: Any, input: Tensor) -> Any:
        """Run instead of the norm's `forward`, if asked for."""
        return own_forward(norm, input)

    @abstractmethod
    def leave(self, *, completed: bool) -> None:
        """Run when a call of the scope has ended; not ``completed`` if it raised."""


LinkType = TypeVar("LinkType", bound=Link)


@contextmanager
def linked(
    model: nn.Module,
    pairs: Iterable[Pair],
    make: Callable[[Pair, nn.Module, str, Scope], LinkType],
    *,
    norms: bool,
) -> Iterator[list[LinkType]]:
    """Replace the `forward` of the layers of some pairs, and of the modules that call them.

    Methods are set on the instances: classes, hooks and names stay. They are found by copies of
    the model, and blocks of one class still share what `torch.compile` made of it. A pickled model
    computes as the classes say.

    Args:
        model: The model that the names in ``pairs`` are of.
        pairs: From `find_pairs`.
        make: Makes a link, from its pair and the arguments of `Link`.
        norms: Replace the `forward` of the norms too.
    """
    scopes: dict[str, Scope] = defaultdict(Scope)
    links = []
    with ExitStack() as stack:

        def replace(module: nn.Module, attribute: str, value: object, forward: Any) -> None:
            stack.enter_context(instance_attribute(module, attribute, value))
            stack.enter_context(instance_attribute(module, "forward", MethodType(forward, module)))

        for pair in pairs:
            holder, _, name = pair.norm.rpartition(".")
            scope = scopes[pair.scope]
            link = make(pair, model.get_submodule(holder), name, scope)
            replace(model.get_submodule(pair.layer), "_conv_norm_link", link, _layer_forward)
            if norms:
                replace(link.norm, "_conv_norm_link", link, _norm_forward)
            scope.links.append(link)
            links.append(link)
        for path, scope in scopes.items():
            replace(model.get_submodule(path), "_conv_norm_scope", scope, _scope_forward)
        yield links


def own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the `forward` of a module's class."""
    return type(module).forward(module, *args, **kwargs)


def seen(layer: nn.Module, norm: nn.Module) -> bool:
    """Return whether hooks get hold of what a layer hands to its norm, but for our own."""
    hooks = (layer._forward_hooks, norm._forward_hooks, norm._forward_pre_hooks)
    return any(
        not str(getattr(hook, "__module__", "")).startswith("lightning_perf.")
        for registered in hooks
        for hook in registered.values()
    )


def apply_layer(
    layer: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_size: list[int] | None = None,
) -> Tensor:
    """Run a layer with another weight and bias than its own.

    Args:
        layer: A linear layer or convolution of torch.
        input: Its input.
        weight: Used instead of its weight.
        bias: Used instead of its bias.
        output_size: The second argument of transposed convolutions.
    """
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(input, weight, bias)
    transposed = _TRANSPOSED.get(type(layer))
    # The private methods are what torch's own `forward` calls (2.6 - 2.14): they pad as it does.
    if transposed is None:
        output: Tensor = layer._conv_forward(input, weight, bias)
        return output
    padding = layer._output_padding(
        input,
        output_size,
        layer.stride,
        layer.padding,
        layer.kernel_size,
        weight.dim() - 2,
        layer.dilation,
    )
    return transposed(
        input, weight, bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation
    )


def _layer_forward(layer: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return layer._conv_norm_link.run_layer(layer, input, *args, **kwargs)


def _norm_forward(norm: Any, input: Tensor) -> Any:
    return norm._conv_norm_link.run_norm(norm, input)


def _scope_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    scope: Scope = module._conv_norm_scope
    outside, scope.running, completed = scope.running, True, False
    try:
        output = own_forward(module, *args, **kwargs)
        completed = True
    finally:
        scope.running = outside
        for link in scope.links:
            link.leave(completed=completed)
    return output


# A bound method is pickled by the name of its function, so these unpickle as the class's `forward`.
for _function in (_layer_forward, _norm_forward, _scope_forward):
    _function.__name__ = "forward"
