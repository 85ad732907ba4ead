"""The example of recomputed activations: less memory, the same loss."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

SCRIPT = "big_model_small_memory.py"
SMALL = ("--layers=4", "--width=64", "--batch-size=4", "--steps=2", "--turns=1")


@pytest.mark.slow
def test_it_tells_memory_and_learns_the_same(
    run_example: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    picture = tmp_path_factory.mktemp("pictures") / "memory.png"
    output = run_example(SCRIPT, *SMALL, f"--picture={picture}")
    rows = re.findall(
        r"^(keep all|every 2nd|selective|full) +(\d+) MiB +(\d+) MiB +(\S+%) +\S+% +(\S+)$",
        output,
        re.MULTILINE,
    )
    ways, kept, _, flops, losses = zip(*rows, strict=True)
    assert ways == ("keep all", "every 2nd", "selective", "full")
    assert len(set(losses)) == 1
    assert flops[0] == "+0.0%"
    assert min(map(int, kept)) == int(kept[3]) < int(kept[2]) < int(kept[0])
    assert picture.stat().st_size > 10_000


def test_help_shows_the_command_and_the_defaults(help_of: Callable[[str], str]) -> None:
    output = help_of(SCRIPT)
    assert f"python examples/{SCRIPT}" in output
    assert "default: 16" in output
