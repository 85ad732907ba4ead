"""What the launcher decides on many machines, and under other launchers."""

from __future__ import annotations

import json
import shlex
from typing import Any

import layouts
import pytest
from layouts import restricted, server, with_quota
from machines import TWO_SOCKETS, machine

from lightning_perf.launch.gpus import GPU
from lightning_perf.launch.options import Options
from lightning_perf.launch.plan import PROMISE, Plan, make_plan

COMMAND = ["python", "train.py"]
GPUS = (GPU(0, "GPU-a", 0), GPU(1, "GPU-b", 0), GPU(2, "GPU-c", 1), GPU(3, "GPU-d", 1))


def planned(
    files: layouts.Files = TWO_SOCKETS,
    environ: dict[str, str] | None = None,
    command: str = "python train.py",
    facts: dict[str, Any] | None = None,
    **options: Any,
) -> Plan:
    asked = Options(**{"allocator": "none", **options})
    found = machine(files, **(facts or {}))
    return make_plan(found, asked, command.split(), environ or {}, "cpu")


def commands(plan: Plan) -> list[str]:
    return [shlex.join(process.command) for process in plan.processes]


def threads(plan: Plan) -> list[str | None]:
    return [process.variables.get("OMP_NUM_THREADS") for process in plan.processes]


def promise(plan: Plan) -> dict[str, Any]:
    return json.loads(plan.processes[0].variables[PROMISE])


def as_rank(rank: int, ranks: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}


# --- one process ---


def test_a_process_that_has_the_machine_needs_no_binding() -> None:
    plan = planned(server(1, 4, smt=2))
    assert (commands(plan), threads(plan), plan.notes) == (["python train.py"], ["4"], ())


def test_one_process_on_several_nodes_is_told_of_it() -> None:
    plan = planned()
    assert (commands(plan), threads(plan)) == (["python train.py"], ["8"])
    assert plan.notes[0].startswith("One process computes on 2 NUMA nodes")


def test_a_node_that_was_asked_for() -> None:
    plan = planned(numa="1")
    assert commands(plan) == ["numactl --physcpubind=4-7,12-15 --membind=1 python train.py"]
    assert threads(plan) == ["4"]


def test_a_node_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"numa=2 was asked for; the NUMA nodes .* are 0-1 here"):
        planned(numa="2")
    with pytest.raises(ValueError, match="are unknown here"):
        planned({"/proc/self/status": "Cpus_allowed_list:\t0-3\n"}, numa="0")


def test_a_container_with_a_small_cpuset() -> None:
    plan = planned(restricted(TWO_SOCKETS, "2-3", memory="0"))
    assert (commands(plan), threads(plan)) == (["python train.py"], ["2"])
    assert plan.notes == ("14 CPUs are not allowed by affinity or cpuset.",)


def test_a_container_without_node_0() -> None:
    plan = planned(restricted(TWO_SOCKETS, "4-7", memory="1"), numa="1")
    assert (commands(plan), threads(plan)) == (["python train.py"], ["4"])


def test_a_quota_below_the_cores() -> None:
    plan = planned(with_quota(server(1, 8), 2.5))
    assert threads(plan) == ["3"]
    assert plan.notes == ("3 threads on 8 cores: the control group allows 2.5 CPUs.",)


def test_hybrid_cores() -> None:
    plan = planned(layouts.hybrid(4, 4))
    assert threads(plan) == ["4"]
    assert commands(plan) == ["taskset --cpu-list 0-7 python train.py"]
    assert "efficient cores left out" in plan.notes[0]


def test_arm() -> None:
    plan = planned(layouts.big_little([400] * 4 + [1024] * 4))
    assert (commands(plan), threads(plan)) == (["taskset --cpu-list 4-7 python train.py"], ["4"])


def test_offline_cores() -> None:
    plan = planned(layouts.without(server(1, 4), 2))
    assert (commands(plan), threads(plan)) == (["python train.py"], ["3"])


# --- how it is bound ---


def test_numactl_that_is_refused_or_missing() -> None:
    for state, said in (("refused", "capability SYS_NICE"), ("missing", "apt-get install numactl")):
        plan = planned(facts={"numactl": state}, numa="0")
        assert commands(plan) == ["taskset --cpu-list 0-3,8-11 python train.py"]
        assert said in plan.notes[-1]


def test_without_any_program_the_launcher_binds_itself() -> None:
    plan = planned(facts={"numactl": "missing", "taskset": False}, numa="0")
    assert commands(plan) == ["python train.py"]
    assert plan.processes[0].affinity == (0, 1, 2, 3, 8, 9, 10, 11)


