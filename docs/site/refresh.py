"""Writes what the pages take from elsewhere; a test fails when it was not run.

    python docs/site/refresh.py

Two things: the index of items, from the classes; and the code blocks of the Chinese README, from
the English one.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from lightning_perf import callbacks, data, strategies

PACKAGES = (callbacks, strategies, data)
ROOT = Path(__file__).parents[2]
BEGIN = "<!-- index of items, written by docs/site/refresh.py -->\n"
END = "<!-- end of the index -->"
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def index_of_items(folder: str) -> str:
    """Return the table of items.

    Args:
        folder: Where the cards are, seen from the page, with a slash at the end.
    """
    lines = ["| Item | What it does | Guide |", "| --- | --- | --- |"]
    classes = [(name, getattr(package, name)) for package in PACKAGES for name in package.__all__]
    for name, item in classes:
        stem = item.__module__.rpartition(".")[2]
        summary = (inspect.getdoc(item) or "").partition("\n")[0].replace("``", "`")
        lines.append(f"| [`{name}`]({folder}{stem}.md) | {summary} | {item.guide} |")
    return "\n".join(lines) + "\n"


def with_index(text: str, folder: str) -> str:
    """Return a page with the present index of items between its two marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"The page needs the lines {BEGIN.strip()!r} and {END!r}.")
    return f"{before}{begin}\n{index_of_items(folder)}\n{end}{after}"


def with_code_of(text: str, original: str) -> str:
    """Return a translated page with its code blocks replaced by those of the original."""
    blocks = CODE.findall(original)
    if len(CODE.findall(text)) != len(blocks):
        raise ValueError(f"The translation must have {len(blocks)} code blocks, as the original.")
    remaining = iter(blocks)
    return CODE.sub(lambda _: next(remaining), text)


def fresh_pages() -> dict[Path, str]:
    """Return the pages that hold something derived, as they should be."""
    readme, cards = ROOT / "README.md", ROOT / "docs" / "items" / "README.md"
    english = with_index(readme.read_text("utf-8"), "docs/items/")
    chinese = ROOT / "docs" / "README.zh.md"
    return {
        readme: english,
        cards: with_index(cards.read_text("utf-8"), ""),
        chinese: with_code_of(chinese.read_text("utf-8"), english),
    }


if __name__ == "__main__":
    for page, text in fresh_pages().items():
        page.write_text(text, "utf-8")
