"""What a block's forward pass finds, so that its recomputation finds the same and changes nothing.

`torch.utils.checkpoint` brings back torch's random numbers and autocast. Beyond that, a second
forward pass would update running statistics again, and would see buffers, counters and Python's
random numbers as the first one, and the rest of the step, left them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
Generator = torch.Generator | np.random.Generator | random.Random

_CONTAINERS = (dict, list, set, deque)
# Parameters, submodules and hooks are not what a forward pass changes.
_LEFT_OUT = vars(nn.Module()).keys() - {"_buffers"}
# Batch normalization writes its statistics without a trace in their version, so that of small
# tensors the copies are kept anyway. A large one is a mask, a table or weights.
_SMALL = 2**16


class BlockState:
    """Attributes, buffers and random generators of a block's modules, as they are now.

    Copies of large tensors that the forward pass does not change live only as long as it takes.

    Args:
        modules: The block and everything in it.
        process_rng: Also the generators of Python and NumPy, which take a while to read.
    """

    def __init__(self, modules: Iterable[nn.Module], *, process_rng: bool) -> None:
        self._contents: list[tuple[Container, Container]] = []
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._generators: list[tuple[Generator, Callable[[], None]]] = []
        for module in modules:
            attributes = vars(module)
            own = attributes.keys() - _LEFT_OUT
            self._remember(attributes, [attributes[name] for name in own])
        self._process = _process_rng() if process_rng else None

    def forward_is_over(self) -> None:
        """Let go of all that the forward pass left as it was."""
        self._tensors = {
            key: (tensor, version, copy)
            for key, (tensor, version, copy) in self._tensors.items()
            if tensor._version != version or tensor.numel() <= _SMALL
        }
        if self._process is not None and _same_rng(self._process, _process_rng()):
            self._process = None

    @property
    def drew_from_process(self) -> bool:
        """Whether the forward pass drew random numbers of Python or NumPy."""
        return self._process is not None

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Let the block find this state again, and undo all that happens to it then.

        Tensors are exchanged and not written to, because autograd may hold them.
        """
        fresh = {key: copy.clone() for key, (_, _, copy) in self._tensors.items()}
        now = [(container, container.copy()) for container, _ in self._contents]
        with ExitStack() as stack:
            for container, content in now:
                stack.callback(_fill, container, content, {})
            for generator, restore in self._generators:
                stack.callback(_restore_of(generator))
                restore()
            if self._process is not None:
                stack.callback(_set_process_rng, _process_rng())
                _set_process_rng(self._process)
            for container, content in self._contents:
                _fill(container, content, fresh)
            yield

    def _remember(self, container: Container, values: Iterable[Any]) -> None:
        self._contents.append((container, container.copy()))
        for value in values:
            if isinstance(value, Tensor):
                self._remember_tensor(value)
            elif isinstance(value, _CONTAINERS):
                self._remember(value, value.values() if isinstance(value, dict) else value)
            elif isinstance(value, Generator):
                self._generators.append((value, _restore_of(value)))

    def _remember_tensor(self, tensor: Tensor) -> None:
        # Parameters and results are not state, and inference tensors cannot be written to here.
        if not (tensor.requires_grad or tensor.is_inference()):
            self._tensors[id(tensor)] = (tensor, tensor._version, tensor.detach().clone())


def _fill(container: Any, content: Any, exchange: dict[int, Tensor]) -> None:
    """Make a container hold ``content``, with some tensors exchanged for others."""
    if isinstance(container, dict):
        new = {key: exchange.get(id(value), value) for key, value in content.items()}
        if not _same(container, new) or not _same(container.values(), new.values()):
            container.clear()
            container.update(new)
        return
    values = [exchange.get(id(value), value) for value in content]
    if not _same(container, values):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(values)


def _same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _restore_of(generator: Generator) -> Callable[[], None]:
    """Return what puts a generator back to where it is now."""
    if isinstance(generator, np.random.Generator):
        bits, bits_state = generator.bit_generator, generator.bit_generator.state
        return lambda: setattr(bits, "state", bits_state)
    if isinstance(generator, random.Random):
        python, python_state = generator, generator.getstate()
        return lambda: python.setstate(python_state)
    state = generator.get_state()
    return lambda: (generator.set_state(state), None)[1]


def _process_rng() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_process_rng(state: tuple[Any, Any]) -> None:
    python, numpy = state
    random.setstate(python)
    np.random.set_state(numpy)


def _same_rng(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    (python, numpy), (other_python, other_numpy) = one, other
    same_numpy = numpy[2] == other_numpy[2] and np.array_equal(numpy[1], other_numpy[1])
    return bool(python == other_python and same_numpy)
