"""Cutting one network into stages: where, which weights go where, and what each stage computes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_perf._attributes import instance_attribute

Part = Callable[..., Any]
"""What one stage computes: takes what the stage before hands on, one argument a tensor."""


def find_network(module: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """Return the name and the network that is to be cut.

    Args:
        module: What holds the network.
        name: Its dotted name; ``None`` takes the only child that is a Sequential with parameters.

    Raises:
        ValueError: There is no such network, or no or several children to choose from.
    """
    children = {
        key: child
        for key, child in module.named_children()
        if any(True for _ in child.parameters())
    }
    if name is not None:
        try:
            if name:  # the empty name is the module itself
                return name, module.get_submodule(name)
            raise AttributeError(name)
        except AttributeError:
            raise ValueError(
                f"network={name!r} was asked for, and {type(module).__name__} has no such module. "
                f"Its children with parameters are {_listed(children)}."
            ) from None
    found = [key for key, child in children.items() if is_sequential(child)]
    if len(found) != 1:
        raise ValueError(
            f"No network was named, and {type(module).__name__} has {len(found)} children that are "
            f"an nn.Sequential with parameters. Pass network= with one of {_listed(children)}."
        )
    return found[0], children[found[0]]


def is_sequential(network: nn.Module) -> bool:
    """Return whether calling the network is calling its children one after the other."""
    return isinstance(network, nn.Sequential) and type(network).forward is nn.Sequential.forward


def find_points(network: nn.Module, points: Sequence[str] | None, count: int) -> list[str]:
    """Return the names before which each stage but the first begins.

    Args:
        network: What is cut.
        points: The names asked for; ``None`` cuts a Sequential so that parameters are balanced.
        count: The number of stages.

    Raises:
        ValueError: A name is not there, there are too few or too many, or not in order.
    """
    names = list(_layers(network)) if is_sequential(network) else _modules(network)
    if points is None:
        if not is_sequential(network):
            raise ValueError(
                f"{type(network).__name__} is no nn.Sequential, so it is not known where it can be "
                "cut. Pass split_points= with the names of the modules before which a stage "
                f"begins, such as {_listed(names)}."
            )
        return _balanced(_layers(network), count)
    if len(points) != count - 1:
        raise ValueError(
            f"split_points={list(points)} makes {len(points) + 1} stages, and there are {count} "
            f"processes. Name {count - 1} modules, or run {len(points) + 1} processes."
        )
    unknown = [point for point in points if _position(names, point) is None]
    if unknown:
        raise ValueError(
            f"split_points={list(points)} was asked for, and {type(network).__name__} has no "
            f"{_listed(unknown)}. It has {_listed(names)}."
        )
    positions = [_position(names, point) or 0 for point in points]
    if positions != sorted(set(positions)) or positions[0] == 0:
        raise ValueError(
            f"split_points={list(points)} leaves a stage empty, or is not in the order of the "
            f"network: {_listed(names)}."
        )
    return list(points)


def owners(network: nn.Module, points: Sequence[str]) -> dict[str, int]:
    """Return the stage of each parameter and buffer, by name: that in which it is defined.

    Raises:
        ValueError: Several stages share a weight.
    """
    order = [name for name, _ in network.named_modules(remove_duplicate=False)]
    starts = [order.index(point) for point in points]
    stages: dict[str, int] = {}
    seen: dict[int, str] = {}
    for name, tensor in _tensors(network):
        position = order.index(name.rpartition(".")[0])
        stages[name] = sum(start <= position for start in starts)
        other = seen.setdefault(id(tensor), name)
        if stages[other] != stages[name]:
            raise ValueError(
                f"{other!r} and {name!r} are one tensor, in stages {stages[other]} and "
                f"{stages[name]}. Stages lie in different processes: cut elsewhere, or do not "
                "share it."
            )
    return stages


def module_owners(module: nn.Module, name: str, points: Sequence[str]) -> dict[str, int]:
    """Return the stage of each parameter and buffer of a network, by their names in a module.

    Raises:
        ValueError: Several stages share a weight, or one shares it with the rest of the module.
    """
    network = module.get_submodule(name)
    stages = {f"{name}.{key}": stage for key, stage in owners(network, points).items()}
    inside = {id(tensor): f"{name}.{key}" for key, tensor in _tensors(network)}
    for key, tensor in _tensors(module):
        if key not in stages and id(tensor) in inside:
            raise ValueError(
                f"{key!r} and {inside[id(tensor)]!r} are one tensor, in the network and outside of "
                "it. The network lies in several processes: register and use its layers in it only."
            )
    return stages


def sequential_part(network: nn.Module, points: Sequence[str], stage: int) -> Part:
    """Return what a stage of a Sequential computes."""
    layers = _layers(network)
    names = list(layers)
    cuts = [0, *(_position(names, point) or 0 for point in points), len(names)]
    own = [layers[name] for name in names[cuts[stage] : cuts[stage + 1]]]

    def part(*values: Any) -> Any:
        value: Any = values[0] if len(values) == 1 else values
        for layer in own:
            value = layer(value)
        return value

    return part


def traced_part(
    network: nn.Module,
    points: Sequence[str],
    stage: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Part:
    """Return what a stage of any network computes, found by tracing it with an example.

    Args:
        network: Is called with tensors only, and gives a tensor or a tuple of tensors.
        points: See `find_points`.
        stage: Counted from 0.
        args: Example inputs of one micro-batch; only shapes and dtypes matter.
        kwargs: The same, by name.

    Raises:
        ValueError: The network cannot be traced, or uses weights in another stage than they have.
    """
    # Only here: on platforms without torch.distributed it cannot be imported.
    from torch.distributed.pipelining import pipe_split, pipeline

    if not all(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        raise ValueError(
            f"{type(network).__name__} is called with something that is no tensor. To be cut at "
            "split_points it must be called with tensors only: make the rest its attributes."
        )

    def cut(*_: Any) -> None:
        pipe_split()  # type: ignore[no-untyped-call]  # torch has no types here

    handles = [network.get_submodule(point).register_forward_pre_hook(cut) for point in points]
    device = next(network.parameters()).device.type
    # In a run another forward stands in for the network's own.
    forward = partial(type(network).forward, network)
    try:
        with (
            instance_attribute(network, "forward", forward),
            torch.inference_mode(False),
            torch.autocast(device, enabled=False),
        ):
            # Made here: tensors of inference mode cannot be traced.
            example = tuple(torch.zeros_like(value) for value in args)
            named = {name: torch.zeros_like(value) for name, value in kwargs.items()}
            pipe = pipeline(network, example, named)
    except Exception as error:
        raise ValueError(
            f"{type(network).__name__} cannot be traced, which split_points need: {error} Make it "
            "an nn.Sequential of its blocks, or remove what depends on values from its forward."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if pipe.num_stages != len(points) + 1:
        raise ValueError(
            f"split_points={list(points)} cut {type(network).__name__} into {pipe.num_stages} "
            "stages. Name modules that its forward calls once each."
        )
    stages = owners(network, points)
    for number in range(pipe.num_stages):
        used = [name for name, _ in pipe.get_stage_module(number).named_parameters()]
        strays = [name for name in used if stages[name] != number]
        if strays:
            raise ValueError(
                f"{_listed(strays)} of {type(network).__name__} is used in stage {number} and "
                f"defined among the modules of stage {stages[strays[0]]}. Define modules in the "
                "order in which they are called, or choose other split_points."
            )
    return _GraphPart(pipe.split_gm.graph, pipe.get_stage_module(stage), stage)


class _GraphPart:
    """One stage of a traced network: runs its module, and passes on what later stages need."""

    def __init__(self, graph: fx.Graph, module: nn.Module, stage: int) -> None:
        calls = [node for node in graph.nodes if node.op == "call_module"]
        self._module, self._call = module, calls[stage]
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        made = dict.fromkeys(self._inputs, -1) | {call: i for i, call in enumerate(calls)}
        for node in graph.nodes:
            if node.op == "call_function":  # takes one of several results of a stage
                made[node] = made[node.args[0]]
        needed = {
            node: max((made.get(user, len(calls)) for user in node.users), default=-1)
            for node in made
        }
        self._received = [node for node in made if made[node] < stage <= needed[node]]
        self._picked = [node for node in made if node.op == "call_function" and made[node] == stage]
        self._handed = [node for node in made if made[node] <= stage < needed[node]]
        self._first, self._last = stage == 0, stage == len(calls) - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        nodes = self._inputs if self._first else self._received
        known: dict[fx.Node, Any] = dict(zip(nodes, args, strict=False))
        known |= {node: kwargs[str(node.target)] for node in nodes if node.target in kwargs}
        result = self._module(*(known[node] for node in self._call.args))
        if self._last:
            return result[0] if isinstance(result, tuple | list) and len(result) == 1 else result
        known[self._call] = result
        for node in self._picked:
            known[node] = operator.getitem(known[node.args[0]], node.args[1])
        return tuple(known[node] for node in self._handed)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def _layers(network: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return what a Sequential calls, one after the other; those inside it are opened as well."""
    layers: dict[str, nn.Module] = {}
    # Not `named_children`, which leaves out a layer that is there twice.
    for name, child in network.named_modules(remove_duplicate=False):
        if not name or "." in name:
            continue
        if isinstance(child, nn.Sequential) and is_sequential(child) and len(child):
            layers |= _layers(child, f"{prefix}{name}.")
        else:
            layers[f"{prefix}{name}"] = child
    return layers


