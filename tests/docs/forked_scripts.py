"""Runs scripts in processes that are forked from one which has imported everything once.

Takes a line for each, with the path of the script and that of its output, and answers with its exit
status.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

# What scripts of the documentation import; here only for their sake.
import lightning.pytorch.demos.boring_classes  # noqa: F401
import torchvision  # noqa: F401

import lightning_perf.callbacks
import lightning_perf.strategies  # noqa: F401

SECONDS = 240
"""How long a script may take."""

for line in sys.stdin:
    script, output = line.rstrip("\n").split("\t")
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        for standard in (1, 2):
            os.dup2(file, standard)
        os.chdir(Path(script).parent)
        sys.argv = [script]
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
