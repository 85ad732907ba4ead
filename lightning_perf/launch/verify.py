"""Whether what the launcher promised is in effect, seen from inside the process it started."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_perf.launch.kernel_files import format_cpu_list, parse_cpu_list, read_text
from lightning_perf.launch.libraries import allocator_among, openmp_among
from lightning_perf.launch.options import launch_half
from lightning_perf.launch.plan import PROMISE

_MAPPED = re.compile(r"^\S+ r\S+ \S+ \S+ \S+ +(/.*\.so[.\d]*)$", re.MULTILINE)


@dataclass(frozen=True)
class InEffect:
    """What is in effect in a process.

    Attributes:
        allocator: ``"jemalloc"``, ``"tcmalloc"`` or another that is loaded, else ``"glibc"``.
        openmp: The OpenMP runtimes that are loaded, the one that runs threads first.
        cpus: Logical CPUs it may run on.
        threads: ``OMP_NUM_THREADS``, None where unset.
    """

    allocator: str
    openmp: tuple[str, ...]
    cpus: frozenset[int]
    threads: int | None


def in_effect(maps: str, environ: Mapping[str, str], cpus: frozenset[int]) -> InEffect:
    """Return what is in effect in a process.

    Args:
        maps: Content of its /proc/self/maps.
        environ: Its environment variables.
        cpus: Logical CPUs it may run on.

    Example:
        >>> line = "7f00-7f01 r-xp 00000000 08:01 42 /usr/lib/libjemalloc.so.2"
        >>> in_effect(line, {}, frozenset({0})).allocator
        'jemalloc'
    """
    libraries = list(dict.fromkeys(_MAPPED.findall(maps)))
    runtimes = openmp_among(libraries)
    # One that is loaded first, by LD_PRELOAD, takes over the functions of the one torch brings.
    first = openmp_among(environ.get("LD_PRELOAD", "").replace(":", " ").split())
    runtimes.sort(key=lambda runtime: runtime not in first)
    threads = environ.get("OMP_NUM_THREADS", "")
    return InEffect(
        allocator_among(libraries) or "glibc",
        tuple(runtimes),
        cpus,
        int(threads) if threads.isdecimal() else None,
    )


def broken_promises(promise: Mapping[str, Any], effect: InEffect) -> list[str]:
    """Return what the launcher promised and is not in effect, one line each.

    A strategy may have bound a rank to a part of the promised CPUs, and given it other threads:
    that is no broken promise.

    Args:
        promise: What the launcher has promised.
        effect: What is in effect.
    """
    broken = []
    allocator = promise.get("allocator", effect.allocator)
    if allocator != effect.allocator:
        broken.append(f"allocator {allocator}, but {effect.allocator} is loaded")
    openmp = promise.get("openmp", "gnu")
    if effect.openmp and openmp != effect.openmp[0]:
        broken.append(f"OpenMP runtime {openmp}, but {effect.openmp[0]} is loaded")
    cpus = parse_cpu_list(str(promise.get("cpus", "")))
    if cpus and not effect.cpus <= cpus:
        broken.append(
            f"CPUs {format_cpu_list(cpus)}, but it may run on {format_cpu_list(effect.cpus)}"
        )
    if "threads" in promise and effect.threads is None:
        broken.append(f"{promise['threads']} threads, but OMP_NUM_THREADS is not set any more")
    return broken


def promised(environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return what a launcher has promised this process, None if none has started it."""
    try:
        promise = json.loads(environ.get(PROMISE, ""))
    except ValueError:
        return None
    return promise if isinstance(promise, dict) else None


def remark(
    preset: str, environ: Mapping[str, str], command: Sequence[str], effect: InEffect
) -> str | None:
    """Return what to tell the user of a run about its preset's launch half, None if nothing.

    Args:
        preset: Name of the preset.
        environ: Environment variables.
        command: The command line of this process, the interpreter first.
        effect: What is in effect.
    """
    promise = promised(environ)
    if promise is not None:
        broken = broken_promises(promise, effect)
        return f"The launcher promised {'; '.join(broken)}." if broken else None
    if launch_half(preset) is None:
        return None
    return (
        f"Preset {preset} has a launch half (cores, threads, allocator) that is not in effect: "
        f"{launch_command(preset, environ, command)}"
    )


def launch_command(preset: str, environ: Mapping[str, str], command: Sequence[str]) -> str:
    """Return the command by which a run would be started with a preset's launch half.

    Example:
        >>> launch_command("cpu", {}, ["python", "train.py", "--lr", "0.1"])
        'lightning-perf launch --preset cpu -- python train.py --lr 0.1'
    """
    launch = f"lightning-perf launch --preset {preset} --"
    if any(os.path.basename(word) == "ipykernel_launcher" for word in command):
        return f"{launch} jupyter lab"
    words = shlex.join(command)
    if "TORCHELASTIC_RUN_ID" in environ:
        return f"torchrun ... --no-python {launch} {words}"
    return f"{launch} {words}"


def remark_on_this_process(preset: str) -> str | None:
    """Return what to tell the user about this process; None where there is no launcher for it."""
    if sys.platform != "linux":
        return None
    effect = in_effect(read_text("/proc/self/maps"), os.environ, frozenset(os.sched_getaffinity(0)))
    spawned = multiprocessing.parent_process() is not None  # its own command line starts a worker
    command = [sys.executable, *sys.argv] if spawned else sys.orig_argv
    return remark(preset, os.environ, command, effect)
