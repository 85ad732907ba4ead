"""The cost of a step without and with recomputation, measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_perf._preserve_state import preserve_model
from lightning_perf.callbacks._checkpoint.blocks import all_recomputing, required_blocks
from lightning_perf.callbacks._checkpoint.forward import Block, Stopwatch
from lightning_perf.callbacks._checkpoint.meter import Meter, readable


@dataclass(frozen=True)
class StepCost:
    """One forward and backward pass.

    Args:
        saved_bytes: What is alive between the two, of all that the forward pass made.
        flops: Floating-point operations of both.
        seconds: Time of both, one number for each turn.
    """

    saved_bytes: int
    flops: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class CheckpointingCost:
    """A step without and with recomputation.

    Args:
        without: Blocks run as they are.
        recomputed: Blocks are recomputed.
    """

    without: StepCost
    recomputed: StepCost

    @property
    def spared(self) -> float:
        """Share of the saved bytes that is not kept any more."""
        return 1 - self.recomputed.saved_bytes / self.without.saved_bytes

    @property
    def extra_flops(self) -> float:
        """FLOPs added, as a share of those without recomputation."""
        return self.recomputed.flops / self.without.flops - 1

    @property
    def extra_time(self) -> float:
        """Time added, as a share of that without recomputation: the median of the turns."""
        pairs = zip(self.recomputed.seconds, self.without.seconds, strict=True)
        return statistics.median(mine / plain for mine, plain in pairs) - 1

    def __str__(self) -> str:
        return (
            f"{readable(self.recomputed.saved_bytes)} kept for the backward pass instead of "
            f"{readable(self.without.saved_bytes)} ({-self.spared:.0%}), FLOPs "
            f"{self.extra_flops:+.1%}, time {self.extra_time:+.0%}"
        )


def checkpointing_cost(
    model: nn.Module,
    loss: Callable[[], Tensor],
    blocks: str | Sequence[str] = "auto",
    *,
    policy: float | str = "full",
    every_n: int = 1,
    turns: int = 5,
) -> CheckpointingCost:
    """Measure a step of a model without and with recomputation, in turns.

    The steps without it need the memory that it spares: measure on a batch that fits. The model,
    its gradients and random numbers are afterwards as before.

    Args:
        model: Any module.
        loss: Runs the forward pass and returns the loss.
        blocks: As for `ActivationCheckpointing`.
        policy: As for `ActivationCheckpointing`.
        every_n: Recompute only the first of each n blocks.
        turns: Pairs of steps whose time is compared.

    Raises:
        ValueError: No block is found, a name or the policy is unknown, or a number is below 1.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> x = torch.randn(5, 3, 8)
        >>> cost = checkpointing_cost(model, lambda: model(x).sum(), turns=1)
        >>> cost.spared > 0.5
        True
    """
    if turns < 1:
        raise ValueError(f"turns={turns} was asked for; it is at least 1.")
    chosen = required_blocks(model, blocks, policy, every_n)
    stopwatch = Stopwatch(next(model.parameters()).device)
    with preserve_model(model), all_recomputing(chosen, policy) as found:
        bytes_and_flops = [_counted(model, loss, found, recompute) for recompute in (False, True)]
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(turns):
            for recompute in (False, True):
                seconds[recompute].append(_timed(model, loss, found, recompute, stopwatch))
    return CheckpointingCost(
        *(
            StepCost(*counts, tuple(times))
            for counts, times in zip(bytes_and_flops, seconds, strict=True)
        )
    )


def _counted(
    model: nn.Module, loss: Callable[[], Tensor], blocks: dict[str, Block], recompute: bool
) -> tuple[int, int]:
    _prepare(model, blocks, recompute)
    # In its first step a selective policy learns what to keep.
    torch.autograd.backward(loss())
    _prepare(model, blocks, recompute)
    with Meter() as meter:
        value = loss()
        saved = meter.alive_bytes()
        torch.autograd.backward(value)
    return saved, meter.flops


def _timed(
    model: nn.Module,
    loss: Callable[[], Tensor],
    blocks: dict[str, Block],
    recompute: bool,
    stopwatch: Stopwatch,
) -> float:
    _prepare(model, blocks, recompute)
    start = stopwatch.now()
    torch.autograd.backward(loss())
    return stopwatch.now() - start


def _prepare(model: nn.Module, blocks: dict[str, Block], recompute: bool) -> None:
    model.zero_grad()
    for block in blocks.values():
        block.left_alone = not recompute
