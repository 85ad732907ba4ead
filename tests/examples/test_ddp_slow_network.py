"""The example of a slow network, run as its first lines say, with each of its YAML files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "ddp_slow_network"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"), [("plain", 1.0), ("bf16", 0.5), ("powersgd", 0.2)], ids=lambda v: str(v)
)
def test_it_learns_and_says_what_it_sent(tmp_path: Path, name: str, share: float) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "train.py"), "fit", "--config", f"{FOLDER / name}.yaml"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert float(re.findall(r"epoch 2: accuracy (\S+)", output)[-1]) > 0.9
    (sent,) = re.findall(r"with (\S+) MB", output)
    assert float(sent) / 4.5 == pytest.approx(share, abs=0.15 * share + 0.05)
    assert not list(tmp_path.iterdir()), "the example left files behind"
