"""The YAML examples, run as their first lines say, with small limits."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from lightning_perf import presets

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMITS = [
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--trainer.enable_progress_bar=false",
    "--data.image_size=16",
    "--data.batch_size=4",
]


def command(script: Path) -> str:
    """Return the indented lines of a script's docstring."""
    text = ast.get_docstring(ast.parse(script.read_text()))
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    return textwrap.dedent("\n".join(lines))


@pytest.mark.skipif(sys.platform == "win32", reason="the commands are for a POSIX shell")
@pytest.mark.parametrize("name", ["train.py", "train_stock.py"])
def test_it_trains_with_the_preset_and_saves_it(name: str, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "cli", tmp_path / "examples" / "cli")
    here = Path(sys.executable).parent  # where `python` and `lightning-perf` are
    done = subprocess.run(
        ["bash", "-c", f"{command(EXAMPLES / 'cli' / name)} {' '.join(LIMITS)}"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    preset = presets.resolve("auto")
    shown = done.stdout + done.stderr
    assert f"lightning_perf (preset {preset}):" in shown
    assert "`max_steps=2` reached" in shown

    saved = yaml.safe_load((tmp_path / "lightning_logs/version_0/config.yaml").read_text())
    assert saved.get("preset") == (preset if name == "train.py" else None)
    found = [entry["class_path"].rpartition(".")[2] for entry in saved["trainer"]["callbacks"]]
    assert found[0] == "Preset"
    assert found[-1] == "ModelCheckpoint"
    assert list((tmp_path / "lightning_logs/version_0/checkpoints").iterdir())


def test_both_files_ask_for_the_same_training() -> None:
    ours, stock = (
        yaml.safe_load((EXAMPLES / "cli" / name).read_text())
        for name in ("train.yaml", "train_stock.yaml")
    )
    assert ours.pop("preset") == "auto"
    ours["trainer"]["callbacks+"] = ours["trainer"].pop("callbacks")
    assert ours == stock
