"""What several processes need to record the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_perf import _compat
from lightning_perf._attributes import instance_attribute
from lightning_perf._gloo_threads import settle_at_exit
from lightning_perf.callbacks._graph.engine import Engine


class Ranks:
    """What the processes of a run tell one another.

    Collectives in graphs must be replayed by all ranks or by none. The ranks agree on the CPU, in
    a group of their own, so that no GPU is waited for.

    Args:
        group: Their group on the CPU, or ``None`` for one process.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def least(self, number: int) -> int:
        """Return the least of the numbers that all ranks give."""
        if self._group is None:
            return number
        value = torch.tensor(int(number))
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        return int(value)

    def first(self, reason: str | None) -> str:
        """Return the first reason that any rank gives, with its number."""
        reasons = [reason]
        if self._group is not None:
            reasons = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(reasons, reason, group=self._group)
        rank, text = next((r, text) for r, text in enumerate(reasons) if text is not None)
        return text if rank == 0 else f"on rank {rank}, {text}"


@contextmanager
def ranks_together() -> Iterator[Ranks]:
    """Yield what lets the ranks agree; alone, it agrees with itself."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield Ranks()
        return
    group = dist.new_group(backend="gloo")
    settle_at_exit()
    try:
        yield Ranks(group)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group(group)


@contextmanager
def ddp_on_stream(strategy: Any, engine: Engine) -> Iterator[None]:
    """Let DDP be built on the stream of the captures.

    It keeps the accumulation nodes of all parameters, and these remember their stream. Lightning
    2.5 and 2.6 build it on another stream; its development line on the default one, which cannot
    be captured.
    """
    if not _compat.builds_plain_ddp(strategy):
        yield
        return

    def setup_model(model: torch.nn.Module) -> torch.nn.Module:
        with engine.warm_up():
            return _compat.build_ddp(strategy, model)

    with instance_attribute(strategy, "_setup_model", setup_model):
        yield
