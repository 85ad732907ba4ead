"""Runs of `PerfCLI`, what they save, and what becomes of it when it is given back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.project import (
    QUIET,
    Mine,
    Model,
    ParsingCLI,
    Project,
    entry,
    items_of,
    names,
    own_callbacks,
    write,
)
from items import ROWS, Row
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from models import images
from presets.machines import HOME

from lightning_perf import presets
from lightning_perf.cli import PerfCLI

FEW = {**QUIET, "max_steps": 2}
ON_CPU = ["cpu", "cpu_bf16"]


def saved(trainer: Trainer) -> Path:
    return Path(trainer.log_dir) / "config.yaml"


def callbacks_in(path: Path) -> list[dict[str, Any]]:
    return yaml.safe_load(path.read_text())["trainer"]["callbacks"]


# --- every preset and every item ---


@pytest.mark.filterwarnings("ignore:Preset 'cpu_bf16' computes in bfloat16")
@pytest.mark.parametrize("name", ON_CPU)
def test_a_run_with_a_preset_is_saved_and_run_again(project: Project, name: str) -> None:
    own = {**FEW, "callbacks": [entry(Mine, weight=2.0)]}
    first = project.fit("--config", write("mine.yaml", {"preset": name, "trainer": own}))
    assert first.global_step == 2
    assert names(own_callbacks(first)) == [*items_of(name), "Mine"]
    assert yaml.safe_load(saved(first).read_text())["preset"] == name

    again = project.fit("--config", saved(first))
    assert again.global_step == 2
    assert again.precision == first.precision
    assert names(own_callbacks(again)) == names(own_callbacks(first))
    assert saved(again).read_text() == saved(first).read_text()


@pytest.mark.parametrize("name", sorted(set(presets.names()) - set(ON_CPU)))
def test_a_preset_for_other_hardware_is_saved_and_read_again(
    project: Project, on: Any, name: str
) -> None:
    on(HOME[name])
    first = project.parsing("--preset", name, run=False)
    first.parser.save(first.config, "saved.yaml", skip_none=False)  # as Lightning does
    again = project.parsing("--config", "saved.yaml", run=False)
    again.parser.save(again.config, "again.yaml", skip_none=False)
    assert again.config.trainer == first.config.trainer
    assert Path("again.yaml").read_text() == Path("saved.yaml").read_text()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_an_item_in_the_users_file_is_run_saved_and_run_again(project: Project, row: Row) -> None:
    described = entry(row.id, **row.arguments, strict=False)
    own = {"accelerator": "cpu", **FEW, **row.trainer, "callbacks": [described]}
    first = project.fit("--config", write("mine.yaml", {"trainer": own}))
    again = project.fit("--config", saved(first))
    assert repr(own_callbacks(again)) == repr(own_callbacks(first))
    assert repr(own_callbacks(first)) == repr([row.item(strict=False)])
    assert saved(again).read_text() == saved(first).read_text()


@pytest.mark.parametrize("command", PerfCLI.subcommands())
def test_every_subcommand_runs(project: Project, command: str) -> None:
    file = write("mine.yaml", {"preset": "cpu", "trainer": {**QUIET, "max_epochs": 1}})
    trainer = project.cli(command, "--config", file, cls=PerfCLI).trainer
    assert trainer.state.finished
    assert names(own_callbacks(trainer)) == items_of("cpu")
    assert yaml.safe_load(saved(trainer).read_text())["preset"] == "cpu"


def test_without_subcommands_the_trainer_is_ready(project: Project) -> None:
    file = write("mine.yaml", {"preset": "cpu", "trainer": FEW})
    cli = project.cli("--config", file, run=False)
    cli.trainer.fit(cli.model)
    assert names(own_callbacks(cli.trainer)) == items_of("cpu")
    assert yaml.safe_load(saved(cli.trainer).read_text())["preset"] == "cpu"


# --- a saved configuration ---


@pytest.fixture
def config(project: Project) -> Path:
    """The configuration that a run with preset cpu saved."""
    return saved(project.fit("--config", write("mine.yaml", {"preset": "cpu", "trainer": FEW})))


def test_a_saved_list_is_complete(project: Project, config: Path) -> None:
    # Were the preset to gain an item after this run, it would look just like this.
    content = yaml.safe_load(config.read_text())
    content["trainer"]["callbacks"] = callbacks_in(config)[:-1]
    shorter = write("shorter.yaml", content)
    found = project.parsed("fit", "--config", shorter).trainer.callbacks
    assert names(found) == items_of("cpu")[:-1]


def test_an_item_added_to_a_saved_list_replaces_the_presets(project: Project, config: Path) -> None:
    more = f"--trainer.callbacks+={entry('Threads', intra_op=1)}"
    found = project.parsed("fit", "--config", config, more).trainer.callbacks
    assert sorted(names(found)) == sorted(items_of("cpu"))
    assert found[-1].init_args.intra_op == 1


@pytest.mark.parametrize("other", ["cuda_bf16", "null", "none"])
def test_a_saved_configuration_and_another_preset(
    project: Project, config: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    with pytest.raises(SystemExit):
        project.parsed("fit", "--config", config, "--preset", other)
    shown = capsys.readouterr().err.splitlines()[-1]
    assert "the callbacks hold preset 'cpu' written out, as a saved configuration does" in shown


def test_on_a_machine_without_the_hardware_it_says_so(
    project: Project, on: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    on("H100")
    cli = project.parsing("--preset", "auto", run=False)
    cli.parser.save(cli.config, "saved.yaml")
    on("old CPU")
    with pytest.raises(SystemExit):
        project.cli("--config", "saved.yaml", run=False)
    assert "Preset 'cuda_bf16' needs a device of kind 'cuda'" in capsys.readouterr().err


def test_a_configuration_saved_by_lightningcli(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {**FEW, "precision": "64-true", "callbacks": [entry(Mine)]}
    file = write("mine.yaml", {"seed_everything": False, "trainer": own})
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--config", str(file)])
    theirs = saved(LightningCLI(Model, save_config_kwargs={"overwrite": True}).trainer)
    found = project.parsed("fit", "--config", theirs, "--preset", "cpu").trainer
    # It holds every setting, so only the callbacks come from the preset.
    assert found.accelerator == "auto"
    assert found.precision == "64-true"
    assert names(found.callbacks) == [*items_of("cpu"), "Mine"]
    assert "preset" not in project.parsed("fit", "--config", theirs)


# --- other parts of a project ---


def test_a_project_that_sets_precision_and_callbacks(project: Project) -> None:
    threads = entry("Threads", intra_op=1, strict=False)
    own = {**FEW, "precision": "64-true", "callbacks": [entry(Mine), threads]}
    trainer = project.fit("--config", write("mine.yaml", {"preset": "cpu", "trainer": own}))
    assert trainer.precision == "64-true"
    assert sorted(names(own_callbacks(trainer))) == sorted([*items_of("cpu"), "Mine"])


@pytest.mark.parametrize(
    "limits", [{"fast_dev_run": True}, {"overfit_batches": 2}, {"limit_train_batches": 1}], ids=str
)
def test_short_runs(project: Project, limits: dict[str, Any]) -> None:
    file = write("mine.yaml", {"preset": "cpu", "trainer": {**QUIET, "max_epochs": 1, **limits}})
    trainer = project.fit("--config", file)
    assert names(own_callbacks(trainer)) == items_of("cpu")
    assert trainer.global_step == next(iter(limits.values()))


def test_tensorboard_holds_preset_and_items(project: Project) -> None:
    logger = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger"}
    own = {**FEW, "logger": {**logger, "init_args": {"save_dir": "."}}}
    trainer = project.fit("--config", write("mine.yaml", {"preset": "cpu", "trainer": own}))
    logged = yaml.safe_load((Path(trainer.log_dir) / "hparams.yaml").read_text())
    assert logged["lightning_perf/preset"] == "cpu"
    both = f"{logged['lightning_perf/active']}, {logged['lightning_perf/skipped']}"
    assert sorted(both.split(", ")) == sorted(set(items_of("cpu")) - {"Preset"})


class Saving(Model):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # the version's number is in it
@pytest.mark.parametrize(("first", "second"), [("cpu", None), (None, "cpu")])
def test_a_checkpoint_goes_on_with_and_without_a_preset(
    project: Project, first: str | None, second: str | None
) -> None:
    own = {**QUIET, "accelerator": "cpu", "enable_checkpointing": True, "max_epochs": 1}
    more = ["fit", "--config", write("mine.yaml", {"trainer": own})]
    began = project.cli(*more, "--preset", first or "null", model=Saving).trainer
    checkpoint = began.checkpoint_callback.best_model_path
    more += ["--trainer.max_epochs", "2", "--ckpt_path", checkpoint]
    ended = project.cli(*more, "--preset", second or "null", model=Saving).trainer
    assert ended.global_step == 2 * began.global_step
    for trainer, preset in ((began, first), (ended, second)):
        assert names(own_callbacks(trainer)) == (items_of(preset) if preset else [])


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return images(batch_size=self.batch_size)


class Linked(ParsingCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--scale", type=float, default=1.0)
        parser.link_arguments("scale", "model.lr")
        parser.link_arguments("data.batch_size", "trainer.max_steps")


def test_linked_arguments(project: Project) -> None:
    file = write("mine.yaml", {"preset": "cpu", "scale": 0.5, "data": {"batch_size": 3}})
    found = project.parsed("fit", "--config", file, cls=Linked, datamodule_class=Data)
    assert (found.model.lr, found.trainer.max_steps) == (0.5, 3)
    assert names(found.trainer.callbacks) == items_of("cpu")
