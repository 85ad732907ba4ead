"""The example of CPU ranks, run as its first lines say, with each of its YAML files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="binds threads on Linux only")
@pytest.mark.parametrize(("name", "ranks"), [("numa", None), ("two_ranks", 2), ("one_process", 0)])
def test_it_learns_and_says_where_ranks_compute(
    run_example: Callable[..., str], name: str, ranks: int | None
) -> None:
    config = EXAMPLES / "cpu_ddp" / f"{name}.yaml"
    output = run_example("cpu_ddp/train.py", "fit", f"--config={config}", logs=True)
    assert float(re.findall(r"epoch 2: accuracy (\S+)", output)[-1]) > 0.4
    found = re.findall(r"^  rank (\d+)  CPUs (\S+)", output, re.MULTILINE)
    if ranks is None:
        assert found, output
    else:
        assert len(found) == len({cpus for _, cpus in found}) == ranks, output
