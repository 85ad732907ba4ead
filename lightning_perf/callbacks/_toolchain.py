"""What TorchInductor needs on the machine."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

_COMPILERS = {"win32": "cl", "darwin": "clang++"}
_INSTALL = {
    "win32": "Install the C++ tools of Visual Studio Build Tools and start from their prompt",
    "darwin": "Run `xcode-select --install`",
    "linux": "Install it with `apt install g++`, `dnf install gcc-c++` or `conda install gxx`",
}


def what_inductor_lacks(
    device: torch.device,
    *,
    platform: str = sys.platform,
    environ: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    headers: Path | None = None,
) -> str | None:
    """Return what backend ``inductor`` lacks to make code for a device, with the way out.

    Args:
        device: Where the model is.
        platform: `sys.platform`.
        environ: Environment variables.
        which: Finds a program.
        headers: Folder of Python's C headers, by default that of this Python.
    """
    if device.type == "cuda":
        return _what_triton_lacks(device)
    if device.type != "cpu":
        return None
    compiler = environ.get("CXX") or _COMPILERS.get(platform, "g++")
    program = shlex.split(compiler, posix=platform != "win32")[0]
    if which(program) is None:
        install = _INSTALL.get(platform, _INSTALL["linux"])
        return (
            f"TorchInductor needs a C++ compiler and {compiler!r} is not there. {install}, or name "
            "one in the environment variable CXX."
        )
    headers = headers or Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        return (
            f"TorchInductor needs Python's C headers and {headers}/Python.h is not there. Install "
            "them with `apt install python3-dev` or `dnf install python3-devel`."
        )
    return None


def _what_triton_lacks(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "TorchInductor needs Triton on a GPU. Install it with `pip install triton`."
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or newer."
    return None
