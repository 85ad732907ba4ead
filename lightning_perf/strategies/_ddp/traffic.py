"""What plain DDP sends for gradients, and how it is told."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from lightning_perf.strategies._ddp.unused import logging_data
from lightning_perf.strategies.comm_hooks import Traffic


def count_plain(model: DistributedDataParallel, traffic: Traffic) -> None:
    """Count the buckets that DDP averaged itself; it rearranges them after the first step.

    Args:
        model: After its last backward pass.
        traffic: Its steps are counted already.
    """
    first, rest = _buckets(model)
    later = max(traffic.steps - 1, 0)
    searches = traffic.steps if model.find_unused_parameters else 0
    traffic.collectives = len(first) * min(traffic.steps, 1) + len(rest) * later + searches
    parameters = sum(parameter.requires_grad for parameter in model.parameters())
    # The search sums a 32-bit number for each parameter.
    traffic.bytes = sum(first) * traffic.steps + 4 * parameters * searches


def told(traffic: Traffic, model: DistributedDataParallel, *, hooked: bool) -> str:
    """Return what was sent in a run, in one line.

    Args:
        traffic: Of at least one step.
        model: Whose gradients they were.
        hooked: Whether to tell what it would have been without a hook.
    """
    times, each = traffic.steps, traffic.bytes / traffic.steps
    instead = f" instead of {_megabytes(sum(_buckets(model)[0]))}" if hooked else ""
    collectives = f"{traffic.collectives / times:.3g}"
    return (
        f"gradients were averaged {times} time{'' if times == 1 else 's'}, with "
        f"{_megabytes(each)}{instead} in {collectives} "
        f"collective{'' if collectives == '1' else 's'} each time"
    )


def _buckets(model: DistributedDataParallel) -> tuple[list[int], list[int]]:
    """Return the sizes of the buckets in bytes, in the first step and in the others."""
    data = logging_data(model)
    first, rest = (
        [int(size) for size in data.get(key, "").split(",") if size]
        for key in ("bucket_sizes", "rebuilt_bucket_sizes")
    )
    return first, rest or first


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB"
