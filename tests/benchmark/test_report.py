from __future__ import annotations

import io
from typing import Any

import pytest
from benchmark.results import BUSY, result
from rich.console import Console

from lightning_perf.benchmark.report import print_report, table


def text(width: int = 80, encoding: str = "utf-8", **changes: Any) -> str:
    """Return the table as it comes out of a pipe."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width).print(table(result(**changes)))
    file.seek(0)
    return file.read()


def rows(printed: str) -> dict[str, list[str]]:
    return {
        line[:17].strip(): line[17:].split()
        for line in printed.splitlines()
        if line and not line.startswith(" ")
    }


def test_the_table_holds_all_that_was_measured() -> None:
    found = rows(text())
    assert found["speed-up"][:2] == ["1", "1.250"]
    assert "1.210 to 1.291" in " ".join(found["speed-up"])
    assert found["step time"] == ["50.0", "ms", "40.0", "ms"]
    assert found["samples/s"] == ["640", "800"]
    assert found["peak memory"] == ["800", "MiB", "1.66", "GiB", "+112%"]
    assert found["start-up"][:4] == ["4.10", "s", "4.60", "s"]
    assert found["first step extra"][:4] == ["40.0", "ms", "9.00", "s"]
    assert found["waiting for data"][:2] == ["1.3%", "1.6%"]
    assert found["precision"] == ["32-true", "bf16-mixed"]
    assert found["val accuracy"][:2] == ["0.931", "0.934"]


def test_the_table_says_how_far_to_believe_it() -> None:
    printed = " ".join(text().split())
    assert "Learns the same: yes" in printed
    assert "losses drift by -0.01% on average (0.2% allowed)" in printed
    assert "active ChannelsLast 20 convolutions" in printed
    assert "skipped Compile brings nothing here" in printed
    assert "! Thread counts differ" in printed
    assert "1 launch and 12 pairs of turns (1 dropped) of 23 steps in 64 s" in printed
    assert "stopped: quick mode" in printed
    assert "Quick mode: with one launch" in printed
    assert "Quick mode" not in text(quick=False)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("changes", [{}, BUSY, {"learning": None, "losses_agree": None}])
def test_the_table_fits_a_pipe(changes: dict[str, Any], encoding: str) -> None:
    printed = text(encoding=encoding, **changes)
    assert max(map(len, printed.splitlines())) <= 80
    assert "\x1b" not in printed
    assert "nan" not in printed
    assert "None" not in printed


@pytest.mark.parametrize(
    ("agree", "shown"),
    [
        (True, "Learns the same: yes"),
        (False, "Learns the same: NO"),
        (None, "Learns the same: not known"),
    ],
)
def test_learning_has_a_line_of_its_own(agree: bool | None, shown: str) -> None:
    assert shown in text(losses_agree=agree)


def test_names_are_taken_as_they_are() -> None:
    printed = text(b="mine[bold]", statuses_b=[{"item": "[x]", "active": True, "text": "[y]"}])
    assert "B: mine[bold]" in printed
    assert "[x]" in printed
    assert "[y]" in printed


def test_long_names_fit_too() -> None:
    name = "a_name_that_somebody_chose_for_a_file_without_thinking_of_a_table_of_80_columns"
    assert max(map(len, text(a=name, b=name).splitlines())) <= 80


def test_a_pipe_gets_no_spaces_at_the_ends_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(result())
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert len(lines) == len(text().splitlines())


def test_a_busy_machine_gets_no_number() -> None:
    printed = text(**BUSY)
    assert "machine busy: 38%" in printed
    assert "speed-up" not in printed
    assert "step time" not in printed


def test_stalls_are_named_when_only_they_differ() -> None:
    said = "differ in stalls"
    assert said not in text()
    assert said in " ".join(text(speedup_of_minimum=1.01).split())


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"speedup": 0.8, "step_seconds_b": 0.0625}, "compiling and the like"),
        ({"first_step_seconds_b": 0.01, "startup_seconds_b": 4.0}, "compiling and the like"),
        ({}, "paid back after 945 steps"),
    ],
)
def test_compile_time_is_paid_back_only_by_a_gain(changes: dict[str, Any], note: str) -> None:
    assert note in text(**changes)


def test_memory_that_hardly_differs_is_the_same() -> None:
    assert rows(text(peak_memory_b=805 * 2**20))["peak memory"][-2:] == ["the", "same"]
