"""The site builds without a warning, and its pages need nothing from the network."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("material") is None, reason="needs mkdocs-material: pip install '.[docs]'"
)

# What a browser loads by itself; links are only followed by a click.
LOADED = re.compile(
    r"<(?:script|img|iframe|link rel=.?stylesheet)[^>]*(?:src|href)=.?(?:https?:)?//"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    site = tmp_path_factory.mktemp("site")
    config = ROOT / "docs" / "site" / "mkdocs.yml"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", config, "-d", site],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.relative_to(site).as_posix(): path.read_text("utf-8") for path in html(site)}


def html(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if "results" not in path.parts)


def test_nothing_is_loaded_from_the_network(pages: dict[str, str]) -> None:
    assert {name for name, text in pages.items() if LOADED.search(text)} == set()


def test_every_markdown_list_and_table_became_one(pages: dict[str, str]) -> None:
    # Without a blank line before it, GitHub makes a list or table of it and mkdocs does not.
    raw = re.compile(r"<p>[^<]*(?:<(?!/p>)[^<]*)*\n(?:- |\d\. |\|)")
    assert {name for name, text in pages.items() if raw.search(text)} == set()
