"""Attributes that hold for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def instance_attribute(obj: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute on one object, above what its class defines, for the length of a block."""
    attributes = vars(obj)
    had, previous = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if had:
            attributes[name] = previous
        else:
            attributes.pop(name, None)
