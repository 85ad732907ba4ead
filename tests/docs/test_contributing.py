"""The five steps of docs/contributing.md lead to an item that keeps every promise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCS, ROOT, Block, all_blocks

STEPS = [
    block for block in all_blocks((DOCS / "contributing.md").read_text("utf-8")) if block.title
]
STEM = "rare_garbage_collection"


def with_lines(text: str, diff: str) -> str:
    """Return a file with the lines marked ``+`` put below the unmarked line before them."""
    lines, place = text.splitlines(), 0
    for marked in diff.splitlines():
        mark, line = marked[0], marked[1:]
        if mark == "+":
            lines.insert(place, line)
            place += 1
        else:
            assert lines.count(line) == 1, f"The page shows {line!r}, which is not there once."
            place = lines.index(line) + 1
    return "\n".join(lines) + "\n"


def follow(block: Block, project: Path) -> None:
    file = project / str(block.title)
    if block.language == "diff":
        file.write_text(with_lines(file.read_text("utf-8"), block.code), "utf-8")
    else:
        file.write_text(block.code, "utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project, with the item of the page in it."""
    for name in ("lightning_perf", "tests", "docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for block in STEPS:
        follow(block, tmp_path)
    return tmp_path


def run(project: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_five_steps_make_an_item(project: Path) -> None:
    run(project, "docs/site/refresh.py")
    index = (project / "docs" / "items" / "README.md").read_text("utf-8")
    assert f"({STEM}.md) | Let Python look for garbage less often. | L 4 |" in index

    chosen = f"RareGarbageCollection or {STEM} or every_exported or fresh"
    tests = (
        "tests/test_contract.py",
        f"tests/callbacks/test_{STEM}.py",
        "tests/docs/test_pages.py",
    )
    told = run(project, "-m", "pytest", "-v", "-m", "not gpu", "-k", chosen, *tests)
    passed = {line.partition("::")[0] for line in told.splitlines() if " PASSED" in line}
    assert passed == set(tests)
