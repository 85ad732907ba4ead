"""The state of a communication hook, of every rank, in Lightning's one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from lightning_perf.strategies.comm_hooks import CommHook
from lightning_perf.strategies.comm_hooks.base import ErrorFeedback

KEY = "lightning_perf.comm_hook"


def gathered(hook: CommHook) -> dict[str, Any] | None:
    """Return on rank 0 what `restore` needs, ``None`` on others; every rank must call it."""
    ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(hook.state_dict(), ranks)
    return {"settings": hook.settings(), "ranks": ranks} if ranks else None


def restore(hook: CommHook, saved: Mapping[str, Any] | None) -> None:
    """Let a hook go on where that of the same rank was when a checkpoint was saved.

    Args:
        hook: The hook of this rank.
        saved: What `gathered` returned; ``None`` if the checkpoint has no state.

    Raises:
        RuntimeError: The state is that of another hook, or of another number of ranks.
    """
    if saved is None:
        if hook.start_iter or isinstance(hook, ErrorFeedback):
            rank_zero_warn(
                f"The checkpoint holds no state of the communication hook '{hook.name}'. It starts "
                f"anew: with {hook.start_iter} plain steps, and without what compression lost."
            )
        return
    way_out = (
        "Resume with the same hook and as many ranks, or pass save_hook_state=False to start "
        "without the state."
    )
    if saved["settings"] != hook.settings():
        raise RuntimeError(
            f"This run has the communication hook {hook.settings()}, and the checkpoint the state "
            f"of {saved['settings']}. {way_out}"
        )
    ranks = saved["ranks"]
    if len(ranks) != dist.get_world_size():
        raise RuntimeError(
            f"The checkpoint holds the state of the communication hook of {len(ranks)} ranks, and "
            f"this run has {dist.get_world_size()}. {way_out}"
        )
    hook.load_state_dict(ranks[dist.get_rank()])
