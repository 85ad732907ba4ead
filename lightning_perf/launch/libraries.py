"""Libraries that take the place of others when the loader loads them first (``LD_PRELOAD``)."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Allocator = Literal["auto", "glibc", "jemalloc", "tcmalloc", "none"]
OpenMP = Literal["auto", "gnu", "intel"]


@dataclass(frozen=True)
class Library:
    """One library to load first.

    Attributes:
        name: What a person calls it.
        files: Its file names, the preferred one first.
        install: How to get it.
        environment: What it needs to be any good.
    """

    name: str
    files: tuple[str, ...]
    install: str
    environment: tuple[tuple[str, str], ...] = ()


LIBRARIES = {
    "jemalloc": Library(
        "jemalloc",
        ("libjemalloc.so.2", "libjemalloc.so"),
        "apt-get install libjemalloc2",
        # Without this it hands freed tensors back to the system and takes them again in each step.
        # Decay -1 keeps what was freed for good: a process never gets smaller.
        (
            (
                "MALLOC_CONF",
                "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
                "dirty_decay_ms:-1,muzzy_decay_ms:-1",
            ),
        ),
    ),
    "tcmalloc": Library(
        "tcmalloc",
        # The full library adds a heap profiler, which nobody asked for.
        (
            "libtcmalloc_minimal.so.4",
            "libtcmalloc_minimal.so",
            "libtcmalloc.so.4",
            "libtcmalloc.so",
        ),
        "apt-get install libtcmalloc-minimal4",
    ),
    "intel": Library(
        "Intel OpenMP",
        ("libiomp5.so",),
        "pip install 'lightning-perf[openmp]'",
        # Threads that wait longer for work, 200 ms by default, take the cores of loader workers.
        (("KMP_BLOCKTIME", "1"),),
    ),
}


@dataclass(frozen=True)
class Choice:
    """What ``auto`` stands for.

    Attributes:
        use: The value it stands for.
        reason: Why.
        measured: The result file that shows it.
    """

    use: str
    reason: str
    measured: str


# `auto` is what is installed anyway, unless a result of this project shows that another is faster.
AUTO_ALLOCATOR = Choice(
    "glibc",
    "told to keep freed tensors, which needs no installation; 1.23x as fast as glibc as it is "
    "on a small conv net. Others were compared with glibc as it is only.",
    "docs/results/2026-11-30_convnet_allocator-glibc_amx_bf16.json",
)
AUTO_OPENMP = Choice(
    "gnu",
    "the OpenMP runtime that PyTorch brings; no gain by Intel's was found.",
    "docs/results/2026-11-30_convnet_openmp-intel_amx_bf16.json",
)

_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "tbbmalloc", "snmalloc", "hoard")
_OPENMP_RUNTIMES = {"iomp5": "intel", "libomp": "llvm", "gomp": "gnu"}


def preloaded(ld_preload: str) -> list[str]:
    """Return the libraries in a value of ``LD_PRELOAD``, which colons or spaces separate."""
    return [path for path in re.split(r"[:\s]+", ld_preload) if path]


def allocator_among(paths: Iterable[str]) -> str | None:
    """Return the allocator that takes over malloc where these libraries are loaded, if any.

    Example:
        >>> allocator_among(["/usr/lib/libm.so.6", "/usr/lib/libtcmalloc_minimal.so.4"])
        'tcmalloc'
    """
    names = [Path(path).name for path in paths]
    return next((found for name in names for found in _ALLOCATORS if found in name), None)


def openmp_among(paths: Iterable[str]) -> list[str]:
    """Return the OpenMP runtimes among libraries: ``"gnu"``, ``"intel"``, ``"llvm"``.

    Example:
        >>> openmp_among(["torch/lib/libgomp-a34b3233.so.1", "libiomp5.so"])
        ['gnu', 'intel']
    """
    names = [Path(path).name for path in paths]
    found = [kind for name in names for part, kind in _OPENMP_RUNTIMES.items() if part in name]
    return list(dict.fromkeys(found))


def library_folders(environ: Mapping[str, str], python: str | None = None) -> list[str]:
    """Return where to look for libraries: the environment of Python first, then the system.

    Args:
        environ: Environment variables.
        python: Path of the Python that is started; the running one's environment if None.
    """
    prefixes = [os.path.dirname(os.path.dirname(python))] if python else []
    prefixes += [environ.get("VIRTUAL_ENV", ""), environ.get("CONDA_PREFIX", ""), sys.prefix]
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = [f"{prefix}/lib" for prefix in prefixes if prefix]
    folders += environ.get("LD_LIBRARY_PATH", "").split(":")
    folders += ["/usr/local/lib", f"/usr/lib/{multiarch}", "/usr/lib64", "/usr/lib"]
    return list(dict.fromkeys(folder for folder in folders if folder.startswith("/")))


def find_libraries(
    folders: Iterable[str], exists: Callable[[str], bool] = os.path.isfile
) -> dict[str, str]:
    """Return the path of each library of `LIBRARIES` that is installed.

    Args:
        folders: Where to look, the preferred one first.
        exists: Whether there is a file.
    """
    folders = list(folders)
    found = {}
    for key, library in LIBRARIES.items():
        paths = (f"{folder}/{file}" for file in library.files for folder in folders)
        path = next(filter(exists, paths), None)
        if path is not None:
            found[key] = path
    return found
