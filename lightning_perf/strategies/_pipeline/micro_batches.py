"""One batch as micro-batches, and what their steps log as what one step logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_perf._batches import map_tensors


def micro_batches(batch: Any, chunks: int) -> tuple[list[Any], int]:
    """Return the parts of a batch, and the number of samples in each.

    Tensors are split along their first dimension; what is no tensor, or has no dimension, goes
    into each part.

    Raises:
        ValueError: Tensors have different first dimensions, or it cannot be divided.
    """
    sizes: set[int] = set()

    def measure(tensor: Tensor) -> Tensor:
        sizes.update(tensor.shape[:1])
        return tensor

    map_tensors(batch, measure)
    if len(sizes) != 1:
        raise ValueError(
            "To be split into micro-batches, the tensors of a batch must have one first dimension, "
            f"the samples; this batch has {sorted(sizes) or 'no tensors'}."
        )
    (size,) = sizes
    if size % chunks or not size:
        raise ValueError(
            f"A batch has {size} samples, which cannot be divided into chunks={chunks} equal "
            "micro-batches. Choose a batch size that can, and pass drop_last=True to the "
            "DataLoader if only the last batch of an epoch is smaller."
        )
    rows = size // chunks

    def part(index: int) -> Any:
        cut = slice(index * rows, (index + 1) * rows)
        return map_tensors(batch, lambda tensor: tensor[cut] if tensor.dim() else tensor)

    return [part(index) for index in range(chunks)], rows


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, sizes: (values * sizes).sum() / sizes.sum(),
    "avg": lambda values, sizes: (values * sizes).sum() / sizes.sum(),
    "sum": lambda values, sizes: values.sum(),
    "min": lambda values, sizes: values.min(),
    "max": lambda values, sizes: values.max(),
}


@dataclass
class Recorder:
    """Takes the place of ``self.log`` while micro-batches run, in any process.

    Args:
        rows: The batch size of a micro-batch.
    """

    rows: int
    _names: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    _values: dict[str, list[tuple[Tensor, int]]] = field(default_factory=dict)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note what was logged.

        Raises:
            ValueError: It cannot be put together from micro-batches.
        """
        reduction = str(kwargs.get("reduce_fx", "mean")).lower()
        if isinstance(value, Metric) or reduction not in _REDUCTIONS:
            what = type(value).__name__ if isinstance(value, Metric) else f"reduce_fx={reduction}"
            raise ValueError(
                f"training_step logs {name!r} with {what}, which only the last stage could. In a "
                "pipeline log numbers, such as `self.log(name, metric(preds, target))`, with "
                f"reduce_fx one of {', '.join(map(repr, _REDUCTIONS))}; or log it in "
                "validation_step."
            )
        size = kwargs.pop("batch_size", None) or self.rows
        self._names[name] = args, kwargs
        number = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)
        self._values.setdefault(name, []).append((number.squeeze(), size))

    def summary(self) -> list[tuple[str, Tensor, tuple[Any, ...], dict[str, Any]]]:
        """Return what one step with the whole batch would have logged: arguments of ``log``."""
        found = []
        for name, (args, kwargs) in self._names.items():
            values = torch.stack([value for value, _ in self._values[name]]).cpu()
            values = values if values.is_floating_point() else values.float()
            sizes = torch.tensor([size for _, size in self._values[name]], dtype=values.dtype)
            reduce = _REDUCTIONS[str(kwargs.get("reduce_fx", "mean")).lower()]
            options = {**kwargs, "batch_size": int(sizes.sum())}
            found.append((name, reduce(values, sizes), args, options))
        return found
