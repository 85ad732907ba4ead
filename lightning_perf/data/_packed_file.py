"""One file with arrays behind a checked header, written once and mapped by whoever reads."""

from __future__ import annotations

import json
import mmap
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PAGE = 4096
"""Arrays begin at a page."""

_MAGIC = b"\x93LPMAP\r\n"  # the line end shows a file that was transferred as text
_VERSION = 1
_PREFIX = len(_MAGIC) + 4 * 4


@dataclass(frozen=True)
class Region:
    """Where an array lies in the file, and what it is. Numbers are little-endian."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The byte after the array."""
        return self.offset + int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=object))


class Packing:
    """A file that is being written.

    Args:
        file: At the place after the header.
        room: Bytes that are kept for the header.
    """

    def __init__(self, file: BinaryIO, room: int) -> None:
        self.file = file
        self.room = room
        self.regions: dict[str, Region] = {}
        """Where the arrays are; the header is made of it at the end."""


@contextmanager
def packing(path: str | os.PathLike[str], kind: str, room: int = PAGE) -> Iterator[Packing]:
    """Write a file for a block; it gets its name at the end, and is not there if the block fails.

    Args:
        path: Where; a file of that name is replaced.
        kind: Which class reads it.
        room: Bytes to keep for the header.
    """
    target = Path(path)
    # Beside it, as only within a file system a file is moved at once.
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("w+b") as file:
            file.seek(room)
            made = Packing(file, room)
            yield made
            header = _header(kind, made.regions)
            if len(header) > room:
                raise ValueError(
                    f"{len(made.regions)} arrays were to be packed into {path}; the header has no "
                    "room for so many. Put some of them together into one."
                )
            file.seek(0)
            file.write(header.ljust(room, b"\0"))
            file.truncate(max((region.end for region in made.regions.values()), default=room))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def open_packed(path: str | os.PathLike[str], kind: str) -> dict[str, Array]:
    """Map the arrays of a file, without reading them.

    Args:
        path: The file.
        kind: Which class reads it.

    Raises:
        ValueError: The file is of another kind, damaged or not complete.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        regions = _read_header(file, size, str(path), kind)
        whole = _mapped(file)
    return {
        name: np.ndarray(region.shape, region.dtype, whole, region.offset)
        for name, region in regions.items()
    }


def at_a_page(offset: int) -> int:
    """Return the first page that begins at an offset, or after it."""
    return -(-offset // PAGE) * PAGE


def _mapped(file: BinaryIO) -> mmap.mmap:
    """Map a file that is open for reading, so that writing changes this process's memory only.

    PyTorch knows no tensors that are not to be written to, and writing to a mapping for reading
    ends the process.
    """
    if sys.platform != "linux":
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    # Linux refuses mappings that may be written to and are larger than the memory, unless it is
    # told not to reserve any for them. Python has the name since 3.13.
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(
        file.fileno(),
        0,
        flags=mmap.MAP_PRIVATE | no_reserve,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )


def _header(kind: str, regions: Mapping[str, Region]) -> bytes:
    arrays = {name: asdict(region) for name, region in regions.items()}
    text = json.dumps({"kind": kind, "arrays": arrays}).encode()
    room = regions_start(regions)
    numbers = np.array([_VERSION, room, len(text), zlib.crc32(text)], "<u4")
    return _MAGIC + numbers.tobytes() + text


def regions_start(regions: Mapping[str, Region]) -> int:
    """Return where the first array begins."""
    return min((region.offset for region in regions.values()), default=PAGE)


def _read_header(file: BinaryIO, size: int, path: str, kind: str) -> dict[str, Region]:
    prefix = file.read(_PREFIX)
    if prefix[: len(_MAGIC)] != _MAGIC:
        begins = f"begins with {prefix[:8]!r}" if prefix else "is empty"
        raise ValueError(
            f"{path} was to be opened by {kind}, but it {begins}: no class of lightning_perf.data "
            f"packed it. Pack the data with {kind}.pack."
        )
    if len(prefix) < _PREFIX:
        raise ValueError(_truncated(path, kind, size, "its header"))
    numbers = np.frombuffer(prefix, "<u4", offset=len(_MAGIC)).tolist()
    version, room, length, checksum = numbers
    if version != _VERSION:
        raise ValueError(
            f"{path} has version {version} of the format, and this lightning_perf reads version "
            f"{_VERSION}. Update lightning_perf, or pack the data again."
        )
    text = file.read(length)
    if size < room or len(text) < length:
        raise ValueError(_truncated(path, kind, size, f"its header of {room:,} bytes"))
    if zlib.crc32(text) != checksum:
        raise ValueError(
            f"The header of {path} is damaged: its checksum is wrong. Copy the file again, or "
            f"pack the data again with {kind}.pack."
        )
    header = json.loads(text)
    if header["kind"] != kind:
        raise ValueError(
            f"{path} was to be opened by {kind}, but {header['kind']} packed it. Open it with that."
        )
    regions = {
        name: Region(region["dtype"], tuple(region["shape"]), region["offset"])
        for name, region in header["arrays"].items()
    }
    end = max((region.end for region in regions.values()), default=room)
    if size != end:
        what = f"the {end:,} bytes that its header tells of"
        if size < end:
            raise ValueError(_truncated(path, kind, size, what))
        raise ValueError(f"{path} has {size:,} bytes, more than {what}. Pack the data again.")
    return regions


def _truncated(path: str, kind: str, size: int, what: str) -> str:
    return (
        f"{path} is truncated: it has {size:,} bytes, and not {what}. Copy the file again, or pack "
        f"the data again with {kind}.pack."
    )
