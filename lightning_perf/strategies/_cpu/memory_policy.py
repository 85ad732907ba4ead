"""The NUMA nodes that Linux gives new memory of this thread from."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# Numbers of set_mempolicy and get_mempolicy, which the C library has no functions for.
_SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_PREFERRED = 1
_BITS = 1024
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_Mask = ctypes.c_ulong * (_BITS // _WORD)


@contextmanager
def memory_on(node: int) -> Iterator[None]:
    """Prefer the memory of one NUMA node for this thread, and for those it starts, in a block.

    Other nodes still serve once that one is full.

    Args:
        node: Number of the node.

    Raises:
        OSError: The kernel refuses, as in many containers, or is not Linux on x86-64 or Arm.
    """
    mode, mask = policy()
    preferred = _Mask()
    preferred[node // _WORD] = 1 << node % _WORD
    _set(_PREFERRED, preferred)
    try:
        yield
    finally:
        _set(mode, mask)


def policy() -> tuple[int, ctypes.Array[ctypes.c_ulong]]:
    """Return the policy of this thread and its nodes, as the kernel numbers them.

    Raises:
        OSError: See `memory_on`.
    """
    mode, mask = ctypes.c_int(), _Mask()
    _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(_BITS), None, ctypes.c_ulong(0))
    return mode.value, mask


def preferred_node() -> int | None:
    """Return the node this thread prefers, ``None`` if it prefers none or that is unknown."""
    try:
        mode, mask = policy()
    except OSError:
        return None
    nodes = [bit for bit in range(_BITS) if mask[bit // _WORD] >> bit % _WORD & 1]
    return nodes[0] if mode == _PREFERRED and nodes else None


def _set(mode: int, mask: ctypes.Array[ctypes.c_ulong]) -> None:
    # The kernel reads one bit less than it is told.
    _call(0, ctypes.c_int(mode), mask, ctypes.c_ulong(_BITS + 1))


def _call(which: int, *arguments: object) -> None:
    numbers = _SYSTEM_CALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if numbers is None:
        raise OSError(f"no memory policy on {platform.system()} {platform.machine()}")
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(numbers[which]), *arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
