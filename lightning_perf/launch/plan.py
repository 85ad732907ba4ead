"""What the launcher is going to do: the processes it starts, and what it has to say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_perf.launch.environment import Settings, environment
from lightning_perf.launch.kernel_files import format_cpu_list
from lightning_perf.launch.libraries import allocator_among, openmp_among, preloaded
from lightning_perf.launch.machine import Machine
from lightning_perf.launch.options import Options
from lightning_perf.launch.seats import Seat, assign_seats
from lightning_perf.launch.topology import Placement

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
    seats, command = assign_seats(machine, options, command, environ, notes)
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


def _binding(
    machine: Machine, options: Options, seat: Seat, notes: list[str]
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
    threads = settings.variables.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():  # for nested regions there may be several
        promise["threads"] = int(threads)
    if options.interop_threads is not None:
        promise["interop_threads"] = options.interop_threads
    return promise


def _open_files(machine: Machine) -> int | None:
    """Return the soft limit on open files to set: as high as allowed, for tensors of workers."""
    soft, hard = machine.open_files
    wanted = _MOST_OPEN_FILES if hard < 0 else min(hard, _MOST_OPEN_FILES)
    return wanted if 0 <= soft < wanted else None
