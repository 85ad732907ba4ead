"""`PerfCLI`: which setting wins, what is printed, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.project import Mine, ParsingCLI, Project, entry, items_of, names, write
from lightning.pytorch.callbacks import EarlyStopping
from presets.machines import HOME

import lightning_perf.cli
from lightning_perf import NoEffectWarning, presets
from lightning_perf.callbacks import ChannelsLast, Threads
from lightning_perf.cli import PerfCLI
from lightning_perf.presets._reader import trainer_section

On = Callable[[str], None]


def test_an_unknown_attribute_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PerfCLl'"):
        lightning_perf.cli.PerfCLl  # noqa: B018


# --- where a preset may be named ---


class AllCommands(ParsingCLI):
    subcommands = staticmethod(PerfCLI.subcommands)


@pytest.mark.parametrize("command", PerfCLI.subcommands())
def test_the_flag_in_every_subcommand(project: Project, command: str) -> None:
    config = project.parsed(command, "--preset", "cpu", cls=AllCommands)
    assert config.preset == "cpu"
    assert names(config.trainer.callbacks) == items_of("cpu")


@pytest.mark.parametrize("name", presets.names())
def test_the_flag_without_subcommands(project: Project, on: On, name: str) -> None:
    on(HOME[name])
    config = project.parsed("--preset", name, run=False)
    section = trainer_section(name)
    assert config.preset == name
    assert names(config.trainer.callbacks) == items_of(name)
    for key in section.keys() - {"callbacks", "strategy"}:
        assert config.trainer[key] == section[key]
    if "strategy" in section:
        chosen = config.trainer.strategy
        assert chosen.class_path == section["strategy"]["class_path"]
        given = section["strategy"].get("init_args", {})
        assert dict(chosen.init_args.items()).items() >= given.items()


@pytest.mark.parametrize("run", [True, False])
def test_the_key_in_a_file(project: Project, run: bool) -> None:
    file = write("mine.yaml", {"preset": "cpu", "trainer": {"max_epochs": 3}})
    config = project.parsed(*["fit"][: int(run)], "--config", file, run=run)
    assert names(config.trainer.callbacks) == items_of("cpu")
    assert config.trainer.max_epochs == 3


def test_the_key_in_a_section_of_a_file_for_all_subcommands(project: Project) -> None:
    file = write("all.yaml", {"fit": {"preset": "cpu", "trainer": {"max_epochs": 3}}})
    config = project.parsed("--config", file, "fit")
    assert names(config.trainer.callbacks) == items_of("cpu")
    assert config.trainer.max_epochs == 3


def test_the_flag_before_and_after_the_file(project: Project) -> None:
    file = write("mine.yaml", {"trainer": {"accelerator": "auto", "callbacks": [entry(Mine)]}})
    before = project.parsed("fit", "--preset", "cpu", "--config", file)
    after = project.parsed("fit", "--config", file, "--preset", "cpu")
    assert before.trainer == after.trainer
    assert before.trainer.accelerator == "auto"
    assert names(before.trainer.callbacks) == [*items_of("cpu"), "Mine"]


def test_of_two_presets_the_later_is_taken_as_of_any_setting(project: Project) -> None:
    file = write("mine.yaml", {"preset": "cpu"})
    assert project.parsed("fit", "--config", file, "--preset", "cpu_bf16").preset == "cpu_bf16"
    assert project.parsed("fit", "--preset", "cpu_bf16", "--config", file).preset == "cpu"


def test_the_key_in_a_default_config_file_lies_below_the_users(project: Project) -> None:
    default = write("default.yaml", {"preset": "cpu", "trainer": {"max_epochs": 3}})
    more = {"parser_kwargs": {"fit": {"default_config_files": [str(default)]}}}
    config = project.parsed("fit", **more)
    assert names(config.trainer.callbacks) == items_of("cpu")
    assert config.trainer.max_epochs == 3
    assert project.parsed("fit", "--preset", "null", **more).trainer.callbacks is None


def test_settings_of_a_default_config_file_win_over_the_preset(project: Project) -> None:
    own = {"precision": "64-true", "callbacks": [entry(Mine)]}
    for content, kwargs in (
        ({"trainer": own}, {"fit": {"default_config_files": ["default.yaml"]}}),
        ({"fit": {"trainer": own}}, {"default_config_files": ["default.yaml"]}),
    ):
        write("default.yaml", content)
        config = project.parsed("fit", "--preset", "cpu_bf16", parser_kwargs=kwargs)
        assert config.trainer.precision == "64-true"
        assert names(config.trainer.callbacks) == [*items_of("cpu_bf16"), "Mine"]


def test_environment_variables(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_FIT__PRESET", "cpu_bf16")
    monkeypatch.setenv("PL_FIT__TRAINER__PRECISION", "64-true")
    monkeypatch.setenv("PL_FIT__TRAINER__CALLBACKS", f"[{{class_path: {Mine.__module__}.Mine}}]")
    config = project.parsed("fit", parser_kwargs={"default_env": True})
    assert config.preset == "cpu_bf16"
    assert config.trainer.precision == "64-true"
    assert names(config.trainer.callbacks) == [*items_of("cpu_bf16"), "Mine"]
    # Without `default_env` they mean nothing.
    assert "preset" not in project.parsed("fit")


# --- precedence and merging ---


def test_command_line_over_file_over_preset_over_trainer_defaults(project: Project) -> None:
    words = ["fit", "--preset", "cpu_bf16"]
    kwargs = {"trainer_defaults": {"precision": "16-true", "max_epochs": 7}}
    config = project.parsed(*words, **kwargs)
    assert (config.trainer.precision, config.trainer.max_epochs) == ("bf16-mixed", 7)
    words += ["--config", write("mine.yaml", {"trainer": {"precision": "64-true"}})]
    assert project.parsed(*words, **kwargs).trainer.precision == "64-true"
    words += ["--trainer.precision", "32-true"]
    assert project.parsed(*words, **kwargs).trainer.precision == "32-true"


@pytest.mark.parametrize(("key", "value"), [("precision", None), ("accelerator", "auto")])
def test_a_setting_of_the_user_that_is_lightnings_default_wins_too(
    project: Project, on: On, key: str, value: str | None
) -> None:
    on("new CPU")
    file = write("mine.yaml", {"preset": "cpu_bf16", "trainer": {key: value}})
    assert project.parsed("fit", "--config", file).trainer[key] == value


PLUS = [{"callbacks+": [entry(Mine)]}, {"callbacks": [entry(Mine)]}, {"callbacks": entry(Mine)}]


@pytest.mark.parametrize("own", PLUS, ids=["callbacks+", "callbacks", "a single one"])
def test_the_users_callbacks_are_added(project: Project, own: dict[str, Any]) -> None:
    file = write("mine.yaml", {"preset": "cpu", "trainer": own})
    callbacks = project.parsed("fit", "--config", file).trainer.callbacks
    assert names(callbacks) == [*items_of("cpu"), "Mine"]


def test_parts_of_a_configuration_in_files_of_their_own(project: Project) -> None:
    Path("callbacks.yaml").write_text(yaml.safe_dump([entry(Mine), entry("Threads", intra_op=3)]))
    trainer = write("trainer.yaml", {"precision": "64-true", "callbacks": "callbacks.yaml"})
    file = write("mine.yaml", {"preset": "cpu_bf16", "trainer": str(trainer)})
    config = project.parsed("fit", "--config", file)
    assert config.trainer.precision == "64-true"
    assert sorted(names(config.trainer.callbacks)) == sorted([*items_of("cpu_bf16"), "Mine"])


@pytest.mark.parametrize("words", ["--trainer.callbacks+={}", "--trainer.callbacks=[{}]"])
def test_callbacks_of_the_command_line_are_added(project: Project, words: str) -> None:
    callback = f"{{class_path: {Mine.__module__}.Mine, init_args: {{weight: 3}}}}"
    file = write("mine.yaml", {"preset": "cpu", "trainer": {"callbacks": [entry("ChannelsLast")]}})
    callbacks = project.parsed("fit", "--config", file, words.format(callback)).trainer.callbacks
    assert callbacks[-1].init_args.weight == 3
    replaced = "+" not in words  # the user's own list, as in LightningCLI
    assert callbacks[-2].init_args.strict is (False if replaced else None)
    assert sorted(names(callbacks)) == sorted([*items_of("cpu"), "Mine"])


@pytest.mark.parametrize("key", ["callbacks", "callbacks+"])
@pytest.mark.parametrize(
    "path", ["lightning_perf.callbacks.Threads", "lightning_perf.callbacks.threads.Threads"]
)
def test_an_item_of_the_user_replaces_that_of_the_preset(
    project: Project, key: str, path: str
) -> None:
    own = [{"class_path": path, "init_args": {"intra_op": 1}}]
    file = write("mine.yaml", {"preset": "cpu", "trainer": {key: own}})
    callbacks = project.parsed("fit", "--config", file).trainer.callbacks
    assert [c.init_args.intra_op for c in callbacks if names([c]) == ["Threads"]] == [1]
    assert sorted(names(callbacks)) == sorted(items_of("cpu"))


def test_a_subclass_replaces_too_and_a_function_does_not(project: Project) -> None:
    own = [entry(MyThreads), {"class_path": f"{__name__}.channels_last"}]
    file = write("mine.yaml", {"preset": "cpu", "trainer": {"callbacks": own}})
    found = names(project.parsed("fit", "--config", file).trainer.callbacks)
    assert "Threads" not in found
    assert found[-2:] == ["MyThreads", "channels_last"]


class MyThreads(Threads):
    pass


def channels_last() -> ChannelsLast:
    return ChannelsLast()


def test_callbacks_of_trainer_defaults_replace_items_and_stay(project: Project) -> None:
    lasting = [Threads(intra_op=1), EarlyStopping("loss")]
    config = project.parsed("fit", "--preset", "cpu", trainer_defaults={"callbacks": lasting})
    assert set(items_of("cpu")) - set(names(config.trainer.callbacks)) == {"Threads"}


@pytest.mark.parametrize("form", ["file", "flag"])
def test_null_drops_the_items_only(project: Project, on: On, form: str) -> None:
    on("new CPU")
    words = ["--trainer.callbacks", "null"]
    if form == "file":
        words = ["--config", write("mine.yaml", {"trainer": {"callbacks": None}})]
    config = project.parsed("fit", "--preset", "cpu_bf16", *words)
    assert config.trainer.callbacks is None
    assert config.trainer.precision == "bf16-mixed"


@pytest.mark.parametrize("own", PLUS[:2], ids=["callbacks+", "callbacks"])
def test_the_file_of_a_preset_is_read_as_lightningcli_reads_it(
    project: Project, own: dict[str, Any]
) -> None:
    files = ["--config", presets.path("cpu"), "--config", write("mine.yaml", {"trainer": own})]
    config = project.parsed(*files, run=False)
    items = items_of("cpu") if "callbacks+" in own else []
    assert names(config.trainer.callbacks) == [*items, "Mine"]
    assert "preset" not in config


@pytest.mark.parametrize("off", ["null", "none"])
def test_turned_off_it_is_plain_lightning(project: Project, off: str) -> None:
    file = write("mine.yaml", {"preset": "cpu", "trainer": {"callbacks": [entry(Mine)]}})
    config = project.parsed("fit", "--config", file, "--preset", off)
    plain = project.parsed("fit", "--trainer.callbacks", str([entry(Mine)]))
    assert config.trainer == plain.trainer


def test_arguments_given_in_python(project: Project) -> None:
    early, last = EarlyStopping("loss"), ChannelsLast(strict=True)
    given = {"preset": "cpu", "trainer": {"callbacks": [early, last]}}
    config = project.parsed(run=False, args=given)
    assert config.trainer.callbacks[-2:] == [early, last]
    assert names(config.trainer.callbacks).count("ChannelsLast") == 1
    assert project.parsed(args={"subcommand": "fit", "fit": given}).preset == "cpu"
    assert project.parsed(args=["fit", "--preset", "cpu"]).preset == "cpu"
    assert given == {"preset": "cpu", "trainer": {"callbacks": [early, last]}}


# --- auto and aliases ---


@pytest.mark.parametrize(
    ("name", "machine", "preset"),
    [("auto", "old CPU", "cpu"), ("auto", "H100", "cuda_bf16"), ("turing", "T4", "cuda_fp16")],
)
def test_the_preset_that_a_name_stands_for_is_kept(
    project: Project, on: On, name: str, machine: str, preset: str
) -> None:
    on(machine)
    config = project.parsed("fit", "--preset", name)
    assert config.preset == preset
    assert names(config.trainer.callbacks) == items_of(preset)


def test_auto_where_no_preset_helps(project: Project, on: On) -> None:
    on("P100")
    with pytest.warns(NoEffectWarning, match="No preset for this machine: P100"):
        config = project.parsed("fit", "--preset", "auto")
    assert config.preset == "none"
    assert config.trainer == project.parsed("fit").trainer
