"""Datasets in one mapped file: opened at once by every worker, never copied."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Mapping, Sized
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_perf.data._packed_file import Array, Region, at_a_page, open_packed, packing

T = TypeVar("T")

# Written at once, so that packing needs no more memory than that.
_CHUNK = 2**22


class _Mapped(Dataset[T]):
    """A dataset whose arrays are mapped again in each process that gets it."""

    _kind: ClassVar[str]  # what the header says; a subclass of the user reads the same files

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._arrays = self._opened()

    def _opened(self) -> dict[str, Array]:
        return open_packed(self.path, self._kind)

    def __getstate__(self) -> dict[str, Any]:
        # Pickled, the arrays would be copied.
        return {name: value for name, value in vars(self).items() if name != "_arrays"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._arrays = self._opened()


class MemmapTokens(_Mapped[Tensor]):
    """Texts as numbers in one file that every process maps, however large it is.

    Items are the documents as they were packed, or with ``block`` pieces of one length of all of
    them joined together. They are tensors that lie in the mapped file: opening costs the same for
    any size, the pages that are read are shared by all workers, and nothing is copied. Writing to
    a tensor changes it in that process only, never the file.

    Do not use it for data that fit into memory many times over: a tensor does the same.

    Args:
        path: A file that `pack` has written.
        block: Tokens of an item; ``None`` for whole documents. Tokens that do not fill the last
            block are left out.

    Raises:
        ValueError: The file is truncated, damaged, or was not written by `pack`; a block below 1.

    Example:
        >>> import tempfile, pathlib
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name) / "texts"
        >>> MemmapTokens.pack(path, [[5, 6, 7], [8, 9]])
        >>> dataset = MemmapTokens(path)
        >>> dataset[1].tolist(), dataset.lengths.tolist()
        ([8, 9], [3, 2])
        >>> MemmapTokens(path, block=2)[1].tolist()
        [7, 8]
        >>> folder.cleanup()

    Source: ten techniques, 10.
    """

    guide: ClassVar[str] = "K 10"
    """Section of the tuning guides."""
    _kind = "MemmapTokens"

    def __init__(self, path: str | os.PathLike[str], block: int | None = None) -> None:
        if block is not None and (isinstance(block, bool) or block < 1):
            raise ValueError(f"block={block!r} was asked for; it is a number of tokens or None.")
        super().__init__(path)
        self.block = block

    @staticmethod
    def pack(
        path: str | os.PathLike[str],
        documents: Iterable[npt.ArrayLike],
        *,
        dtype: npt.DTypeLike = np.int32,
    ) -> None:
        """Write documents to a file, one after another; only one is in memory at a time.

        The file has its name only once it is complete.

        Args:
            path: Where; a file of that name is replaced.
            documents: The numbers of each document.
            dtype: An integer type. PyTorch's embeddings take int32 and int64; uint16 takes half the
                space of int32, and the batch must be converted.

        Raises:
            ValueError: A number does not fit into the type, or is none.
        """
        kind = np.dtype(dtype)
        if kind.kind not in "iu":
            raise ValueError(f"dtype={kind} was asked for; tokens are integers.")
        kind = kind.newbyteorder("<")
        ends = array("q", [0])
        with packing(path, MemmapTokens._kind) as made:
            for number, document in enumerate(documents):
                tokens = _of_type(document, kind, number)
                made.file.write(tokens.tobytes())
                ends.append(ends[-1] + len(tokens))
            made.regions["tokens"] = Region(kind.str, (ends[-1],), made.room)
            made.regions["ends"] = Region(
                "<i8", (len(ends),), at_a_page(made.regions["tokens"].end)
            )
            made.file.seek(made.regions["ends"].offset)
            made.file.write(np.asarray(ends, "<i8").tobytes())

    @property
    def tokens(self) -> Array:
        """All tokens, mapped."""
        return self._arrays["tokens"]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of each item, as batch samplers want it."""
        if self.block is not None:
            return np.full(len(self), self.block)
        return np.diff(self._arrays["ends"])

    def __len__(self) -> int:
        if self.block is not None:
            return len(self.tokens) // self.block
        return len(self._arrays["ends"]) - 1

    def __getitem__(self, index: int) -> Tensor:
        index = _checked_index(index, len(self))
        if self.block is not None:
            start, stop = index * self.block, (index + 1) * self.block
        else:
            start, stop = self._arrays["ends"][index : index + 2].tolist()
        return torch.from_numpy(self.tokens[start:stop])


