"""Which layers hand their output to one normalization and to nothing else: the real data flow.

Read from the `forward` methods with `torch.fx`, not from the order of attributes.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from typing import Any
from weakref import ReferenceType, ref

from lightning.pytorch import LightningModule
from torch import fx, nn
from torch.nn.parameter import is_lazy

from lightning_perf._preserve_state import preserve_model

CONVOLUTIONS: tuple[type[nn.Module], ...] = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# What may be asked about an output without looking at its values.
_SHAPE_ATTRIBUTES = ("shape", "dtype", "device", "ndim")
_SHAPE_METHODS = ("size", "dim")

_RETURNED = object()


@dataclass(frozen=True)
class Pair:
    """A layer whose output goes only to one norm, whenever ``scope`` calls it; by name."""

    layer: str
    norm: str
    scope: str
    """The smallest module whose `forward` makes both calls; empty for the model itself."""


@dataclass(frozen=True)
class Flow:
    """The pairs that were found, and why every other layer in question is in none."""

    pairs: tuple[Pair, ...]
    kept: dict[str, str]


def find_pairs(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    norms: tuple[type[nn.Module], ...],
    mismatch: Callable[[nn.Module, nn.Module], str | None],
) -> Flow:
    """Find the layers whose output goes only to one norm.

    The `forward` of the modules above a layer is traced symbolically, from the inside out, until
    one shows where the output goes: in training and in evaluation mode, with optional arguments
    given and left out. What cannot be proven so is kept, with the reason: a `forward` whose path
    depends on values, a layer that is called twice, a second use of the output.

    The proof holds for calls by the `forward` of ``scope``. Somebody may still call the layer
    directly; `linked` tells the two apart while the model runs.

    Args:
        model: Any module. Nothing in it is changed.
        layers: The layers in question by their names in ``model``.
        norms: Classes of norms, exactly.
        mismatch: Takes a layer and the norm after it, and returns why they do not fit, or ``None``.
    """
    search = _Search(model, norms)
    pairs, kept = [], {}
    for name, layer in layers.items():
        found = search.reason(layer) or search.pair(name)
        if isinstance(found, Pair):
            norm = model.get_submodule(found.norm)
            reason = search.reason(norm) or mismatch(layer, norm)
            if reason is None:
                pairs.append(found)
                continue
            found = f"its norm {found.norm!r}: {reason}"
        kept[name] = found
    followed = Counter(pair.norm for pair in pairs)
    kept |= {p.layer: "its norm follows several layers" for p in pairs if followed[p.norm] > 1}
    return Flow(tuple(pair for pair in pairs if followed[pair.norm] == 1), kept)


def list_kept(kept: Mapping[str, str], *, most: int = 3) -> str:
    """Return the first of the kept layers with their reasons, in one line."""
    lines = [f"{name!r} ({reason})" for name, reason in list(kept.items())[:most]]
    if len(kept) > most:
        lines.append(f"{len(kept) - most} more")
    return ", ".join(lines)


class _Search:
    """Looks for pairs in one model; each `forward` is traced once."""

    def __init__(self, model: nn.Module, norms: tuple[type[nn.Module], ...]) -> None:
        self._model = model
        self._norms = norms
        self._names = {module: name for name, module in model.named_modules()}
        self._parents = Counter(c for module in model.modules() for c in module._modules.values())
        self._graphs: dict[nn.Module, list[fx.Graph] | str | None] = {}

    def reason(self, module: nn.Module) -> str | None:
        """Return why a layer or norm cannot be in a pair, wherever its output goes."""
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return "it has hooks"
        return _replaced(module)

    def pair(self, name: str) -> Pair | str:
        """Return the pair of the layer of that name, or the reason why it is in none."""
        layer, reason = self._model.get_submodule(name), ""
        for above in _above(name):
            scope = self._model.get_submodule(above)
            if not any(type(module) in self._norms for module in scope.modules()):
                continue
            reason = reason or "no forward above it calls it"
            graphs = self._traced(scope)
            if isinstance(graphs, str):
                return graphs
            consumers = {self._consumer(graph, scope, layer) for graph in graphs or ()} - {None}
            if len(consumers) > 1:
                return f"where its output goes depends on how {_forward(scope)} is called"
            for consumer in consumers:
                if isinstance(consumer, nn.Module):
                    norm = self._names[consumer]
                    if self._is_shared(name, above) or self._is_shared(norm, above):
                        return "it, its norm, or what holds one of them has several parents"
                    return Pair(name, norm, above)
                if isinstance(consumer, str):
                    return consumer
                reason = f"{_forward(scope)} returns its output"
        return reason or "no module above it has a norm"

    def _is_shared(self, name: str, scope: str) -> bool:
        """Return whether a module below the scope can also be reached without the scope."""
        between = (name, *_above(name))
        return any(
            self._parents[self._model.get_submodule(path)] > 1
            for path in between[: between.index(scope)]
        )

    def _traced(self, scope: nn.Module) -> list[fx.Graph] | str | None:
        """Return the graphs of a `forward`, why there are none, or ``None`` if it has none."""
        if scope not in self._graphs:
            self._graphs[scope] = _trace(scope)
        return self._graphs[scope]

    def _consumer(self, graph: fx.Graph, scope: nn.Module, layer: nn.Module) -> Any:
        """Return the norm after a layer, `_RETURNED`, a reason, or ``None`` if it is not called."""
        calls = _calls(graph, scope)
        if layer not in calls:
            return None
        if len(calls[layer]) > 1:
            return f"{_forward(scope)} calls it {len(calls[layer])} times"
        if _reads(graph, scope, layer.bias):
            return f"{_forward(scope)} reads its bias"
        (node,) = calls[layer]
        while True:
            if node.meta["stored"]:
                return f"{_forward(scope)} stores its output"
            users = [user for user in node.users if not _asks_for_shape(user)]
            if len(users) != 1:
                uses = dict.fromkeys(_describe(user, scope) for user in users)
                return f"its output goes to {' and '.join(uses) or 'nothing'}"
            (user,) = users
            if user.op == "output":
                return _RETURNED
            module = scope.get_submodule(str(user.target)) if user.op == "call_module" else None
            if module is None or user.args != (node,) or user.kwargs:
                return f"its output goes to {_describe(user, scope)}"
            if type(module) is nn.Identity:
                node = user
                continue
            if type(module) not in self._norms:
                return f"its output goes to {_describe(user, scope)}"
            if len(calls[module]) > 1:
                return f"{_forward(scope)} calls its norm {len(calls[module])} times"
            if any(_reads(graph, scope, buffer) for buffer in module.buffers()):
                return f"{_forward(scope)} reads the statistics of its norm"
            return module


class _Tracer(fx.Tracer):
    """Follows calls into all modules but those of torch and those whose hooks may do anything."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self._proxies: list[tuple[fx.Node, ReferenceType[fx.Proxy]]] = []

    def graph_of(self, scope: nn.Module, arguments: dict[str, Any] | None) -> fx.Graph:
        """Return the graph of a `forward`; of each node it tells whether the output was stored."""
        graph = self.trace(scope, arguments)
        for node, proxy in self._proxies:
            # In an attribute or a list, where the graph does not show it.
            node.meta["stored"] = node.meta.get("stored", False) or proxy() is not None
        return graph

    def proxy(self, node: fx.Node) -> fx.Proxy:
        proxy = super().proxy(node)
        self._proxies.append((node, ref(proxy)))
        return proxy

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        hooks = m._forward_hooks or m._forward_pre_hooks
        return bool(hooks) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        # Not `forward`, which would run what `Module.compile` made.
        return super().call_module(m, m.forward, args, kwargs)


