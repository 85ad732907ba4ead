"""The guide's minimal example: precision, accumulation, and the memory before and after."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

SCRIPT = "minimal_amp_accumulation.py"


@pytest.mark.parametrize(
    "precision", [pytest.param("32-true", marks=pytest.mark.slow), "bf16-mixed"]
)
def test_it_accumulates_and_prints_memory_around_it(
    run_example: Callable[..., str], precision: str
) -> None:
    limits = ("--epochs=2", "--batch-size=128", "--accumulate=4")
    output = run_example(SCRIPT, *limits, f"--precision={precision}")
    assert f"Precision {precision}. The preset for this machine is " in output
    lines = [line for line in output.splitlines() if line.startswith("[")]
    assert [line.split("]")[0] for line in lines] == ["[before", "[batch  8", "[batch 16", "[after"]
    assert all(re.search(r"\d+\.\d MB", line) for line in lines)
    last = re.fullmatch(
        r"16 batches made 4 updates, and the loss went from ([\d.]+) to ([\d.]+)\.",
        output.splitlines()[-1],
    )
    assert last, output
    assert float(last[2]) < float(last[1])


def test_help_names_every_step_of_the_guide(help_of: Callable[[str], str]) -> None:
    output = help_of(SCRIPT)
    assert f"python examples/{SCRIPT}" in output
    for step in ("autocast()", "GradScaler()", "accumulation_steps", "zero_grad", "memory_alloc"):
        assert step in output
