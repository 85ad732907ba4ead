"""The forward of a network as a graph: dispatch, capture, and what must hold at each replay."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_perf._item import instance_attribute
from lightning_perf.callbacks._graph_engine import Engine
from lightning_perf.callbacks._graph_probe import IneligibleError, observed, trial
from lightning_perf.callbacks._graph_signature import (
    autocast_key,
    filled,
    flatten,
    static_copy,
)
from lightning_perf.callbacks._graph_state import FrozenState
from lightning_perf.callbacks._graph_table import GraphTable

Report = Callable[[str], None]


@contextmanager
def graphed_network(
    network: nn.Module, engine: Engine, report: Report
) -> Iterator[GraphTable[NetworkGraph]]:
    """Run a network's calls in training as graphs, for a block.

    Args:
        network: Its calls in train mode with gradients are recorded and repeated; all others, and
            those that cannot be, run as ever.
        engine: What records and repeats.
        report: Called with the reason when calls stay eager for good.

    Yields:
        The counts.
    """
    dispatch = _GraphedForward(network, engine, report)
    try:
        with instance_attribute(network, "forward", dispatch):
            yield dispatch.table
    finally:
        dispatch.close()


class _GraphedForward:
    """Takes the place of ``network.forward``: replays what it can and calls the original else."""

    def __init__(self, network: nn.Module, engine: Engine, report: Report) -> None:
        self._original = network.forward
        self._network = network
        self._engine = engine
        self._report = report
        self.table: GraphTable[NetworkGraph] = GraphTable()
        functools.update_wrapper(self, self._original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trains = self._network.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not trains:
            return self._original(*args, **kwargs)
        if self.table.reason is not None:
            self.table.eager += 1
            return self._original(*args, **kwargs)
        tensors, signature = flatten((args, kwargs))
        key = (signature, autocast_key(_device_type(self._network)))
        graph = self._graph(key, (args, kwargs), tensors)
        if graph is not None:
            self.table.replayed += 1
            return graph(tensors)
        self.table.count_eager(key)
        self._tell()
        output = self._original(*args, **kwargs)
        self._watch_gradients(output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the network, as weight averaging makes one, must run its own weights: a bound
        # method is copied and pickled together with its module.
        return _itself, (self._original,)

    def close(self) -> None:
        """Let go of all graphs and of their memory."""
        for graph in self.table.graphs.values():
            graph.release_gradients()
        self.table.graphs.clear()

    def _graph(
        self, key: Hashable, arguments: Any, tensors: Sequence[Tensor]
    ) -> NetworkGraph | None:
        graph = self.table.graphs.get(key)
        if graph is None:
            return self._captured(key, arguments, tensors) if self.table.is_due(key) else None
        if graph.waits_for_backward():
            self.table.waiting += 1
            return None
        if changed := graph.changed():
            graph.release_gradients()
            self.table.drop(key, changed)
            return None
        return graph

    def _captured(
        self, key: Hashable, arguments: Any, tensors: Sequence[Tensor]
    ) -> NetworkGraph | None:
        try:
            _require_plain(self._network)
            with trial(self._network):
                graph = NetworkGraph(
                    self._network, self._original, self._engine, arguments, tensors
                )
        except IneligibleError as reason:
            self.table.reason = str(reason)
        except Exception as error:
            self.table.reason = f"the capture failed: {_cause(error)}"
        else:
            graph.freeze()
            self.table.add(key, graph)
            return graph
        return None

    def _tell(self) -> None:
        if self.table.reason is not None:
            self._report(self.table.reason)

    def _watch_gradients(self, output: Any) -> None:
        """Find out, before there is a graph, whether gradients are differentiated again."""

        def look(gradient: Tensor) -> None:
            if torch.is_grad_enabled() and self.table.reason is None:
                self.table.reason = (
                    "its gradients are differentiated again (create_graph=True), which a graph "
                    "does not allow."
                )
                self._tell()

        for tensor in flatten(output)[0]:
            if tensor.requires_grad and self.table.reason is None:
                tensor.register_hook(look)  # type: ignore[no-untyped-call]  # torch


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
        if any(tensor.device != _device(network) for tensor in tensors):
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
        if call != self._calls:
            raise RuntimeError(
                f"CUDAGraph: backward was asked for an earlier call of {_name(self._network)}, "
                "whose activations a later call has overwritten. Run each backward once, before "
                "the next call of the network, or remove CUDAGraph."
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"CUDAGraph: gradients of {_name(self._network)} were asked for with "
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


def _require_plain(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if module._compiled_call_impl is not None:
            raise IneligibleError(
                "it is compiled. For compiled networks use Compile(mode='reduce-overhead'), which "
                "makes CUDA graphs itself."
            )
        if isinstance(module, nn.SyncBatchNorm) and dist.is_initialized():
            raise IneligibleError("it has SyncBatchNorm, which communicates with other processes.")
        hooks = (
            *(module._forward_hooks, module._forward_pre_hooks),
            *(module._backward_hooks, module._backward_pre_hooks),
        )
        if name and any(hooks):
            raise IneligibleError(f"its layer {name} has hooks, which a replay would not call.")


def _device(network: nn.Module) -> torch.device:
    return next(tensor.device for tensor in network.parameters())


def _device_type(network: nn.Module) -> str:
    return _device(network).type


def _name(network: nn.Module) -> str:
    return type(network).__name__


def _cause(error: BaseException) -> str:
    """Return the message of what went wrong first: ending a broken capture fails once more."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _itself(forward: Any) -> Any:
    return forward


def _nothing() -> None:
    return None
