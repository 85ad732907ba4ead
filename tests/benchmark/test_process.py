from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from lightning_perf.benchmark.process import (
    CAN_FREEZE,
    VariantFailed,
    Worker,
    busy_seconds,
    cpus,
)

ECHO = """
import json, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
print("not a message", flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "stop":
        break
    if command["do"] == "work":
        sum(range(10**7))
    print(json.dumps({"event": "echo", "child": child.pid, "got": command["do"]}), flush=True)
"""


@contextmanager
def echo(folder: Path) -> Iterator[Worker]:
    worker = Worker(
        (sys.executable, "-c", ECHO), name="echo", env=dict(os.environ), log=folder / "log"
    )
    try:
        yield worker
    finally:
        worker.stop()


@pytest.fixture
def worker(tmp_path):
    with echo(tmp_path) as worker:
        yield worker


def status(pid: int) -> str:
    return psutil.Process(pid).status()


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_answers_and_ignores_what_is_no_message(worker):
    answer = worker.ask({"do": "x"}, timeout=60, phase="echoing")
    assert answer["got"] == "x"
    assert answer["received"] <= time.monotonic()


@pytest.mark.skipif(not CAN_FREEZE, reason="processes cannot be frozen here")
def test_is_frozen_with_its_children_but_for_its_turns(tmp_path):
    with echo(tmp_path) as worker:
        answer = worker.ask({"do": "x"}, timeout=60, phase="echoing")
        family = (psutil.Process(answer["child"]).ppid(), answer["child"])
        wait_for(lambda: [status(pid) for pid in family] == [psutil.STATUS_STOPPED] * 2)
        with worker.awake():
            wait_for(lambda: psutil.STATUS_STOPPED not in [status(pid) for pid in family])
        wait_for(lambda: [status(pid) for pid in family] == [psutil.STATUS_STOPPED] * 2)
    assert not any(psutil.pid_exists(pid) for pid in family[:1])
    wait_for(lambda: not psutil.pid_exists(family[1]) or status(family[1]) == psutil.STATUS_ZOMBIE)


def test_one_that_must_not_be_frozen_is_not(worker):
    worker.can_freeze = False
    answer = worker.ask({"do": "x"}, timeout=60, phase="echoing")
    worker.freeze()
    assert status(answer["child"]) != psutil.STATUS_STOPPED


def test_counts_its_own_cpu_time(worker):
    before = worker.cpu_seconds(children=True), busy_seconds()
    worker.ask({"do": "work"}, timeout=60, phase="working")
    after = worker.cpu_seconds(children=True), busy_seconds()
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert len(cpus()) >= 1


def test_commands_to_the_dead_are_no_error_but_their_answer_is(worker):
    worker.ask({"do": "x"}, timeout=60, phase="echoing")
    worker.send({"do": "stop"})
    with worker.awake(), pytest.raises(VariantFailed, match="exit status 0"):
        worker.receive(60)
    worker.send({"do": "x"})


def test_a_command_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        Worker(("/no/such/program",), name="x", env={}, log=tmp_path / "log")


def test_the_error_survives_pickling():
    error = VariantFailed("B", "training", "no good", "Traceback ...")
    again = pickle.loads(pickle.dumps(error))
    assert (
        str(again)
        == str(error)
        == ("Variant 'B' failed while training: no good\n\nTraceback ...\n")
    )


def test_a_long_output_is_cut_to_its_end(tmp_path):
    program = "import sys\nfor i in range(100): print(i, file=sys.stderr)\nsys.exit(5)"
    worker = Worker((sys.executable, "-c", program), name="x", env={}, log=tmp_path / "log")
    try:
        with pytest.raises(VariantFailed, match="exit status 5") as caught:
            worker.receive(60)
    finally:
        worker.stop()
    assert caught.value.details.splitlines()[-1] == "99"
    assert len(caught.value.details.splitlines()) == 20
    assert json.dumps(caught.value.variant) == '"x"'
    assert Path(tmp_path / "log").exists()
