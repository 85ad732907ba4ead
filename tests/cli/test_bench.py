from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lightning_perf.benchmark import Progress, VariantFailed
from lightning_perf.cli import bench
from lightning_perf.cli.__main__ import main

FILES = ["losses.png", "ratios.png", "report.html", "report.json", "row.md", "step_times.png"]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def compared(monkeypatch, compare_fakes):
    """Compare fakes where the command would compare the user's variants; keep its arguments."""
    calls = []

    def compare(make, a, b, **arguments):
        calls.append({"make": make, "a": a, "b": b, **arguments})
        return compare_fakes({"steps": [0.02]}, quick=True, learning_steps=3)

    monkeypatch.setattr(bench, "compare", compare)
    return calls


def test_passes_on_what_is_asked(compared, capsys):
    command = "bench --config t.yaml --a cpu --b m.yaml --budget 9 --quick --seed 3"
    assert main([*command.split(), "--learning-steps", "5"]) == 0
    (call,) = compared
    del call["progress"]
    assert call == {
        "make": "t.yaml",
        "a": "cpu",
        "b": "m.yaml",
        "budget_s": 9.0,
        "quick": True,
        "seed": 3,
        "learning_steps": 5,
        "validate": False,
    }
    assert capsys.readouterr().out.strip()


def test_defaults(compared):
    main(["bench", "--config", "t.yaml"])
    assert (compared[0]["a"], compared[0]["b"], compared[0]["budget_s"]) == ("none", "auto", 600.0)
    assert not compared[0]["quick"]


def test_writes_json(compared, tmp_path):
    assert main(["bench", "--config", "t.yaml", "--json", "out.json"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["launches"] == 1


@pytest.mark.parametrize("target", ["precious.json", "no/such/folder/out.json"])
def test_a_file_that_cannot_be_written_is_found_before_the_run(compared, tmp_path, capsys, target):
    (tmp_path / "precious.json").write_text("precious")
    assert main(["bench", "--config", "t.yaml", "--json", target]) == 2
    assert not compared
    assert (tmp_path / "precious.json").read_text() == "precious"
    assert "error" in capsys.readouterr().err


def test_a_report_is_a_folder(compared, capsys):
    assert main(["bench", "--config", "t.yaml", "--report", "out/mine"]) == 0
    assert names("out/mine") == FILES
    printed = capsys.readouterr().out
    assert "Written to out/mine" in printed
    assert printed.index("speed-up") < printed.index("Written to")
    assert Path("out/mine/row.md").read_text().count("\n") == 3


def test_a_report_does_not_touch_what_is_there(compared):
    Path("mine").mkdir()
    Path("mine/report.html").write_text("precious")
    assert main(["bench", "--config", "t.yaml", "--report", "mine"]) == 0
    assert Path("mine/report.html").read_text() == "precious"
    assert "report.html" in names("mine_2")


def test_without_matplotlib_a_report_fails_before_the_run(compared, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--config", "t.yaml", "--report", "mine"]) == 2
    assert not compared
    assert "pip install 'lightning-perf[demo]'" in capsys.readouterr().err
    assert not Path("mine").exists()


def test_the_report_of_a_failure_shows_the_traceback(monkeypatch, capsys):
    def compare(*_, **__):
        raise VariantFailed("B: mine", "training", "no good", "Traceback: line 7")

    monkeypatch.setattr(bench, "compare", compare)
    assert main(["bench", "--config", "t.yaml", "--report", "mine"]) == 2
    assert names("mine") == ["report.html"]
    assert "Traceback: line 7" in Path("mine/report.html").read_text()
    assert "mine/report.html" in capsys.readouterr().err


def test_a_failed_variant_is_shown_with_its_traceback(monkeypatch, capsys):
    def compare(*_, **__):
        raise VariantFailed("B: mine", "training", "no good", "Traceback: line 7")

    monkeypatch.setattr(bench, "compare", compare)
    assert main(["bench", "--config", "t.yaml"]) == 2
    error = capsys.readouterr().err
    assert "Variant 'B: mine' failed while training: no good" in error
    assert "Traceback: line 7" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "missing.yaml"], "There is no file missing.yaml"),
        (["--config", "train"], "give a function"),
        (["--config", "models:trainer", "--b", "cpu_bf17"], "cpu_bf16"),
        (["--config", "models:trainer", "--b", "missing.yaml"], "missing.yaml"),
        (["--config", "models:trainer", "--budget", "0"], "budget must be a positive"),
    ],
)
def test_bad_input_is_one_line(arguments, words, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_progress_in_one_line():
    line = bench.progress_line(Progress("measuring", 2, 5, 41.3, 1.5))
    assert line == "launch 2, measuring, pair 5, 41 s left, speed-up so far 1.500"
    assert bench.progress_line(Progress("starting", 1, 0, -3.0, None)) == (
        "launch 1, starting, 0 s left"
    )


def test_a_line_for_each_phase_in_a_pipe(capsys):
    with bench.shown_progress() as progress:
        for pair in range(3):
            progress(Progress("measuring", 1, pair, 10.0, None))
        progress(Progress("starting", 2, 0, 9.0, 1.5))
    assert capsys.readouterr().err.splitlines() == [
        "launch 1, measuring, 10 s left",
        "launch 2, starting, 9 s left, speed-up so far 1.500",
    ]


@pytest.mark.parametrize(
    ("changes", "status"), [({"speedup": None}, 1), ({"losses_agree": False}, 1)]
)
def test_exit_status_without_a_good_answer(monkeypatch, compare_fakes, changes, status):
    result = compare_fakes(quick=True)
    for name, value in changes.items():
        setattr(result, name, value)
    monkeypatch.setattr(bench, "compare", lambda *_, **__: result)
    assert main(["bench", "--config", "t.yaml"]) == status
