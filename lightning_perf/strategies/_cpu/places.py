"""Which cores each rank of one machine computes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from lightning_perf.launch.kernel_files import format_cpu_list
from lightning_perf.launch.topology import By, Placement, Topology, placements


@dataclass(frozen=True)
class Place:
    """Where a rank computes.

    Attributes:
        compute: Logical CPUs for compute threads; ``None`` leaves the rank where it is.
        workers: Logical CPUs for loader workers.
        threads: Intra-op threads.
        node: NUMA node to take memory from; ``None`` where the choice is left to Linux.
        note: What the user should know, or ``""``.
    """

    compute: frozenset[int] | None
    workers: frozenset[int]
    threads: int
    node: int | None = None
    note: str = ""

    def noted(self, note: str) -> Place:
        """Return the place with one more note."""
        return replace(self, note=", ".join(filter(None, (self.note, note))))

    @property
    def cpus(self) -> str:
        """The compute CPUs in the kernel's list format."""
        return format_cpu_list(self.compute or self.workers)


def place(
    topology: Topology,
    affinities: Sequence[frozenset[int]],
    index: int,
    *,
    by: By = "auto",
    loader_cores: int = 0,
) -> Place:
    """Return where one of the ranks on this machine computes.

    Ranks that come with CPUs of their own, as from a launcher, stay on them. Ranks that share CPUs
    are spread over them: none gets a core of another, and none crosses a border where it can be
    avoided.

    Args:
        topology: The machine, as this rank sees it.
        affinities: Logical CPUs that each rank on this machine may run on.
        index: Which of them this rank is.
        by: The borders, see `placements`.
        loader_cores: Cores of each rank that are left to its loader workers.

    Raises:
        ValueError: No core would be left to compute.
    """
    ranks = len(affinities)
    bound = ranks > 1 and all(a.isdisjoint(b) for a, b in combinations(affinities, 2))
    if bound:
        mine = placements(topology, 1, "machine")[0]
        note = "bound by the launcher"
    elif ranks > len(topology.cores):
        return Place(
            compute=None,
            workers=affinities[index],
            threads=1,
            note=f"not bound: {ranks} ranks share {len(topology.cores)} cores",
        )
    else:
        mine = placements(topology, ranks, by)[index]
        note = ""
    return _with_loader_cores(topology, mine, loader_cores, note)


def _with_loader_cores(topology: Topology, mine: Placement, loader_cores: int, note: str) -> Place:
    if loader_cores >= len(mine.cpus):
        raise ValueError(
            f"loader_cores={loader_cores} was asked for, and a rank has {len(mine.cpus)} cores "
            "here. At least one must be left to compute."
        )
    compute = mine.cpus[: len(mine.cpus) - loader_cores]
    left = frozenset(mine.cpus) - frozenset(compute)
    # Without cores of their own, workers share those of the rank, hardware threads included.
    workers = left | frozenset(mine.siblings) if left else frozenset(mine.cpus + mine.siblings)
    nodes = {cpu.node for cpu in topology.cpus}
    return Place(
        compute=frozenset(compute),
        workers=workers,
        threads=min(mine.threads, len(compute)),
        node=mine.nodes[0] if len(nodes) > 1 and len(mine.nodes) == 1 else None,
        note=note,
    )


def limited(there: Place, chosen: int | None) -> Place:
    """Return the place with the threads that the user wants, if it has the cores for them.

    Args:
        there: Where the rank computes.
        chosen: ``OMP_NUM_THREADS`` if it is the user's.
    """
    if chosen is None or chosen == there.threads:
        return there
    if chosen < there.threads:
        return replace(there, threads=chosen).noted(f"OMP_NUM_THREADS={chosen}")
    return there.noted(f"OMP_NUM_THREADS={chosen} would be more threads than cores")
