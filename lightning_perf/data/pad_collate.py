"""Collate items of several lengths into batches of few shapes, and count the padding."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

# Rows of counters, one for each process that collates. A prime: processes that are started one
# after another have neighbouring numbers, so they never meet in one row.
_PROCESSES = 1021

FieldName = str | int


@dataclass(frozen=True)
class PaddingStatistics:
    """What was collated so far, in all processes together."""

    batches: int
    items: int
    tokens: int
    """Sum of the lengths of the items."""
    padded_tokens: int
    """Sum of the lengths after padding."""

    @property
    def padding_share(self) -> float:
        """The share of what is computed that is padding, from 0 to 1."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.padding_share:.1%} padding: {self.tokens:,} tokens in {self.batches:,} "
            f"batches, {self.padded_tokens:,} when padded"
        )


class pad_collate:  # noqa: N801  # used like a function, as `torch.no_grad` is
    """Pad the items of a batch to one length: the longest, a multiple, or one of a few edges.

    A `collate_fn` that keeps the structure of the items (tensors, arrays, lists of numbers, in
    mappings, tuples, named tuples and dataclasses) as PyTorch's own does. Every array of one or
    more dimensions is a sequence along its first dimension, unless ``only`` names those that are.

    Do not use it for items of one size: PyTorch's `default_collate` does the same with less work.

    Args:
        pad_to_multiple_of: A multiple that lengths are rounded up to, for tensor cores; or the
            edges, ascending lengths of which the smallest that fits is taken, so that compiled
            code sees few shapes; or ``None`` for the longest of the batch.
        value: What to pad with; or a mapping from fields to that, and 0 for all others.
        only: The fields that are sequences: keys, positions or attributes at the top of an item.
            The others are stacked.

    Raises:
        ValueError: The multiple or the edges are not positive, or edges do not ascend; later, an
            item is longer than the last edge, or items do not fit together.

    Example:
        >>> collate = pad_collate(4, value={"labels": -100})
        >>> items = [{"words": [1, 2, 3, 4, 5], "labels": [1] * 5}, {"words": [6], "labels": [2]}]
        >>> collate(items)["labels"].tolist()
        [[1, 1, 1, 1, 1, -100, -100, -100], [2, -100, -100, -100, -100, -100, -100, -100]]
        >>> collate.statistics.padding_share
        0.625

    Source: ten techniques, 4.2 and 9.2.
    """

    guide: ClassVar[str] = "K 4.2, K 9.2"
    """Section of the tuning guides."""

    def __init__(
        self,
        pad_to_multiple_of: int | Sequence[int] | None = 8,
        *,
        value: float | Mapping[FieldName, float] = 0,
        only: Iterable[FieldName] | None = None,
    ) -> None:
        if pad_to_multiple_of is not None and not isinstance(pad_to_multiple_of, int):
            pad_to_multiple_of = tuple(int(edge) for edge in pad_to_multiple_of)
        _require_valid(pad_to_multiple_of)
        self.pad_to_multiple_of = pad_to_multiple_of
        self.value = value
        self.only = None if only is None else tuple(only)
        # In shared memory, because loader workers collate: each process counts in a row of its own.
        self._counts = torch.zeros(_PROCESSES, 4, dtype=torch.int64)
        self._counts.share_memory_()  # type: ignore[no-untyped-call]  # torch has no types here

    def __repr__(self) -> str:
        optional = f", only={self.only!r}" if self.only is not None else ""
        return f"pad_collate({self.pad_to_multiple_of!r}, value={self.value!r}{optional})"

    @property
    def statistics(self) -> PaddingStatistics:
        """What was collated since the start, by all processes that this object was handed to.

        Batches that workers have prepared in advance are in it.
        """
        return PaddingStatistics(*self._counts.sum(0).tolist())

    def padded(self, lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the lengths after padding, for a sampler that shall count what is computed.

        Args:
            lengths: The length of each item.

        Raises:
            ValueError: One of them is longer than the last edge.

        Example:
            >>> pad_collate((8, 32)).padded([3, 8, 9]).tolist()
            [8, 8, 32]
        """
        array = np.asarray(lengths, dtype=np.int64)
        if self.pad_to_multiple_of is None:
            return array
        if isinstance(self.pad_to_multiple_of, int):
            return -(-array // self.pad_to_multiple_of) * self.pad_to_multiple_of
        edges = np.asarray(self.pad_to_multiple_of)
        if array.size and array.max() > edges[-1]:
            raise ValueError(
                f"An item has the length {array.max()}, but the last edge of {self!r} is "
                f"{edges[-1]}. Add a longer edge, or cut the item."
            )
        return edges[np.searchsorted(edges, array)]

    def __call__(self, items: Sequence[Any]) -> Any:
        """Return the batch of some items.

        Args:
            items: All of one structure.
        """
        lengths: list[int] = []
        batch = self._collated(items, None, lengths)
        if lengths:
            padded = int(self.padded(max(lengths))) * len(items)
            row = self._counts[os.getpid() % _PROCESSES]
            row += torch.tensor([1, len(items), sum(lengths), padded])
        return batch

    def _collated(self, parts: Sequence[Any], field: FieldName | None, lengths: list[int]) -> Any:
        """Collate one place of all items; the lengths of the first sequence go to ``lengths``.

        Args:
            parts: What the items have there.
            field: The name of the place at the top of an item, ``None`` for the whole item.
            lengths: Filled where it is empty.
        """
        first = parts[0]
        if isinstance(first, Mapping):
            return {
                key: self._collated([part[key] for part in parts], _named(field, key), lengths)
                for key in first
            }
        if is_dataclass(first) and not isinstance(first, type):
            return type(first)(
                **{
                    name: self._collated(
                        [getattr(part, name) for part in parts], _named(field, name), lengths
                    )
                    for name in (each.name for each in fields(first))
                }
            )
        sequences = [_tensor(part) for part in parts]
        if all(sequence is not None for sequence in sequences):
            return self._padded_tensors([s for s in sequences if s is not None], field, lengths)
        if isinstance(first, tuple | list):
            names = getattr(first, "_fields", range(len(first)))
            columns = [
                self._collated(list(column), _named(field, name), lengths)
                for name, column in zip(names, zip(*parts, strict=True), strict=True)
            ]
            return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
        return default_collate(list(parts))

    def _padded_tensors(
        self, tensors: list[Tensor], field: FieldName | None, lengths: list[int]
    ) -> Tensor:
        is_sequence = tensors[0].dim() > 0 and (self.only is None or field in self.only)
        shapes = {tensor.shape[1:] if is_sequence else tensor.shape for tensor in tensors}
        if len(shapes) > 1:
            name = "Items" if field is None else f"Items in the field {field!r}"
            raise ValueError(
                f"{name} have the shapes {sorted(tuple(tensor.shape) for tensor in tensors)}; only "
                "the first dimension of a sequence may differ"
                + ("." if is_sequence else f", and `only={self.only}` says that it is none.")
            )
        if len({tensor.dtype for tensor in tensors}) > 1:
            widest = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
            tensors = [tensor.to(widest) for tensor in tensors]
        if not is_sequence:
            return torch.stack(tensors)
        mine = [len(tensor) for tensor in tensors]
        if not lengths:
            lengths.extend(mine)
        missing = int(self.padded(max(mine))) - max(mine)
        value = self.value.get(field, 0) if isinstance(self.value, Mapping) else self.value  # type: ignore[arg-type]  # None has no entry
        if missing:
            tensors[0] = _longer(tensors[0], max(mine) + missing, value)
        return pad_sequence(tensors, batch_first=True, padding_value=value)


def _require_valid(lengths: int | tuple[int, ...] | None) -> None:
    if lengths is None:
        return
    edges = (lengths,) if isinstance(lengths, int) else lengths
    ascend = all(a < b for a, b in pairwise(edges))
    if not edges or edges[0] < 1 or not ascend or isinstance(lengths, bool):
        raise ValueError(
            f"pad_to_multiple_of={lengths!r} was asked for; it is a positive integer, edges that "
            "are positive and ascend, or None."
        )


def _named(outer: FieldName | None, inner: FieldName) -> FieldName:
    return inner if outer is None else outer


def _tensor(part: Any) -> Tensor | None:
    """Return a tensor of what is one, or an array or a list of numbers; of others ``None``."""
    if isinstance(part, Tensor):
        return part
    if isinstance(part, np.ndarray) and part.dtype.kind in "biufc":
        # PyTorch warns of arrays that are not to be written to.
        return torch.from_numpy(part if part.flags.writeable else part.copy())
    if isinstance(part, list) and all(isinstance(number, int | float) for number in part):
        # An empty list would become a float tensor, and the batch with it.
        return torch.tensor(part) if part else torch.tensor(part, dtype=torch.int64)
    return None


def _longer(tensor: Tensor, length: int, value: float) -> Tensor:
    longer = tensor.new_full((length, *tensor.shape[1:]), value)
    longer[: len(tensor)] = tensor
    return longer