def test_no_binding_at_all() -> None:
    plan = planned(numa="none", instances=2)
    assert commands(plan) == ["python train.py"] * 2
    assert "cpus" not in promise(plan)


# --- several instances ---


def test_instances_share_the_machine() -> None:
    plan = planned(instances=2)
    assert commands(plan) == [
        "numactl --physcpubind=0-3,8-11 --membind=0 python train.py",
        "numactl --physcpubind=4-7,12-15 --membind=1 python train.py",
    ]
    assert threads(plan) == ["4", "4"]
    assert plan.notes == ()


@pytest.mark.parametrize(
    ("numa", "expected"),
    [("node", ["0-1", "2-3", "4-7"]), ("core", ["0-2", "3-5", "6-7"]), ("1", ["4-5", "6", "7"])],
)
def test_the_border_may_be_named(numa: str, expected: list[str]) -> None:
    plan = planned(server(2, 4), numa=numa, instances=3, facts={"numactl": "missing"})
    assert [process.command[2] for process in plan.processes] == expected


def test_more_instances_than_cores() -> None:
    with pytest.raises(ValueError, match="9 instances were asked for; it is 1 to 8 here"):
        planned(instances=9)


def test_each_instance_sees_one_gpu() -> None:
    plan = planned(facts={"gpus": GPUS}, numa="gpu", instances=4)
    assert [process.variables["CUDA_VISIBLE_DEVICES"] for process in plan.processes] == list("0123")
    assert [process.command[1] for process in plan.processes] == [
        "--physcpubind=0-1,8-9",
        "--physcpubind=2-3,10-11",
        "--physcpubind=4-5,12-13",
        "--physcpubind=6-7,14-15",
    ]


def test_instances_keep_to_the_gpus_that_are_visible_and_share_them() -> None:
    plan = planned(
        environ={"CUDA_VISIBLE_DEVICES": "3,0"}, facts={"gpus": GPUS}, numa="gpu", instances=3
    )
    assert [process.variables["CUDA_VISIBLE_DEVICES"] for process in plan.processes] == list("303")
    assert "3 instances share 2 GPUs." in plan.notes
    assert [process.command[2] for process in plan.processes] == [
        "--membind=1",
        "--membind=0",
        "--membind=1",
    ]


# --- GPUs ---


def test_a_process_is_bound_to_the_node_of_its_only_gpu() -> None:
    plan = planned(environ={"CUDA_VISIBLE_DEVICES": "2"}, facts={"gpus": GPUS}, numa="gpu")
    assert commands(plan) == ["numactl --physcpubind=4-7,12-15 --membind=1 python train.py"]
    assert "CUDA_VISIBLE_DEVICES" not in plan.processes[0].variables


def test_a_process_that_sees_gpus_on_several_nodes_is_not_bound() -> None:
    plan = planned(facts={"gpus": GPUS}, numa="gpu")
    assert commands(plan) == ["python train.py"]
    assert plan.notes == (
        "Not bound to the NUMA node of a GPU: the process sees GPUs on 2 of them.",
    )
    same = planned(facts={"gpus": GPUS[:2]}, numa="gpu")
    assert commands(same) == ["numactl --physcpubind=0-3,8-11 --membind=0 python train.py"]


def test_ranks_on_gpus_share_the_quota() -> None:
    files = with_quota(TWO_SOCKETS, 4)
    plan = planned(files, facts={"gpus": GPUS}, numa="gpu", instances=4)
    assert threads(plan) == ["1"] * 4


def test_a_gpu_whose_node_is_unknown() -> None:
    plan = planned(facts={"gpus": (GPU(0, "GPU-a", -1),)}, numa="gpu")
    assert commands(plan) == ["python train.py"]
    assert "the system does not tell it" in plan.notes[0]
    without = planned(numa="gpu")
    assert "sees no GPU that nvidia-smi lists" in without.notes[0]


# --- under other launchers ---


def test_ranks_of_torchrun_share_the_machine() -> None:
    first, second = (planned(environ=as_rank(rank, 2)) for rank in (0, 1))
    assert commands(first) == ["numactl --physcpubind=0-3,8-11 --membind=0 python train.py"]
    assert commands(second) == ["numactl --physcpubind=4-7,12-15 --membind=1 python train.py"]
    assert threads(first) == threads(second) == ["4"]
    assert promise(first)["ranks"] == 2


def test_ranks_of_srun_too() -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert commands(planned(environ=slurm))[0].startswith("numactl --physcpubind=4-7,12-15")


