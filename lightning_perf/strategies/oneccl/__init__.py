"""The backend ``"ccl"`` of `torch.distributed`: Intel's oneCCL for tensors on the CPU.

Importing this makes the name known, and nothing else: the C++ part is built when the first process
group asks for it, once, and kept.

It is not for GPUs, for sparse tensors, and for processes that are forked from one that uses it. Its
card, docs/items/oneccl.md, tells more.

Source: PyTorch tuning guide, "Train a model on CPU with DistributedDataParallel".
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_perf.strategies.oneccl._build import extension_path, find_tools, missing

__all__ = ["available", "why_not"]


def why_not() -> str | None:
    """Return why the backend ``"ccl"`` cannot be used here, or ``None`` if it can be tried.

    Nothing is built for the answer.

    Example:
        >>> from lightning_perf.strategies import oneccl
        >>> backend = "gloo" if oneccl.why_not() else "ccl"
    """
    tools = find_tools()
    return missing(tools, is_built=extension_path(tools).exists())


def available() -> bool:
    """Return whether the backend ``"ccl"`` can be tried here. See `why_not`.

    Example:
        >>> from lightning_perf.strategies import oneccl
        >>> oneccl.available() == (oneccl.why_not() is None)
        True
    """
    return why_not() is None


def _create(options: Any, _: Any = None) -> Any:
    from lightning_perf.strategies.oneccl._backend import create

    return create(options)


def _register() -> None:
    # Another package may have taken the name, as Intel's own did.
    if dist.is_available() and not dist.is_backend_available("ccl"):
        dist.Backend.register_backend("ccl", _create, extended_api=True, devices=["cpu"])


_register()
