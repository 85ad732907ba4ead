"""Launchers around this one: torchrun, srun and mpirun start one of it for each rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

# Launcher, local rank, ranks on this machine.
_VARIABLES = (
    ("torchrun", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Programs that start ranks, perhaps on other machines; they read the placement from their own
# options, and know better than anybody in front of them.
_RANK_STARTERS = ("torchrun", "srun", "mpirun", "mpiexec", "accelerate", "deepspeed")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_NUMA_BINDING = "--numa-binding"


@dataclass(frozen=True)
class LocalRank:
    """The place of this process among those that another launcher started on this machine.

    Attributes:
        launcher: Which one.
        rank: Its number on this machine.
        ranks: How many there are on this machine.
    """

    launcher: str
    rank: int
    ranks: int


def local_rank(environ: Mapping[str, str]) -> LocalRank | None:
    """Return the place that another launcher has given this process, None where there is none.

    Example:
        >>> local_rank({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
        LocalRank(launcher='torchrun', rank=1, ranks=2)
    """
    for launcher, rank, ranks in _VARIABLES:
        numbers = environ.get(rank, ""), environ.get(ranks, "")
        if all(number.isdecimal() for number in numbers):
            return LocalRank(launcher, int(numbers[0]), int(numbers[1]))
    # A batch script has a local id too, but is no step that srun started.
    if "SLURM_STEP_ID" in environ and environ.get("SLURM_LOCALID", "").isdecimal():
        ranks_here = tasks_per_node(environ)
        return LocalRank("srun", int(environ["SLURM_LOCALID"]), ranks_here)
    return None


def tasks_per_node(environ: Mapping[str, str]) -> int:
    """Return how many tasks the step has on this node.

    Example:
        >>> tasks_per_node({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "1"})
        4
    """
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found:
            counts += [int(found[1])] * int(found[2] or 1)
    node = environ.get("SLURM_NODEID", "0")
    index = int(node) if node.isdecimal() else 0
    return counts[index] if index < len(counts) else 1


def bound_by_outer(
    launcher: str,
    environ: Mapping[str, str],
    allowed: frozenset[int],
    parents: frozenset[int] | None,
) -> bool:
    """Return whether the other launcher has bound this process to some of the CPUs already.

    Args:
        launcher: Its name.
        environ: Environment variables.
        allowed: Logical CPUs this process may run on.
        parents: Those its parent process may run on, None where unknown.
    """
    if launcher == "srun":
        # Its parent is a daemon, whose CPUs are not those of the job.
        binding = environ.get("SLURM_CPU_BIND_TYPE", "")
        return binding.startswith(("map_", "mask_", "rank"))
    return parents is not None and allowed < parents


def rank_starter(command: Sequence[str]) -> str | None:
    """Return the name of the launcher that a command starts, None if it starts none.

    Example:
        >>> rank_starter(["python", "-m", "torch.distributed.run", "train.py"])
        'torchrun'
    """
    program = os.path.basename(command[0])
    if program in _RANK_STARTERS:
        return program
    modules = [word for flag, word in pairwise(command) if flag == "-m"]
    return "torchrun" if modules and modules[0] in _TORCHRUN_MODULES else None


def with_numa_binding(command: Sequence[str]) -> list[str]:
    """Return a torchrun command that binds each rank to the NUMA node of its GPU.

    Example:
        >>> with_numa_binding(["torchrun", "--nproc-per-node=8", "train.py"])
        ['torchrun', '--numa-binding=node', '--nproc-per-node=8', 'train.py']
    """
    words = list(command)
    if any(word.replace("_", "-").startswith(_NUMA_BINDING) for word in words):
        return words
    start = next((words.index(module) for module in _TORCHRUN_MODULES if module in words), 0)
    return [*words[: start + 1], f"{_NUMA_BINDING}=node", *words[start + 1 :]]
