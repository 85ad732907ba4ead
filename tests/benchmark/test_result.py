import json

import pytest

from lightning_perf.benchmark import Result
from lightning_perf.benchmark.summary import task_name
from lightning_perf.benchmark.task import Task


@pytest.fixture
def result(compare_fakes):
    return compare_fakes({"steps": [0.02]}, {"steps": [0.01]}, quick=True, learning_steps=3)


def test_json_is_flat_and_comes_back(result, tmp_path):
    path = result.save(tmp_path / "result.json")
    record = json.loads(path.read_text())
    assert record["speedup"] == pytest.approx(2)
    assert record["interval"] == list(result.interval)
    assert record["step_seconds_a"] == 0.02
    assert record["losses_agree"] is True
    assert Result.load(path) == result
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_nothing_is_overwritten_unasked(result, tmp_path):
    path = tmp_path / "result.json"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="Choose another name"):
        result.save(path)
    assert path.read_text() == "precious"
    result.save(path, overwrite=True)
    assert Result.load(path) == result


def test_statistics_can_be_redone_from_the_turns(result):
    from math import exp, log

    from lightning_perf.benchmark.statistics import hodges_lehmann, turn_value

    values = {
        (turn["variant"], turn["pair"]): turn_value(
            turn["times"], discard=result.discarded_steps, window=result.window
        )
        for turn in result.turns
        if turn["counts"]
    }
    ratios = [
        log(values["a", pair] / values["b", pair]) for variant, pair in values if variant == "a"
    ]
    assert len(ratios) == result.pairs
    assert exp(hodges_lehmann(ratios)) == pytest.approx(result.speedup)


def test_the_result_says_what_was_compared(result):
    assert result.task == "module:make"
    assert (result.variant_a["name"], result.variant_b["name"]) == ("A", "B")
    assert result.variant_a.keys() == {"name", "preset", "trainer", "env"}


def test_a_result_of_an_older_version_is_read(result, tmp_path):
    record = result.to_dict()
    for name in ("task", "variant_a", "variant_b"):
        del record[name]
    (tmp_path / "old.json").write_text(json.dumps(record))
    assert Result.load(tmp_path / "old.json").speedup == result.speedup


@pytest.mark.parametrize(
    ("where", "function", "name"),
    [
        ("train.yaml", None, "train.yaml"),
        ("below/train.py", "make", "below/train.py:make"),
        ("../train.py", "make", None),
        ("a.module", "make", "a.module:make"),
    ],
)
def test_what_was_trained_is_named_as_on_the_command_line(tmp_path, where, function, name):
    path = where if where == "a.module" else str((tmp_path / where).resolve())
    assert task_name(Task(path, function)) == (name or f"{path}:{function}")


@pytest.mark.parametrize("text", ["{}", "[]", '{"speedup": 2}', "# no JSON", "1"])
def test_another_file_is_no_result(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a result of this version"):
        Result.load(path)


def test_environments_and_their_difference(compare_fakes):
    result = compare_fakes({"threads": 1}, {"threads": 2, "precision": "bf16-mixed"}, quick=True)
    assert result.environment_a["versions"] == {"torch": "2.6"}
    assert result.environment_difference == {
        "precision": ["32-true", "bf16-mixed"],
        "threads": [1, 2],
    }


def test_a_busy_machine_is_a_result_too(compare_fakes, cpu_clock, tmp_path):
    cpu_clock(100.0)
    result = compare_fakes()
    assert Result.load(result.save(tmp_path / "busy.json")) == result
    assert result.step_seconds_a is None
    assert result.samples_per_s_b is None
    assert result.startup_seconds_a > 0
