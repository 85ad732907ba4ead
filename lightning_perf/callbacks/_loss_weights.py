"""How much each micro-batch counts: the number of things that its loss is a mean over."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_perf._batches import map_tensors

Count = Callable[[Any], Callable[[Tensor], float | Tensor]]
"""Takes the batch before the step, and returns what gives the weight once the loss is known."""

WEIGHTS = ("batches", "samples", "tokens")

_IGNORED = -100  # what torch's cross-entropy leaves out unless told otherwise
_MEAN = 1  # how autograd notes ``reduction="mean"``
_WAY_OUT = (
    "Pass a callable that takes the batch and returns the number of things that the loss is a "
    "mean over; in YAML, its dotted path."
)


def function_of(weight: str | Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """Return the callable that ``weight`` is or names, or ``None`` where it is one of `WEIGHTS`.

    Raises:
        ValueError: It is neither, or the path leads to nothing that can be called.
    """
    if callable(weight):
        return weight
    if weight in WEIGHTS:
        return None
    asked = f"ExactAccumulation(weight={weight!r}) was asked for"
    if not isinstance(weight, str) or "." not in weight:
        raise ValueError(
            f"{asked}; it is 'batches', 'samples', 'tokens', a callable that takes the batch and "
            "returns a number, or the dotted path of one, such as 'my_project.data.count'."
        )
    try:
        found = pkgutil.resolve_name(weight)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{asked}, but there is nothing at that path: {error}.") from error
    if not callable(found):
        raise ValueError(
            f"{asked}, and there is a {type(found).__name__}. Name a callable that takes the batch "
            "and returns a number."
        )
    function: Callable[[Any], Any] = found
    return function


def counter(weight: str | Callable[[Any], Any], say: Callable[[str], None]) -> Count:
    """Return what finds the weight of a micro-batch.

    Args:
        weight: As for `ExactAccumulation`.
        say: Tells the user which tokens are counted where the loss does not show it.
    """
    function = function_of(weight)
    if function is None:
        counts: dict[Any, Count] = {
            "batches": _one,
            "samples": _samples,
            "tokens": _Tokens(say),
        }
        return counts[weight]

    def count(batch: Any) -> Callable[[Tensor], float | Tensor]:
        found = function(batch)
        return lambda loss: found

    return count


def sizes(batch: Any) -> set[int]:
    """Return the first dimensions of all tensors in a batch that have one."""
    found: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.dim():
            found.add(tensor.shape[0])
        return tensor

    map_tensors(batch, note)
    return found


def cross_entropy_weights(loss: Tensor) -> list[Tensor]:
    """Return what each cross-entropy of a loss, if it is a mean, was divided by.

    That is the number of targets that are not ignored, or the sum of their classes' weights. It is
    read from the graph of the loss, in which single numbers are followed back. A cross-entropy in a
    compiled region is not seen.

    Args:
        loss: A scalar, before its backward.

    Example:
        >>> import torch
        >>> logits, targets = torch.zeros(3, 2, requires_grad=True), torch.tensor([0, 1, -100])
        >>> cross_entropy_weights(torch.nn.functional.cross_entropy(logits, targets) / 4)
        [tensor(2.)]
    """
    found: list[Tensor] = []
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen or not _gives_numbers(node):
            continue
        seen.add(node)
        if not node.name().startswith("NllLoss"):
            todo += [following for following, _ in node.next_functions]
        elif node._saved_reduction == _MEAN:
            found.append(node._saved_total_weight.detach())
    return found


def _gives_numbers(node: Any) -> bool:
    return all(math.prod(output.shape) == 1 for output in node._input_metadata)


def _one(batch: Any) -> Callable[[Tensor], float | Tensor]:
    return lambda loss: 1


def _samples(batch: Any) -> Callable[[Tensor], float | Tensor]:
    found = sorted(sizes(batch))
    if len(found) != 1:
        which = f"are {', '.join(map(str, found))}" if found else "are not there"
        raise ValueError(
            "ExactAccumulation(weight='samples') was asked for, but the first dimensions of the "
            f"tensors in the batch, a {type(batch).__name__}, {which}, so its number of samples "
            f"is not known. {_WAY_OUT}"
        )
    return lambda loss: found[0]


class _Tokens:
    """Counts the targets of the cross-entropy, or the labels or the mask that the batch names."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told = False

    def __call__(self, batch: Any) -> Callable[[Tensor], float | Tensor]:
        # Looked up before the step, which may take them out of the batch.
        labels, mask = _named(batch, "labels"), _named(batch, "attention_mask")

        def weight(loss: Tensor) -> float | Tensor:
            means = cross_entropy_weights(loss)
            if len(means) == 1:
                return means[0]
            if means:
                raise ValueError(
                    "ExactAccumulation(weight='tokens') was asked for, but the loss is made of "
                    f"{len(means)} cross-entropies, each a mean over targets of its own. {_WAY_OUT}"
                )
            if labels is not None and not labels.is_floating_point():
                self._tell(f"entries of `labels` that are not {_IGNORED}")
                return (labels != _IGNORED).sum()
            if mask is not None:
                self._tell("entries of `attention_mask` that are not 0")
                return (mask != 0).sum()
            raise ValueError(
                "ExactAccumulation(weight='tokens') was asked for, but the loss shows no "
                "cross-entropy that is a mean, and the batch, a "
                f"{type(batch).__name__}, has no integer `labels` and no `attention_mask`. "
                f"{_WAY_OUT}"
            )

        return weight

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            self._say(
                f"tokens are the {what}, as the loss shows no cross-entropy that is a mean. If "
                f"the loss is a mean over others: {_WAY_OUT}"
            )


def _named(batch: Any, name: str) -> Tensor | None:
    value = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
    return value if isinstance(value, Tensor) else None
