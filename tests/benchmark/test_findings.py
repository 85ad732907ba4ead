from __future__ import annotations

from typing import Any

import pytest
from benchmark.results import BUSY, environment, result

from lightning_perf.benchmark.findings import (
    RESULTS_HEADER,
    figures,
    headline,
    results_row,
    verdict,
    warnings,
)

OTHER_BATCHES = {"batch_size_b": 64, "samples_per_s_b": 1280.0}


def test_the_verdict_is_one_sentence_on_speed_and_learning() -> None:
    assert verdict(result()) == (
        "cpu against none: 1.250x faster, 95% interval 1.210 to 1.291 (1 launch, stopped: quick "
        "mode); it learns the same."
    )


@pytest.mark.parametrize(
    ("agree", "said"),
    [
        (True, "it learns the same."),
        (False, "BUT IT DOES NOT LEARN THE SAME."),
        (None, "whether it learns the same is not known."),
    ],
)
def test_learning_is_part_of_the_verdict(agree: bool | None, said: str) -> None:
    assert verdict(result(losses_agree=agree)).endswith(f"; {said}")


def test_other_batch_sizes_are_part_of_the_verdict() -> None:
    assert verdict(result(**OTHER_BATCHES)).endswith("; BATCH SIZES DIFFER: 32 AND 64.")


SLOWER = {"speedup": 0.8, "interval": (0.78, 0.82)}
EQUAL = {"speedup": 1.001, "interval": (0.994, 1.008)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "cpu trains 1.250x faster than plain Lightning, and learns the same."),
        ({"a": "old"}, "cpu trains 1.250x faster than old, and learns the same."),
        (SLOWER, "cpu trains 1.250x slower than plain Lightning; it learns the same."),
        (
            EQUAL | {"stop_reason": "narrow enough"},
            "cpu trains as fast as plain Lightning, to within 0.8%; it learns the same.",
        ),
        (
            EQUAL | {"stop_reason": "budget spent"},
            "Whether cpu trains faster than plain Lightning is undecided; it learns the same.",
        ),
        (
            BUSY,
            "The machine was too busy to tell whether cpu is faster than plain Lightning; it "
            "learns the same.",
        ),
        (
            {"losses_agree": False},
            "cpu trains 1.250x faster than plain Lightning, BUT IT DOES NOT LEARN THE SAME.",
        ),
        (
            {"losses_agree": None},
            "cpu trains 1.250x faster than plain Lightning; whether it learns the same could not "
            "be compared.",
        ),
        (
            {"losses_agree": None, "learning": None},
            "cpu trains 1.250x faster than plain Lightning; whether it learns the same was not "
            "checked.",
        ),
        (
            OTHER_BATCHES,
            "cpu trains 1.250x faster than plain Lightning per step (batch sizes differ: 32 and "
            "64), and learns the same.",
        ),
    ],
)
def test_the_headline_needs_no_explanation(changes: dict[str, Any], sentence: str) -> None:
    assert headline(result(**changes)) == sentence


def test_samples_are_compared_when_steps_are_not_alike() -> None:
    notes = {figure.name: figure.note for figure in figures(result(**OTHER_BATCHES))}
    assert notes["batch size"] == "NOT THE SAME"
    assert notes["samples/s"] == "B has 2.000x as many"
    assert {f.note for f in figures(result()) if f.name in ("batch size",)} == {""}


def test_quick_mode_is_a_warning_as_long_as_there_is_a_number() -> None:
    assert "Quick mode" in warnings(result())[-1]
    assert "Quick mode" not in str(warnings(result(**BUSY)))


def cells(**changes: Any) -> dict[str, str]:
    """Return a row of the table of results by its headings."""
    row = results_row(result(**changes), link="x.json").replace(r"\|", "¦")
    split = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (row, RESULTS_HEADER)]
    heads = RESULTS_HEADER.splitlines()[0].split("|")[1:-1]
    assert len(split[0]) == len(heads)
    return dict(zip((head.strip() for head in heads), split[0], strict=True))


def test_a_row_of_results() -> None:
    assert cells() == {
        "date": "2030-01-01",
        "trained": "train.py:make",
        "A": "none",
        "B": "cpu",
        "speed-up of B (interval)": "**1.250** (1.210 to 1.291, 95%)",
        "launches": "1",
        "learns the same": "yes",
        "machine": "Some CPU (avx2), 8 cores",
        "software": "torch 2.9.0, lightning 2.6.0",
        "": "[file](x.json)",
    }


@pytest.mark.parametrize(
    ("changes", "column", "cell"),
    [
        (BUSY, "speed-up of B (interval)", BUSY["verdict"]),
        ({"losses_agree": False}, "learns the same", "**no**"),
        ({"losses_agree": None}, "learns the same", "could not be compared"),
        ({"losses_agree": None, "learning": None}, "learns the same", "not checked"),
        ({"b": "a|b"}, "B", "a¦b"),
        ({"environment_b": {}}, "machine", ""),
        (
            OTHER_BATCHES,
            "speed-up of B (interval)",
            "**1.250** (1.210 to 1.291, 95%) per step, **batch sizes differ: 32 and 64**",
        ),
    ],
)
def test_a_row_does_not_hide_anything(changes: dict[str, Any], column: str, cell: str) -> None:
    assert cells(**changes)[column] == cell


def test_a_gpu_that_was_used_is_the_machine() -> None:
    used = environment("16-mixed") | {"device": "cuda:0"}
    used["hardware"]["device_name"] = "Some GPU"
    assert cells(environment_b=used)["machine"] == "Some GPU"


def test_one_core_is_one_core() -> None:
    small = environment("32-true")
    small["hardware"] |= {"cores": 1, "isa": []}
    assert cells(environment_b=small)["machine"] == "Some CPU, 1 core"


@pytest.mark.parametrize(
    ("samples", "shown"), [(18.309, "18.31"), (640.0, "640"), (51234.5, "51,234")]
)
def test_numbers_are_written_out(samples: float, shown: str) -> None:
    (found,) = (f for f in figures(result(samples_per_s_a=samples)) if f.name == "samples/s")
    assert found.a == shown


def test_what_was_trained_can_be_called_otherwise() -> None:
    assert "| 2030-01-01 | resnet | none |" in results_row(result(), trained="resnet")
