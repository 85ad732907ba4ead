"""The items' plain functions around a loop of Lightning Fabric."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_perf import callbacks, presets

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = "fabric.py"


@pytest.mark.parametrize("more", [("--compile=eager",), pytest.param((), marks=pytest.mark.slow)])
def test_it_runs_and_says_what_was_learned(
    run_example: Callable[..., str], more: tuple[str, ...]
) -> None:
    output = run_example(SCRIPT, "--epochs=1", "--batch-size=128", *more)
    assert re.search(r"^epoch 1: accuracy \d+\.\d%$", output, re.MULTILINE)
    assert ("compiled: the whole network" in output) == bool(more)
    assert re.match(r"Read [\d.]+% of the digits .* are as before\.", output.splitlines()[-1])


def test_help_shows_the_command(help_of: Callable[[str], str]) -> None:
    assert f"python examples/{SCRIPT}" in help_of(SCRIPT)


def test_it_uses_the_function_of_every_item_of_the_presets() -> None:
    text = (EXAMPLES / SCRIPT).read_text()
    files = [presets.path(name).read_text(encoding="utf-8") for name in presets.names()]
    items = [n for n in callbacks.__all__ if any(f"callbacks.{n}\n" in file for file in files)]
    assert len(items) >= 7
    for name in items:
        module = getattr(callbacks, name).__module__
        assert f"from {module} import " in text
