"""What Python says about a model: frozen in a CUDA graph, and compared before each replay."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Set
from functools import cache
from operator import attrgetter, is_, methodcaller
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LONG = 64
# Methods that items replace for a run, and what recurrent layers note about their own weights.
_BOOKKEEPING = {"forward", "log", "backward", "_flat_weight_refs"}


class FrozenState:
    """Remembers a model's attributes and where its tensors are, to see later whether they changed.

    A graph has frozen every Python value that it met, and every address. Values in parameters and
    buffers may change as long as they stay in place.

    Args:
        model: A network or a LightningModule.
        read: Names of the attributes of ``model`` itself that matter; all by default.
    """

    def __init__(self, model: nn.Module, read: Set[str] | None = None) -> None:
        # Flat lists, because they are compared before each replay, by functions written in C.
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._labels: list[str] = []
        self._hooks: list[dict[int, Any]] = []
        tensors: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            attributes, ignored = vars(module), _internal(isinstance(module, LightningModule))
            if module is model and read is not None:
                ignored |= attributes.keys() - read
            self._add(attributes, [name for name in attributes if name not in ignored], prefix)
            for group in ("_parameters", "_buffers", "_modules"):
                self._add(attributes[group], attributes[group], prefix)
            self._hooks += [attributes[hooks] for hooks in _HOOKS] if name else []
            tensors.update(module.named_parameters(prefix=name, recurse=False))
            tensors.update(module.named_buffers(prefix=name, recurse=False))
        self._values = list(map(dict.get, self._owners, self._names))
        self._contents = [
            (index, _contents(value))
            for index, value in enumerate(self._values)
            if isinstance(value, _CONTAINERS)
        ]
        self._tensors, self._tensor_names = list(tensors.values()), list(tensors)
        self._flags, self._places = self._trained(), self._addresses()
        self._hooked = self._number_of_hooks()

    def changed(self) -> str | None:
        """Return the name of something that is different from before, or ``None``."""
        values = map(dict.get, self._owners, self._names)
        if not all(map(is_, values, self._values)):
            for owner, name, label, before in zip(
                self._owners, self._names, self._labels, self._values, strict=True
            ):
                if not _same(owner.get(name), before):
                    return label
        for index, contents in self._contents:
            if _contents(self._owners[index].get(self._names[index])) != contents:
                return self._labels[index]
        if self._number_of_hooks() != self._hooked:
            return "the hooks of its layers"
        if (flags := self._trained()) != self._flags:
            return f"{self._first_difference(flags, self._flags)}.requires_grad"
        if (places := self._addresses()) != self._places:
            return f"the memory of {self._first_difference(places, self._places)}"
        return None

    def _add(self, owner: dict[str, Any], names: Collection[str], prefix: str) -> None:
        self._owners += [owner] * len(names)
        self._names += names
        self._labels += [f"{prefix}{name}" for name in names]

    def _first_difference(self, now: list[Any], before: list[Any]) -> str:
        return next(n for n, a, b in zip(self._tensor_names, now, before, strict=True) if a != b)

    def _trained(self) -> list[bool]:
        return list(map(attrgetter("requires_grad"), self._tensors))

    def _addresses(self) -> list[int]:
        return list(map(methodcaller("data_ptr"), self._tensors))

    def _number_of_hooks(self) -> int:
        return sum(map(len, self._hooks))


@cache
def _internal(lightning: bool) -> frozenset[str]:
    """Return the attributes of a module that are not the user's: torch's and Lightning's own."""
    plain = LightningModule() if lightning else nn.Module()
    return frozenset(vars(plain)) - {"training"} | _BOOKKEEPING


def _same(value: Any, before: Any) -> bool:
    if value is before:
        return True
    if type(value) is not type(before):
        return False
    if isinstance(value, float) and math.isnan(value):
        return math.isnan(before)
    if isinstance(value, tuple):
        return _contents(value) == _contents(before)
    # What is in other containers is compared apart.
    return isinstance(value, _CONTAINERS) or (isinstance(value, _SCALARS) and value == before)


def _contents(container: Any) -> Hashable:
    """Return the numbers and objects in a container, of long ones only how many."""
    if not isinstance(container, (*_CONTAINERS, tuple)):
        return None
    if len(container) > _LONG:
        return len(container)
    if isinstance(container, dict):
        return tuple((key, _itself(value)) for key, value in container.items())
    contents = map(_itself, container)
    return frozenset(contents) if isinstance(container, set) else tuple(contents)


def _itself(value: Any) -> Hashable:
    return value if isinstance(value, _SCALARS) else id(value)
