"""Scripts of several ranks: run with a time-out, leaving no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run_ranks(
    script: str,
    folder: Path,
    *arguments: str,
    launcher: tuple[str, ...] = (),
    environ: dict[str, str] | None = None,
    timeout: int = 150,
) -> str:
    """Run a script, with gloo on the loopback, and return its output; fail if it fails.

    It may import the helpers here and the tests of the callbacks. Output goes through a file: a
    rank that hangs would hold a pipe open.
    """
    path, output, tests = folder / "script.py", folder / "output.txt", Path(__file__).parent
    path.write_text(script)
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {
        "PYTHONPATH": f"{tests}{os.pathsep}{tests / 'callbacks'}",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
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
            code = -1
        finally:
            # By parentage, as torchrun gives each rank a process group of its own.
            children = []
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True)
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait()
    text = output.read_text()
    assert code == 0, text
    return text
