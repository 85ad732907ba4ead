"""All ranks end soon, whatever ends one of them, and the checkpoint of the exception is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import MARK, TORCHRUN, end_marked, marked

pytestmark = pytest.mark.slow

_SCRIPT = """
import os, signal, sys, time
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from models import Classifier, images, mlp, trainer
from lightning_perf.strategies import PerfDDPStrategy

what, ranks = sys.argv[1], sys.argv[2].split(",")

class End(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(0.02)  # a step long enough for signals to arrive in the same one
        if batch_idx == 4 and str(trainer.global_rank) in ranks:
            open("began", "a").close()
            if what == "raise":
                raise ValueError("raised on purpose")
            os.kill(os.getpid(), getattr(signal, what))

if __name__ == "__main__":
    run = trainer(
        devices=2, strategy=PerfDDPStrategy("powersgd", start_powerSGD_iter=1), max_epochs=9,
        enable_checkpointing=True, callbacks=[End(), OnExceptionCheckpoint("saved")],
    )
    run.fit(Classifier(mlp()), images(samples=400))
"""


@pytest.mark.parametrize(
    ("launcher", "what", "ranks"),
    [
        ("popen", "raise", "1"),
        ("popen", "SIGTERM", "0"),
        ("popen", "SIGTERM", "1"),
        ("popen", "SIGINT", "0,1"),
        ("popen", "SIGKILL", "0"),
        ("popen", "SIGKILL", "1"),
        ("torchrun", "raise", "0"),
        ("torchrun", "SIGTERM", "0,1"),
        ("torchrun", "SIGKILL", "1"),
    ],
)
def test_all_ranks_end(tmp_path: Path, launcher: str, what: str, ranks: str) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    began, saved = tmp_path / "began", tmp_path / "saved" / "on_exception.ckpt"
    mark = {MARK: str(tmp_path), "OMP_NUM_THREADS": "1"}
    environ = {**os.environ, **mark, "PYTHONPATH": str(Path(__file__).parents[1])}
    start = [sys.executable, *(TORCHRUN if launcher == "torchrun" else ()), "script.py"]
    with (tmp_path / "output.txt").open("w") as file:
        process = subprocess.Popen(
            [*start, what, ranks],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environ,
            # A shell makes what it runs in the background ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            deadline = time.monotonic() + 120
            while not began.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            deadline = time.monotonic() + 30
            while (left := marked(str(tmp_path))) and time.monotonic() < deadline:
                process.poll()  # else it stays as a zombie
                time.sleep(0.2)
        finally:
            end_marked(str(tmp_path))
            code = process.wait()
    output = (tmp_path / "output.txt").read_text()
    assert began.exists(), output
    assert not left, output
    # Lightning ends with 0 after SIGTERM.
    assert code != 0 or what == "SIGTERM", output
    # Rank 0 saves, unless it is killed itself.
    assert saved.exists() == ((what, ranks) != ("SIGKILL", "0")), output
    if what == "raise":
        assert "ValueError: raised on purpose" in output
    elif what == "SIGKILL":
        other = 1 - int(ranks)
        assert f"Rank {other} ends because another rank left the run" in output
    elif what == "SIGTERM":
        assert "SIGTERM" in output
