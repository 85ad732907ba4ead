"""The C++ part of the backend: what it needs, and how it is built once and kept."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

MODULE = "lightning_perf_oneccl"
VERSION = "2021.16.2"
"""Later ones need a library that is not on PyPI, or comes with 700 MB for GPUs only."""
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
INSTALL = "pip install 'lightning-perf[oneccl]'"
BUILD_SECONDS = 600.0
"""A build takes a minute; several on one core, or with a disk that is far away, take longer."""


@dataclass(frozen=True)
class Tools:
    """What is there to build the extension, and to run it."""

    system: str
    """Such as ``"Linux x86_64"``."""
    version: str | None
    """Of the package ``oneccl-cpu``."""
    library: Path | None
    """Folder of ``libccl.so.1``."""
    headers: Path | None
    """Folder of ``oneapi/ccl.hpp``."""
    python_headers: Path | None
    """Folder of ``Python.h``."""
    compiler: str | None


def find_tools() -> Tools:
    """Look for the packages of oneCCL, the headers of Python, and a C++ compiler."""
    library = _file_of("oneccl-cpu", "libccl.so.1")
    header = _file_of("oneccl-cpu-devel", "oneapi/ccl.hpp")
    python = Path(sysconfig.get_path("include"))
    return Tools(
        system=f"{platform.system()} {platform.machine()}",
        version=_version_of("oneccl-cpu"),
        library=library.parent if library else None,
        headers=header.parents[1] if header else None,
        python_headers=python if (python / "Python.h").exists() else None,
        compiler=shutil.which(os.environ.get("CXX", "c++")),
    )


def missing(tools: Tools, *, is_built: bool) -> str | None:
    """Return what is missing for the backend, and how to get it, or ``None``.

    Args:
        tools: What was found.
        is_built: Whether the extension is there already, so that no compiler is needed.
    """
    if tools.system != "Linux x86_64":
        return f"oneCCL is there for Linux on x86_64, and this is {tools.system}."
    if not torch.distributed.is_available():
        return "this PyTorch was built without torch.distributed."
    if tools.version is None or tools.library is None:
        return f"the library of oneCCL is not installed: {INSTALL}."
    if tools.version != VERSION:
        return f"oneccl-cpu {tools.version} is installed, and {VERSION} is needed: {INSTALL}."
    if is_built:
        return None
    if tools.headers is None:
        return f"the headers of oneCCL (oneccl-cpu-devel) are not installed: {INSTALL}."
    if tools.compiler is None:
        asked = os.environ.get("CXX", "c++")
        return (
            f"it must be built once, and there is no C++ compiler {asked!r}: apt-get install g++, "
            "or name one by the environment variable CXX."
        )
    if tools.python_headers is None:
        return "it must be built once, and there is no Python.h: apt-get install python3-dev."
    return None


def extension_path(tools: Tools) -> Path:
    """Return where the built extension is kept: one for each source, PyTorch, oneCCL and Python."""
    key = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        key.update(file.read_bytes())
    # The extension finds the library where it was when it was built.
    parts = (torch.__version__, tools.version, tools.library, *FLAGS)
    key.update(repr(parts).encode())
    name = f"{MODULE}-torch{torch.__version__}-{key.hexdigest()[:16]}"
    return _cache() / (name + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))


def load(wait_seconds: float = BUILD_SECONDS) -> ModuleType:
    """Import the extension, and build it before if nobody has.

    Of several processes one builds, and the others wait for it.

    Args:
        wait_seconds: How long to wait for a process that builds.

    Raises:
        RuntimeError: Something is missing, the compiler fails, or the wait is over.
    """
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    tools = find_tools()
    path = extension_path(tools)
    reason = missing(tools, is_built=path.exists())
    if reason is not None:
        raise RuntimeError(f"The backend 'ccl' was asked for, but {reason} Or choose 'gloo'.")
    if not path.exists():
        build(tools, path, wait_seconds)
    return _imported(path)


def build(tools: Tools, path: Path, wait_seconds: float = BUILD_SECONDS) -> None:
    """Build the extension, unless another process does so first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(
            f"The backend 'ccl' must be built once, and {path.parent} cannot be written: {error}. "
            "Name another folder by the environment variable TORCH_EXTENSIONS_DIR."
        ) from error
    with _locked(path.with_suffix(".lock"), wait_seconds):
        if path.exists():
            return
        print(
            "lightning_perf: building the oneCCL backend, once, in about a minute.",
            file=sys.stderr,
            flush=True,
        )
        unfinished = path.with_suffix(".unfinished")
        done = subprocess.run(command(tools, unfinished), capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(
                f"The backend 'ccl' could not be built for PyTorch {torch.__version__}. This "
                f"failed: {' '.join(done.args)}\n{done.stderr[-4000:]}"
            )
        unfinished.replace(path)  # all of it is there at once, for those that look


def command(tools: Tools, output: Path) -> list[str]:
    """Return the command that builds the extension."""
    # Not by `torch.utils.cpp_extension`, which looks for CUDA first and needs ninja.
    ours = Path(torch.__file__).parent
    folders = [ours / "include", ours / "include" / "torch" / "csrc" / "api" / "include"]
    folders += [folder for folder in (tools.headers, tools.python_headers) if folder]
    macros = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    # Older versions of PyTorch share their types only with who says the same.
    for part in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        if value := getattr(torch._C, f"_PYBIND11_{part}", None):
            macros.append(f'-DPYBIND11_{part}="{value}"')
    return [
        tools.compiler or "c++",
        *FLAGS,
        *macros,
        *(f"-isystem{folder}" for folder in folders),
        str(SOURCES / "module.cpp"),
        "-o",
        str(output),
        *(f"-L{folder}" for folder in (ours / "lib", tools.library)),
        *("-lc10", "-ltorch_cpu", "-ltorch_python", "-l:libccl.so.1"),
        f"-Wl,-rpath,{tools.library}",
    ]


@contextmanager
def _locked(path: Path, wait_seconds: float) -> Iterator[None]:
    """Hold a lock file. The system frees the lock of a process that was killed."""
    import fcntl  # not on Windows, where nothing is built

    deadline = time.monotonic() + wait_seconds
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"Another process has been building the backend 'ccl' for {wait_seconds:g} "
                        f"seconds, and holds {path}. End it, or wait and start again."
                    ) from None
                time.sleep(0.1)
        yield


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} is no extension of Python. Delete it, and start again.")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise RuntimeError(
            f"The backend 'ccl' was built as {path}, and cannot be loaded: {error}. Delete it, and "
            f"install again: {INSTALL}."
        ) from error
    sys.modules[MODULE] = module
    return module


def _cache() -> Path:
    """Return the folder of built extensions, PyTorch's if the user has chosen one."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return (Path(chosen) if chosen else Path(home)) / "lightning_perf"


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _file_of(package: str, name: str) -> Path | None:
    """Return a file that a package installed, wherever that was."""
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if f"/{file.as_posix()}".endswith(f"/{name}"):
            path = Path(str(file.locate())).resolve()
            return path if path.exists() else None
    return None
