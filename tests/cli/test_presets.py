"""The `lightning-perf` command and its subcommand `presets`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from types import ModuleType

import pytest
import yaml

from lightning_perf import presets
from lightning_perf.cli.__main__ import main


def shell(*arguments: str, width: int = 80) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user would, its output piped."""
    environment = {**os.environ, "COLUMNS": str(width)}
    return subprocess.run(
        [sys.executable, "-m", "lightning_perf", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Replaces the subcommand `bench` by one that raises the given error."""

    def install(error: BaseException) -> None:
        def run(arguments: argparse.Namespace) -> int:
            raise error

        module = ModuleType("lightning_perf.cli.bench")
        module.add_parser = lambda subparsers: subparsers.add_parser("bench").set_defaults(run=run)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def test_list_as_a_user_sees_it() -> None:
    done = shell("presets", "list")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    table, sentence = done.stdout.split("\n\n")
    head, *lines = table.splitlines()
    assert head.split() == ["preset", "for", "aliases", "measured"]
    rows = [line.split()[0] for line in lines if line[:1].strip()]  # cells may wrap
    assert rows == presets.names()
    assert sentence.startswith(f"auto is {presets.resolve('auto')} here: ")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", presets.names())
def test_list_says_what_was_measured(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["presets", "list"]) == 0
    (line,) = [li for li in capsys.readouterr().out.splitlines() if li.split()[:1] == [name]]
    about = presets.metadata(name)
    assert (about.measured or "unmeasured") in line
    assert about.hardware in line
    assert all(alias in line for alias in about.aliases)


@pytest.mark.parametrize("name", [*presets.names(), "turing", "auto"])
def test_show_prints_the_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "show", name]) == 0
    shown = capsys.readouterr().out
    assert shown == presets.path(name).read_text(encoding="utf-8")
    assert "trainer" in yaml.safe_load(shown)


@pytest.mark.parametrize("name", [*presets.names(), "hopper", "auto"])
def test_path_prints_only_the_path(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "path", name]) == 0
    assert capsys.readouterr().out == f"{presets.path(name)}\n"


@pytest.mark.parametrize("action", ["show", "path"])
def test_a_wrong_name_is_one_line_and_exit_code_2(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["presets", action, "cpu_bf61"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lightning-perf: error: There is no preset 'cpu_bf61'. Did you mean")
    assert err.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="no preset 'nope'"):
        main(["--debug", "presets", "show", "nope"])


@pytest.mark.parametrize("error", [ValueError, RuntimeError, FileNotFoundError, ImportError])
def test_errors_of_any_subcommand_are_one_line(
    failing, error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    failing(error("what happened"))
    assert main(["bench"]) == 2
    assert capsys.readouterr().err == "lightning-perf: error: what happened\n"


def test_a_bug_keeps_its_traceback(failing) -> None:
    failing(KeyError("bug"))
    with pytest.raises(KeyError):
        main(["bench"])


def test_ctrl_c_ends_quietly(failing, capsys: pytest.CaptureFixture[str]) -> None:
    failing(KeyboardInterrupt())
    assert main(["bench"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [["--debug"], ["presets", "show"], ["nonsense"]])
def test_incomplete_commands_say_what_is_missing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: lightning-perf" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--help", "presets --help", "presets path cpu"])
def test_what_needs_no_lightning_does_not_import_it(arguments: str) -> None:
    code = (
        "import sys; from lightning_perf.cli.__main__ import main\n"
        f"try: main({arguments.split()!r})\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'lightning'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True)


def test_list_does_not_import_lightning() -> None:
    code = (
        "import sys; from lightning_perf.cli.__main__ import main\n"
        "main(['presets', 'list']); assert 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True)
