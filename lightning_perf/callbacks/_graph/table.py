"""Which calls have a graph, which may get one, and how often each way was taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

WARM_UP = 3
"""Eager calls of a signature before its capture: libraries choose kernels and allocate."""
_MOST_GRAPHS = 8
_MOST_CHANGES = 3
_MOST_SIGNATURES = 32


class GraphTable(Generic[T]):
    """Graphs by signature, with the counts of what was done.

    Args:
        warm_up: Eager calls, of any signature, before the first capture.
    """

    def __init__(self, warm_up: int = 0) -> None:
        self.graphs: dict[Hashable, T] = {}
        self.replayed = 0
        self.waiting = 0
        self.reason: str | None = None
        self._warm_up = warm_up
        self._seen: Counter[Hashable] = Counter()
        self._changes: Counter[str] = Counter()
        self._captured = 0
        self.eager = 0

    def is_due(self, key: Hashable) -> bool:
        """Return whether calls with this signature have warmed up and may be captured."""
        return (
            self.reason is None
            and self.eager >= self._warm_up
            and self._seen[key] >= WARM_UP
            and self._captured < _MOST_GRAPHS
        )

    def add(self, key: Hashable, graph: T) -> None:
        """Keep a new graph."""
        self.graphs[key] = graph
        self._captured += 1

    def drop(self, key: Hashable, changed: str) -> None:
        """Forget a graph in which a value is frozen that has changed since."""
        del self.graphs[key]
        del self._seen[key]
        self._changes[changed] += 1
        if self._changes[changed] >= _MOST_CHANGES:
            self.reason = (
                f"{changed} keeps changing, and a graph would keep its old value. Make it a tensor "
                "(a buffer) and change it in place."
            )

    def count_eager(self, key: Hashable) -> None:
        """Count a call that ran eagerly; find out when signatures never come back."""
        self.eager += 1
        if key in self._seen or len(self._seen) < 4 * _MOST_SIGNATURES:
            self._seen[key] += 1
        if self.reason is None and not self._captured and len(self._seen) > _MOST_SIGNATURES:
            self.reason = (
                f"shapes change from batch to batch: {len(self._seen)} different ones so far, none "
                "often enough. Pad batches to a few lengths."
            )

    def summary(self) -> str:
        """Return in words how often each way was taken."""
        calls = self.replayed + self.eager
        graphs = f"{self._captured} graph{'' if self._captured == 1 else 's'}"
        parts = [f"replayed {self.replayed} of {calls} calls from {graphs}"]
        if self._changes:
            parts.append(f"recorded anew after changes of {', '.join(self._changes)}")
        if self.waiting:
            parts.append(f"{self.waiting} ran eagerly while an earlier call waited for backward")
        if (rare := sum(n for key, n in self._seen.items() if key not in self.graphs)) and (
            self._captured and self.reason is None
        ):
            parts.append(f"{rare} had a rare signature")
        if self.reason is not None:
            parts.append("the rest ran eagerly, for the reason given above")
        return "; ".join(parts)