def _modules(network: nn.Module) -> list[str]:
    return [
        name
        for name, child in network.named_modules()
        if name and any(True for _ in child.parameters())
    ]


def _position(names: Sequence[str], point: str) -> int | None:
    """Return where a module, or the first part of a container, is among the names."""
    found = (i for i, name in enumerate(names) if f"{name}.".startswith(f"{point}."))
    return next(found, None)


def _balanced(layers: dict[str, nn.Module], count: int) -> list[str]:
    """Return where to cut so that the squares of the stages' parameter counts add up to least."""
    names = list(layers)
    if len(names) < count:
        raise ValueError(
            f"The network has {len(names)} layers, {_listed(names)}, and there are {count} "
            f"processes, one for each stage. Run {len(names)} processes at most."
        )
    sizes = [sum(p.numel() for p in layers[name].parameters()) for name in names]
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    best: dict[int, tuple[int, list[int]]] = {
        end: (total[end] ** 2, []) for end in range(1, len(total))
    }
    for stages in range(2, count + 1):
        best = {
            end: min(
                (best[cut][0] + (total[end] - total[cut]) ** 2, [*best[cut][1], cut])
                for cut in range(stages - 1, end)
            )
            for end in range(stages, len(total))
        }
    return [names[cut] for cut in best[len(names)][1]]


def _listed(names: Any) -> str:
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return (", ".join(shown[:8]) or "none") + more
