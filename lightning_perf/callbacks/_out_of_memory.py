"""Errors that mean there was not enough memory: to know them, and to say what would fit."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable

import psutil
import torch

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator of whatever device raised this for lack of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def memory_in_use(device: torch.device) -> str:
    """Return in words how much memory the process has, and how much there is."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (
            f"{_gib(torch.cuda.memory_allocated(device))} allocated, "
            f"{_gib(torch.cuda.memory_reserved(device))} reserved, {_gib(free)} free of "
            f"{_gib(total)}"
        )
    host = psutil.virtual_memory()
    resident = psutil.Process().memory_info().rss
    return f"{_gib(resident)} resident, {_gib(host.available)} available of {_gib(host.total)}"


def release_memory(error: Exception) -> None:
    """Give back what an error left behind, so that something smaller can be tried."""
    traceback.clear_frames(error.__traceback__)  # they hold the activations
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
        torch.cuda.empty_cache()


def largest_fitting(fits: Callable[[int], bool], too_large: int) -> int:
    """Return the largest size that fits, to within a twentieth of the smallest that does not.

    Args:
        fits: Tries a size.
        too_large: A size that does not fit.
    """
    good, bad = 0, too_large
    while bad - good > max(1, bad // 20):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB"
