"""Fixtures for every test: nothing may leak, and small models to train."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_perf._knobs import read_knobs

# Threads of OpenMP wait by spinning. The operations of tests are small: with two threads they take
# longer, and several times as long where processes share the cores. Loading torch, above, has
# started none yet; processes that tests start find the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# Set by Lightning or torch on first use, and meant to stay.
_LASTING_VARIABLES = {
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "POPLAR_ENGINE_OPTIONS",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
    "CRC32C_SW_MODE",
    "PYTEST_CURRENT_TEST",
}
# Pools that torch, Lightning, tensorboard and tqdm start once per process and keep.
_LASTING_THREADS = ("ThreadPoolExecutor", "QueueManager", "Thread-", "tqdm_monitor", "SubprocPool")


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in _LASTING_VARIABLES}


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if not t.name.startswith(_LASTING_THREADS)}


def _children() -> set[int]:
    """Child processes, but for the compile workers that inductor keeps for the whole session."""
    children = set()
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            zombie = child.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            continue
        if "compile_worker" not in command and "resource_tracker" not in command and not zombie:
            children.add(child.pid)
    return children


def _wait_for_the_end(threads: set[str], children: set[int]) -> None:
    """Give loader workers and their queues, which end by themselves, the time to do so."""
    deadline = time.monotonic() + 10
    while (_threads() - threads or _children() - children) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def nothing_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Run each test in a folder of its own and fail it if it leaves anything behind."""
    monkeypatch.chdir(tmp_path)
    rootdir = request.config.rootpath
    files = set(rootdir.iterdir())
    before = {
        "knobs": read_knobs(),
        "environment": _environment(),
        "threads": _threads(),
        "child processes": _children(),
        "signal handlers": {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)},
    }
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("The test left a process group behind.")
    monkeypatch.undo()
    _wait_for_the_end(before["threads"], before["child processes"])
    assert not _threads() - before["threads"], "The test left threads behind."
    assert not _children() - before["child processes"], "The test left child processes behind."
    after = {
        "knobs": read_knobs(),
        "environment": _environment(),
        "signal handlers": {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)},
    }
    for what in ("knobs", "environment", "signal handlers"):
        assert after[what] == before[what], f"The test changed {what}."
    assert set(rootdir.iterdir()) <= files, "The test wrote into the project's folder."


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random numbers."""
    seed_everything(0, verbose=False)
    os.environ.pop("PL_GLOBAL_SEED", None)
    os.environ.pop("PL_SEED_WORKERS", None)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """Put back the handlers that Lightning leaves behind after Ctrl-C."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # A shell makes what it runs in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
