"""What the launcher sets, and what torch's own launcher sets, as variants of a comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_perf.benchmark import Variant
from lightning_perf.launch.environment import environment
from lightning_perf.launch.machine import look_around
from lightning_perf.launch.options import Options, launch_half
from lightning_perf.launch.topology import placements

TASKS = ("convnet", "resnet50", "encoder")
# glibc as it is. The benchmark settles malloc in both variants, unless a variant has a setting of
# its own; this one changes nothing.
GLIBC = Variant("glibc", env={"MALLOC_PERTURB_": "0"})
DECIDED = ("OMP_", "KMP_", "GOMP_", "MALLOC_", "LD_PRELOAD", "GLIBC_", "THP_")
SHOW = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


def launched(name: str, options: Options | None = None, **asked: Any) -> Variant:
    """Return a variant with the variables that the launcher sets for these options."""
    machine = look_around({}, sys.executable)
    chosen = (options or Options(allocator="none", threads="none")).overridden(asked)
    (place,) = placements(machine.topology, 1)
    found = environment(machine, chosen, place, {})
    return Variant(name, env=found.variables or {"MALLOC_PERTURB_": "0"})


def run_cpu() -> Variant:
    """Return a variant with the variables that torch.backends.xeon.run_cpu sets by default.

    It also binds the process to all cores that lscpu lists, on a machine with one node where it is
    anyway.
    """
    environ = {name: v for name, v in os.environ.items() if not name.startswith(DECIDED)}
    environ["VIRTUAL_ENV"] = sys.prefix  # where it looks for libraries
    with tempfile.TemporaryDirectory() as folder:
        script, shown = Path(folder) / "show.py", Path(folder) / "environ.json"
        script.write_text(SHOW)
        command = [sys.executable, "-m", "torch.backends.xeon.run_cpu", "--ninstances", "1"]
        subprocess.run(
            [*command, str(script), str(shown)],
            env=environ,
            capture_output=True,
            timeout=120,
            check=True,
        )
        found = json.loads(shown.read_text())
    theirs = {n: v for n, v in found.items() if n.startswith(DECIDED)}
    return Variant("run_cpu", env={**GLIBC.env, **theirs})


def comparisons() -> Iterator[tuple[str, Variant | Callable[[], Variant], Variant]]:
    """Yield task, baseline and variant of everything the launcher decides on a CPU."""
    cores = len(look_around({}).topology.cores)
    twice = Variant("twice-the-threads", env={"OMP_NUM_THREADS": str(2 * cores)})
    for task in TASKS:
        for allocator in ("glibc", "jemalloc", "tcmalloc"):
            yield task, GLIBC, launched(f"allocator-{allocator}", allocator=allocator)
        yield task, Variant("none"), launched("openmp-intel", openmp="intel")
        yield task, Variant("none"), launched("huge-pages", huge_pages=True)
        yield task, twice, launched("threads", threads="auto")
        bound = launched("bind-threads", threads="auto", bind_threads=True)
        yield task, launched("threads", threads="auto"), bound
        yield task, run_cpu, launched("launch", launch_half("cpu"))
