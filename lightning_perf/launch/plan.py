"""What the launcher is going to do: the processes it starts, and what it has to say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_perf.launch.environment import Settings, environment
from lightning_perf.launch.gpus import GPU, visible_gpus
from lightning_perf.launch.kernel_files import format_cpu_list
from lightning_perf.launch.libraries import allocator_among, openmp_among, preloaded
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

PROMISE = "LIGHTNING_PERF_LAUNCH"
"""Variable in which the started process finds, as JSON, what the launcher has promised it."""

# More is no use, and some programs walk through all numbers up to the limit.
_MOST_OPEN_FILES = 2**20


@dataclass(frozen=True)
class Process:
    """One process to start.

    Attributes:
        variables: Environment variables beyond those it inherits.
        command: The program and its arguments, behind the program that binds it, if any.
        affinity: CPUs that the launcher itself binds it to, where no program does; empty for all.
    """

    variables: Mapping[str, str]
    command: tuple[str, ...]
    affinity: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What the launcher is going to do.

    Attributes:
        processes: One for each instance.
        notes: What is missing, refused, or decided otherwise than asked; one line each.
        open_files: Limit on open files to set, None to leave it.
    """

    processes: tuple[Process, ...]
    notes: tuple[str, ...] = ()
    open_files: int | None = None


@dataclass(frozen=True)
class _Seat:
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


def make_plan(
    machine: Machine,
    options: Options,
    command: Sequence[str],
    environ: Mapping[str, str],
    preset: str = "none",
) -> Plan:
    """Decide how to start a program.

    Args:
        machine: What there is.
        options: What is asked for.
        command: The program and its arguments.
        environ: The environment variables of the launcher.
        preset: Name of the preset whose launch half the options are.

    Raises:
        ValueError: More instances were asked for than there are cores, or unknown NUMA nodes.
        RuntimeError: The user asked for something by name that cannot be had here.
    """
    notes: list[str] = []
    seats, command = _seats(machine, options, command, environ, notes)
    processes = []
    for seat in seats:
        settings = environment(machine, options, seat.place, environ)
        if seat.gpu is not None:
            settings.variables["CUDA_VISIBLE_DEVICES"] = str(seat.gpu.index)
        binding, affinity = _binding(machine, options, seat, notes)
        promise = _promise(preset, options, seat.place, settings, bound=bool(binding or affinity))
        if seat.ranks > 1:
            promise["ranks"] = seat.ranks
        settings.variables[PROMISE] = json.dumps(promise, separators=(",", ":"))
        notes += settings.notes
        processes.append(Process(settings.variables, (*binding, *command), affinity))
    notes = list(dict.fromkeys(notes))  # instances say the same
    return Plan(tuple(processes), tuple(notes), _open_files(machine))


def _seats(
    machine: Machine,
    options: Options,
    command: Sequence[str],
    environ: Mapping[str, str],
    notes: list[str],
) -> tuple[list[_Seat], Sequence[str]]:
    """Return where each instance runs, and the command, which torchrun's own binding may change."""
    starter = rank_starter(command)
    gpus = visible_gpus(machine.gpus, environ)
    if starter is not None:
        binds = starter == "torchrun" and machine.torchrun_binds and options.numa == "gpu"
        if binds and len({gpu.node for gpu in gpus} - {-1}) > 1:
            return [_Seat()] * options.instances, with_numa_binding(command)
        notes.append(
            f"{starter} starts the ranks, so their cores and threads are left to it. To have them "
            f"decided for each rank, put the launcher behind it: {starter} ... "
            f"{'--no-python ' if starter == 'torchrun' else ''}lightning-perf launch -- python ..."
        )
        return [_Seat()] * options.instances, command
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
        _Seat(place, gpu=visible[index % len(visible)] if visible else None)
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
) -> _Seat:
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
            return _Seat(place, bound=True)
        # Ranks that are bound to one NUMA node may share it.
        share = len(place.cpus) * len(machine.parents_cpus) // (len(allowed) * rank.ranks)
        return _Seat(replace(place, threads=max(1, min(place.threads, share))), bound=True)
    if options.numa == "gpu" and len(gpus) >= rank.ranks:
        return _gpu_seats(topology, rank.ranks, gpus, notes)[rank.rank]
    if options.numa == "gpu" and len(gpus) == 1:  # each rank sees its own only
        everybodys = _gpu_seats(topology, len(machine.gpus), machine.gpus, notes)
        return everybodys[machine.gpus.index(gpus[0])]
    if rank.ranks > len(topology.cores):
        notes.append(f"{rank.ranks} ranks on {len(topology.cores)} cores: they are not bound.")
        (place,) = placements(topology, 1)
        return _Seat(replace(place, threads=1))
    return _Seat(placements(topology, rank.ranks, _border(options))[rank.rank])


