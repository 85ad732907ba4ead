"""The preset files under an unchanged LightningCLI and under jsonargparse alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from models import Classifier, images

from lightning_perf import presets

# LightningCLI itself uses parts of jsonargparse that are deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")

MINE = """\
seed_everything: false
trainer:
  devices: 1
  max_steps: 2
  limit_val_batches: 1
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  log_every_n_steps: 1
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args:
      save_dir: .
"""


class Model(Classifier):
    def train_dataloader(self) -> Any:
        return images()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Mine(Callback):
    pass


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Trainer:
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    return LightningCLI(Model, save_config_kwargs={"overwrite": True}).trainer


def own_types(trainer: Trainer) -> list[str]:
    lightnings = ("lightning.pytorch.callbacks", "lightning.pytorch.cli")
    callbacks = [c for c in trainer.callbacks if not type(c).__module__.startswith(lightnings)]
    return sorted(type(callback).__name__ for callback in callbacks)


def names_in(preset: str) -> list[str]:
    callbacks = yaml.safe_load(presets.path(preset).read_text())["trainer"]["callbacks"]
    return [entry["class_path"].rpartition(".")[2] for entry in callbacks]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    return file


@pytest.mark.parametrize("name", ["cpu", "cpu_bf16"])
def test_fit_and_reload_of_the_saved_config(
    monkeypatch: pytest.MonkeyPatch, mine: Path, name: str
) -> None:
    trainer = run(monkeypatch, "fit", "--config", presets.path(name), "--config", mine)
    assert trainer.global_step == 2
    assert own_types(trainer) == sorted(names_in(name))

    saved = Path(trainer.log_dir) / "config.yaml"
    entries = yaml.safe_load(saved.read_text())["trainer"]["callbacks"]
    assert entries[0] == {
        "class_path": "lightning_perf.presets.Preset",
        "init_args": {"name": name},
    }
    again = run(monkeypatch, "fit", "--config", saved)
    assert again.global_step == 2
    assert own_types(again) == own_types(trainer)
    assert (Path(again.log_dir) / "config.yaml").read_text() == saved.read_text()


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_other_subcommands(monkeypatch: pytest.MonkeyPatch, mine: Path, command: str) -> None:
    text = MINE.replace("  max_steps: 2\n", "")
    mine.write_text(text)
    trainer = run(monkeypatch, command, "--config", presets.path("cpu"), "--config", mine)
    assert own_types(trainer) == sorted(names_in("cpu"))


def test_callbacks_plus_adds_the_users(monkeypatch: pytest.MonkeyPatch, mine: Path) -> None:
    mine.write_text(MINE + f"  callbacks+:\n    - class_path: {__name__}.Mine\n")
    trainer = run(monkeypatch, "fit", "--config", presets.path("cpu"), "--config", mine)
    assert own_types(trainer) == sorted([*names_in("cpu"), "Mine"])


def test_callbacks_without_plus_replaces_the_items(
    monkeypatch: pytest.MonkeyPatch, mine: Path
) -> None:
    mine.write_text(MINE + f"  callbacks:\n    - class_path: {__name__}.Mine\n")
    trainer = run(monkeypatch, "fit", "--config", presets.path("cpu"), "--config", mine)
    assert own_types(trainer) == ["Mine"]


def test_the_later_file_and_the_command_line_win(
    monkeypatch: pytest.MonkeyPatch, mine: Path
) -> None:
    mine.write_text(MINE + "  precision: 64-true\n")
    files = ["fit", "--config", presets.path("cpu_bf16"), "--config", mine]
    assert run(monkeypatch, *files).precision == "64-true"
    assert run(monkeypatch, *files, "--trainer.precision=32-true").precision == "32-true"


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_parses_dumps_and_builds(name: str, tmp_path: Path) -> None:
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    config = parser.parse_path(str(presets.path(name)))
    built = parser.instantiate_classes(parser_of_callbacks(config)).trainer.callbacks
    assert [type(callback).__name__ for callback in built] == names_in(name)
    assert built[0].name == name
    assert all(callback.strict is False for callback in built[1:])

    copy = tmp_path / "copy.yaml"
    # With what is None, as Lightning saves its configurations: None may not be the default.
    copy.write_text(parser.dump(config, skip_none=False))
    assert parser.dump(parser.parse_path(str(copy)), skip_none=False) == copy.read_text()


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_prints_and_is_read_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def printed(file: object) -> str:
        words = ["train.py", "--config", str(file), "--print_config"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit):
            LightningCLI(Model, run=False)
        return capsys.readouterr().out

    first = printed(presets.path(name))
    assert yaml.safe_load(first)["trainer"]["callbacks"][0]["init_args"] == {"name": name}
    Path("printed.yaml").write_text(first)
    assert printed("printed.yaml") == first


def parser_of_callbacks(config: Any) -> Any:
    """The same configuration for hardware that every machine has."""
    config = config.clone()
    config.trainer.accelerator = "cpu"
    config.trainer.precision = "32-true"
    config.trainer.logger = False
    return config
