from __future__ import annotations

from pathlib import Path

import pytest
from benchmark.results import result

from lightning_perf.benchmark import Result
from lightning_perf.cli.__main__ import main

FILES = {"report.html", "report.json", "row.md", "step_times.png", "ratios.png", "losses.png"}


@pytest.fixture
def saved() -> Path:
    return result().save("saved.json")


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_shows_a_saved_result_again(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "saved.json"]) == 0
    assert names("lightning_perf_report") == FILES
    assert Result.load("lightning_perf_report/report.json") == Result.load(saved)
    printed = capsys.readouterr().out
    for expected in ("1.250x faster", "Items of cpu", "Written to lightning_perf_report", *FILES):
        assert expected in printed


def test_a_report_of_a_report_is_the_same(saved: Path) -> None:
    main(["report", "saved.json", "--output", "one"])
    main(["report", "one/report.json", "--output", "two"])
    for name in ("report.html", "row.md"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()


def test_a_folder_that_is_taken_is_left_alone(saved: Path) -> None:
    Path("mine").mkdir()
    assert main(["report", "saved.json", "--output", "mine"]) == 0
    assert names("mine") == FILES
    Path("mine/report.html").write_text("precious")
    assert main(["report", "saved.json", "--output", "mine"]) == 0
    assert Path("mine/report.html").read_text() == "precious"
    assert names("mine_2") == FILES


def test_overwrite_replaces_the_files(saved: Path) -> None:
    for _ in range(2):
        assert main(["report", "saved.json", "--output", "mine", "--overwrite"]) == 0
    assert names(".") == {"mine", "saved.json"}


def test_a_file_in_the_way_is_left_alone(saved: Path) -> None:
    Path("mine").write_text("precious")
    assert main(["report", "saved.json", "--output", "mine"]) == 0
    assert Path("mine").read_text() == "precious"
    assert names("mine_2") == FILES


@pytest.mark.parametrize(
    ("name", "words"), [("missing.json", "missing.json"), ("other", "is not a result")]
)
def test_what_is_no_result_is_one_line(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other").write_text("# something else")
    assert main(["report", name]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert names(".") == {"other"}
