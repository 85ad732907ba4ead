"""Ranks whose loaders have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

Uneven = Literal["error", "join"]

_WAY_OUT = (
    "Give all ranks as many, or pass uneven='join' to end each epoch with the rank that has fewest."
)


def even(loader: Any, uneven: Uneven, limit: float) -> Any:
    """Return a loader that has as many batches on every rank; every rank must call it.

    Args:
        loader: This rank's loader, with or without a length.
        uneven: What to do where ranks differ: raise, or end with the first one that ends.
        limit: Number of batches, or share of them as a float, after which an epoch ends anyway.

    Raises:
        RuntimeError: The lengths differ and ``uneven`` is ``"error"``.
    """
    lengths = _lengths(loader)
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return _AgreeingLoader(loader, uneven)
    used = [min(n, limit) if isinstance(limit, int) else int(n * limit) for n in known]
    if min(used) == max(used):
        return loader
    counts = ", ".join(f"rank {rank} has {n}" for rank, n in enumerate(known))
    if uneven == "error":
        raise RuntimeError(
            f"The ranks have different numbers of training batches: {counts}. All would wait for "
            f"the first one that ends. {_WAY_OUT}"
        )
    rank_zero_warn(
        f"The ranks have different numbers of training batches: {counts}. Each epoch ends after "
        f"{min(known)}, and the others are left out."
    )
    return _ShorterLoader(loader, min(known))


def require_batches(loader: Any, stage: object) -> None:
    """Refuse an evaluation that some ranks would skip; every rank must call it.

    Otherwise it may be uneven: ranks talk to each other before and after it only.

    Args:
        loader: This rank's loader, with or without a length.
        stage: What to call the evaluation in the error.

    Raises:
        RuntimeError: Some ranks have no batches, and others have.
    """
    lengths = _lengths(loader)
    empty = [rank for rank, length in enumerate(lengths) if length == 0]
    if empty and len(empty) < len(lengths):
        raise RuntimeError(
            f"{stage}: rank {', '.join(map(str, empty))} has no batches, and other ranks have. "
            "They would wait for it at the end. Give each rank at least one."
        )


def _lengths(loader: Any) -> list[int | None]:
    """Return how many batches each rank's loader has, ``None`` where that is unknown."""
    try:
        mine: int | None = len(loader)
    except (TypeError, NotImplementedError):
        mine = None
    lengths: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, mine)
    return lengths


class _Loader:
    """Stands for a loader, and has all its attributes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy or a pickle that is not filled yet
            raise AttributeError(name)
        return getattr(self._loader, name)


class _ShorterLoader(_Loader):
    """The first batches of a loader."""

    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        yield from islice(self._loader, self._length)


class _AgreeingLoader(_Loader):
    """A loader without a length, that ends on all ranks with the first one that ends.

    Before each batch the ranks tell each other whether they have one: a collective of a byte for
    each rank, on the host.
    """

    def __init__(self, loader: Any, uneven: Uneven) -> None:
        super().__init__(loader)
        self._uneven = uneven
        on_host = dist.get_backend() in ("gloo", "ccl")
        # So that no GPU is waited for.
        self._group: Any = None if on_host else dist.new_group(backend="gloo")

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        count = 0
        while True:
            try:
                batch = next(iterator)
                mine = torch.ones(1, dtype=torch.uint8)
            except StopIteration:
                batch = None
                mine = torch.zeros(1, dtype=torch.uint8)
            flags = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(flags, mine, group=self._group)
            ended = [rank for rank, flag in enumerate(flags) if not flag]
            if ended:
                break
            yield batch
            count += 1
        if len(ended) == len(flags):
            return
        ranks = ", ".join(map(str, ended))
        found = f"After {count} batches rank {ranks} has no other one, and another rank has."
        if self._uneven == "error":
            raise RuntimeError(f"{found} {_WAY_OUT}")
        rank_zero_warn(f"{found} The epoch ends, and what is left is left out.")
