"""The example of CPU ranks, run as its first lines say, with each of its YAML files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "cpu_ddp"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="binds threads on Linux only")
@pytest.mark.parametrize(("name", "ranks"), [("numa", None), ("two_ranks", 2), ("one_process", 0)])
def test_it_learns_and_says_where_ranks_compute(
    tmp_path: Path, name: str, ranks: int | None
) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "train.py"), "fit", "--config", f"{FOLDER / name}.yaml"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert float(re.findall(r"epoch 2: accuracy (\S+)", output)[-1]) > 0.4
    found = re.findall(r"^  rank (\d+)  CPUs (\S+)", output, re.MULTILINE)
    if ranks is None:
        assert found, output
    else:
        assert len(found) == len({cpus for _, cpus in found}) == ranks, output
    assert not list(tmp_path.iterdir()), "the example left files behind"
