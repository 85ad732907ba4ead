"""What the command says about itself, and how it behaves in a terminal and in a pipe."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys

import pytest

from lightning_perf import __version__, presets
from lightning_perf.cli.__main__ import COMMANDS, main

ACTIONS = ["presets list", "presets show", "presets path"]
COMMAND = [sys.executable, "-m", "lightning_perf"]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def say(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints that ends well."""
    try:
        code = main(arguments.split())
    except SystemExit as stop:
        code = stop.code
    assert code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["", *COMMANDS, *ACTIONS])
def test_help_is_one_screen_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = say(f"{command} --help", capsys)
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert f"lightning-perf {command}".strip() in text.partition("\nexamples:\n")[2]


@pytest.mark.parametrize("command", ["", "presets"])
def test_nothing_to_do_shows_the_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(command, capsys) == say(f"{command} --help", capsys)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = say("--help", capsys)
    assert re.findall(r"^    (\w+) ", text, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_a_module(command: str) -> None:
    assert callable(importlib.import_module(f"lightning_perf.cli.{command}").add_parser)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert say("--version", capsys) == f"{__version__}\n"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("benhc", "bench"), ("preset", "presets"), ("presets lst", "list"), ("presets pth x", "path")],
)
def test_a_typo_is_answered_with_the_closest(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(typed.split())
    assert stop.value.code == 2
    assert f"Did you mean {meant!r}?" in capsys.readouterr().err


def test_a_word_like_no_other_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["xyzzy"])
    error = capsys.readouterr().err
    assert all(command in error for command in COMMANDS)
    assert "Did you mean" not in error


def test_ctrl_c_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_perf.cli.__main__.import_module", interrupted)
    assert main(["bench"]) == 130


def test_sigterm_ends_a_command_as_an_error_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = []

    def ended(name: str) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(name)

    monkeypatch.setattr("lightning_perf.cli.__main__.import_module", ended)
    with pytest.raises(SystemExit) as caught:
        main(["bench"])
    assert caught.value.code == 128 + signal.SIGTERM
    assert cleaned == ["lightning_perf.cli.bench"]


@pytest.mark.parametrize("arguments", ["--vers", "bench --conf x.py:f"])
def test_options_are_whole_words(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--help", "presets show cpu", "presets path cpu"])
def test_a_reader_that_has_seen_enough_ends_it_quietly(arguments: str) -> None:
    # As in `lightning-perf ... | head -1`, when head is already gone.
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [*COMMAND, *arguments.split()], stdout=closed, stderr=subprocess.PIPE, timeout=60
        )
    assert done.stderr == b""
    # Some versions of argparse keep it to themselves that their help was not read.
    assert done.returncode in ({0, 141} if arguments == "--help" else {141})


@pytest.mark.parametrize("columns", ["60", "120"])
def test_tables_are_as_wide_as_the_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table = say("presets list", capsys).partition("\n\n")[0]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= int(columns)
    wraps = len(table.splitlines()) > len(presets.names()) + 1
    assert wraps == (columns == "60")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no pseudo-terminals here")
@pytest.mark.parametrize("variable", ["NO_COLOR=1", "TERM=dumb"])
@pytest.mark.parametrize("arguments", ["--help", "presets list", "presets show nope"])
def test_a_terminal_without_colours_gets_none(arguments: str, variable: str) -> None:
    text = in_a_terminal(arguments, variable)
    assert len(text.splitlines()) >= 1
    colours = re.findall(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", text)
    assert not colours
    if variable == "TERM=dumb":
        assert "\x1b" not in text


def in_a_terminal(arguments: str, variable: str) -> str:
    """Run the command with a terminal as its output and return what it writes there."""
    name, _, value = variable.partition("=")
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        with os.fdopen(theirs, "wb", buffering=0) as terminal:
            subprocess.run(
                [*COMMAND, *arguments.split()],
                stdout=terminal,
                stderr=terminal,
                timeout=60,
                env={**os.environ, "TERM": "xterm-256color", name: value},
            )
        # The buffer of a terminal holds a screen, so that nobody need read meanwhile.
        return screen.read(65536).decode()
