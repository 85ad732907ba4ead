"""Scripts of several ranks: run with a time-out, leaving no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "LIGHTNING_PERF_TEST_RANKS"

# torchrun asks for unbuffered output, in which the words of one rank's `print` come between those
# of another's.
_WHOLE_LINES = "import sys; sys.stdout.reconfigure(line_buffering=True, write_through=False)\n"

# Lightning leaves gloo's process group to the end of Python, which aborts the process now and then.
# So collectives that a failure left in flight end here, and threads let go of their tensors.
_END_OF_GROUP = """
import torch.distributed
from lightning_perf._gloo_threads import settle
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
    settle()
"""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NAME": "train",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost",
    "SLURM_NNODES": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
}
"""What a job of two tasks on one node has in its environment."""


def run_ranks(
    script: str,
    folder: Path,
    *arguments: str,
    launcher: tuple[str, ...] = (),
    environ: dict[str, str] | None = None,
    timeout: int = 150,
    fails: bool = False,
) -> str:
    """Run a script, with gloo on the loopback, and return its output.

    Fails if the script fails, or if it does not and ``fails`` says that it shall.

    It may import the helpers here and the tests of the callbacks. Output goes through a file: a
    rank that hangs would hold a pipe open.
    """
    path, output, tests = folder / "script.py", folder / "output.txt", Path(__file__).parent
    path.write_text(_WHOLE_LINES + script + _END_OF_GROUP)
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {
        # The package that lies beside the tests, wherever another one may be installed.
        "PYTHONPATH": os.pathsep.join(map(str, (tests.parent, tests, tests / "callbacks"))),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        MARK: str(folder),
        **(environ or {}),
    }
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(path), *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_marked(str(folder))
            process.wait()
    text = output.read_text()
    assert code is not None, f"no end within {timeout} s: {text}"
    assert (code != 0) == fails, f"exit status {code}: {text}"
    return text


def marked(mark: str) -> list[psutil.Process]:
    """Return what a script started: hung ranks outlive parents, torchrun's leave the session."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            zombie = process.status() == psutil.STATUS_ZOMBIE
            if process.environ().get(MARK) == mark and not zombie:
                found.append(process)
    return found


def end_marked(mark: str) -> None:
    """End what a script started."""
    for process in marked(mark):
        with suppress(psutil.NoSuchProcess):
            process.kill()
