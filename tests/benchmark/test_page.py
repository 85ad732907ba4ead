from __future__ import annotations

import re
import shlex
from functools import cache
from html import unescape

import pytest
import yaml
from benchmark.page_cases import CASES, FILE, LONG, failed, shown
from benchmark.results import result, variant

from lightning_perf.benchmark import Result, load_variant
from lightning_perf.benchmark.findings import figures, headline, results_row, warnings
from lightning_perf.cli import bench

PAGES = [*CASES, "failed"]


@cache
def html(case: str) -> str:
    return failed() if case == "failed" else shown(CASES[case])


def words(text: str) -> str:
    """Return what a reader sees, without pictures, in one line."""
    body = re.sub(r"<svg.*?</svg>", "", text.partition("<body>")[2], flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


@pytest.mark.parametrize("case", PAGES)
def test_a_page_needs_nothing_else(case: str) -> None:
    text = html(case)
    assert not re.findall(r"<script|<link(?! rel=\"icon\" href=\"data:,\")|<img|@import", text)
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text)
    assert not re.findall(r"url\((?!#)", text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("case", PAGES)
def test_a_page_is_whole(case: str) -> None:
    text = html(case)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    for name in ("section", "table", "div", "figure", "svg", "ul", "dl", "pre", "details"):
        assert len(re.findall(rf"<{name}\b", text)) == text.count(f"</{name}>"), name
    for wrong in ("None", "nan", "Undefined", "{{", "Markup"):
        assert wrong not in words(text)


@pytest.mark.parametrize("case", CASES)
def test_a_page_says_what_the_result_says(case: str) -> None:
    found, read = result(**CASES[case]), words(html(case))
    expected = [headline(found), results_row(found), *warnings(found)]
    for figure in figures(found):
        expected += [figure.name, figure.a, figure.b, figure.note]
    for status in found.statuses_b:
        expected += [status["item"], status["text"]]
    for text in expected:
        assert " ".join(text.split()) in read


@pytest.mark.parametrize("case", CASES)
def test_every_picture_is_described_twice(case: str) -> None:
    text = html(case)
    assert text.count("<svg") == text.count('<svg role="img" aria-label="')
    for figure in re.findall(r"<figure>.*?</figure>", text, re.DOTALL):
        assert len(re.findall(r"<figcaption>.{40,}</figcaption>", figure, re.DOTALL)) == 1


@pytest.mark.parametrize(
    ("case", "pictures"),
    [("plain", 3), ("many", 3), ("busy", 1), ("no learning check", 2), ("not comparable", 2)],
)
def test_pictures_are_there_when_there_is_something_to_see(case: str, pictures: int) -> None:
    assert html(case).count("<figure>") == pictures


def mood(case: str) -> str:
    (found,) = re.findall(r'<div class="verdict ?(\w*)">', html(case))
    return found


def test_only_a_gain_without_a_but_is_green() -> None:
    assert mood("plain") == "good"
    assert mood("does not learn the same") == mood("failed") == "bad"
    for case in ("busy", "no learning check", "not comparable", "other batch sizes"):
        assert mood(case) == "", case


def test_other_batch_sizes_are_said_loudly() -> None:
    alarm = '<p class="alarm" role="alert">Batch sizes differ: A trains on batches of 32, B of 64.'
    assert alarm in html("other batch sizes")
    assert 'class="alarm"' not in html("plain")


def test_differences_of_the_environments_are_marked() -> None:
    (row,) = re.findall(r'<tr class="differs">(.*?)</tr>', html("plain"))
    assert words(f"<body>{row}") == "precision 32-true bf16-mixed"
    assert "The same in both" in html("plain")
    assert "CACHE_DIR" not in html("plain")
    same = shown({"environment_b": result().environment_a})
    assert "Nothing differs" in same
    assert 'class="differs"' not in same


def command(text: str) -> list[str]:
    (found,) = re.findall(r"<pre>(<span class=\"word\">lightning-perf.*?)</pre>", text, re.DOTALL)
    return shlex.split(words(f"<body>{found}"))


def test_the_command_repeats_the_comparison() -> None:
    from lightning_perf.cli.__main__ import parse

    asked = parse(command(html("plain"))[1:])
    assert asked.run is bench.run
    assert (asked.config, asked.a, asked.b) == ("train.py:make", "none", "cpu")
    assert (asked.budget, asked.learning_steps, asked.seed) == (120, 60, 0)
    assert asked.quick
    assert asked.validate
    later = shown({"stop_reason": "decided", "learning": None, "learning_steps": 0, "seed": 7})
    asked = parse(command(later)[1:])
    assert not asked.quick
    assert not asked.validate
    assert (asked.learning_steps, asked.seed) == (0, 7)


def test_a_variant_of_a_file_is_written_out(tmp_path) -> None:
    text = html("variant of a file")
    assert "mine.yaml" in command(text)
    (content,) = re.findall(r"<code>mine.yaml</code>:</p>\s*<pre>(.*?)</pre>", text, re.DOTALL)
    assert set(yaml.safe_load(unescape(content))) == {"preset", "trainer", "env"}
    file = tmp_path / "mine.yaml"
    file.write_text(unescape(content))
    assert load_variant(file).__dict__ == FILE


def test_both_variants_may_be_files() -> None:
    other = variant("other", preset=None, trainer={"max_epochs": 3})
    text = shown({"a": "other", "b": "mine", "variant_a": other, "variant_b": FILE})
    assert {"other.yaml", "mine.yaml"} <= set(command(text))
    assert text.count("with this in <code>") == 2


def test_names_and_tracebacks_are_text() -> None:
    text = shown({"b": "<b>&", "statuses_b": [{"item": "<i>", "active": True, "text": "<u>"}]})
    assert not re.findall(r"<[bu]>", text)
    assert "B: <b>&" in words(text)
    assert "in <module>" in unescape(failed())
    assert "<module>" not in failed()


def test_a_failure_says_what_happened() -> None:
    read = words(failed())
    for expected in (
        "B: mine failed while training.",
        "ValueError: no <good>",
        "Traceback (most recent call last)",
        "lightning-perf bench --config 'my train.py:make'",
        "torch ",
    ):
        assert expected in read


def test_a_saved_result_gives_the_same_page(tmp_path) -> None:
    from lightning_perf.benchmark.page import page
    from lightning_perf.benchmark.pictures import pictures

    loaded = Result.load(result().save(tmp_path / "result.json"))
    assert page(loaded, pictures(loaded)) == html("plain")


def test_long_names_are_there_in_full() -> None:
    assert words(html("long names")).count(LONG) > 3
