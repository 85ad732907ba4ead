"""What the started process finds out about itself."""

from __future__ import annotations

import json
import multiprocessing
import sys

import pytest

from lightning_perf.launch import verify
from lightning_perf.launch.plan import PROMISE
from lightning_perf.launch.verify import (
    InEffect,
    broken_promises,
    in_effect,
    launch_command,
    promised,
    remark,
)

MAPS = """\
55d0c8a00000-55d0c8a6c000 r--p 00000000 fe:00 132 /usr/bin/python3.11
7f10a0000000-7f10a0021000 rw-p 00000000 00:00 0
7f10b1000000-7f10b1200000 r--p 00000000 fe:00 9001 /venv/lib/libgomp-a34b3233.so.1
7f10b1200000-7f10b1300000 r-xp 00200000 fe:00 9001 /venv/lib/libgomp-a34b3233.so.1
7f10c1000000-7f10c1200000 r--p 00000000 fe:00 9002 /usr/lib/x86_64-linux-gnu/libc.so.6
7ffc12300000-7ffc12321000 rw-p 00000000 00:00 0 [stack]
"""
JEMALLOC = "7f20-7f21 r-xp 00000000 fe:00 7 /usr/lib/x86_64-linux-gnu/libjemalloc.so.2\n"
INTEL = "7f30-7f31 r-xp 00000000 fe:00 8          /my envs/lib/libiomp5.so\n"
FOUR = frozenset({0, 1, 2, 3})


def effect(maps: str = MAPS, cpus: frozenset[int] = FOUR, **environ: str) -> InEffect:
    return in_effect(maps, environ, cpus)


def test_what_is_mapped_is_in_effect() -> None:
    assert effect() == InEffect("glibc", ("gnu",), FOUR, None)
    assert effect(MAPS + JEMALLOC, OMP_NUM_THREADS="4") == InEffect("jemalloc", ("gnu",), FOUR, 4)


def test_the_runtime_that_is_loaded_first_runs_the_threads() -> None:
    both = MAPS + INTEL
    assert effect(both, LD_PRELOAD="/my-envs/lib/libiomp5.so").openmp == ("intel", "gnu")
    assert effect(both).openmp == ("gnu", "intel")


def test_a_library_that_is_only_named_is_not_in_effect() -> None:
    # The loader passes over a file that is not there.
    assert effect(LD_PRELOAD="/gone/libjemalloc.so.2").allocator == "glibc"


@pytest.mark.parametrize(
    ("promise", "broken"),
    [
        ({}, []),
        ({"allocator": "glibc", "openmp": "gnu", "cpus": "0-3", "threads": 4}, []),
        # A strategy has bound this rank to a part, with fewer threads.
        ({"cpus": "0-7", "threads": 8}, []),
        ({"allocator": "jemalloc"}, ["allocator jemalloc, but glibc is loaded"]),
        ({"openmp": "intel"}, ["OpenMP runtime intel, but gnu is loaded"]),
        ({"cpus": "4-7"}, ["CPUs 4-7, but it may run on 0-3"]),
    ],
)
def test_broken_promises(promise: dict[str, object], broken: list[str]) -> None:
    assert broken_promises(promise, effect(OMP_NUM_THREADS="4")) == broken


def test_threads_that_somebody_has_taken_back() -> None:
    assert broken_promises({"threads": 4}, effect()) == [
        "4 threads, but OMP_NUM_THREADS is not set any more"
    ]


def test_without_openmp_there_is_nothing_to_complain_of() -> None:
    assert broken_promises({"openmp": "intel"}, effect("")) == []


@pytest.mark.parametrize("text", ["", "{", "3", "null"])
def test_a_variable_that_is_no_promise(text: str) -> None:
    assert promised({PROMISE: text}) is None


COMMAND = ["/venv/bin/python", "train.py", "--name", "a b"]


def test_a_run_whose_launch_half_is_not_in_effect_is_told_the_command() -> None:
    assert remark("cpu", {}, COMMAND, effect()) == (
        "Preset cpu has a launch half (cores, threads, allocator) that is not in effect: "
        "lightning-perf launch --preset cpu -- /venv/bin/python train.py --name 'a b'"
    )
    assert remark("mps", {}, COMMAND, effect()) is None


def test_a_run_that_the_launcher_started_is_told_of_broken_promises_only() -> None:
    environ = {PROMISE: json.dumps({"preset": "cpu", "allocator": "glibc"})}
    assert remark("cpu", environ, COMMAND, effect()) is None
    environ = {PROMISE: json.dumps({"allocator": "tcmalloc", "openmp": "intel"})}
    assert remark("cpu", environ, COMMAND, effect()) == (
        "The launcher promised allocator tcmalloc, but glibc is loaded; OpenMP runtime intel, but "
        "gnu is loaded."
    )


def test_the_command_under_torchrun_and_in_a_notebook() -> None:
    torchrun = launch_command("cpu", {"TORCHELASTIC_RUN_ID": "x"}, ["python", "train.py"])
    assert torchrun == (
        "torchrun ... --no-python lightning-perf launch --preset cpu -- python train.py"
    )
    notebook = ["python", "-m", "ipykernel_launcher", "-f", "kernel.json"]
    assert launch_command("cpu", {}, notebook) == (
        "lightning-perf launch --preset cpu -- jupyter lab"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the launcher is for Linux")
def test_a_spawned_rank_names_the_command_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROMISE, raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "from multiprocessing.spawn import x"])
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    monkeypatch.setattr(sys, "executable", "/bin/python")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    told = verify.remark_on_this_process("cpu")
    assert told is not None
    assert told.endswith("-- /bin/python train.py --lr 1")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert verify.remark_on_this_process("cpu") is None
