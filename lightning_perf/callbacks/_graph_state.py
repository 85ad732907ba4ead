"""What Python says about a model: frozen in a CUDA graph, and compared before each replay."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Set
from operator import is_
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, tuple, deque)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LONG = 64
# Methods that items replace for a run, and what recurrent layers note about their own weights.
_BOOKKEEPING = {"forward", "log", "backward", "_flat_weight_refs"}
_MISSING = object()


class FrozenState:
    """Remembers a model's attributes and where its tensors are, to see later whether they changed.

    A graph has frozen every Python value that it met, and every address. Values in parameters and
    buffers may change as long as they stay in place.

    Args:
        model: A network or a LightningModule.
        read: Names of the attributes of ``model`` itself that matter; all by default.
    """

    def __init__(self, model: nn.Module, read: Set[str] | None = None) -> None:
        self._attributes: list[_Attributes] = []
        self._hooks: list[dict[int, Any]] = []
        self._tensors: list[tuple[str, Tensor]] = []
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            attributes = vars(module)
            ignored = _internal(module)
            if module is model and read is not None:
                ignored |= attributes.keys() - read
            self._attributes.append(_Attributes(attributes, prefix, ignored))
            members = (("_parameters", prefix), ("_buffers", prefix), ("_modules", prefix))
            for group, label in members:
                self._attributes.append(_Attributes(getattr(module, group), label, frozenset()))
            self._hooks += [getattr(module, hooks) for hooks in _HOOKS] if name else []
            self._tensors += module.named_parameters(prefix=name, recurse=False)
            self._tensors += module.named_buffers(prefix=name, recurse=False)
        self._flags = self._trainable()
        self._places = self._addresses()
        self._hooked = self._number_of_hooks()

    def changed(self) -> str | None:
        """Return what is different from before, as a name and what happened, or ``None``."""
        for attributes in self._attributes:
            if (name := attributes.changed()) is not None:
                return name
        if self._number_of_hooks() != self._hooked:
            return "the hooks of its layers"
        for (name, _), flag, before in zip(
            self._tensors, self._trainable(), self._flags, strict=True
        ):
            if flag != before:
                return f"{name}.requires_grad"
        for (name, _), place, before_place in zip(
            self._tensors, self._addresses(), self._places, strict=True
        ):
            if place != before_place:
                return f"the memory of {name}"
        return None

    def _trainable(self) -> list[bool]:
        return [tensor.requires_grad for _, tensor in self._tensors]

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for _, tensor in self._tensors]

    def _number_of_hooks(self) -> int:
        return sum(map(len, self._hooks))


class _Attributes:
    """One dictionary of attributes, with the values that it had."""

    def __init__(self, now: dict[str, Any], prefix: str, ignored: frozenset[str]) -> None:
        self._now = now
        self._prefix = prefix
        self._names = [name for name in now if name not in ignored]
        self._values = [now[name] for name in self._names]
        self._contents = {
            name: _contents(now[name]) for name in self._names if isinstance(now[name], _CONTAINERS)
        }

    def changed(self) -> str | None:
        now = self._now
        values = [now.get(name, _MISSING) for name in self._names]
        if not all(map(is_, values, self._values)):
            # Slower, and only then: most attributes are the very objects that they were.
            for name, value, before in zip(self._names, values, self._values, strict=True):
                if not (_same(value, before) or name in self._contents):
                    return f"{self._prefix}{name}"
        for name, contents in self._contents.items():
            if _contents(now.get(name)) != contents:
                return f"{self._prefix}{name}"
        return None


def _internal(module: nn.Module) -> frozenset[str]:
    """Return the attributes of a module that are not the user's: torch's and Lightning's own."""
    plain = LightningModule() if isinstance(module, LightningModule) else nn.Module()
    return frozenset(vars(plain)) - {"training"} | _BOOKKEEPING


def _same(value: Any, before: Any) -> bool:
    if value is before:
        return True
    if type(value) is not type(before) or value is _MISSING:
        return False
    if isinstance(value, float) and math.isnan(value):
        return math.isnan(before)
    return isinstance(value, _SCALARS) and bool(value == before)


def _contents(container: Any) -> Hashable:
    """Return the numbers and objects in a container, of long ones only how many."""
    if not isinstance(container, _CONTAINERS):
        return None
    if len(container) > _LONG:
        return len(container)
    if isinstance(container, dict):
        return tuple((key, _itself(value)) for key, value in container.items())
    contents = map(_itself, container)
    return frozenset(contents) if isinstance(container, set) else tuple(contents)


def _itself(value: Any) -> Hashable:
    return value if isinstance(value, _SCALARS) else id(value)
