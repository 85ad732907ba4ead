"""Processes end after their native threads, which gloo's own may abort otherwise."""

from __future__ import annotations

import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
from ranks import run_ranks

from lightning_perf import _gloo_threads
from lightning_perf._gloo_threads import settle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are seen in /proc")

# Compresses without Python's lock for a second or so, as a daemon, for which Python does not wait.
COMPUTES = """
import threading, zlib
def compute():
    zlib.compress(bytes(100_000_000), 9)
    print("computed", flush=True)
threading.Thread(target=compute, daemon=True).start()
"""


def test_it_waits_for_a_thread_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gloo_threads, "LIMIT_S", 60)
    ended = threading.Event()

    def compute() -> None:
        zlib.compress(bytes(100_000_000), 9)
        ended.set()

    thread = threading.Thread(target=compute)
    thread.start()
    settle()
    assert ended.is_set()
    thread.join()


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gloo_threads, "LIMIT_S", 0.2)
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            zlib.compress(bytes(1_000_000))

    thread = threading.Thread(target=compute)
    thread.start()
    settle()
    assert thread.is_alive()
    stop.set()
    thread.join()


@pytest.mark.parametrize("registered", [True, False])
def test_a_process_ends_after_its_threads(registered: bool) -> None:
    register = "from lightning_perf import _gloo_threads\n_gloo_threads.LIMIT_S = 60\n"
    register += "_gloo_threads.settle_at_exit()\n" * 2
    output = subprocess.run(
        [sys.executable, "-c", register * registered + COMPUTES],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert output == "computed\n" * registered


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["PerfDDPStrategy()", "CPUDDPStrategy('gloo')", "PipelineStrategy()"]
)
def test_ranks_of_the_strategies_end_after_their_threads(strategy: str, tmp_path: Path) -> None:
    script = f"""
from lightning_perf import _gloo_threads
from lightning_perf.strategies import *
from models import Classifier, images, mlp, trainer
_gloo_threads.LIMIT_S = 60
trainer(devices=2, strategy={strategy}, max_epochs=1).fit(Classifier(mlp()), images())
"""
    # The end that scripts of ranks get settles too: this one leaves before it.
    output = run_ranks(script + COMPUTES + "raise SystemExit\n", tmp_path)
    assert output.count("computed") == 2
