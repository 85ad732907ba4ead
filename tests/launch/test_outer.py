"""The launchers around this one."""

import pytest

from lightning_perf.launch.outer import (
    LocalRank,
    bound_by_outer,
    local_rank,
    rank_starter,
    with_numa_binding,
)

SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, LocalRank("torchrun", 1, 4)),
        # Lightning's launcher gives its children this one only.
        ({"LOCAL_RANK": "1"}, None),
        (SRUN, LocalRank("srun", 3, 4)),
        # torchrun within a step of srun: torchrun has started this process.
        (SRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, LocalRank("torchrun", 0, 2)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),2", "SLURM_NODEID": "2"}, 2),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),2", "SLURM_NODEID": "1"}, 4),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "what"}, 1),
        # The batch script itself.
        ({"SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}, None),
        (
            {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
            LocalRank("mpirun", 2, 3),
        ),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}, LocalRank("mpirun", 0, 3)),
    ],
)
def test_local_rank(environ: dict[str, str], expected: LocalRank | int | None) -> None:
    found = local_rank(environ)
    if isinstance(expected, int):
        assert found is not None
        assert found.ranks == expected
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("launcher", "binding", "parents", "bound"),
    [
        ("torchrun", "", {0, 1}, False),
        ("torchrun", "", {0, 1, 2, 3}, True),
        ("torchrun", "", None, False),
        # Under srun the parent may have more than the job.
        ("srun", "", {0, 1, 2, 3}, False),
        ("srun", "none", {0, 1, 2, 3}, False),
        ("srun", "mask_cpu:", {0, 1}, True),
    ],
)
def test_a_rank_that_is_bound_already(
    launcher: str, binding: str, parents: set[int] | None, bound: bool
) -> None:
    environ = {"SLURM_CPU_BIND_TYPE": binding} if binding else {}
    theirs = None if parents is None else frozenset(parents)
    assert bound_by_outer(launcher, environ, frozenset({0, 1}), theirs) == bound


@pytest.mark.parametrize(
    ("command", "starter"),
    [
        ("torchrun --nproc-per-node=2 train.py", "torchrun"),
        ("/opt/venv/bin/torchrun train.py", "torchrun"),
        ("python -u -m torch.distributed.run train.py", "torchrun"),
        ("srun python train.py", "srun"),
        ("python train.py -m torch", None),
        ("python train.py", None),
        ("python -m train torchrun", None),
    ],
)
def test_a_command_that_starts_ranks(command: str, starter: str | None) -> None:
    assert rank_starter(command.split()) == starter


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun train.py", "torchrun --numa-binding=node train.py"),
        (
            "python -m torch.distributed.run train.py",
            "python -m torch.distributed.run --numa-binding=node train.py",
        ),
        ("torchrun --numa-binding exclusive train.py", None),
        ("torchrun --numa_binding=socket train.py", None),
    ],
)
def test_torchruns_own_binding_is_asked_for_unless_the_user_has(
    command: str, expected: str | None
) -> None:
    assert " ".join(with_numa_binding(command.split())) == (expected or command)
