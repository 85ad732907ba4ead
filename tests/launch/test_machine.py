"""What the launcher finds on a machine: this one, and what programs answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from machines import TWO_SOCKETS, machine, topology

from lightning_perf.launch import machine as module
from lightning_perf.launch.machine import look_around
from lightning_perf.launch.options import Options
from lightning_perf.launch.plan import make_plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher is for Linux")


def test_this_machine() -> None:
    found = look_around(os.environ, sys.executable)
    assert {cpu.id for cpu in found.topology.usable} == os.sched_getaffinity(0)
    assert found.parents_cpus
    soft, hard = found.open_files
    assert soft != 0
    assert hard != 0
    assert all(Path(path).is_file() for path in found.libraries.values())


@pytest.mark.parametrize(("status", "state"), [(0, "works"), (1, "refused"), (None, "missing")])
def test_numactl_is_tried(
    status: int | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if status is not None:
        numactl = tmp_path / "numactl"
        numactl.write_text(f'#!/bin/sh\ntest "$*" = "--membind=0 true" && exit {status}\nexit 9\n')
        numactl.chmod(0o755)
    assert module._try_numactl(topology(TWO_SOCKETS)) == state


@pytest.mark.skipif(shutil.which("numactl") is None, reason="needs apt-get install numactl")
def test_numactl_understands_what_it_is_told() -> None:
    here = look_around({})
    if len(here.topology.memory_nodes) != 1 or module._try_numactl(here.topology) != "works":
        pytest.skip("numactl may not set a memory policy here")
    plan = make_plan(machine(), Options(numa="0"), ["true"], {})
    program, cpus, memory, _ = plan.processes[0].command
    assert cpus.startswith("--physcpubind=")
    cpu = min(os.sched_getaffinity(0))
    code = "import os; print(*os.sched_getaffinity(0))"
    command = [program, f"--physcpubind={cpu}", memory, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{cpu}\n"


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("always [madvise] never\n", True),
        ("[always] madvise never\n", True),
        ("always madvise [never]\n", False),
        ("", False),
    ],
)
def test_huge_pages(text: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_text", lambda path: text)
    assert look_around({}).huge_pages == allowed


@pytest.mark.parametrize(
    ("answer", "version"),
    [("glibc 2.36", (2, 36)), ("glibc 2.41.9000", (2, 41)), ("musl", None), (None, None)],
)
def test_the_version_of_the_c_library(
    answer: str | None, version: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: answer)
    assert module._glibc() == version


def test_a_c_library_that_does_not_know_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", unknown)
    assert module._glibc() is None


def test_torchrun_is_asked_for_its_binding_only_where_it_knows_it() -> None:
    from torch.distributed.run import get_args_parser

    assert module._torchrun_binds() == ("--numa-binding" in get_args_parser().format_help())


def test_a_parent_that_may_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: int) -> set[int]:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert module._affinity_of(1) is None
