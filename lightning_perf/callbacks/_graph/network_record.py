"""One signature of a network, recorded: what a replay needs, and what must hold for it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_perf.callbacks._graph.engine import Engine
from lightning_perf.callbacks._graph.probe import IneligibleError, observed
from lightning_perf.callbacks._graph.signature import filled, flatten, static_copy
from lightning_perf.callbacks._graph.state import FrozenState


class NetworkGraph:
    """One signature of a network, recorded.

    Args:
        network: The network, in train mode.
        forward: Its own forward.
        engine: What records and repeats.
        arguments: The ``(args, kwargs)`` of a call.
        tensors: The tensors in them.

    Raises:
        IneligibleError: A replay would not do what the call does.
    """

    def __init__(
        self,
        network: nn.Module,
        forward: Callable[..., Any],
        engine: Engine,
        arguments: Any,
        tensors: Sequence[Tensor],
    ) -> None:
        self._network = network
        self._engine = engine
        if any(tensor.device != device_of(network) for tensor in tensors):
            raise IneligibleError("it is called with tensors that are not on its device.")
        statics = tuple(static_copy(tensor) for tensor in tensors)

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            weights = dict(zip(self._parameters, values[len(statics) :], strict=True))
            args, kwargs = filled(arguments, values[: len(statics)])
            with _swapped(network, weights):
                output = forward(*args, **kwargs)
            leaves, _ = flatten(output)
            self._template = filled(output, [leaf.detach() for leaf in leaves])
            self._differentiable = [leaf.requires_grad for leaf in leaves]
            return tuple(leaves)

        self._parameters = [p for p in network.parameters() if p.requires_grad]
        self._parameters = _with_gradient(network, self._parameters, function, statics)
        aliases = _aliases(self._parameters)
        if not (statics or aliases):
            raise IneligibleError("it has neither inputs nor parameters that are trained.")
        self._graph = engine.capture(function, (*statics, *aliases))
        self._frozen: FrozenState | None = None
        self._calls = 0
        self._returned = True
        self._node: Callable[[], Any] = _nothing
        self._static_gradients: list[tuple[Tensor, int]] = []

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        outputs = self._engine.replay(self._graph, (*tensors, *self._parameters))
        self._follow(outputs)
        # The next replay overwrites the outputs, and callers may change theirs in place.
        pairs = zip(outputs, self._differentiable, strict=True)
        return filled(self._template, [(o if grad else o.detach()).clone() for o, grad in pairs])

    def freeze(self) -> None:
        """Remember the state of the model that is in the graph, once the trial left no trace."""
        self._frozen = FrozenState(self._network)

    def changed(self) -> str | None:
        """Return what is not any more as it was recorded."""
        return self._frozen.changed() if self._frozen is not None else None

    def waits_for_backward(self) -> bool:
        """Return whether a replay would overwrite activations that are still needed."""
        return not self._returned and self._node() is not None

    def release_gradients(self) -> None:
        """Give gradients that lie in the memory of the graph memory of their own.

        Autograd takes the tensor that a backward returns as the gradient where there is none yet.
        The next replay would write into it before autograd adds to it.
        """
        for parameter, address in self._static_gradients:
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() == address:
                parameter.grad = gradient.clone()

    def _follow(self, outputs: Sequence[Tensor]) -> None:
        """Look at the backward of this call: when it comes, and what it returns."""
        node = next((o.grad_fn for o in outputs if o.grad_fn is not None), None)
        if node is None:
            return
        self._calls += 1
        self._returned = False
        self._node = weakref.ref(node)
        node.register_prehook(functools.partial(self._before_backward, self._calls))
        node.register_hook(self._after_backward)

    def _before_backward(self, call: int, gradients: tuple[Tensor, ...]) -> None:
        name = type(self._network).__name__
        if call != self._calls:
            raise RuntimeError(
                f"CUDAGraph: backward was asked for an earlier call of {name}, whose activations a "
                "later call has overwritten. Run each backward once, before the next call of the "
                "network, or remove CUDAGraph."
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"CUDAGraph: gradients of {name} were asked for with "
                "create_graph=True, and graphs cannot be differentiated twice. Remove CUDAGraph."
            )
        self.release_gradients()

    def _after_backward(
        self, gradients: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]
    ) -> None:
        self._returned = True
        if not self._static_gradients and self._parameters:
            own = gradients[-len(self._parameters) :]
            self._static_gradients = [
                (parameter, gradient.data_ptr())
                for parameter, gradient in zip(self._parameters, own, strict=True)
                if gradient is not None
            ]


def _aliases(parameters: Sequence[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """Return leaves in the same memory.

    The accumulation nodes of the parameters themselves may belong to DDP, and to another stream,
    which a capture must not touch.
    """
    return tuple(nn.Parameter(parameter.detach()) for parameter in parameters)


@contextmanager
def _swapped(network: nn.Module, weights: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Put other parameters in a network's place; recurrent layers follow with their own lists."""
    places = [
        (module, name, parameter)
        for module in network.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in weights
    ]
    try:
        for module, name, parameter in places:
            setattr(module, name, weights[parameter])
        yield
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)


def _with_gradient(
    network: nn.Module,
    parameters: list[nn.Parameter],
    function: Callable[..., tuple[Tensor, ...]],
    statics: tuple[Tensor, ...],
) -> list[nn.Parameter]:
    """Try the network, and return the parameters that get a gradient from it."""
    aliases = _aliases(parameters)
    versions = [tensor._version for tensor in statics]
    state = FrozenState(network)
    with observed() as found:
        outputs = [output for output in function(*statics, *aliases) if output.requires_grad]
        inputs = [*aliases, *parameters, *(s for s in statics if s.requires_grad)]
        gradients: tuple[Tensor | None, ...] = (
            torch.autograd.grad(
                outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True
            )
            if outputs
            else (None,) * len(inputs)
        )
    if [tensor._version for tensor in statics] != versions:
        found.append("changes its input in place")
    if changed := state.changed():
        found.append(f"changes {changed}, and a replay would not")
    if any(g is not None and g.layout is not torch.strided for g in gradients):
        found.append("has sparse gradients")
    if any(g is not None for g in gradients[len(aliases) : 2 * len(aliases)]):
        found.append("reaches parameters through references of its own")
    if found:
        raise IneligibleError(f"its forward {found[0]}.")
    return [p for p, gradient in zip(parameters, gradients, strict=False) if gradient is not None]


def device_of(network: nn.Module) -> torch.device:
    """Return where the parameters of a network are."""
    return next(parameter.device for parameter in network.parameters())


def _nothing() -> None:
    return None
