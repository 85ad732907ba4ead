"""What the launcher finds on this machine, as one value, so that a plan can be tested anywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lightning_perf.launch.gpus import GPU, installed_gpus
from lightning_perf.launch.kernel_files import read_text
from lightning_perf.launch.libraries import find_libraries, library_folders
from lightning_perf.launch.topology import Topology, this_machine

_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True)
class Machine:
    """What there is to work with.

    Attributes:
        topology: The logical CPUs.
        parents_cpus: Logical CPUs the parent process may run on, None where unknown.
        gpus: The NVIDIA GPUs, whether visible or not.
        libraries: Path of each library of `lightning_perf.launch.libraries` that is installed.
        numactl: ``"works"``; ``"refused"``: it may not set a memory policy; or ``"missing"``.
        taskset: Whether the program ``taskset`` is there.
        glibc: Version of the C library, None if it is another.
        huge_pages: Whether a process may ask for transparent huge pages.
        open_files: Limits on open files, soft and hard; -1 is no limit.
        torchrun_binds: Whether torchrun knows ``--numa-binding``.
    """

    topology: Topology
    parents_cpus: frozenset[int] | None = None
    gpus: tuple[GPU, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    numactl: Literal["works", "refused", "missing"] = "missing"
    taskset: bool = True
    glibc: tuple[int, int] | None = None
    huge_pages: bool = True
    open_files: tuple[int, int] = (1024, 1024)
    torchrun_binds: bool = False


def look_around(environ: Mapping[str, str], python: str | None = None) -> Machine:
    """Return what this machine, a Linux one, offers.

    Args:
        environ: Environment variables.
        python: Path of the Python that will be started, if it is one: its environment may hold
            libraries.
    """
    import resource  # not on Windows

    topology = this_machine()
    return Machine(
        topology=topology,
        parents_cpus=_affinity_of(os.getppid()),
        gpus=installed_gpus(read_text),
        libraries=find_libraries(library_folders(environ, python)),
        # Where there is one node, memory cannot be elsewhere.
        numactl=_try_numactl(topology) if len(topology.memory_nodes) > 1 else "missing",
        taskset=shutil.which("taskset") is not None,
        glibc=_glibc(),
        huge_pages="[never]" not in read_text(_HUGE_PAGES) != "",
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        torchrun_binds=_torchrun_binds(),
    )


def _affinity_of(process: int) -> frozenset[int] | None:
    try:
        return frozenset(os.sched_getaffinity(process))
    except OSError:  # another user's, or hidden by a container
        return None


def _try_numactl(topology: Topology) -> Literal["works", "refused", "missing"]:
    if shutil.which("numactl") is None:
        return "missing"
    # Containers often forbid set_mempolicy, which only shows when it is tried.
    trial = ["numactl", f"--membind={min(topology.memory_nodes)}", "true"]
    try:
        done = subprocess.run(trial, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "refused"
    return "works" if done.returncode == 0 else "refused"


def _glibc() -> tuple[int, int] | None:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", version)
    return (int(found[1]), int(found[2])) if found else None


def _torchrun_binds() -> bool:
    # The text of its parser: to ask the parser itself would import torch, which takes seconds.
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    run = Path(torch.origin).with_name("distributed") / "run.py"
    return "--numa-binding" in read_text(str(run))
