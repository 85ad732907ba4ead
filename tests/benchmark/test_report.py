from __future__ import annotations

import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmark.results import learning, result, turns
from matplotlib.image import imread
from rich.console import Console

from lightning_perf.benchmark.report import pictures, table, verdict

BUSY = {
    "speedup": None,
    "interval": None,
    "verdict": "machine busy: 38% of the CPU was used by others; no number can be given",
    "stop_reason": "machine busy",
    "launches": 0,
    "pairs": 0,
    "speedup_of_minimum": None,
    "step_seconds_a": None,
    "step_seconds_b": None,
    "samples_per_s_a": None,
    "samples_per_s_b": None,
    "compile_seconds_a": None,
    "compile_seconds_b": None,
    "data_wait_a": None,
    "data_wait_b": None,
}


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
    ("agree", "shown", "said"),
    [
        (True, "Learns the same: yes", "it learns the same."),
        (False, "Learns the same: NO", "BUT IT DOES NOT LEARN THE SAME."),
        (None, "Learns the same: not known", "whether it learns the same is not known."),
    ],
)
def test_learning_is_part_of_the_verdict(agree: bool | None, shown: str, said: str) -> None:
    assert shown in text(losses_agree=agree)
    assert verdict(result(losses_agree=agree)).endswith(f"; {said}")


def test_the_verdict_is_one_sentence_on_speed_and_learning() -> None:
    assert verdict(result()) == (
        "cpu against none: 1.250x faster, 95% interval 1.210 to 1.291 (1 launch, stopped: quick "
        "mode); it learns the same."
    )


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


@pytest.mark.parametrize("launches", [1, 6])
def test_pictures_are_drawn(launches: int) -> None:
    drawn = pictures(result(turns=turns(launches)), Path.cwd())
    assert [path.name for path in drawn] == ["step_times.png", "losses.png"]
    for path in drawn:
        image = imread(path)
        assert min(image.shape[:2]) > 500
        assert image[..., :3].std() > 0.05, "the picture is blank"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"learning": None}, ["step_times.png"]),
        ({"learning": asdict(learning(losses_a=[], losses_b=[]))}, ["step_times.png"]),
        (BUSY | {"turns": []}, ["losses.png"]),
        (BUSY, ["losses.png"]),
    ],
)
def test_pictures_without_data_are_left_out(changes: dict[str, Any], names: list[str]) -> None:
    assert [path.name for path in pictures(result(**changes), Path.cwd())] == names


@pytest.mark.parametrize(
    "changes",
    [
        {"identical": True, "allowed_max": None},
        {"losses_a": [1.0], "losses_b": [1.0]},
        {"losses_a": [0.0, 1.0, float("nan")], "losses_b": [0.5, float("inf")]},
    ],
)
def test_odd_losses_are_drawn(changes: dict[str, Any]) -> None:
    drawn = pictures(result(learning=asdict(learning(**changes))), Path.cwd())
    assert [path.name for path in drawn] == ["step_times.png", "losses.png"]


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-perf\[demo\]'"):
        pictures(result(), Path.cwd())