def _above(name: str) -> Iterator[str]:
    """Yield the names of the modules above one, from the inside out; the last is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _trace(scope: nn.Module) -> list[fx.Graph] | str | None:
    if type(scope).forward in (nn.Module.forward, LightningModule.forward):
        return None
    if reason := _replaced(scope):
        return f"{type(scope).__name__}: {reason}"
    if any(is_lazy(tensor) for tensor in chain(scope.parameters(), scope.buffers())):
        return f"{type(scope).__name__} has layers without a shape before their first batch"
    graphs = []
    # A forward may count its calls or keep an activation.
    with preserve_model(scope):
        try:
            for training, arguments in product((True, False), _optional_arguments(scope)):
                for module in scope.modules():
                    module.training = training
                graphs.append(_Tracer().graph_of(scope, arguments))
        except Exception as error:
            what = re.split(r"[.\n] ?", str(error))[0] or type(error).__name__
            return f"{_forward(scope)} cannot be traced: {what}"
    return graphs


def _replaced(module: nn.Module) -> str | None:
    """Return by what, if another `forward` than that of its class was set on a module."""
    forward = vars(module).get("forward")
    # DDP in Lightning leaves the method of the class there.
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        return None
    return f"its forward was replaced by {getattr(forward, '__qualname__', type(forward).__name__)}"


def _optional_arguments(scope: nn.Module) -> Iterator[dict[str, Any] | None]:
    """Yield the optional arguments to leave out: none, and all whose default is a plain value."""
    yield None
    parameters = inspect.signature(type(scope).forward).parameters.values()
    plain = (bool, int, float, str, type(None))
    defaults = {p.name: p.default for p in parameters if isinstance(p.default, plain)}
    if defaults:
        yield defaults


def _calls(graph: fx.Graph, scope: nn.Module) -> dict[nn.Module, list[fx.Node]]:
    calls = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_module":
            calls[scope.get_submodule(node.target)].append(node)
    return calls


def _reads(graph: fx.Graph, scope: nn.Module, tensor: Any) -> bool:
    if tensor is None:
        return False
    read = (str(node.target).rpartition(".") for node in graph.nodes if node.op == "get_attr")
    return any(
        getattr(scope.get_submodule(holder), name, None) is tensor for holder, _, name in read
    )


def _asks_for_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SHAPE_METHODS
    return node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES


def _describe(node: fx.Node, scope: nn.Module) -> str:
    if node.op == "output":
        return f"the return value of {_forward(scope)}"
    if node.op == "call_module":
        return f"{node.target!r} ({type(scope.get_submodule(str(node.target))).__name__})"
    return str(getattr(node.target, "__name__", node.target))


def _forward(module: nn.Module) -> str:
    return f"{type(module).__name__}.forward"
