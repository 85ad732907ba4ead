from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmark.results import BUSY, learning, result, turns
from matplotlib.image import imread

from lightning_perf.benchmark.picture import save_pictures
from lightning_perf.benchmark.pictures import pictures, ratios

ALL = ["step_times", "ratios", "losses"]


def names(**changes: Any) -> list[str]:
    return [picture.name for picture in pictures(result(**changes))]


@pytest.mark.parametrize(("launches", "pairs"), [(1, 12), (6, 12), (10, 150)])
def test_pictures_are_drawn(launches: int, pairs: int) -> None:
    drawn = pictures(result(turns=turns(launches, pairs)))
    assert [picture.name for picture in drawn] == ALL
    for path in save_pictures(drawn, Path.cwd()):
        image = imread(path)
        assert min(image.shape[:2]) > 400
        assert image[..., :3].std() > 0.05, "the picture is blank"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"learning": None}, ["step_times", "ratios"]),
        ({"learning": asdict(learning(losses_a=[], losses_b=[]))}, ["step_times", "ratios"]),
        (BUSY | {"turns": []}, ["losses"]),
        (BUSY, ["losses"]),
        ({"turns": []}, ["losses"]),
    ],
)
def test_pictures_without_data_are_left_out(changes: dict[str, Any], expected: list[str]) -> None:
    assert names(**changes) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"identical": True, "allowed_max": None},
        {"losses_a": [1.0], "losses_b": [1.0]},
        {"losses_a": [0.0, 1.0, float("nan")], "losses_b": [0.5, float("inf")]},
    ],
)
def test_odd_losses_are_drawn(changes: dict[str, Any]) -> None:
    drawn = pictures(result(learning=asdict(learning(**changes))))
    assert all(picture.svg() for picture in drawn)


def test_each_pair_that_counts_is_a_ratio() -> None:
    found = ratios(result(turns=turns(launches=2, pairs=5)))
    assert {launch: len(values) for launch, values in found.items()} == {1: 5, 2: 5}
    assert all(1.1 < value < 1.4 for values in found.values() for value in values)


def test_launches_of_another_length_are_drawn_too() -> None:
    measured = turns(launches=3)
    for turn in measured:
        turn["times"] = turn["times"][: {1: 23, 2: 4, 3: 2}[turn["launch"]]]
    found = result(turns=measured, launch_speedups=[1.25, 1.24])
    assert {launch: len(values) for launch, values in ratios(found).items()} == {1: 12, 2: 12}
    assert [picture.name for picture in pictures(found)] == ALL


def test_launches_that_do_not_count_are_not_passed_off_as_good_ones() -> None:
    captions = [
        pictures(result(turns=turns(launches=3), launch_speedups=speedups))[1].caption
        for speedups in ([1.25, 1.24], [1.25, 1.24, 1.26])
    ]
    assert "do not count" in captions[0]
    assert "what the launch is worth" in captions[1]


def test_pairs_far_off_are_counted_in_the_caption() -> None:
    measured = turns(pairs=40)
    measured[-1]["times"] = [100 * seconds for seconds in measured[-1]["times"]]
    caption = {p.name: p.caption for p in pictures(result(turns=measured))}["ratios"]
    assert "1 pair lies further out" in caption


def test_an_svg_is_an_element_whose_names_are_its_own() -> None:
    drawn = {picture.name: picture.svg() for picture in pictures(result())}
    seen: set[str] = set()
    for name, text in drawn.items():
        ElementTree.fromstring(text)
        own = set(re.findall(r'\bid="([^"]*)"', text))
        assert own
        assert all(found.startswith(name) for found in own)
        assert set(re.findall(r'(?:url\(#|href="#)([^")]*)', text)) <= own
        assert not own & seen
        seen |= own


def test_an_svg_leaves_colours_and_size_to_the_page() -> None:
    for picture in pictures(result()):
        text = picture.svg()
        assert not re.findall(r"#[0-9a-f]{6}\b", text)
        assert {"var(--ink)", "var(--b)"} <= set(re.findall(r"var\([^)]*\)", text))
        assert not re.search(r"<svg[^>]*(width|height)=", text)


def test_names_of_variants_are_no_formulas_and_not_too_long() -> None:
    for name in ("a$b$c_d^e", "x" * 200):
        for picture in pictures(result(a=name, b=name)):
            assert name[:20] in picture.svg() or picture.name == "ratios"


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-perf\[demo\]'"):
        pictures(result())
