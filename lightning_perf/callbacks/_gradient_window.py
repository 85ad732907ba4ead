"""Micro-batches whose gradients add up to those of one big batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

Number = float | Tensor
"""A float, or on a GPU, where reading it would wait for the GPU, a tensor in double precision."""


class GradientWindow:
    """The micro-batches of one optimizer step, each with its weight.

    The loss of a micro-batch is a mean over some number of things: samples, tokens. With that
    number as its weight, the gradients after `correct` are those of the mean over all micro-batches
    of the window, in all processes if there are several and their gradients were averaged.

    Nothing is read back from a GPU, so that no step waits for it. In several processes there is one
    all-reduce of a number for each window, and another for the first.

    Args:
        usual: A usual weight, the same in all processes; the first weight if not given. Losses
            are multiplied by their weight divided by it, so that loss scaling stays in range.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> window = GradientWindow()
        >>> for samples in (4, 4, 1):
        ...     loss = model(torch.ones(samples, 2)).mean()
        ...     window.weigh(loss, samples).backward()
        >>> window.correct(optimizer)
        >>> optimizer.step()
    """

    def __init__(self, usual: float | None = None) -> None:
        self._usual: Number | None = None if usual is None else as_weight(usual)
        self._weights: list[Number] = []
        self._device = torch.device("cpu")
        self.summary = WindowSummary()

    @property
    def empty(self) -> bool:
        """Whether no micro-batch was weighed since the last window."""
        return not self._weights

    def weigh(self, loss: Tensor, weight: float | Tensor = 1) -> Tensor:
        """Return the loss to call ``backward`` on.

        A micro-batch of weight 0 adds nothing to the gradients. So does one without any target: the
        cross-entropy of torch is NaN there, but its backward is not.

        Args:
            loss: The mean over the things in this micro-batch, a scalar.
            weight: How many they are; a tensor on a GPU is not read back.

        Raises:
            ValueError: The weight is no number, is negative or not finite.
        """
        mine = as_weight(weight)
        self._device = loss.device
        if self._usual is None:
            self._usual = _nonzero(self._over_processes(mine) / _processes())
        self._weights.append(mine)
        ratio = mine / self._usual
        if isinstance(ratio, Tensor):
            return loss * ratio.to(loss.dtype)
        return loss if ratio == 1 else loss * ratio

    def correct(self, optimizer: Optimizer, *, divisor: float = 1, alike: bool = False) -> None:
        """Make the gradients those of one big batch, and start a new window.

        Call it after the last backward, before gradients are unscaled or clipped.

        Args:
            optimizer: The one whose parameters have the gradients.
            divisor: What all losses of the window were divided by beforehand.
            alike: Whether all processes have the same weights: those are not added up then.
        """
        if self._usual is None or not self._weights:
            return
        total = sum(self._weights)
        total = total * _processes() if alike else self._over_processes(total)
        factor = divisor * _processes() * self._usual / _nonzero(total)
        if isinstance(factor, Tensor) or factor != 1:
            scale_gradients(optimizer, factor)
        self.summary.add([factor * weight / self._usual for weight in self._weights])
        self.forget()

    def forget(self) -> None:
        """Start a new window: the gradients of this one are gone."""
        self._weights.clear()

    def _over_processes(self, weight: Number) -> Number:
        """Return the sum over all processes."""
        if _processes() == 1:
            return weight
        if isinstance(weight, Tensor):
            total = weight.clone()
        else:
            # `full` fills it on the device; a copy from the host would wait for the device.
            total = torch.full((), weight, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return total.item() if _readable(total) else total


class WindowSummary:
    """How many windows were corrected and by how much.

    Kept on the device where the weights are there, and read at the end.
    """

    def __init__(self) -> None:
        self.windows = 0
        self._corrected: Number = 0
        self._least: Number = math.inf
        self._most: Number = 0

    def add(self, changes: list[Any]) -> None:
        """Note how many times as much each micro-batch of a window counts as in a plain mean."""
        self.windows += 1
        if isinstance(changes[0], Tensor):
            least, most = torch.aminmax(torch.stack(changes))
            different = (least != 1) | (most != 1)
            self._corrected = self._corrected + different
            self._least = torch.where(different, least, math.inf).clamp(max=self._least)
            self._most = torch.where(different, most, 0).clamp(min=self._most)
        elif any(change != 1 for change in changes):
            self._corrected = self._corrected + 1
            self._least = min(self._least, *changes)
            self._most = max(self._most, *changes)

    def __str__(self) -> str:
        corrected = int(self._corrected)
        text = f"windows corrected: {corrected} of {self.windows}"
        if not corrected:
            return text
        least, most = float(self._least), float(self._most)
        how_much = f"{most:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
        return f"{text}; their micro-batches count {how_much} times as much as without it"


def as_weight(weight: Any) -> Number:
    """Return a weight as a number in double precision, on the device where it is.

    Raises:
        ValueError: It is no number, is negative or not finite; where it can be read.
    """
    if isinstance(weight, Tensor) and weight.numel() == 1 and not _readable(weight):
        # MPS has no float64.
        double = torch.float32 if weight.device.type == "mps" else torch.float64
        return weight.detach().reshape(()).to(double)
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"The weight of a micro-batch is {weight!r}, a {type(weight).__name__}. It must be "
            "one number: how many things its loss is a mean over."
        ) from error
    if not 0 <= number < math.inf:
        raise ValueError(
            f"The weight of a micro-batch is {number}. It must be the number of things that its "
            "loss is a mean over: finite, and not negative."
        )
    return number


def scale_gradients(optimizer: Optimizer, factor: Number) -> None:
    """Multiply the gradients of an optimizer's parameters in place.

    Args:
        optimizer: Parameters without a gradient are passed over.
        factor: A number; on a GPU it is not read back.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in _gradients(optimizer):
        groups[gradient.device, gradient.dtype].append(gradient)
    with torch.no_grad():
        for (device, dtype), gradients in groups.items():
            if not isinstance(factor, Tensor):
                torch._foreach_mul_(gradients, factor)
            elif dtype.itemsize < 4:
                # Cast to the gradient's dtype, the factor would keep 8 or 11 bits.
                for gradient in gradients:
                    gradient.copy_(gradient.float() * factor.to(device))
            else:
                torch._foreach_mul_(gradients, factor.to(device, dtype))


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether any parameter of an optimizer has a gradient."""
    return next(_gradients(optimizer), None) is not None


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    return (
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _readable(tensor: Tensor) -> bool:
    """Return whether a tensor can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def _nonzero(number: Number) -> Number:
    """Return 1 in the place of 0: what it divides is 0 as well then."""
    return torch.where(number > 0, number, 1) if isinstance(number, Tensor) else number or 1.0
