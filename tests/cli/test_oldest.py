"""The tests of YAML once more, with the oldest Lightning and jsonargparse that are supported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
OLDEST = {"lightning": "2.5.0", "jsonargparse": "4.39.0"}
FILES = [
    "tests/cli/test_perf_cli.py",
    "tests/cli/test_perf_cli_prints.py",
    "tests/cli/test_perf_cli_runs.py",
    "tests/presets/test_stock_cli.py",
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that put the old packages before those of this environment."""
    folder = tmp_path_factory.mktemp("oldest")
    packages = [f"{name}=={version}" for name, version in OLDEST.items()]
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *packages],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        pytest.skip(f"pip cannot install {packages}: {done.stderr.strip().splitlines()[-1]}")
    # Lightning 2.5.0 uses parts of jsonargparse that are deprecated in 4.39 already.
    quiet = {"JSONARGPARSE_DEPRECATION_WARNINGS": "off"}
    return {**os.environ, **quiet, "PYTHONPATH": str(folder)}


def test_the_old_packages_are_the_ones_imported(environment: dict[str, str]) -> None:
    code = "import lightning, jsonargparse; print(lightning.__version__, jsonargparse.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.stdout.split() == list(OLDEST.values()), done.stderr


@pytest.mark.parametrize("file", FILES)
def test_yaml_works_with_them(environment: dict[str, str], file: str, tmp_path: Path) -> None:
    # Warnings of old packages about new ones are nothing to mend here.
    options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    # A file, since a pipe would be kept open by whatever outlives a time-out.
    with open(tmp_path / "output", "w+") as output:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, file],
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=700,
            cwd=ROOT,
            env=environment,
        )
        output.seek(0)
        shown = output.read()
    assert done.returncode == 0, shown
    assert " passed" in shown
