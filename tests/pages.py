"""What the pages of the documentation hold: code blocks, commands, links, anchors."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CARDS = sorted(path for path in (DOCS / "items").glob("*.md") if path.name != "README.md")
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(
    r'^(?P<ticks>```+)(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^(?P=ticks)$',
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"(?<![\w./-])([`\"]?)lightning-perf ((?:(?!  )[^\n|&;>#`)\"'])*)")


class Block(NamedTuple):
    """A fenced block; one with a title is a file, or lines to add to one."""

    language: str
    title: str | None
    code: str


def name(page: Path) -> str:
    """Return the name of a page, as test ids show it."""
    return page.relative_to(ROOT).as_posix()


def all_blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, not those within others."""
    return [Block(m["language"], m["title"], m["code"]) for m in _FENCE.finditer(text)]


def blocks(page: Path, language: str) -> list[str]:
    """Return the code of the blocks in a language.

    Python blocks with a title are left out: they are files of somebody's project.
    """
    found = [block for block in all_blocks(page.read_text("utf-8")) if block.language == language]
    return [block.code for block in found if language != "python" or block.title is None]


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", text)


def commands(text: str) -> list[tuple[list[str], bool]]:
    """Return the arguments of the `lightning-perf` commands in a text; and whether only named.

    Backslashes join lines. Pipes, comments, quotes, closing brackets, the end of inline code and
    two spaces end a command.
    """
    joined = re.sub(r"\\\n\s*", " ", text)
    return [
        (shlex.split(arguments.rstrip(" ,.:")), bool(tick))
        for tick, arguments in _COMMAND.findall(joined)
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the built site give to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text("utf-8")), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings]
    return {slug.replace(" ", "-") for slug in slugs}


def links(page: Path) -> list[tuple[str, str]]:
    """Return path and anchor of every link of a page that leads to another page, or within it."""
    found = re.findall(r"\]\(([^)\s]*)\)", prose(page.read_text("utf-8")))
    return [
        (path, anchor)
        for path, _, anchor in (target.partition("#") for target in found)
        if "://" not in path
    ]
