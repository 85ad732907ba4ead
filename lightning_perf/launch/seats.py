"""Where each instance runs: by its number, its rank under another launcher, or its GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_perf.launch.gpus import GPU, visible_gpus
from lightning_perf.launch.kernel_files import format_cpu_list
from lightning_perf.launch.machine import Machine
from lightning_perf.launch.options import Options
from lightning_perf.launch.outer import (
    LocalRank,
    bound_by_outer,
    local_rank,
    rank_starter,
    with_numa_binding,
)
from lightning_perf.launch.topology import By, Placement, Topology, placements


@dataclass(frozen=True)
class Seat:
    """Where one instance runs.

    Attributes:
        place: Its cores, None for anywhere.
        bound: Whether somebody has bound it to them already.
        gpu: The only GPU it may see, None for all.
        ranks: Ranks of its program on this machine that the launcher knows of.
    """

    place: Placement | None = None
    bound: bool = False
    gpu: GPU | None = None
    ranks: int = 1


def assign_seats(
    machine: Machine,
    options: Options,
    command: Sequence[str],
    environ: Mapping[str, str],
    notes: list[str],
) -> tuple[list[Seat], Sequence[str]]:
    """Return where each instance runs, and the command, which torchrun's own binding may change.

    Args:
        machine: What there is.
        options: What is asked for.
        command: The program and its arguments.
        environ: The environment variables of the launcher.
        notes: Gets what there is to say, line by line.

    Raises:
        ValueError: More instances were asked for than there are cores, or unknown NUMA nodes.
    """
    starter = rank_starter(command)
    gpus = visible_gpus(machine.gpus, environ)
    if starter is not None:
        binds = starter == "torchrun" and machine.torchrun_binds and options.numa == "gpu"
        if binds and len({gpu.node for gpu in gpus} - {-1}) > 1:
            return [Seat()] * options.instances, with_numa_binding(command)
        notes.append(
            f"{starter} starts the ranks, so their cores and threads are left to it. To have them "
            f"decided for each rank, put the launcher behind it: {starter} ... "
            f"{'--no-python ' if starter == 'torchrun' else ''}lightning-perf launch -- python ..."
        )
        return [Seat()] * options.instances, command
    topology = _on_nodes(machine.topology, options)
    notes += topology.left_out()
    rank = local_rank(environ)
    if rank is not None:
        seat = _rank_seat(machine, topology, options, environ, rank, gpus, notes)
        return [replace(seat, gpu=None, ranks=rank.ranks)], command
    if options.numa == "gpu":
        return _gpu_seats(topology, options.instances, gpus, notes), command
    by = _border(options)
    places = placements(topology, options.instances, by)
    if options.instances == 1 and len(places[0].nodes) > 1 and options.threads == "auto":
        notes.append(
            f"One process computes on {len(places[0].nodes)} NUMA nodes, and reads memory across "
            "them. Preset cpu_ddp gives each node a rank; --numa 0 stays on one."
        )
    visible = gpus if len(places) > 1 and gpus else ()
    return [
        Seat(place, gpu=visible[index % len(visible)] if visible else None)
        for index, place in enumerate(places)
    ], command


def _on_nodes(topology: Topology, options: Options) -> Topology:
    """Return the topology as seen from the NUMA nodes that were asked for."""
    if not options.nodes:
        return topology
    known = {cpu.node for cpu in topology.usable}
    if not options.nodes <= known:
        raise ValueError(
            f"numa={options.numa} was asked for; the NUMA nodes with usable cores are "
            f"{format_cpu_list(known - {-1}) or 'unknown'} here."
        )
    cpus = tuple(
        replace(cpu, allowed=cpu.allowed and cpu.node in options.nodes) for cpu in topology.cpus
    )
    return replace(topology, cpus=cpus)


def _border(options: Options) -> By:
    borders: dict[str, By] = {"socket": "socket", "node": "numa", "l3": "l3", "core": "core"}
    return borders.get(options.numa, "auto")


def _rank_seat(
    machine: Machine,
    topology: Topology,
    options: Options,
    environ: Mapping[str, str],
    rank: LocalRank,
    gpus: tuple[GPU, ...],
    notes: list[str],
) -> Seat:
    """Return where this process runs as one of the ranks that another launcher has started."""
    if options.instances > 1:
        raise ValueError(
            f"{options.instances} instances were asked for, and {rank.launcher} starts "
            f"{rank.ranks} ranks already. Leave out one of the two."
        )
    allowed = frozenset(cpu.id for cpu in machine.topology.usable)
    if bound_by_outer(rank.launcher, environ, allowed, machine.parents_cpus):
        notes.append(f"{rank.launcher} has bound this rank to CPUs {format_cpu_list(allowed)}.")
        (place,) = placements(topology, 1)
        if rank.launcher == "srun" or machine.parents_cpus is None:
            return Seat(place, bound=True)
        # Ranks that are bound to one NUMA node may share it.
        share = len(place.cpus) * len(machine.parents_cpus) // (len(allowed) * rank.ranks)
        return Seat(replace(place, threads=max(1, min(place.threads, share))), bound=True)
    if options.numa == "gpu" and len(gpus) >= rank.ranks:
        return _gpu_seats(topology, rank.ranks, gpus, notes)[rank.rank]
    if options.numa == "gpu" and len(gpus) == 1:  # each rank sees its own only
        everybodys = _gpu_seats(topology, len(machine.gpus), machine.gpus, notes)
        return everybodys[machine.gpus.index(gpus[0])]
    if rank.ranks > len(topology.cores):
        notes.append(f"{rank.ranks} ranks on {len(topology.cores)} cores: they are not bound.")
        (place,) = placements(topology, 1)
        return Seat(replace(place, threads=1))
    return Seat(placements(topology, rank.ranks, _border(options))[rank.rank])


def _gpu_seats(
    topology: Topology, instances: int, gpus: tuple[GPU, ...], notes: list[str]
) -> list[Seat]:
    """Return for each instance a share of the NUMA node of its GPU."""
    nodes = {gpu.node for gpu in gpus}
    if not gpus or (instances == 1 and len(nodes) > 1):
        seen = f"GPUs on {len(nodes)} of them" if gpus else "no GPU that nvidia-smi lists"
        notes.append(f"Not bound to the NUMA node of a GPU: the process sees {seen}.")
        return [Seat(place) for place in placements(topology, instances)]
    mine = [gpus[index % len(gpus)] for index in range(instances)]
    if instances > len(gpus):
        notes.append(f"{instances} instances share {len(gpus)} GPUs.")
    by_node: dict[int, list[Placement]] = {}
    for node in {gpu.node for gpu in mine}:
        near = tuple(
            replace(cpu, allowed=cpu.allowed and cpu.node == node) for cpu in topology.cpus
        )
        sharing = sum(gpu.node == node for gpu in mine)
        quota = None if topology.quota is None else topology.quota * sharing / instances
        there = replace(topology, cpus=near, quota=quota)
        if sharing > len(there.cores):
            notes.append(
                f"Not bound to the NUMA node of a GPU: the system does not tell it, or it has "
                f"fewer usable cores than GPUs (node {node})."
            )
            return [
                Seat(place, gpu=gpu if instances > 1 else None)
                for place, gpu in zip(placements(topology, instances), mine, strict=True)
            ]
        by_node[node] = placements(there, sharing)
    several = instances > 1
    return [Seat(by_node[gpu.node].pop(0), gpu=gpu if several else None) for gpu in mine]
