"""Memory that is used again: leases of tensors, of which no two share a byte."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar, Protocol

import torch
from torch import Tensor

# Classes of sizes between two powers of two: a buffer is at most a quarter larger than asked for.
_CLASSES_IN_A_DOUBLING = 4


class Event(Protocol):
    """What tells that a device is done with a buffer, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether all is done that was asked for before."""


@dataclass(frozen=True)
class PoolStatistics:
    """What a pool has done so far, and what it holds now."""

    leases: int
    """Leases given out so far."""
    reused: int
    """Leases that got memory which was there already."""
    leased: int
    """Leases that are out now."""
    abandoned: int
    """Leases that were dropped without a release; their memory is not used again."""
    leased_bytes: int
    idle_bytes: int
    """Bytes that wait for the next lease."""


@dataclass(frozen=True)
class _Key:
    numbers: int
    dtype: torch.dtype
    device: torch.device
    pinned: bool

    @property
    def bytes(self) -> int:
        return self.numbers * self.dtype.itemsize


class Lease:
    """A tensor of a pool's memory, for its holder alone until it is released.

    Dropped without a release, its memory is not used again: a device may still be busy with it.
    """

    def __init__(self, pool: BufferPool, key: _Key, buffer: Tensor, shape: tuple[int, ...]) -> None:
        self._pool = pool
        self._key = key
        self._buffer: Tensor | None = buffer
        self._tensor: Tensor | None = buffer[: prod(shape)].view(shape)

    @property
    def tensor(self) -> Tensor:
        """The tensor; what is in it is left from before.

        Raises:
            RuntimeError: The lease was released.
        """
        if self._tensor is None:
            raise RuntimeError(
                "The tensor of a lease was asked for after its release: somebody else may have its "
                "memory now. Copy what is needed before the release."
            )
        return self._tensor

    def release(self, after: Event | None = None) -> None:
        """Give the memory back; once is enough.

        It waits until nobody holds the tensor or a view of it, an array of NumPy included.

        Args:
            after: The memory is not given to the next lease before this has happened: a copy from
                pinned memory to a GPU, say, which still runs when this is called.
        """
        with self._pool._lock:
            buffer, self._buffer, self._tensor = self._buffer, None, None
            if buffer is not None:
                self._pool._take_back(self._key, buffer, after)

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if getattr(self, "_buffer", None) is not None:
            # No lock: this may run at any moment, also while this thread holds it. A deque takes
            # it without one.
            self._pool._dropped.append(self._key)


class BufferPool:
    """Give out tensors for a while, and the same memory again once they are released.

    Allocating pinned memory takes milliseconds, and large host memory is given back to the system
    and zeroed again by it. Buffers are kept by size class, type, device and pinning, so batches of
    somewhat different shapes share them. A buffer belongs to one lease at a time. Any thread may
    lease and release; another process has no part in it.

    Do not use it for memory on a GPU in ordinary training: PyTorch's allocator reuses that itself,
    and knows of its streams.

    Args:
        max_idle_bytes: Memory to keep at most for later leases; ``None`` for no limit.

    Raises:
        ValueError: A negative limit.

    Example:
        >>> pool = BufferPool()
        >>> with pool.lease((3, 5)) as first:
        ...     address = first.data_ptr()
        >>> del first
        >>> with pool.lease((15,)) as second, pool.lease((15,)) as third:
        ...     second.data_ptr() == address, third.data_ptr() == address
        (True, False)
        >>> pool.statistics.leases, pool.statistics.reused
        (3, 1)

    Source: ten techniques, 5.2.
    """

    guide: ClassVar[str] = "K 5.2"
    """Section of the tuning guides."""

    def __init__(self, *, max_idle_bytes: int | None = None) -> None:
        if max_idle_bytes is not None and max_idle_bytes < 0:
            raise ValueError(
                f"max_idle_bytes={max_idle_bytes} was asked for; it is at least 0, or None."
            )
        self.max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._idle: defaultdict[_Key, deque[tuple[Tensor, Event | None]]] = defaultdict(deque)
        self._dropped: deque[_Key] = deque()
        self._leases = self._reused = self._leased = self._abandoned = 0
        self._leased_bytes = self._idle_bytes = 0
        self._alone = _users(torch.empty(1))

    def lease(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        pinned: bool = False,
    ) -> Lease:
        """Return a tensor that nobody else has until it is released.

        What is in it is left from before.

        Args:
            shape: Its shape.
            dtype: Its type.
            device: Where it lies.
            pinned: In page-locked memory, from which a GPU copies while the program goes on.

        Raises:
            ValueError: A negative length, or pinned memory that is not the host's.
            RuntimeError: Pinned memory without a device that needs it.
        """
        place = torch.device(device)
        if place == torch.device("cuda"):  # without a number
            place = torch.device("cuda", torch.cuda.current_device())
        _require_possible(shape, place, pinned)
        key = _Key(_size_class(prod(shape)), dtype, place, pinned)
        with self._lock:
            buffer = self._ready(key)
            self._leases += 1
            self._reused += buffer is not None
            self._leased += 1
            self._leased_bytes += key.bytes
        if buffer is None:
            try:
                buffer = torch.empty(key.numbers, dtype=dtype, device=place, pin_memory=pinned)
            except BaseException:
                with self._lock:
                    self._leases -= 1
                    self._leased -= 1
                    self._leased_bytes -= key.bytes
                raise
        return Lease(self, key, buffer, tuple(shape))

    @property
    def statistics(self) -> PoolStatistics:
        """What was done so far, and what is held now."""
        with self._lock:
            self._count_dropped()
            return PoolStatistics(
                leases=self._leases,
                reused=self._reused,
                leased=self._leased,
                abandoned=self._abandoned,
                leased_bytes=self._leased_bytes,
                idle_bytes=self._idle_bytes,
            )

    def clear(self) -> None:
        """Give up the memory that waits for later leases."""
        with self._lock:
            self._idle.clear()
            self._idle_bytes = 0

    def __reduce__(self) -> tuple[object, ...]:
        # Another process has memory of its own.
        return partial(BufferPool, max_idle_bytes=self.max_idle_bytes), ()

    def _ready(self, key: _Key) -> Tensor | None:
        """Return an idle buffer that its device is done with and nobody has a part of."""
        waiting = self._idle[key]
        for _ in range(len(waiting)):
            buffer, after = waiting.popleft()
            if (after is None or after.query()) and _users(buffer) == self._alone:
                self._idle_bytes -= key.bytes
                return buffer
            waiting.append((buffer, after))
        return None

    def _take_back(self, key: _Key, buffer: Tensor, after: Event | None) -> None:
        """Keep a buffer for later, if there is room."""
        self._leased -= 1
        self._leased_bytes -= key.bytes
        if self.max_idle_bytes is None or self._idle_bytes + key.bytes <= self.max_idle_bytes:
            self._idle[key].append((buffer, after))
            self._idle_bytes += key.bytes

    def _count_dropped(self) -> None:
        while self._dropped:
            key = self._dropped.popleft()
            self._leased -= 1
            self._leased_bytes -= key.bytes
            self._abandoned += 1


def _users(buffer: Tensor) -> int:
    """Count what holds the memory of a buffer: it, its views, and the object that is asked.

    PyTorch counts it to free memory, and tells it in a private function only (2.6 - 2.14).
    """
    storage = buffer.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


def _size_class(numbers: int) -> int:
    """Return the size of the buffer for so many numbers, at most a quarter more."""
    below = 1 << max(0, (numbers - 1).bit_length() - 1)  # the power of two below
    step = max(1, below // _CLASSES_IN_A_DOUBLING)
    return max(1, -(-numbers // step) * step)


def _require_possible(shape: tuple[int, ...], device: torch.device, pinned: bool) -> None:
    if any(length < 0 for length in shape):
        raise ValueError(f"A tensor of the shape {tuple(shape)} was asked for; none is negative.")
    if pinned and device.type != "cpu":
        raise ValueError(
            f"Pinned memory on {device} was asked for; only memory of the host is pinned."
        )
    if pinned and not torch.accelerator.is_available():
        raise RuntimeError(
            "Pinned memory was asked for, but this machine has no device that copies from it. Pass "
            "pinned=torch.accelerator.is_available()."
        )
