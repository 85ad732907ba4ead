"""Loader workers on CPUs of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader


@dataclass(frozen=True)
class _Bound:
    """Binds a worker, then starts it as the user asked."""

    cpus: frozenset[int]
    init: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        os.sched_setaffinity(0, self.cpus)
        if self.init is not None:
            self.init(worker)


@contextmanager
def bound_workers(loader: DataLoader[Any], cpus: frozenset[int]) -> Iterator[None]:
    """Start the workers of a loader on some CPUs, in a block.

    Args:
        loader: Its workers are not running yet.
        cpus: Logical CPUs.
    """
    init = loader.worker_init_fn
    loader.worker_init_fn = _Bound(cpus, init)
    try:
        yield
    finally:
        loader.worker_init_fn = init
