"""Which implementation of an optimizer's step suits a param group."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import ASGD, Optimizer

FLAGS = ("fused", "foreach")
# On a CPU, foreach saves Python calls but goes over memory once more for each operation: good for
# small parameters, bad for large ones.
_FOREACH_NUMEL = 8192


class Choice(NamedTuple):
    """What to do with a param group: the flag to set, or ``None``, and why."""

    flag: str | None
    reason: str


def plan(optimizer: Optimizer, sparse: frozenset[Tensor]) -> list[Choice]:
    return [choose(optimizer, group, sparse) for group in optimizer.param_groups]


def choose(optimizer: Optimizer, group: dict[str, Any], sparse: frozenset[Tensor]) -> Choice:
    obstacle = _obstacle(optimizer, group, sparse)
    if obstacle is not None:
        return Choice(None, obstacle)
    refusal = _try_fused(optimizer, group)
    if refusal is None:
        return Choice("fused", "fused")
    parameters = group["params"]
    if "foreach" not in group or any(p.device.type != "cpu" for p in parameters):
        return Choice(None, refusal)
    mean_numel = sum(p.numel() for p in parameters) / max(1, len(parameters))
    if mean_numel > _FOREACH_NUMEL or isinstance(optimizer, ASGD):
        return Choice(None, f"{refusal}, and on a CPU foreach is slower at this size")
    return Choice("foreach", "foreach")


def _obstacle(optimizer: Optimizer, group: dict[str, Any], sparse: frozenset[Tensor]) -> str | None:
    """Return why the implementation of a param group must stay what it is, or ``None``."""
    step = getattr(type(optimizer), "step", None)
    if not getattr(step, "__module__", "").startswith("torch.optim."):
        return "its step is not one of torch.optim"
    if not any(flag in group for flag in FLAGS):
        return "it has one implementation only"
    for flag in FLAGS:
        if group.get(flag) is not None:
            return f"{flag}={group[flag]} was chosen"
    for option in ("differentiable", "capturable"):
        if group.get(option):
            return f"{option}=True was chosen"
    for parameter in group["params"]:
        if type(parameter) not in (Tensor, nn.Parameter):
            return f"it updates a {type(parameter).__name__}"
        if parameter.is_complex():
            return "it updates complex parameters"
        if parameter in sparse:
            return "it updates an embedding with sparse gradients"
        if parameter.layout is not torch.strided or not _is_dense(parameter):
            return "it updates a parameter that is not dense in memory"
    return None


def _is_dense(parameter: Tensor) -> bool:
    """Return whether elements fill the memory without gaps: fused CPU kernels ignore strides."""
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()


def _try_fused(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Return why the fused implementation refuses a param group, or ``None`` if it works.

    What it supports differs by optimizer, device, dtype, option and torch version, so it is tried
    on one number.
    """
    if "fused" not in group:
        return "it has no fused implementation"
    if group.get("momentum") and group.get("dampening"):
        # A parameter whose first gradient comes late would start from a wrong momentum.
        return "SGD with dampening starts its momentum late for some parameters"
    cls = next(c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim."))
    options = {k: group[k] for k in inspect.signature(cls).parameters if k in group}
    options.update(fused=True, foreach=False)
    for device, dtype in {(p.device, p.dtype) for p in group["params"]}:
        number = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
        number.grad = torch.zeros_like(number)
        try:
            cls(**{**options, "params": [number]}).step()
        except (RuntimeError, TypeError, ValueError) as error:
            text = str(error).strip().partition("\n")[0]
            return f"fused does not work for {dtype} on {device.type} here ({text})"
    return None


def sparse_weights(module: nn.Module) -> frozenset[Tensor]:
    return frozenset(
        layer.weight
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    )


def describe(optimizers: list[Optimizer], plans: list[list[Choice]]) -> str:
    parts = []
    for optimizer, choices in zip(optimizers, plans, strict=True):
        reasons = ", ".join(
            choice.reason if choice.flag else f"left alone ({choice.reason})"
            for choice in dict.fromkeys(choices)
        )
        parts.append(f"{type(optimizer).__name__}: {reasons}")
    return "; ".join(dict.fromkeys(parts))
