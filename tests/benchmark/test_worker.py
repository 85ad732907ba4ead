from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from models import Classifier, images
from torch.utils.data import DataLoader

from lightning_perf.benchmark import Variant
from lightning_perf.benchmark.task import Task
from lightning_perf.benchmark.worker import Builder, _failure, _fit, _variables, peak_memory

FINISH = {"do": "finish"}


class ScriptedChannel:
    """Stands for the coordinator: gives these commands, keeps the reports."""

    def __init__(self, *commands: dict[str, Any]) -> None:
        self.commands, self.reports = list(commands), []

    def send(self, report: dict[str, Any]) -> None:
        json.dumps(report)
        self.reports.append(report)

    def exchange(self, report: dict[str, Any]) -> dict[str, Any]:
        self.send(report)
        return self.commands.pop(0)


def turn(steps: int) -> dict[str, Any]:
    return {"do": "turn", "steps": steps, "cap": 1000.0}


def make():
    return Classifier(), images()


def make_empty():
    return Classifier(), DataLoader([])


def make_interrupted():
    return (
        Classifier(),
        images(),
        {
            "callbacks": [EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")],
            "max_epochs": 1,
            "max_steps": 2,
            "fast_dev_run": True,
            "accumulate_grad_batches": 2,
        },
    )


class Raising(Classifier):
    def training_step(self, batch, batch_idx):
        raise ArithmeticError("the model's own trouble")


def make_raising():
    return Raising(), images()


class Quitting(Classifier):
    def training_step(self, batch, batch_idx):
        self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def make_quitting():
    return Quitting(), images()


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make_scheduled():
    return Scheduled(), images()


@pytest.fixture(autouse=True)
def restored_environment(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


@pytest.fixture
def serve(tmp_path):
    """Fit a task of this file under scripted commands."""

    def run(make, *commands, variant=None):
        channel = ScriptedChannel(*commands)
        variant = variant or Variant("mine", trainer={"accelerator": "cpu", "devices": 1})
        _fit(Builder(Task(__name__, make.__name__), variant, tmp_path), channel, seed=0)
        return channel.reports

    return run


def test_reports_every_turn_and_the_end(serve):
    reports = serve(make, turn(1), turn(10), FINISH)
    assert [report["event"] for report in reports] == ["ready", "turn", "turn", "finished"]


def test_describes_what_runs(serve):
    trainer = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "bf16-mixed",
        "callbacks": [
            {"class_path": "lightning_perf.callbacks.ChannelsLast"},
            {"class_path": "LearningRateMonitor"},
        ],
    }
    variant = Variant("mine", trainer=trainer, env={"MY_OWN": "1"})
    _, _, description, _ = serve(make, turn(1), {"do": "describe"}, FINISH, variant=variant)
    assert description["statuses"][0]["item"] == "ChannelsLast"
    assert description["inexact"] == ["ChannelsLast"]
    assert description["callbacks"] == ["LearningRateMonitor"]
    assert description["epoch_batches"] == 4
    assert description["accumulate"] == 1
    assert description["peak_memory"] > 10 * 2**20
    environment = description["environment"]
    assert environment["precision"] == "bf16-mixed"
    assert environment["threads"] == torch.get_num_threads()
    assert environment["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert environment["hardware"]["system"]
    assert "intra_op_threads" in environment["knobs"]


def test_what_ends_or_interrupts_a_run_is_left_out_and_named(serve):
    commands = [turn(12), {"do": "describe"}, FINISH]
    _, report, description, _ = serve(make_interrupted, *commands)
    assert len(report["times"]) == 12
    assert description["left_out"] == ["EarlyStopping", "ModelCheckpoint"]
    assert description["accumulate"] == 2


def test_schedules_computed_from_the_number_of_steps_are_possible(serve):
    reports = serve(make_scheduled, turn(3), FINISH)
    assert all(math.isfinite(time) for time in reports[1]["times"])


def test_nothing_is_written_where_the_user_works(serve, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    serve(make, turn(60), FINISH)
    assert not list(elsewhere.iterdir())


@pytest.mark.filterwarnings("ignore:Total length of .* across ranks is zero")
def test_an_empty_loader_is_named(serve):
    with pytest.raises(ValueError, match=r"gave no batch\. Check the length of the data set"):
        serve(make_empty)


def test_an_error_of_the_model_is_its_own(serve):
    with pytest.raises(ArithmeticError, match="the model's own trouble"):
        serve(make_raising, turn(1))


def test_a_model_that_stops_the_trainer_is_an_error(serve):
    with pytest.raises(RuntimeError, match="ended by itself after 1 optimizer steps"):
        serve(make_quitting, turn(100))


def test_several_processes_are_refused(serve):
    variant = Variant("mine", trainer={"accelerator": "cpu", "devices": 2})
    with pytest.raises(ValueError, match=r"this one has 2 processes\. Set `devices: 1`"):
        serve(make, variant=variant)


class Marker(Callback):
    pass


def test_the_variant_wins_over_the_task(tmp_path):
    variant = Variant("mine", trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5})
    _, _, arguments = Builder(Task(__name__, "make_interrupted"), variant, tmp_path)()
    assert arguments["accumulate_grad_batches"] == 3
    assert arguments["gradient_clip_val"] == 0.5
    assert arguments["callbacks"] == []
    assert arguments["max_epochs"] == 1
    assert "fast_dev_run" not in arguments


def test_a_failure_carries_its_traceback_and_names_memory():
    def fail(error):
        try:
            raise error
        except Exception as caught:
            return _failure(caught)

    report = fail(ValueError("no good"))
    assert report["reason"] == "ValueError: no good"
    assert "raise error" in report["traceback"]
    assert fail(torch.OutOfMemoryError("of 10 GiB"))["reason"].startswith("out of memory. ")


def test_only_variables_that_matter_are_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MY_API_KEY", "secret")
    monkeypatch.setenv("MINE", "1")
    recorded = _variables(Variant("mine", env={"MINE": "1"}))
    assert recorded["OMP_NUM_THREADS"] == "3"
    assert recorded["MINE"] == "1"
    assert "secret" not in recorded.values()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_this_process_s_own_and_not_its_parent_s():
    ballast = bytearray(400 * 2**20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    program = "from lightning_perf.benchmark.worker import peak_memory; print(peak_memory())"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(child.stdout) < 300 * 2**20 < peak_memory()


def test_prints_and_children_stay_out_of_the_channel():
    program = (
        "import os, sys\n"
        "from lightning_perf.benchmark.worker import Channel\n"
        "channel = Channel()\n"
        "print('noise', flush=True)\n"
        "os.system('echo more noise')\n"
        "assert sys.stdin.read() == ''\n"
        "channel.send(channel.receive())\n"
        "channel.receive()\n"
        "raise SystemExit('is not reached: the end of the commands ends the process')\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], input=b'{"do": "x"}\n', capture_output=True
    )
    assert child.returncode == 0
    assert child.stdout.split() == [b'{"do":', b'"x"}']
    assert child.stderr.split() == [b"noise", b"more", b"noise"]
