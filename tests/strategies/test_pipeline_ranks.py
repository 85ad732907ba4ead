"""A pipeline over processes computes what one process computes, and ends where it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_cases import NUMBERS, RUNS
from pipeline_faults import FAULTS
from ranks import TORCHRUN, run_ranks

_GROUPS = {"NUMBERS": NUMBERS, "RUNS": RUNS, "FAULTS": FAULTS}
_CASES = """
from {module} import {group}

if __name__ == "__main__":
    for case in {group}:
        case()
        print(f"case {{case.__name__}} held", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", _GROUPS)
def test_on_two_ranks(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = "pipeline_faults" if group == "FAULTS" else "pipeline_cases"
    script = _CASES.format(module=module, group=group)
    output = run_ranks(script, tmp_path, launcher=TORCHRUN, timeout=500)
    for case in _GROUPS[group]:
        assert output.count(f"case {case.__name__} held") == 2, output


_THREE = """
import torch
from pipelines import *

def held(make, data, **options):
    expected = unsplit(seeded(make), data, gradient_clip_val=0.05)
    module = seeded(make)
    trainer = pipeline(module, data, devices=3, gradient_clip_val=0.05, **options)
    assert_same(module, expected)
    trainer.save_checkpoint("three.ckpt")
    state = dict(torch.load("three.ckpt", weights_only=False)["state_dict"])
    torch.testing.assert_close(state, dict(expected.state_dict()), rtol=EXACT, atol=EXACT)

if __name__ == "__main__":
    for schedule in ("gpipe", "1f1b"):
        held(lambda: Classifier(convolutions()), images(), schedule=schedule)
        points = {"network": "net", "split_points": ["blocks.1", "blocks.3"]}
        held(lambda: Masked(Transformer()), sequences(), schedule=schedule, **points)
    print("three stages held", flush=True)
"""


@pytest.mark.slow
def test_with_stages_between_the_first_and_the_last(tmp_path: Path) -> None:
    launcher = (*TORCHRUN[:-1], "--nproc-per-node=3")
    output = run_ranks(_THREE, tmp_path, launcher=launcher, timeout=280)
    assert output.count("three stages held") == 3, output


_LAUNCHED = """
import sys
from pipelines import *

if __name__ == "__main__":
    expected = unsplit(seeded(lambda: Classifier(convolutions())).double(), images())
    module = seeded(lambda: Classifier(convolutions())).double()
    trainer = make_trainer(strategy=PipelineStrategy(start_method=sys.argv[1]), devices=2)
    trainer.fit(module, loader(images()), loader(images()))
    if sys.argv[1] == "spawn":  # lists of the module stay in the processes
        module.losses, module.validated = expected.losses, expected.validated
    assert_same(module, expected)
    print("launched and held", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["popen", "spawn"])
def test_with_lightnings_own_launchers(how: str, tmp_path: Path) -> None:
    output = run_ranks(_LAUNCHED, tmp_path, how)
    assert output.count("launched and held") == (2 if how == "popen" else 1), output


_KILLED = """
import os
from pipelines import *

class Killed(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:  # only the last stage gets here
            os._exit(9)
        return loss

if __name__ == "__main__":
    trainer = make_trainer(strategy=PipelineStrategy(), devices=2)
    trainer.fit(Killed(convolutions()), loader(images()))
"""


@pytest.mark.slow
def test_a_process_that_dies_ends_the_other(tmp_path: Path) -> None:
    output = run_ranks(_KILLED, tmp_path, fails=True, timeout=100)
    assert "onnection" in output, output


_ONE = """
from pipelines import *

if __name__ == "__main__":
    make_trainer(strategy=PipelineStrategy(), devices=1).fit(Classifier(convolutions()))
"""


@pytest.mark.slow
def test_one_process_is_not_enough(tmp_path: Path) -> None:
    output = run_ranks(_ONE, tmp_path, fails=True)
    assert "PipelineStrategy was asked for with one process" in output


_CLI = """
import torch
from lightning.pytorch.cli import LightningCLI
from pipelines import *

class Made(Classifier):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(convolutions())

    def train_dataloader(self):
        return loader(images())

    def on_fit_end(self):
        print("losses", self.losses[-1], "schedule", self.trainer.strategy.schedule, flush=True)

if __name__ == "__main__":
    LightningCLI(Made, save_config_kwargs={"overwrite": True})
"""
_YAML = """
trainer:
  accelerator: cpu
  devices: 2
  precision: 64-true
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  default_root_dir: {folder}
  strategy:
    class_path: lightning_perf.strategies.PipelineStrategy
    init_args:
      network: net
      split_points: ["3"]
      schedule: gpipe
      chunks: 4
"""


@pytest.mark.slow
def test_from_yaml(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(_YAML.format(folder=tmp_path))
    output = run_ranks(_CLI, tmp_path, "fit", "--config", str(config), launcher=TORCHRUN)
    (line,) = {line for line in output.splitlines() if line.startswith("losses")}
    assert line.endswith("schedule gpipe")
