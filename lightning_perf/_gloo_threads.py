"""Gloo's threads, which abort the process where they let go of tensors while Python ends.

A thread that has done a collective tells the waiting rank so, and lets go of the tensors after it,
for which it needs Python's lock. Where the rank ends in between, as it does now and then if the
cores are busy, Python before 3.14 ends such a thread in a destructor: "terminate called without an
active exception", and a run that had finished counts as failed.
"""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
_STEP_S = 0.01
LIMIT_S = 1.0
"""How long a process waits at most."""


def settle_at_exit() -> None:
    """Let gloo's threads end what they do before Python does."""
    atexit.unregister(settle)
    atexit.register(settle)


def settle() -> None:
    """Wait, without Python's lock, until no other thread of this process computes."""
    if not _THREADS.is_dir():  # not Linux
        return
    end = time.monotonic() + LIMIT_S
    idle = 0
    while idle < 2 and time.monotonic() < end:
        time.sleep(_STEP_S)
        idle = 0 if _others_run() else idle + 1


def _others_run() -> bool:
    me = threading.get_native_id()
    for task in _THREADS.iterdir():
        with suppress(OSError):  # ended meanwhile
            # The name before the state may hold spaces and brackets.
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state in "RD" and int(task.name) != me:
                return True
    return False
