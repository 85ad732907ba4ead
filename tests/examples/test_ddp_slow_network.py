"""The example of a slow network, run as its first lines say, with each of its YAML files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"), [("plain", 1.0), ("bf16", 0.5), ("powersgd", 0.2)], ids=lambda v: str(v)
)
def test_it_learns_and_says_what_it_sent(
    run_example: Callable[..., str], name: str, share: float
) -> None:
    config = EXAMPLES / "ddp_slow_network" / f"{name}.yaml"
    output = run_example("ddp_slow_network/train.py", "fit", f"--config={config}", logs=True)
    assert float(re.findall(r"epoch 2: accuracy (\S+)", output)[-1]) > 0.9
    (sent,) = re.findall(r"with (\S+) MB", output)
    assert float(sent) / 4.5 == pytest.approx(share, abs=0.15 * share + 0.05)
