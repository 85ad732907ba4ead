"""``lightning-perf launch``, from the words of the command line to the started process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_perf.cli.__main__ import main, parse
from lightning_perf.launch.kernel_files import read_text
from lightning_perf.launch.libraries import LIBRARIES, find_libraries, library_folders
from lightning_perf.launch.machine import _glibc
from lightning_perf.launch.plan import PROMISE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher is for Linux")

COMMAND = [sys.executable, "-m", "lightning_perf", "launch", "--preset", "cpu"]
CPUS = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
INSTALLED = find_libraries(library_folders(os.environ))
OURS = ("OMP_", "KMP_", "GOMP_", "MALLOC_", "LD_PRELOAD", "GLIBC_", "LIGHTNING_PERF", "LOCAL_")
SHOW = "import json, os; print(json.dumps([dict(os.environ), sorted(os.sched_getaffinity(0))]))"


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        library not in INSTALLED,
        reason=f"needs {LIBRARIES[library].name}: {LIBRARIES[library].install}",
    )


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from an environment in which nobody has decided anything."""
    for name in os.environ:
        if name.startswith(OURS):
            monkeypatch.delenv(name)


def launched(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=120, **options
    )


def shown(*words: str) -> tuple[dict[str, str], list[int]]:
    """Return environment and CPUs of a process that is started with these options."""
    done = launched(*words, "--", sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    environ, cpus = json.loads(done.stdout)
    return environ, cpus


# --- words ---


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("launch -- python train.py --dry-run -- x", "-- python train.py --dry-run -- x"),
        ("launch python train.py --preset mine", "python train.py --preset mine"),
        ("launch --dry-run --instances 2 -- python -m train", "-- python -m train"),
        ("launch --bind-threads python x.py", "python x.py"),
        ("launch -- launch bench", "-- launch bench"),
    ],
)
def test_everything_behind_the_program_is_the_programs(line: str, program: str) -> None:
    arguments = parse(line.split())
    # Some versions of argparse drop the dashes, some keep them.
    assert arguments.program in (program.split(), program.removeprefix("-- ").split())
    assert arguments.preset == "auto"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("launch", "What is to be started?"),
        ("launch --dry-run --", "What is to be started?"),
        ("launch --preset cpu --env X -- python", "--env X was asked for; it is NAME=VALUE"),
        ("launch --preset cpu --numa die -- sh", "numa='die' was asked for"),
        ("launch --preset cpu --instances 4096 -- sh", "4096 instances were asked for"),
        ("launch --preset cpuu -- sh", "Did you mean 'cpu'?"),
    ],
)
def test_mistakes(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "status", "message"),
    [
        ("train.py", 127, "Put the interpreter in front: python train.py"),
        ("-m train", 127, "Put the interpreter in front: python -m train"),
        ("no-such-program", 127, "No program 'no-such-program'"),
        ("./train.py", 126, "may not be executed"),
    ],
)
def test_programs_that_cannot_be_started(
    program: str, status: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    assert main(["launch", "--", *program.split()]) == status
    assert message in capsys.readouterr().err


def test_elsewhere_it_says_that_it_is_for_linux(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert main(["launch", "--", "sh"]) == 2
    assert "this is Darwin. Start the program without it." in capsys.readouterr().err


# --- what is started ---


def test_the_program_gets_its_threads_and_its_thresholds() -> None:
    environ, cpus = shown()
    assert 1 <= int(environ["OMP_NUM_THREADS"]) <= len(cpus)
    assert environ["MALLOC_TRIM_THRESHOLD_"] == str(2**34)
    promise = json.loads(environ[PROMISE])
    assert (promise["preset"], promise["allocator"]) == ("cpu", "glibc")


def test_the_users_variables_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environ, _ = shown("--env", "NCCL_ALGO=Ring")
    assert (environ["OMP_NUM_THREADS"], environ["NCCL_ALGO"]) == ("3", "Ring")


@pytest.mark.skipif(CPUS < 2, reason="needs two CPUs")
def test_instances_have_cores_of_their_own() -> None:
    done = launched("--instances", "2", "--", sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    cpus = [set(cpus) for _, cpus in found]
    assert cpus[0]
    assert cpus[1]
    assert cpus[0].isdisjoint(cpus[1])


@pytest.mark.skipif(CPUS < 2, reason="needs two CPUs")
def test_a_rank_of_torchrun_is_bound_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cpus = []
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        cpus.append(set(shown()[1]))
    assert cpus[0].isdisjoint(cpus[1])


def test_the_dry_run_can_be_run_by_a_shell() -> None:
    printed = launched("--dry-run", "--env", "A=it's", "--", sys.executable, "-c", SHOW)
    assert printed.returncode == 0
    done = subprocess.run(["sh", "-c", printed.stdout], capture_output=True, text=True, timeout=60)
    environ, cpus = json.loads(done.stdout)
    really, really_cpus = shown("--env", "A=it's")
    ours = {name: value for name, value in environ.items() if name.startswith((*OURS, "A"))}
    assert ours == {n: value for n, value in really.items() if n.startswith((*OURS, "A"))}
    assert cpus == really_cpus


def test_the_dry_run_says_why_auto_is_what_it_is() -> None:
    program = ("--", sys.executable, "-c", "")
    for allocator, comments in (("auto", 2), ("none", 1)):
        printed = launched("--dry-run", "--allocator", allocator, *program).stdout
        said = [line for line in printed.splitlines() if line.startswith("#")]
        assert len(said) == comments
        assert all(" auto is " in line and "docs/results/" in line for line in said)


MALLOC = """
import ctypes
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
memory = libc.malloc(ctypes.c_size_t(100 << 20))
ctypes.memset(ctypes.c_void_p(memory), 1, 100 << 20)
class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]
libc.mallinfo2.restype = Mallinfo
huge = [line.split()[1] for line in open("/proc/self/smaps_rollup") if "AnonHuge" in line]
print(libc.mallinfo2().field4 >> 20, int(huge[0]) >> 10)  # MiB that are mapped, MiB in huge pages
"""


def mapped_and_huge(*options: str) -> tuple[int, int]:
    done = launched(*options, "--", sys.executable, "-c", MALLOC)
    assert done.returncode == 0, done.stderr
    mapped, huge = map(int, done.stdout.split())
    return mapped, huge


@pytest.mark.skipif((_glibc() or (0, 0)) < (2, 36), reason="an older glibc limits the threshold")
def test_glibc_accepts_the_thresholds() -> None:
    assert mapped_and_huge("--allocator", "none")[0] == 100
    assert mapped_and_huge("--allocator", "glibc")[0] == 0


@pytest.mark.skipif(
    "[madvise]" not in read_text("/sys/kernel/mm/transparent_hugepage/enabled")
    or (_glibc() or (0, 0)) < (2, 36),
    reason="needs glibc 2.36, and a kernel that gives huge pages to those who ask",
)
def test_glibcs_memory_comes_in_huge_pages() -> None:
    assert mapped_and_huge()[1] < 50
    assert mapped_and_huge("--huge-pages")[1] > 50


# --- exit status and signals ---


def test_the_exit_status_is_the_programs() -> None:
    assert launched("--", "sh", "-c", "exit 9").returncode == 9
    assert launched("--", "sh", "-c", "kill -KILL $$").returncode == -signal.SIGKILL


@pytest.mark.parametrize("instances", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_program(number: int, instances: str, tmp_path: Path) -> None:
    if int(instances) > len(os.sched_getaffinity(0)):
        pytest.skip("fewer CPUs than instances")
    script = f"touch {tmp_path}/$$.ready; exec sleep 60"
    process = subprocess.Popen(
        [*COMMAND, "--instances", instances, "--", "sh", "-c", script],
        # A background job of a shell, as these tests may be, has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.ready"))) < int(instances):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=60) in (-number, 128 + number)
    for file in tmp_path.glob("*.ready"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.stem), 0)


def test_the_first_instance_that_fails_ends_the_others(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    script = f"if mkdir {tmp_path}/first; then exec sleep 60; else exit 4; fi"
    done = launched("--instances", "2", "--", "sh", "-c", script)
    assert done.returncode == 4
    assert "ended with status 4; the other 1 are ended" in done.stderr


# --- with torchrun ---

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
RANK = """
import json, os, sys
found = [sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], os.environ["LOCAL_RANK"]]
sys.stdout.write(json.dumps(found) + chr(10))  # in one piece, between those of the other rank
"""


def ranks_of(command: list[str]) -> list[tuple[set[int], str]]:
    """Return CPUs and threads of the ranks that a command starts."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    found.sort(key=lambda rank: rank[2])
    return [(set(cpus), threads) for cpus, threads, _ in found]


@pytest.mark.slow
@pytest.mark.skipif(CPUS < 2, reason="needs two CPUs")
def test_behind_torchrun_each_rank_gets_its_share() -> None:
    ranks = ranks_of([*TORCHRUN, "--no-python", *COMMAND, "--", sys.executable, "-c", RANK])
    (first, threads), (second, others) = ranks
    assert first.isdisjoint(second)
    # More than torchrun's one, where there are more.
    assert int(threads) >= len(os.sched_getaffinity(0)) // 4
    assert abs(int(threads) - int(others)) <= 1


@pytest.mark.slow
def test_in_front_of_torchrun_cores_and_threads_are_left_to_it(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = ranks_of([*COMMAND, "--", *TORCHRUN, str(script)])
    assert ranks == [(os.sched_getaffinity(0), "1")] * 2


# --- seen from inside ---

INSIDE = """
import os, torch
from lightning_perf.launch.verify import broken_promises, in_effect, promised
from lightning_perf.launch.kernel_files import read_text
effect = in_effect(read_text("/proc/self/maps"), os.environ, frozenset(os.sched_getaffinity(0)))
broken = broken_promises(promised(), effect)
print(effect.allocator, effect.openmp[0], torch.get_num_threads(), broken)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param("--allocator jemalloc", "jemalloc gnu", marks=needs("jemalloc")),
        pytest.param("--allocator tcmalloc", "tcmalloc gnu", marks=needs("tcmalloc")),
        pytest.param("--openmp intel", "glibc intel", marks=needs("intel")),
        pytest.param(
            "--openmp intel --allocator tcmalloc",
            "tcmalloc intel",
            marks=[needs("intel"), needs("tcmalloc")],
        ),
        ("--allocator glibc --huge-pages", "glibc gnu"),
    ],
)
def test_what_was_asked_for_is_really_loaded(options: str, expected: str) -> None:
    done = launched(*options.split(), "--", sys.executable, "-c", INSIDE)
    assert done.returncode == 0, done.stderr
    threads = json.loads(done.stdout.split()[2])
    assert threads >= 1
    assert done.stdout.strip() == f"{expected} {threads} []"


MAIN_THREAD = """
import os, torch
before = os.sched_getaffinity(0)
torch.ones(1 << 20).add_(1).sum()
threads = [os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")]
print(len(before), len(os.sched_getaffinity(0)), sorted(map(len, threads)))
"""


@pytest.mark.slow
@pytest.mark.skipif(CPUS < 2, reason="needs two CPUs")
@pytest.mark.parametrize("openmp", ["gnu", pytest.param("intel", marks=needs("intel"))])
def test_bound_threads_leave_the_main_thread_and_its_children_all_cores(openmp: str) -> None:
    done = launched("--openmp", openmp, "--bind-threads", "--", sys.executable, "-c", MAIN_THREAD)
    assert done.returncode == 0, done.stderr
    everything = len(os.sched_getaffinity(0))
    before, after, each = done.stdout.split(maxsplit=2)
    assert (int(before), int(after)) == (everything, everything)
    assert 1 in json.loads(each)


RUN = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_perf.presets import Preset
import torch
for _ in range(2):
    trainer = Trainer(
        accelerator="cpu", fast_dev_run=True, callbacks=[Preset("cpu")], enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
print("inter-op", torch.get_num_interop_threads())
"""


@pytest.mark.slow
def test_a_run_says_once_that_its_launch_half_is_not_in_effect(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RUN)
    plain = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    told = f"lightning-perf launch --preset cpu -- {sys.executable} {script}"
    assert plain.stderr.count("has a launch half") == 1
    assert told in plain.stderr
    started = launched("--interop-threads", "3", "--", sys.executable, str(script))
    assert started.returncode == 0, started.stderr
    assert "launch half" not in started.stderr
    assert "promised" not in started.stderr
    assert "inter-op 3" in started.stdout
