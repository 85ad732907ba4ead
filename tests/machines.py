"""Machines as the launcher finds them, for its tests."""

from __future__ import annotations

from typing import Any

import layouts

from lightning_perf.launch.machine import Machine
from lightning_perf.launch.topology import Topology, read_topology

TWO_SOCKETS = layouts.server(2, 4, smt=2)  # cores 0-3 and 4-7, their siblings 8-11 and 12-15
LIBRARIES = {
    "jemalloc": "/lib/libjemalloc.so.2",
    "tcmalloc": "/lib/libtcmalloc_minimal.so.4",
    "intel": "/venv/lib/libiomp5.so",
}


def topology(files: layouts.Files) -> Topology:
    return read_topology(layouts.reader(files))


def machine(files: layouts.Files = TWO_SOCKETS, **facts: Any) -> Machine:
    """A machine on which everything is there and permitted, but for what is said otherwise."""
    known = {
        "libraries": LIBRARIES,
        "numactl": "works",
        "glibc": (2, 36),
        "open_files": (1024, 1024),
        "torchrun_binds": True,
    }
    return Machine(topology(files), **{**known, **facts})
