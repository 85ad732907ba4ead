"""Recording work of the GPU once and repeating it: the two CUDA engines."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

Scope = Literal["network", "step"]
Function = Callable[..., tuple[Tensor, ...]]


class Engine(ABC):
    """Records what a function does to the memory of a device, and repeats it on new inputs."""

    @abstractmethod
    def capture(self, function: Function, samples: tuple[Tensor, ...]) -> Any:
        """Record one call.

        Args:
            function: Takes the samples, returns tensors.
            samples: Tensors that stay in place: later inputs are copied into their memory.

        Returns:
            What `replay` needs.
        """

    @abstractmethod
    def replay(self, graph: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Repeat the call on other inputs; the results hold until the next replay."""

    def warm_up(self) -> AbstractContextManager[None]:
        """Return a context for eager calls that come before the capture of the same work."""
        return nullcontext()


class NetworkEngine(Engine):
    """A differentiable function as two graphs, one for its forward and one for its backward.

    Memory is not shared between captures: several networks are between forward and backward at
    the same time.
    """

    def capture(self, function: Function, samples: tuple[Tensor, ...]) -> Any:
        """Record forward and backward."""
        mode: dict[str, Any] = {"capture_error_mode": _ERROR_MODE} if _takes_error_mode() else {}
        with _stream_kept(), _autocast_cache_off(samples[0].device.type):
            return torch.cuda.make_graphed_callables(
                function, samples, allow_unused_input=True, **mode
            )

    def replay(self, graph: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward graph; the backward one runs when autograd gets there."""
        return cast("tuple[Tensor, ...]", graph(*inputs))


class StepEngine(Engine):
    """A function with its backward inside as one graph.

    Its graphs never overlap in time, so they share memory. Eager calls run on the stream of the
    capture: what autograd keeps between steps remembers the stream on which it was made.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # no types in torch
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Run eager calls on the stream of the captures."""
        outer = torch.cuda.current_stream()
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def capture(self, function: Function, samples: tuple[Tensor, ...]) -> _Captured:
        """Record the function with whatever backward it runs."""
        graph = torch.cuda.CUDAGraph()
        with (
            _stream_kept(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode=_ERROR_MODE
            ),
        ):
            outputs = function(*samples)
        return _Captured(graph, samples, outputs)

    def replay(self, graph: _Captured, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy the inputs in and launch the graph."""
        for static, new in zip(graph.samples, inputs, strict=True):
            static.copy_(new, non_blocking=True)
        graph.graph.replay()
        return graph.outputs


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    samples: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


ENGINES: dict[str, dict[Scope, type[Engine]]] = {
    "cuda": {"network": NetworkEngine, "step": StepEngine}
}
"""Engines by type of device; tests add one for the CPU."""

# Other threads, such as NCCL's watchdog and loaders that pin memory, may go on meanwhile.
_ERROR_MODE = "thread_local"


def _takes_error_mode() -> bool:
    parameters = inspect.signature(torch.cuda.make_graphed_callables).parameters
    return "capture_error_mode" in parameters  # torch 2.6 has no such choice


@contextmanager
def _stream_kept() -> Iterator[None]:
    """Come back to the same stream: a capture that fails at its end stays on its own."""
    stream = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)


@contextmanager
def _autocast_cache_off(device_type: str) -> Iterator[None]:
    """Cast weights inside the graph: casts that Lightning 2.5 caches die with the step."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(
        device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False
    ):
        yield