def _gpu_seats(
    topology: Topology, instances: int, gpus: tuple[GPU, ...], notes: list[str]
) -> list[_Seat]:
    """Return for each instance a share of the NUMA node of its GPU."""
    if not gpus or (instances == 1 and len(gpus) > 1):
        reason = f"sees {len(gpus)} GPUs" if gpus else "sees no GPU that nvidia-smi lists"
        notes.append(f"Not bound to the NUMA node of a GPU: the process {reason}.")
        return [_Seat(place) for place in placements(topology, instances)]
    mine = [gpus[index % len(gpus)] for index in range(instances)]
    if instances > len(gpus):
        notes.append(f"{instances} instances share {len(gpus)} GPUs.")
    by_node: dict[int, list[Placement]] = {}
    for node in {gpu.node for gpu in mine}:
        near = tuple(
            replace(cpu, allowed=cpu.allowed and cpu.node == node) for cpu in topology.cpus
        )
        there = replace(topology, cpus=near)
        sharing = sum(gpu.node == node for gpu in mine)
        if sharing > len(there.cores):
            notes.append(
                f"Not bound to the NUMA node of a GPU: the system does not tell it, or it has "
                f"fewer usable cores than GPUs (node {node})."
            )
            return [
                _Seat(place, gpu=gpu if instances > 1 else None)
                for place, gpu in zip(placements(topology, instances), mine, strict=True)
            ]
        by_node[node] = placements(there, sharing)
    several = instances > 1
    return [_Seat(by_node[gpu.node].pop(0), gpu=gpu if several else None) for gpu in mine]


def _binding(
    machine: Machine, options: Options, seat: _Seat, notes: list[str]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the program that binds a process, or the CPUs that the launcher binds it to."""
    place = seat.place
    if place is None or seat.bound or options.numa == "none":
        return (), ()
    # Its cores' other hardware threads too: loader workers run there.
    cpus = sorted({*place.cpus, *place.siblings})
    everything = {cpu.id for cpu in machine.topology.usable}
    nodes = machine.topology.memory_nodes
    elsewhere = len(nodes) > 1 and place.nodes and set(place.nodes) < nodes
    if set(cpus) == everything and not elsewhere:
        return (), ()
    listed = format_cpu_list(cpus)
    if elsewhere:
        memory = format_cpu_list(place.nodes)
        if machine.numactl == "works":
            return ("numactl", f"--physcpubind={listed}", f"--membind={memory}"), ()
        notes.append(
            "Memory is not bound to NUMA nodes: numactl is not installed (apt-get install numactl)."
            if machine.numactl == "missing"
            else "Memory is not bound to NUMA nodes: numactl may not do it here (a container "
            "needs the capability SYS_NICE). Each thread still allocates on its own node first."
        )
    if machine.taskset:
        return ("taskset", "--cpu-list", listed), ()
    return (), tuple(cpus)


def _promise(
    preset: str, options: Options, place: Placement | None, settings: Settings, *, bound: bool
) -> dict[str, object]:
    environ = {**settings.environ, **settings.variables}
    libraries = preloaded(environ.get("LD_PRELOAD", ""))
    promise: dict[str, object] = {
        "preset": preset,
        "allocator": allocator_among(libraries) or "glibc",
        "openmp": next(iter(openmp_among(libraries)), "gnu"),
    }
    if place is not None and bound:
        promise["cpus"] = format_cpu_list([*place.cpus, *place.siblings])
    if "OMP_NUM_THREADS" in settings.variables:
        promise["threads"] = int(settings.variables["OMP_NUM_THREADS"])
    if options.interop_threads is not None:
        promise["interop_threads"] = options.interop_threads
    return promise


def _open_files(machine: Machine) -> int | None:
    """Return the soft limit on open files to set: as high as allowed, for tensors of workers."""
    soft, hard = machine.open_files
    wanted = _MOST_OPEN_FILES if hard < 0 else min(hard, _MOST_OPEN_FILES)
    return wanted if 0 <= soft < wanted else None
