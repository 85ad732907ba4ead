"""The Python example: a preset around an ordinary LightningModule."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_perf import presets
from lightning_perf.benchmark.task import load_task

SCRIPT = Path(__file__).parents[2] / "examples" / "image_classification.py"
SMALL = ("--epochs=1", "--limit-batches=2", "--image-size=16", "--batch-size=8")


@pytest.mark.parametrize("preset", ["auto", pytest.param("none", marks=pytest.mark.slow)])
def test_it_runs_and_says_what_was_learned(run_example: Callable[..., str], preset: str) -> None:
    output = run_example(SCRIPT.name, *SMALL, f"--preset={preset}")
    name = presets.resolve(preset)
    last = output.splitlines()[-1]
    assert re.fullmatch(rf"Reads \d+\.\d% .* 2 steps in \d+ s with preset {name}\.", last), output


def test_help_shows_the_command_and_the_defaults(help_of: Callable[[str], str]) -> None:
    output = help_of(SCRIPT.name)
    assert f"python examples/{SCRIPT.name}" in output
    assert "default: auto" in output


def test_the_benchmark_finds_what_it_trains() -> None:
    module, loader, _ = load_task(f"{SCRIPT}:make").build()
    images, labels = next(iter(loader))
    assert images.shape == (32, 3, 48, 48)
    assert module.net(images[:2]).shape == (2, 10)
    assert set(labels.tolist()) <= set(range(10))