class MemmapArrays(_Mapped[dict[str, Tensor]]):
    """Arrays with a row for each item in one file that every process maps, however large it is.

    Items are dictionaries of tensors that lie in the mapped file: decoded images and their labels,
    say, which then need no decoding. Opening costs the same for any size, the pages that are read
    are shared by all workers, and nothing is copied. Writing to a tensor changes it in that process
    only, never the file.

    Do not use it where decoded data are larger than what the disk can read in time.

    Args:
        path: A file that `pack` has written.

    Raises:
        ValueError: The file is truncated, damaged, or was not written by `pack`.

    Example:
        >>> import tempfile, pathlib
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name) / "digits"
        >>> MemmapArrays.pack(path, {"image": np.zeros((10, 8, 8), "u1"), "label": np.arange(10)})
        >>> dataset = MemmapArrays(path)
        >>> tuple(dataset[3]["image"].shape), dataset[3]["label"].item()
        ((8, 8), 3)
        >>> folder.cleanup()

    Source: ten techniques, 10.
    """

    guide: ClassVar[str] = "K 10"
    """Section of the tuning guides."""
    _kind = "MemmapArrays"

    @staticmethod
    def pack(
        path: str | os.PathLike[str],
        rows: Mapping[str, npt.ArrayLike] | Any,
    ) -> None:
        """Write rows to a file.

        The file has its name only once it is complete.

        Args:
            path: Where; a file of that name is replaced.
            rows: Arrays by name, all of one length; or the items themselves, anything that has a
                length and yields mappings, a dataset say, of which one is in memory at a time.

        Raises:
            ValueError: The lengths, shapes or types of the rows differ.
        """
        if isinstance(rows, Mapping):
            _pack_columns(path, {name: np.asarray(array) for name, array in rows.items()})
        else:
            _pack_rows(path, rows)

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by name, mapped."""
        return self._arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = _checked_index(index, len(self))
        # Not `array[index]`, which is no array where a row is one number.
        return {
            name: torch.from_numpy(array[index : index + 1])[0]
            for name, array in self._arrays.items()
        }


def _pack_columns(path: str | os.PathLike[str], columns: Mapping[str, Array]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"The arrays have the lengths {lengths}; all must have one row per item.")

    arrays = {name: (_numeric(name, column), column.shape) for name, column in columns.items()}
    with packing(path, MemmapArrays._kind, _room(arrays)) as made:
        made.regions = _placed(arrays, made.room)
        for name, column in columns.items():
            region = made.regions[name]
            made.file.seek(region.offset)
            rows = max(1, _CHUNK // max(1, column[:1].nbytes))
            for start in range(0, len(column), rows):
                made.file.write(column[start : start + rows].astype(region.dtype).tobytes())


def _pack_rows(path: str | os.PathLike[str], rows: Any) -> None:
    if not isinstance(rows, Sized) or not len(rows):
        raise ValueError(
            f"{type(rows).__name__} was given; rows have a length, above 0, so that their place in "
            "the file is known. Put them into a list, or give arrays by name."
        )
    count = len(rows)
    first = {name: np.asarray(value) for name, value in _at(rows, 0).items()}

    arrays = {name: (_numeric(name, a), (count, *a.shape)) for name, a in first.items()}
    with packing(path, MemmapArrays._kind, _room(arrays)) as made:
        made.regions = _placed(arrays, made.room)
        for number in range(count):
            row = {name: np.asarray(value) for name, value in _at(rows, number).items()}
            if _described(row) != _described(first):
                raise ValueError(
                    f"Row {number} is {_described(row)}, and row 0 is {_described(first)}; all "
                    "must have the same arrays. For items of several lengths use MemmapTokens."
                )
            for name, value in row.items():
                region = made.regions[name]
                made.file.seek(region.offset + number * value.nbytes)
                made.file.write(value.astype(region.dtype).tobytes())


def _room(arrays: Mapping[str, Any]) -> int:
    """Return enough bytes for a header that tells of some arrays."""
    return at_a_page(sum(len(name) * 6 + 400 for name in arrays))


def _placed(arrays: Mapping[str, tuple[str, tuple[int, ...]]], room: int) -> dict[str, Region]:
    """Return where arrays lie, one after another."""
    regions, offset = {}, room
    for name, (dtype, shape) in arrays.items():
        regions[name] = Region(dtype, shape, offset)
        offset = at_a_page(regions[name].end)
    return regions


def _at(rows: Any, number: int) -> Mapping[str, Any]:
    row = rows[number]
    if not isinstance(row, Mapping) or not row:
        raise ValueError(
            f"Row {number} is a {type(row).__name__}; rows are mappings from names to arrays."
        )
    return row


def _numeric(name: str, array: Array) -> str:
    if array.dtype.kind not in "biufc":
        raise ValueError(f"{name!r} has the type {array.dtype}; arrays hold numbers.")
    return str(array.dtype.newbyteorder("<").str)


def _described(row: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in row.items())


def _of_type(document: npt.ArrayLike, dtype: np.dtype[Any], number: int) -> Array:
    tokens = np.asarray(document)
    if tokens.size == 0:
        return np.empty(0, dtype)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"Document {number} has the type {tokens.dtype} and the shape {tokens.shape}; it must "
            "be a sequence of integers."
        )
    limits = np.iinfo(dtype)
    if tokens.min() < limits.min or tokens.max() > limits.max:
        raise ValueError(
            f"Document {number} has numbers from {tokens.min()} to {tokens.max()}, which do not "
            f"fit into {dtype}. Pass another dtype."
        )
    return tokens.astype(dtype)


def _checked_index(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"Item {index} was asked for; there are {length}.")
    return int(index) % length
