"""What of a call's arguments a CUDA graph freezes, and what it can be given anew."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_perf._batches import map_tensors, parts_of

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def flatten(value: Any) -> tuple[list[Tensor], Hashable]:
    """Return the tensors of a nested structure, and all else about it as a key.

    Two values with equal keys differ in nothing but what their tensors hold: containers, names,
    shapes, strides, dtypes, devices and everything that is no tensor are the same.

    Args:
        value: Any nested structure, as `map_tensors` follows it.
    """
    tensors: list[Tensor] = []
    key = _key(value, tensors, set())
    return tensors, key


def filled(template: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a copy of a structure that holds other tensors, in the order of `flatten`."""
    left = iter(tensors)
    return map_tensors(template, lambda _: next(left))


def static_copy(tensor: Tensor) -> Tensor:
    """Return a leaf with the same values in memory of its own, laid out alike."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def constants(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Return whatever a graph would freeze in a structure, with the place where it is.

    Flags and ``None`` are not named: there are few of them, and each gets a graph of its own.
    """
    if isinstance(value, Tensor | bool | type(None)):
        return
    parts = parts_of(value)
    if not parts and not _is_empty_container(value):
        yield path, value
    for name, part in parts.items():
        yield from constants(part, f"{path}[{name!r}]")


def autocast_key(device_type: str) -> Hashable:
    """Return whether operations on a device are cast, and to what."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _key(value: Any, tensors: list[Tensor], entered: set[int]) -> Hashable:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _tensor_key(value)
    if _is_empty_container(value):
        return type(value), ()
    parts = parts_of(value)
    # `map_tensors` stops at what contains itself, too.
    if not parts or id(value) in entered:
        # What has no value to compare is itself only.
        return type(value), value if _is_plain(value) else id(value)
    entered.add(id(value))
    key = tuple((name, _key(part, tensors, entered)) for name, part in parts.items())
    entered.discard(id(value))
    return type(value), key


def _tensor_key(tensor: Tensor) -> Hashable:
    strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else None
    return (
        type(tensor),
        None if tensor.is_nested else tuple(tensor.shape),
        strides,
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
    )


def _is_plain(value: Any) -> bool:
    """Return whether a leaf says with its value, not with its identity, what it is."""
    return isinstance(value, _PLAIN)


def _is_empty_container(value: Any) -> bool:
    return isinstance(value, list | tuple | dict | set) and not value
