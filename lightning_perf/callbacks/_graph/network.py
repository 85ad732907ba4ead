"""The forward of a network as a graph: dispatch, capture, and what must hold at each replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_perf._attributes import instance_attribute
from lightning_perf._preserve_state import preserve_model
from lightning_perf.callbacks._graph.engine import Engine
from lightning_perf.callbacks._graph.network_record import NetworkGraph, device_of
from lightning_perf.callbacks._graph.probe import (
    IneligibleError,
    first_cause,
    require_capturable,
)
from lightning_perf.callbacks._graph.signature import autocast_key, flatten
from lightning_perf.callbacks._graph.table import GraphTable

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
        key = (signature, autocast_key(device_of(self._network).type))
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
            require_capturable(self._network)
            with preserve_model(self._network):
                graph = NetworkGraph(
                    self._network, self._original, self._engine, arguments, tensors
                )
        except IneligibleError as reason:
            self.table.reason = str(reason)
        except Exception as error:
            self.table.reason = f"the capture failed: {first_cause(error)}"
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
                tensor.register_hook(look)  # type: ignore[no-untyped-call]  # no types in torch


def _itself(forward: Any) -> Any:
    return forward
