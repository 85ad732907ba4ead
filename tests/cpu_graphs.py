"""CUDA graphs on a CPU, with their traps: what was recorded is repeated in the same memory.

While a graph is recorded every operation is written down with the memory it reads and writes;
a replay runs these operations again on that memory, and nothing else. So a stale buffer, a value
frozen in Python or a missing copy gives wrong losses, as on a GPU. Outputs hold NaN until the
first replay, because a capture on a GPU computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_perf.callbacks._graph.engine import ENGINES


class CPUGraph:
    """Takes the place of ``torch.cuda.CUDAGraph``."""

    recorded: list[CPUGraph] = []  # noqa: RUF012  # all of them, for tests that count

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, list[tuple[int, Tensor]], bool]] = []
        self.replays = 0
        self.recorded.append(self)

    def replay(self) -> None:
        """Run all operations again on the same memory."""
        self.replays += 1
        with torch.no_grad(), _cast_off():
            for func, args, kwargs, outputs, gradients in self.operations:
                with torch.set_grad_enabled(gradients):  # some keep less without
                    fresh = tree_leaves(func(*args, **kwargs))
                for work in fresh:
                    if func.namespace == "c10d" and hasattr(work, "wait"):
                        work.wait()
                for index, static in outputs:
                    static.copy_(fresh[index])


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CPUGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        kept_args, kept_kwargs = tree_map_only(Tensor, torch.detach, (args, kwargs))
        result = func(*args, **kwargs)
        memory = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        outputs = [
            (index, leaf.detach())
            for index, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor) and _memory(leaf) not in memory
        ]
        gradients = torch.is_grad_enabled()
        self._graph.operations.append((func, kept_args, kept_kwargs, outputs, gradients))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for *_, outputs, _ in self._graph.operations:
                for _, static in outputs:
                    if static.is_floating_point():
                        static.fill_(torch.nan)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _cast_off() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False):
        yield


class CPUStream:
    """Takes the place of ``torch.cuda.Stream``: notes which one is current."""

    current: CPUStream

    def wait_stream(self, other: CPUStream) -> None:
        """Nothing to wait for."""


@contextmanager
def _stream(stream: CPUStream) -> Iterator[None]:
    outer = CPUStream.current
    CPUStream.current = stream
    try:
        yield
    finally:
        CPUStream.current = outer


@contextmanager
def _graph(
    graph: CPUGraph, pool: Any = None, stream: CPUStream | None = None, **_: Any
) -> Iterator[None]:
    """Take the place of ``torch.cuda.graph``, which stays on its stream after an error."""
    outer = CPUStream.current
    CPUStream.current = stream or CPUStream()
    with _Recorder(graph):
        yield
    CPUStream.current = outer


@contextmanager
def cpu_graphs(graph: type[CPUGraph] = CPUGraph) -> Iterator[list[CPUGraph]]:
    """Let the CUDA engines run on the CPU, for a block; yield the graphs that are recorded."""
    graph.recorded = []
    CPUStream.current = CPUStream()
    places = {
        "CUDAGraph": graph,
        "graph": _graph,
        "Stream": CPUStream,
        "stream": _stream,
        "current_stream": lambda: CPUStream.current,
        "set_stream": lambda stream: setattr(CPUStream, "current", stream),
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: (0, 0),
    }
    with ExitStack() as stack:
        for name, value in places.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.cuda.graphs, "graph_pool_handle"))
        stack.enter_context(mock.patch.dict(ENGINES, {"cpu": ENGINES["cuda"]}))
        yield graph.recorded
