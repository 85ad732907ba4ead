"""A user's project with `PerfCLI`: model, callback, and ways to start it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, Trainer
from models import Classifier, images
from presets.machines import hardware

from lightning_perf.cli import PerfCLI
from lightning_perf.presets._reader import trainer_section

QUIET = {
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "log_every_n_steps": 1,
    "limit_val_batches": 1,
    "logger": {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "."},
    },
}


class Model(Classifier):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr=lr)

    def train_dataloader(self) -> Any:
        return images()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Mine(Callback):
    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight


class ParsedOnly(Exception):
    """Carries the CLI out of its constructor before anything is built."""

    def __init__(self, cli: PerfCLI) -> None:
        self.cli = cli


class FitCLI(PerfCLI):
    """Has one subcommand only: a parser takes its time to be made."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": PerfCLI.subcommands()["fit"]}


class ParsingCLI(FitCLI):
    """Ends once the arguments are parsed, which needs none of the hardware they name."""

    def before_instantiate_classes(self) -> None:
        raise ParsedOnly(self)


class Project:
    """Starts the CLI with words of a command line, in the test's own folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def cli(
        self,
        *words: object,
        cls: type[PerfCLI] = FitCLI,
        model: type[Model] = Model,
        **kwargs: Any,
    ) -> PerfCLI:
        self._monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
        kwargs = {"seed_everything_default": False, **kwargs}
        return cls(model, save_config_kwargs={"overwrite": True}, **kwargs)

    def parsing(self, *words: object, cls: type[ParsingCLI] = ParsingCLI, **kwargs: Any) -> PerfCLI:
        """Return the CLI as it is when its arguments are parsed and nothing is built."""
        with pytest.raises(ParsedOnly) as stop:
            self.cli(*words, cls=cls, **kwargs)
        return stop.value.cli

    def parsed(self, *words: object, **kwargs: Any) -> Any:
        """Return the configuration of the subcommand, or all of it with ``run=False``."""
        config = self.parsing(*words, **kwargs).config
        return config[config.subcommand] if "subcommand" in config else config

    def fit(self, *words: object, **kwargs: Any) -> Trainer:
        return self.cli("fit", *words, **kwargs).trainer


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Project:
    # LightningCLI uses parts of jsonargparse that are deprecated there, which it says once.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    return Project(monkeypatch)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the command line believe it runs on some hardware."""

    def pretend(name: str) -> None:
        monkeypatch.setattr("lightning_perf.cli.perf_cli.detect", lambda: hardware(name))

    return pretend


def write(name: str, content: dict[str, Any]) -> Path:
    """Write a YAML file into the current folder."""
    path = Path(name)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def entry(cls: type | str, **arguments: Any) -> dict[str, Any]:
    """Return a callback as a YAML file has it; a name is that of an item."""
    path = (
        f"lightning_perf.callbacks.{cls}"
        if isinstance(cls, str)
        else f"{cls.__module__}.{cls.__qualname__}"
    )
    return {"class_path": path, **({"init_args": arguments} if arguments else {})}


def items_of(preset: str) -> list[str]:
    """Return the callbacks in the file of a preset."""
    return names(trainer_section(preset)["callbacks"])


def names(callbacks: Any) -> list[str]:
    """Return the classes' names of callbacks, built or as the parser has them."""
    return [
        type(c).__name__ if isinstance(c, Callback) else c["class_path"].rpartition(".")[2]
        for c in callbacks
    ]


def own_callbacks(trainer: Trainer) -> list[Callback]:
    """Return a Trainer's callbacks without those that Lightning adds by itself."""
    lightnings = ("lightning.pytorch.callbacks", "lightning.pytorch.cli")
    return [c for c in trainer.callbacks if not type(c).__module__.startswith(lightnings)]
