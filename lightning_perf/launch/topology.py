"""The logical CPUs of a machine, read from the text files of Linux, and their split into places."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar, get_args

from lightning_perf.launch.kernel_files import (
    CPU,
    NODE,
    UNKNOWN,
    Read,
    cpu_quota,
    efficient_cores,
    l3_sharers,
    parse_cpu_list,
    parse_fields,
    parse_number,
    read_text,
)

Kind = Literal["performance", "efficient"]
T = TypeVar("T")
By = Literal["auto", "socket", "numa", "l3", "core", "machine"]


@dataclass(frozen=True, kw_only=True)
class LogicalCPU:
    """One hardware thread.

    Attributes:
        id: Number of the logical CPU.
        core: Its physical core: the lowest logical CPU of that core.
        socket: Its socket, -1 where unknown.
        node: Its NUMA node, -1 where unknown.
        l3: Its L3 cache: the lowest logical CPU of those that share it.
        kind: ``"efficient"`` for the slower cores of a hybrid CPU, else ``"performance"``.
        online: Whether the kernel runs anything on it.
        allowed: Whether affinity and cpuset let this process run on it.
    """

    id: int
    core: int
    socket: int = UNKNOWN
    node: int = UNKNOWN
    l3: int = UNKNOWN
    kind: Kind = "performance"
    online: bool = True
    allowed: bool = True


@dataclass(frozen=True)
class Topology:
    """The logical CPUs of a machine, and what one process may use of them.

    Attributes:
        cpus: All logical CPUs, by number.
        quota: CPU time the control group allows, in CPUs, or None.
        memory_nodes: NUMA nodes with memory that this process may allocate on.
    """

    cpus: tuple[LogicalCPU, ...]
    quota: float | None = None
    memory_nodes: frozenset[int] = frozenset()

    @property
    def usable(self) -> tuple[LogicalCPU, ...]:
        """The logical CPUs that are online and allowed."""
        return tuple(cpu for cpu in self.cpus if cpu.online and cpu.allowed)

    @property
    def cores(self) -> tuple[LogicalCPU, ...]:
        """One logical CPU for each core worth a compute thread, neighbours side by side.

        That is the first usable hardware thread of each core. Efficient cores are left out beside
        performance cores: the work is split evenly, and the slowest thread holds up all others.
        """
        first: dict[int, LogicalCPU] = {}
        for cpu in self.usable:
            first.setdefault(cpu.core, cpu)
        fast = [cpu for cpu in first.values() if cpu.kind == "performance"]
        return tuple(
            sorted(fast or first.values(), key=lambda cpu: (cpu.socket, cpu.node, cpu.l3, cpu.core))
        )

    @property
    def threads(self) -> int:
        """Compute threads worth running at once: one per core, as far as the quota allows.

        A fractional quota is rounded up: rounded down, the fraction could never be used.
        """
        cores = len(self.cores)
        return cores if self.quota is None else max(1, min(cores, math.ceil(self.quota)))

    def left_out(self) -> list[str]:
        """Return what is not used and why, one line each, for the user to read."""
        lines = []
        offline = sum(not cpu.online for cpu in self.cpus)
        if offline:
            lines.append(f"{_cpus(offline)} offline.")
        elsewhere = sum(cpu.online and not cpu.allowed for cpu in self.cpus)
        if elsewhere:
            lines.append(f"{_cpus(elsewhere)} not allowed by affinity or cpuset.")
        kinds = {cpu.kind for cpu in self.usable}
        if len(kinds) == 2:
            slow = {cpu.core for cpu in self.usable if cpu.kind == "efficient"}
            lines.append(
                f"{len(slow)} efficient cores left out: threads on them would hold up the others."
            )
        if self.threads < len(self.cores):
            lines.append(
                f"{self.threads} threads on {len(self.cores)} cores: the control group allows "
                f"{self.quota:g} CPUs."
            )
        return lines


@dataclass(frozen=True)
class Placement:
    """Where one process computes.

    Attributes:
        cpus: One logical CPU for each of its physical cores.
        siblings: The other usable hardware threads of these cores, idle while it computes: room
            for loader workers.
        nodes: NUMA nodes to allocate on; empty where unknown.
        threads: Compute threads: one per core, fewer where the quota allows fewer.
    """

    cpus: tuple[int, ...]
    siblings: tuple[int, ...]
    nodes: tuple[int, ...]
    threads: int


def this_machine() -> Topology:
    """Return the topology as this process, on Linux, sees it.

    Example:
        >>> this_machine().threads >= 1
        True
    """
    # Not from /proc/self/status: that is the main thread's, this one may be bound otherwise.
    return read_topology(read_text, frozenset(os.sched_getaffinity(0)))


def read_topology(read: Read, allowed: frozenset[int] | None = None) -> Topology:
    """Return the topology that the text files of /proc and /sys describe.

    Where a file is missing (an old kernel, a sandbox), each CPU counts as a core of its own, and
    all lie on one socket, node and cache.

    Args:
        read: Returns the content of a text file, ``""`` if it cannot be read.
        allowed: Logical CPUs this process may run on; from /proc/self/status if None.
    """
    status = parse_fields(read("/proc/self/status"))
    if allowed is None:
        allowed = parse_cpu_list(status.get("Cpus_allowed_list", ""))
    online = parse_cpu_list(read(f"{CPU}/online")) or allowed
    present = parse_cpu_list(read(f"{CPU}/present")) | online
    nodes = parse_cpu_list(read(f"{NODE}/online"))
    node_of = {
        cpu: node for node in nodes for cpu in parse_cpu_list(read(f"{NODE}/node{node}/cpulist"))
    }
    efficient = efficient_cores(read, present)

    def describe(cpu: int) -> LogicalCPU:
        folder = f"{CPU}/cpu{cpu}/topology"
        return LogicalCPU(
            id=cpu,
            core=min(parse_cpu_list(read(f"{folder}/thread_siblings_list")) or {cpu}),
            socket=parse_number(read(f"{folder}/physical_package_id")),
            node=node_of.get(cpu, UNKNOWN),
            l3=min(l3_sharers(read, cpu), default=UNKNOWN),
            kind="efficient" if cpu in efficient else "performance",
            online=cpu in online,
            allowed=cpu in allowed,
        )

    with_memory = parse_cpu_list(read(f"{NODE}/has_memory")) or nodes
    memory = parse_cpu_list(status.get("Mems_allowed_list", "")) or nodes
    cpus = tuple(describe(cpu) for cpu in sorted(present))
    return Topology(cpus, cpu_quota(read), nodes & with_memory & memory)


def placements(
    topology: Topology, instances: int | None = None, by: By = "auto"
) -> list[Placement]:
    """Split what a process may use into places for several, one core never in two of them.

    By default one for each domain. A given number of instances is split over the domains as evenly
    as their cores allow, and evenly within each, so that none crosses a border. Only where there
    are fewer instances than domains some have to: then all cores, in the order of the machine, are
    split evenly.

    Args:
        topology: The machine as this process sees it.
        instances: How many; as many as there are domains if None.
        by: Which borders not to cross: ``"socket"``, ``"numa"``, ``"l3"``, ``"core"``;
            ``"machine"``: there are none; ``"auto"``: NUMA nodes, or sockets where those are
            unknown.

    Raises:
        ValueError: ``by`` is none of these, or there are fewer cores than instances.

    Example:
        >>> cpus = [LogicalCPU(id=cpu, core=cpu, socket=0, node=cpu // 4) for cpu in range(8)]
        >>> [place.cpus for place in placements(Topology(tuple(cpus)))]
        [(0, 1, 2, 3), (4, 5, 6, 7)]
        >>> [place.cpus for place in placements(Topology(tuple(cpus)), 3)]
        [(0, 1), (2, 3), (4, 5, 6, 7)]
    """
    domains = _domains(topology, by)
    if instances is None:
        instances = len(domains)
    cores = [cpu for domain in domains for cpu in domain]
    if not 1 <= instances <= len(cores):
        raise ValueError(
            f"{instances} instances were asked for; it is 1 to {len(cores)} here, the usable "
            f"cores. {' '.join(topology.left_out())}".rstrip()
        )
    if instances < len(domains):
        groups = _split(cores, instances)
    else:
        counts = _counts([len(domain) for domain in domains], instances)
        groups = [
            group
            for domain, count in zip(domains, counts, strict=True)
            for group in _split(domain, count)
        ]
    budget = _split(range(topology.threads), instances)
    return [
        _placement(topology, group, max(1, len(share)))
        for group, share in zip(groups, budget, strict=True)
    ]


def _placement(topology: Topology, group: Sequence[LogicalCPU], budget: int) -> Placement:
    cores = {cpu.core for cpu in group}
    first = {cpu.id for cpu in group}
    limited = topology.threads < len(topology.cores)
    return Placement(
        cpus=tuple(cpu.id for cpu in group),
        siblings=tuple(c.id for c in topology.usable if c.core in cores and c.id not in first),
        nodes=tuple(sorted({cpu.node for cpu in group} & topology.memory_nodes)),
        threads=min(len(group), budget) if limited else len(group),
    )


def _domains(topology: Topology, by: By) -> list[list[LogicalCPU]]:
    if by not in get_args(By):
        raise ValueError(f"by={by!r} was asked for; it is one of {', '.join(get_args(By))}.")
    keys: dict[str, Callable[[LogicalCPU], tuple[int, ...]]] = {
        "machine": lambda cpu: (),
        "socket": lambda cpu: (cpu.socket,),
        # The socket too: it is the border where nodes are unknown, and no node spans two.
        "numa": lambda cpu: (cpu.socket, cpu.node),
        "l3": lambda cpu: (cpu.socket, cpu.node, cpu.l3),
        "core": lambda cpu: (cpu.core,),
    }
    key = keys["numa" if by == "auto" else by]
    domains: dict[tuple[int, ...], list[LogicalCPU]] = {}
    for cpu in topology.cores:
        domains.setdefault(key(cpu), []).append(cpu)
    return list(domains.values())


def _counts(sizes: Sequence[int], instances: int) -> list[int]:
    """Return how many instances each domain takes, at least one each."""
    counts = [1] * len(sizes)
    for _ in range(instances - len(sizes)):
        # The next one goes where an instance has most cores; a full domain has one each.
        roomiest = max(range(len(sizes)), key=lambda index: sizes[index] / counts[index])
        counts[roomiest] += 1
    return counts


def _split(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Split a sequence into parts whose lengths differ by at most one, the longer ones first."""
    length, longer = divmod(len(items), parts)
    ends = [length * part + min(part, longer) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def _cpus(number: int) -> str:
    return "1 CPU is" if number == 1 else f"{number} CPUs are"
