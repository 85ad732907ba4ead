"""The communication hooks by the names that YAML gives them."""

from __future__ import annotations

from typing import Any

from lightning_perf.strategies.comm_hooks.base import CommHook
from lightning_perf.strategies.comm_hooks.cast import BF16Hook, FP16Hook
from lightning_perf.strategies.comm_hooks.onebit import OneBitHook
from lightning_perf.strategies.comm_hooks.powersgd import PowerSGDHook

HOOKS: dict[str, type[CommHook]] = {
    hook.name: hook for hook in (FP16Hook, BF16Hook, PowerSGDHook, OneBitHook)
}


def named_hook(name: str, matrix_approximation_rank: int, start_iter: int | None) -> CommHook:
    """Return a new hook.

    Args:
        name: A key of `HOOKS`.
        matrix_approximation_rank: For ``"powersgd"``.
        start_iter: ``None`` takes the default of the hook.

    Raises:
        ValueError: A number is too small.
    """
    start = {} if start_iter is None else {"start_iter": start_iter}
    if name == PowerSGDHook.name:
        return PowerSGDHook(matrix_approximation_rank, **start)
    return HOOKS[name](**start)


def require_fitting(hook: Any, matrix_approximation_rank: int, start_iter: int | None) -> None:
    """Refuse a hook that does not exist, and arguments that are for another one.

    Args:
        hook: A name, a function, or ``None``.
        matrix_approximation_rank: 1 if it was not given.
        start_iter: ``None`` if it was not given.

    Raises:
        ValueError: See above.
    """
    choices = ", ".join(map(repr, HOOKS))
    if hook is not None and not callable(hook) and hook not in HOOKS:
        raise ValueError(
            f"ddp_comm_hook={hook!r} was asked for. Choose one of {choices}, a function, or None."
        )
    if hook != PowerSGDHook.name and matrix_approximation_rank != 1:
        raise ValueError(
            f"matrix_approximation_rank={matrix_approximation_rank} was asked for with "
            f"ddp_comm_hook={hook!r}. It is for 'powersgd'."
        )
    if isinstance(hook, str):
        named_hook(hook, matrix_approximation_rank, start_iter)
    elif start_iter is not None:
        raise ValueError(
            f"start_powerSGD_iter={start_iter} was asked for with ddp_comm_hook={hook!r}. It is "
            f"for the hooks {choices}."
        )
