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
        self._usual = None if usual is None else as_weight(usual)
        self._weights: list[Tensor] = []
        self._device = torch.device("cpu")
        self.summary = WindowSummary()

    @property
    def empty(self) -> bool:
        """Whether no micro-batch was weighed since the last window."""
        return not self._weights

    def weigh(self, loss: Tensor, weight: float | Tensor = 1) -> Tensor:
        """Return the loss to call ``backward`` on.

        A micro-batch of weight 0, such as one without any target, whose mean loss is NaN, adds
        nothing to the gradients.

        Args:
            loss: The mean over the things in this micro-batch, a scalar.
            weight: How many they are; a tensor on the device of the loss is not read back.

        Raises:
            ValueError: The weight is no number, is negative or not finite.
        """
        mine = as_weight(weight)
        self._device = loss.device
        if self._usual is None:
            first = self._over_processes(mine) / _processes()
            self._usual = torch.where(first > 0, first, 1)
        self._weights.append(mine)
        ratio = mine / self._usual
        if not _on_host(ratio):
            return (loss * ratio.to(loss.dtype)).masked_fill(ratio == 0, 0)
        if not ratio.item():
            return loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0)
        return loss if ratio.item() == 1 else loss * ratio.item()

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
        total = _stacked(self._weights).sum()
        total = total * _processes() if alike else self._over_processes(total)
        factor = torch.where(total > 0, divisor * _processes() * self._usual / total, 1)
        if not _on_host(factor) or factor.item() != 1:
            scale_gradients(optimizer, factor)
        self.summary.add(factor * _stacked(self._weights, factor.device) / self._usual)
        self.forget()

    def forget(self) -> None:
        """Start a new window: the gradients of this one are gone."""
        self._weights.clear()

    def _over_processes(self, weight: Tensor) -> Tensor:
        """Return the sum over all processes, on a device on which they can communicate."""
        if _processes() == 1:
            return weight
        total = _placed(weight, self._device).clone()
        dist.all_reduce(total)
        return total


class WindowSummary:
    """How many windows were corrected and by how much.

    Kept on the device where the weights are there, and read at the end.
    """

    def __init__(self) -> None:
        self.windows = 0
        self._corrected: float | Tensor = 0
        self._least: float | Tensor = math.inf
        self._most: float | Tensor = 0

    def add(self, changes: Tensor) -> None:
        """Note by how much each micro-batch of a window counts more than in a plain mean."""
        self.windows += 1
        least, most = torch.aminmax(changes)
        different = (least != 1) | (most != 1)
        if not _on_host(changes):
            self._corrected = self._corrected + different
            self._least = torch.where(different, least, math.inf).clamp(max=self._least)
            self._most = torch.where(different, most, 0).clamp(min=self._most)
        elif different.item():
            self._corrected += 1
            self._least = min(self._least, least.item())
            self._most = max(self._most, most.item())

    def __str__(self) -> str:
        corrected = int(self._corrected)
        text = f"windows corrected: {corrected} of {self.windows}"
        if not corrected:
            return text
        least, most = float(self._least), float(self._most)
        how_much = f"{most:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
        return f"{text}; their micro-batches count {how_much} times as much as without it"


def as_weight(weight: Any) -> Tensor:
    """Return a weight as a number in double precision, on the device where it is.

    Raises:
        ValueError: It is no number, is negative or not finite; where it can be read.
    """
    if isinstance(weight, Tensor) and weight.numel() == 1:
        # MPS has no float64.
        double = torch.float32 if weight.device.type == "mps" else torch.float64
        tensor = weight.detach().reshape(()).to(double)
    else:
        try:
            tensor = torch.tensor(float(weight), dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"The weight of a micro-batch is {weight!r}, a {type(weight).__name__}. It must be "
                "one number: how many things its loss is a mean over."
            ) from error
    if _on_host(tensor) and not 0 <= tensor.item() < math.inf:
        raise ValueError(
            f"The weight of a micro-batch is {tensor.item()}. It must be the number of things that "
            "its loss is a mean over: finite, and not negative."
        )
    return tensor


def scale_gradients(optimizer: Optimizer, factor: Tensor) -> None:
    """Multiply the gradients of an optimizer's parameters in place.

    Args:
        optimizer: Parameters without a gradient are passed over.
        factor: A number; on a GPU it is not read back.
    """
    groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for gradient in _gradients(optimizer):
        groups[gradient.device, gradient.dtype, gradient.layout].append(gradient)
    with torch.no_grad():
        for (device, dtype, layout), gradients in groups.items():
            if _on_host(factor):
                torch._foreach_mul_(gradients, factor.item())
            elif layout is not torch.strided:
                for gradient in gradients:
                    gradient.mul_(factor.to(device))
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


def _stacked(weights: list[Tensor], device: torch.device | None = None) -> Tensor:
    """Put weights together, on the device where one of them is unless told which."""
    if device is None:
        device = next((w.device for w in weights if not _on_host(w)), weights[0].device)
    return torch.stack([_placed(weight, device) for weight in weights])


def _placed(weight: Tensor, device: torch.device) -> Tensor:
    """Put a number onto a device without waiting for it, as a copy from the host would."""
    if weight.device == device or not _on_host(weight):
        return weight
    return torch.full((), weight.item(), dtype=weight.dtype, device=device)


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _on_host(tensor: Tensor) -> bool:
    """Return whether a tensor can be read without waiting for a device."""
    return tensor.device.type == "cpu"
