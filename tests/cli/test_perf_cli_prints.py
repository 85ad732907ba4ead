"""What `PerfCLI` prints: configurations that can be given back, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.project import Mine, Model, ParsingCLI, Project, entry, items_of, names, write
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from presets.machines import HOME

from lightning_perf import NoEffectWarning, presets
from lightning_perf.cli import PerfCLI

On = Callable[[str], None]


def error_of(
    capsys: pytest.CaptureFixture[str],
    project: Project,
    *words: object,
    cls: type[PerfCLI] = ParsingCLI,
    **kwargs: Any,
) -> str:
    """Return the last line printed for arguments that are refused."""
    with pytest.raises(SystemExit) as stop:
        project.cli(*words, cls=cls, **kwargs)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return shown.splitlines()[-1]


# --- what is refused ---


def test_a_wrong_name_is_one_line(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("mine.yaml", {"preset": "cuda_bf61"})
    for words in (["--config", file], ["--preset", "cuda_bf61"]):
        shown = error_of(capsys, project, "fit", *words)
        assert shown.startswith("error: There is no preset 'cuda_bf61'. Did you mean 'cuda_bf16'?")


@pytest.mark.parametrize("value", ["[cpu]", "{name: cpu}"])
def test_a_preset_is_one_name(
    project: Project, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    file = Path("mine.yaml")
    file.write_text(f"preset: {value}\n")
    with pytest.raises(SystemExit):
        project.parsed("fit", "--config", file)
    assert 'Parser key "preset"' in capsys.readouterr().err


def test_an_empty_name_is_a_wrong_name(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "There is no preset ''." in error_of(capsys, project, "--preset=", run=False)


def test_a_trainer_that_cannot_be_set(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    def make_trainer(max_epochs: int = 1) -> Trainer:
        return Trainer(max_epochs=max_epochs)

    words, kwargs = ["--trainer.max_epochs", "3"], {"run": False, "trainer_class": make_trainer}
    assert project.parsed(*words, **kwargs).trainer.max_epochs == 3
    shown = error_of(capsys, project, *words, "--preset", "cpu", **kwargs)
    assert "'cpu' sets accelerator, callbacks of the Trainer, which the `trainer_class`" in shown
    assert "make_trainer of this program does not take" in shown


def test_hardware_that_is_not_there(
    project: Project, on: On, capsys: pytest.CaptureFixture[str]
) -> None:
    on("old CPU")
    shown = error_of(capsys, project, "--preset", "hopper", run=False, cls=PerfCLI)
    assert "'cuda_bf16' needs a device of kind 'cuda'; found cpu (old CPU)" in shown
    assert "Use 'auto', which is 'cpu' here." in shown
    # What the user says instead is Lightning's to check.
    words = ["--trainer.accelerator", "cpu", "--trainer.precision", "32-true"]
    trainer = project.cli("--preset", "hopper", *words, run=False).trainer
    assert trainer.precision == "32-true"


def test_what_would_be_emulated(project: Project, on: On) -> None:
    on("old CPU")
    with pytest.warns(NoEffectWarning, match="bfloat16, which old CPU .* emulated and slower"):
        trainer = project.cli("--preset", "cpu_bf16", run=False).trainer
    assert trainer.precision == "bf16-mixed"


def test_a_typo_names_the_item_and_the_argument(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"callbacks": [entry("ChannelsLast"), entry("Threads", intra_ops=2)]}
    file = write("mine.yaml", {"preset": "cpu", "trainer": own})
    with pytest.raises(SystemExit):
        project.parsed("fit", "--config", file)
    shown = capsys.readouterr().err
    assert "class_path 'lightning_perf.callbacks.Threads'" in shown
    assert "'intra_ops'" in shown


# --- printing, and giving back what was printed ---


def printed(
    capsys: pytest.CaptureFixture[str], project: Project, *words: object, **kwargs: Any
) -> str:
    with pytest.raises(SystemExit) as stop:
        project.cli(*words, cls=ParsingCLI, **kwargs)
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", presets.names())
@pytest.mark.parametrize("flag", ["--print_config", "--print_config=skip_default"])
def test_every_preset_prints_and_parses_again(
    project: Project, on: On, capsys: pytest.CaptureFixture[str], name: str, flag: str
) -> None:
    on(HOME[name])
    shown = printed(capsys, project, "fit", "--preset", name, flag)
    content = yaml.safe_load(shown)
    assert content["preset"] == name
    assert [key for key in content if key in ("preset", "trainer")] == ["preset", "trainer"]
    assert names(content["trainer"]["callbacks"]) == items_of(name)
    Path("printed.yaml").write_text(shown)
    again = project.parsed("fit", "--config", "printed.yaml")
    assert again.trainer == project.parsed("fit", "--preset", name).trainer
    assert printed(capsys, project, "fit", "--config", "printed.yaml", flag) == shown


def test_without_a_preset_it_prints_what_lightningcli_prints(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("mine.yaml", {"trainer": {"precision": None, "callbacks": [entry(Mine)]}})
    words = ["--config", file, "--print_config"]
    shown = printed(capsys, project, *words, run=False)
    with pytest.raises(SystemExit):
        LightningCLI(Model, run=False, seed_everything_default=False)
    assert shown == capsys.readouterr().out


def test_printing_needs_no_hardware(
    project: Project, on: On, capsys: pytest.CaptureFixture[str]
) -> None:
    on("old CPU")
    shown = printed(capsys, project, "fit", "--preset", "hopper", "--print_config")
    assert yaml.safe_load(shown)["trainer"]["accelerator"] == "cuda"


def test_what_is_printed_says_where_it_is_from(
    project: Project, on: On, capsys: pytest.CaptureFixture[str]
) -> None:
    on("new CPU")
    own = {"precision": "32-true", "callbacks": [entry(Mine), entry("Threads", intra_op=1)]}
    file = write("mine.yaml", {"preset": "auto", "trainer": own})
    shown = printed(capsys, project, "fit", "--config", file, "--print_config")
    head = [line.split(maxsplit=2)[1:] for line in shown.splitlines() if line.startswith("#   ")]
    origin = dict(head)
    mine = {"precision", "Mine", "Threads"}
    assert {name for name, text in origin.items() if text == "yours"} == mine
    assert {name for name, text in origin.items() if text == "from the preset"} == {
        "accelerator",
        *items_of("cpu_bf16"),
    } - mine
    assert "# preset cpu_bf16 of lightning_perf" in shown

    dropped = ["--preset", "cpu", "--trainer.callbacks", "null", "--print_config"]
    assert "#   callbacks    yours" in printed(capsys, project, "fit", *dropped)


def test_what_is_printed_is_what_won(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_FIT__TRAINER__PRECISION", "64-true")
    words = ["fit", "--preset", "cpu", "--trainer.precision", "32-true", "--print_config"]
    shown = printed(capsys, project, *words, parser_kwargs={"default_env": True})
    assert yaml.safe_load(shown)["trainer"]["precision"] == "32-true"


def test_the_flag_before_the_subcommand_prints_its_section(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--print_config", "fit", "--preset", "cpu", "--trainer.default_root_dir", "fit"]
    shown = printed(capsys, project, *words)
    assert "# preset cpu of" in shown
    Path("all.yaml").write_text(shown)
    assert yaml.safe_load(shown)["fit"]["trainer"]["default_root_dir"] == "fit"
    again = project.parsed("--config", "all.yaml", "fit")
    assert again.trainer == project.parsed(*words[1:]).trainer
