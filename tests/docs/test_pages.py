"""Cards have the fixed headings, and every Python block of the documentation runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CARDS = sorted((ROOT / "docs" / "items").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

HEADINGS = [
    "What it does",
    "Use it",
    "Changes and undo",
    "Needs",
    "Exactness",
    "Measured",
    "When not to use it",
    "Combines with",
    "Support",
    "How it works",
    "Source",
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("card", CARDS, ids=name)
def test_a_card_has_the_fixed_headings(card: Path) -> None:
    assert re.findall(r"^## (.*)$", card.read_text(), re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("card", CARDS, ids=name)
def test_a_card_shows_python_and_yaml_and_a_support_table(card: Path) -> None:
    assert blocks(card, "python")
    assert blocks(card, "yaml")
    support = card.read_text().split("## Support")[1].split("## ")[0]
    for where in ("CPU", "CUDA", "MPS", "DDP", "FSDP", "DeepSpeed", "Linux", "macOS", "Windows"):
        assert re.search(rf"^\| .*{where}", support, re.MULTILINE), where


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=name)
def test_yaml_blocks_parse(page: Path) -> None:
    for block in blocks(page, "yaml"):
        assert yaml.safe_load(block)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