def test_a_rank_that_srun_has_bound_uses_all_it_has() -> None:
    slurm = {
        "SLURM_STEP_ID": "0",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    }
    plan = planned(restricted(TWO_SOCKETS, "2-3,10-11"), environ=slurm)
    assert (commands(plan), threads(plan)) == (["python train.py"], ["2"])
    assert "srun has bound this rank to CPUs 2-3,10-11." in plan.notes


def test_ranks_that_torchrun_has_bound_to_one_node_share_its_cores() -> None:
    facts = {"parents_cpus": frozenset(range(16))}
    node_1 = restricted(TWO_SOCKETS, "4-7,12-15")
    plan = planned(node_1, environ=as_rank(3, 4), facts=facts)
    assert (commands(plan), threads(plan)) == (["python train.py"], ["2"])
    plan = planned(restricted(TWO_SOCKETS, "4-5,12-13"), environ=as_rank(2, 4), facts=facts)
    assert threads(plan) == ["2"]


def test_a_rank_is_bound_to_the_node_of_its_gpu() -> None:
    plan = planned(environ=as_rank(3, 4), facts={"gpus": GPUS}, numa="gpu")
    assert commands(plan) == ["numactl --physcpubind=6-7,14-15 --membind=1 python train.py"]
    assert "CUDA_VISIBLE_DEVICES" not in plan.processes[0].variables


def test_a_rank_that_sees_only_its_own_gpu_shares_the_node_with_the_others() -> None:
    environ = as_rank(3, 4) | {"CUDA_VISIBLE_DEVICES": "3"}
    plan = planned(environ=environ, facts={"gpus": GPUS}, numa="gpu")
    assert commands(plan) == ["numactl --physcpubind=6-7,14-15 --membind=1 python train.py"]


def test_more_ranks_than_cores_are_not_bound() -> None:
    plan = planned(server(1, 2), environ=as_rank(3, 4))
    assert (commands(plan), threads(plan)) == (["python train.py"], ["1"])
    assert "4 ranks on 2 cores: they are not bound." in plan.notes


def test_instances_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 instances were asked for, and torchrun starts 4 ranks"):
        planned(environ=as_rank(0, 4), instances=2)


# --- in front of other launchers ---


def test_torchrun_binds_by_itself_where_it_can() -> None:
    plan = planned(command="torchrun --nproc-per-node=4 train.py", facts={"gpus": GPUS}, numa="gpu")
    assert commands(plan) == ["torchrun --numa-binding=node --nproc-per-node=4 train.py"]
    assert threads(plan) == [None]


def test_an_older_torchrun_is_left_alone_and_the_other_order_is_shown() -> None:
    facts = {"gpus": GPUS, "torchrun_binds": False}
    plan = planned(command="torchrun --nproc-per-node=4 train.py", facts=facts, numa="gpu")
    assert commands(plan) == ["torchrun --nproc-per-node=4 train.py"]
    assert "torchrun ... --no-python lightning-perf launch -- python ..." in plan.notes[0]


def test_srun_is_left_alone() -> None:
    plan = planned(command="srun python train.py", allocator="jemalloc")
    assert (commands(plan), threads(plan)) == (["srun python train.py"], [None])
    assert "srun ... lightning-perf launch -- python ..." in plan.notes[0]
    assert "LD_PRELOAD" in plan.processes[0].variables


# --- the rest ---


def test_what_is_promised() -> None:
    plan = planned(numa="0", allocator="jemalloc", openmp="intel", interop_threads=2)
    assert promise(plan) == {
        "preset": "cpu",
        "allocator": "jemalloc",
        "openmp": "intel",
        "cpus": "0-3,8-11",
        "threads": 4,
        "interop_threads": 2,
    }
    theirs = {"OMP_NUM_THREADS": "3", "LD_PRELOAD": "/x/libtcmalloc.so.4"}
    assert promise(planned(environ=theirs)) == {
        "preset": "cpu",
        "allocator": "tcmalloc",
        "openmp": "gnu",
    }


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((1024, 524288), 524288),
        ((1024, 1024), None),
        ((1024, -1), 2**20),
        ((1024, 2**30), 2**20),
        ((2**20, 2**30), None),
        ((-1, -1), None),
    ],
)
def test_open_files(limits: tuple[int, int], expected: int | None) -> None:
    assert planned(facts={"open_files": limits}).open_files == expected


def test_a_remark_of_all_instances_is_made_once() -> None:
    plan = planned(instances=2, environ={"OMP_SCHEDULE": "DYNAMIC"})
    assert plan.notes == ("OMP_SCHEDULE=DYNAMIC in the environment wins over STATIC.",)
