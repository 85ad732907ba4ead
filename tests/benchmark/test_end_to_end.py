"""Real comparisons, with real worker processes. How busy the machine is does not matter here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_perf.benchmark import Result, Variant, VariantFailed, compare, launch
from lightning_perf.cli.__main__ import main

SCRIPT = """
import sys
import torch
from lightning.pytorch import Callback
from models import Classifier, images, mlp
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)

def make():
    net = nn.Sequential(mlp(), nn.Dropout(0.1))
    return Classifier(net), images(400), {"accelerator": "cpu", "devices": 1}

def make_with_workers(context="fork"):
    data = images(400).dataset
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=context)
    return Classifier(mlp()), loader, {"accelerator": "cpu", "devices": 1}

def make_with_spawned_workers():
    return make_with_workers("spawn")

class Failing(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 5:
            raise ArithmeticError("the model's own trouble")

if __name__ == "__main__":
    from lightning_perf.benchmark import compare
    compare(globals()[sys.argv[1]], "none", "none", quick=True)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A user's script; turns are short, and no time goes into waiting for a quiet machine."""
    monkeypatch.setattr(launch, "FEWEST_BLOCKS", 3)
    monkeypatch.setattr(launch, "LAUNCH_SECONDS", 0.0)
    monkeypatch.setattr(launch, "_BLOCK_SECONDS", 0.001)
    monkeypatch.setattr(launch, "_QUIET_WAIT", 0.0)
    monkeypatch.setattr(launch, "_TURN_SECONDS", 0.02)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_plain_lightning_against_itself(script, cpu_clock):
    result = compare(f"{script}:make", "none", "none", quick=True, learning_steps=5)
    assert (result.launches, result.pairs) == (1, 3)
    assert result.speedup > 0
    assert result.losses_agree is True
    assert result.learning["identical"]
    assert len(result.learning["losses_a"]) == 5
    assert (result.batch_size_a, result.batch_size_b) == (4, 4)
    assert result.environment_a["threads"] == 1
    assert result.environment_difference == {}
    for name in ("step_seconds", "startup_seconds", "first_step_seconds", "peak_memory"):
        assert getattr(result, f"{name}_a") > 0
        assert getattr(result, f"{name}_b") > 0
    assert sorted(path.name for path in script.parent.iterdir() if path.is_file()) == ["script.py"]


CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  callbacks:
  - class_path: EarlyStopping
    init_args: {monitor: val_loss}
model:
  class_path: models.Classifier
data:
  class_path: config_data.Images
"""
DATA = """
import torch
from lightning.pytorch import LightningDataModule
from models import images

torch.set_num_threads(1)

class Images(LightningDataModule):
    def train_dataloader(self):
        return images()
"""
MINE = """
trainer:
  callbacks:
  - class_path: lightning_perf.callbacks.ChannelsLast
env:
  MINE: "1"
"""


@pytest.mark.slow
def test_the_command_with_a_lightning_cli_file(script, cpu_clock, tmp_path, capsys):
    (tmp_path / "config_data.py").write_text(DATA)
    (tmp_path / "train.yaml").write_text(CONFIG)
    (tmp_path / "mine.yaml").write_text(MINE)
    command = "bench --config train.yaml --a none --b mine.yaml --quick --learning-steps 5"
    assert main([*command.split(), "--json", "out.json"]) == 0
    assert "mine" in capsys.readouterr().out
    result = Result.load("out.json")
    assert (result.a, result.b) == ("none", "mine")
    assert result.losses_agree is True
    assert [status["item"] for status in result.statuses_b] == ["ChannelsLast"]
    assert result.environment_b["variables"]["MINE"] == "1"
    assert any("A runs without EarlyStopping" in warning for warning in result.warnings)
    assert not (tmp_path / "lightning_logs").exists()


@pytest.mark.slow
def test_the_failing_variant_is_named_with_its_traceback(script, cpu_clock):
    failing = Variant("failing", trainer={"callbacks": [{"class_path": "script.Failing"}]})
    with pytest.raises(VariantFailed, match="ArithmeticError: the model's own trouble") as caught:
        compare(f"{script}:make", "none", failing, quick=True)
    assert caught.value.variant == "B: failing"
    assert "on_train_batch_end" in caught.value.details


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if status(p) != psutil.STATUS_ZOMBIE]


def status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def frozen(processes: list[psutil.Process]) -> bool:
    return psutil.STATUS_STOPPED in [status(process) for process in processes]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="relies on fork and signals")
@pytest.mark.parametrize("make", ["make_with_workers", "make_with_spawned_workers"])
def test_loader_workers_die_with_a_killed_coordinator(script, make):
    program = [sys.executable, str(script), make]
    # What a killed process leaves in its temporary folder goes with the test's.
    own = {"PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(script.parent)}
    environment = {**os.environ, **own}
    with subprocess.Popen(program, start_new_session=True, env=environment) as parent:
        try:
            deadline = time.monotonic() + 120
            processes: list[psutil.Process] = []
            # Each variant has two loader workers, and one of the two variants is frozen.
            while len(processes) < 8 or not frozen(processes):
                assert time.monotonic() < deadline
                time.sleep(0.2)
                processes = family(parent.pid)
        finally:
            os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while running(processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(processes)


@pytest.mark.slow
def test_compiling_is_over_before_the_turns(script, cpu_clock):
    compiled = Variant(
        "compiled",
        trainer={
            "callbacks": [
                {
                    "class_path": "lightning_perf.callbacks.Compile",
                    "init_args": {"backend": "eager", "strict": True},
                }
            ]
        },
    )
    result = compare(f"{script}:make", "none", compiled, quick=True, learning_steps=5)
    assert result.statuses_b[0]["active"]
    assert not any(turn["compiled"] for turn in result.turns)
    assert json.dumps(result.to_dict())
