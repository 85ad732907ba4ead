"""The started processes: what shells and users see of them. Real processes, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_perf.launch.plan import Plan, Process
from lightning_perf.launch.run import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    CannotStartError,
    as_shell,
    require_program,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher is for Linux")

CPU = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def start(plan: Plan, *, ignored: bool = False) -> subprocess.Popen[str]:
    """Start a plan as the command does, in a process of its own; SIGINT may be ignored in it."""
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    code = "from lightning_perf.launch.plan import Plan, Process\n"
    code += f"from lightning_perf.launch.run import start\nraise SystemExit(start({plan!r}))"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job of a shell, as these tests may be, has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )


def ended(plan: Plan) -> tuple[int, str, str]:
    process = start(plan)
    out, err = finished(process)
    return process.returncode, out, err


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for the end; a launcher that does not end is killed, with what it has started."""
    try:
        return process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        raise


def shell(*scripts: str, **variables: str) -> Plan:
    return Plan(tuple(Process(variables, ("sh", "-c", script)) for script in scripts))


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} was never written"
        time.sleep(0.02)


# --- one process ---


def test_one_process_takes_the_place_of_the_launcher() -> None:
    process = start(shell("echo $$; echo $A; exit 7", A="b"))
    out, _ = finished(process)
    assert out.split() == [str(process.pid), "b"]
    assert process.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_it(number: int, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = start(shell(f"touch {ready}; exec sleep 30"))
    wait_for(ready)
    process.send_signal(number)
    finished(process)
    assert process.returncode == -number


def test_the_launcher_binds_it_where_no_program_does() -> None:
    code = "import os; print(*os.sched_getaffinity(0))"
    plan = Plan((Process({}, (sys.executable, "-c", code), affinity=(CPU,)),))
    assert ended(plan)[:2] == (0, f"{CPU}\n")


def test_the_limit_on_open_files_is_raised() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    plan = Plan(shell("ulimit -S -n; ulimit -H -n").processes, open_files=soft - 1)
    assert ended(plan)[1].split() == [str(soft - 1), str(hard)]


# --- several ---


def test_output_is_marked_with_the_instance() -> None:
    code, out, err = ended(shell("echo one", "echo two; echo three >&2"))
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] one", "[1] two"]
    assert err == "[1] three\n"


def test_each_has_its_variables_and_its_cores() -> None:
    code = "import os; print(os.environ['A'], *os.sched_getaffinity(0))"
    command = (sys.executable, "-c", code)
    plan = Plan(
        (
            Process({"A": "x"}, command, affinity=(CPU,)),
            Process({"A": "y"}, command),
        )
    )
    everything = " ".join(map(str, os.sched_getaffinity(0)))
    status, out, _ = ended(plan)
    assert status == 0
    assert sorted(out.splitlines()) == [f"[0] x {CPU}", f"[1] y {everything}"]


def test_the_first_that_fails_ends_the_others() -> None:
    code, _, err = ended(shell("sleep 60", "exit 3", "sleep 60"))
    assert code == 3
    assert "instance 1 ended with status 3; the other 2 are ended." in err


def test_one_that_a_signal_ends() -> None:
    code, _, err = ended(shell("sleep 60", "kill -SEGV $$"))
    assert code == 128 + signal.SIGSEGV
    assert "instance 1 was ended by SIGSEGV" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_all(number: int, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    # As a program does that puts its work away first.
    scripts = [
        f"trap 'echo end; exit 5' {number}; touch {file}; while :; do sleep 0.05; done"
        for file in files
    ]
    process = start(shell(*scripts))
    for file in files:
        wait_for(file)
    process.send_signal(number)
    out, _ = finished(process)
    assert process.returncode == 5
    assert sorted(out.splitlines()) == ["[0] end", "[1] end"]


def test_a_second_one_that_cannot_start_ends_the_first(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    first = shell(f"echo $$ > {pid}; exec sleep 60").processes
    code, _, err = ended(Plan((*first, Process({}, ("/no/such/program",)))))
    assert code == 1
    assert "/no/such/program" in err
    if pid.exists() and pid.read_text().strip():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


# --- programs ---


def test_a_program_is_found() -> None:
    assert require_program([sys.executable, "x.py"]) == sys.executable
    assert os.path.basename(require_program(["sh"])) == "sh"


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (["no-such"], NOT_FOUND, "No program 'no-such'.$"),
        (["train.py", "--lr", "1"], NOT_FOUND, "in front: python train.py --lr 1$"),
        (["./train.py"], NOT_EXECUTABLE, "may not be executed. Put the .* python ./train.py$"),
        (["./folder"], NOT_EXECUTABLE, "./folder may not be executed.$"),
        (["-m", "train"], NOT_FOUND, "'-m' is an option, not a program. .*python -m train$"),
        (["./gone"], NOT_FOUND, "No program './gone'.$"),
    ],
)
def test_programs_that_cannot_be_started(
    command: list[str], status: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(CannotStartError, match=message) as error:
        require_program(command)
    assert error.value.status == status


# --- as shell ---


def run_in_sh(plan: Plan) -> str:
    done = subprocess.run(
        ["sh", "-c", as_shell(plan)], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


def test_the_lines_for_a_shell_do_the_same() -> None:
    value = """it's {"a": 1} $HOME \\ `x`"""
    code = "import os, sys; sys.stdout.write(os.environ['A'] + sys.argv[1] + chr(10))"
    echo = (sys.executable, "-c", code, " b c")
    assert run_in_sh(Plan((Process({"A": value}, echo),))) == f"{value} b c\n"
    several = Plan(tuple(Process({"A": letter}, echo) for letter in "xy"))
    assert sorted(run_in_sh(several).splitlines()) == ["x b c", "y b c"]


def test_the_lines_for_a_shell_raise_the_limit_and_name_what_they_cannot_do() -> None:
    plan = Plan((Process({}, ("sh", "-c", "ulimit -n"), affinity=(0, 2)),), open_files=256)
    assert run_in_sh(plan) == "256\n"
    assert "# bound to CPUs 0,2 by the launcher" in as_shell(plan)


def test_a_signal_that_comes_while_the_second_is_being_started_reaches_it(tmp_path: Path) -> None:
    # The first one ends the launcher's patience before the second is known to it.
    ready = tmp_path / "ready"
    first = f"while ! test -e {ready}; do :; done; kill -TERM $PPID; exec sleep 60"
    second = f"touch {ready}; exec sleep 60"
    code, _, err = ended(shell(first, second, second))
    assert code == 128 + signal.SIGTERM
    assert "are ended" not in err


def test_a_signal_that_was_ignored_stays_so(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = start(shell(f"touch {ready}; sleep 0.5; exit 3", "sleep 0.1"), ignored=True)
    wait_for(ready)
    process.send_signal(signal.SIGINT)
    finished(process)
    assert process.returncode == 3
