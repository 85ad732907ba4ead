"""Runs an example as a user would, with small limits."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run_example(tmp_path: Path) -> Callable[..., str]:
    """Run a script of examples/ in an empty folder and return what it prints, logs if asked."""

    def run(script: str, *arguments: str, logs: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / script), *arguments],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not list(tmp_path.iterdir()), "the example left files behind"
        return done.stdout + done.stderr if logs else done.stdout

    return run


@pytest.fixture
def help_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Return what a script of examples/ prints when asked for help."""

    def ask(script: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, "--help"])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        assert stop.value.code == 0
        return capsys.readouterr().out

    return ask
