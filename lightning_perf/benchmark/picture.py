"""What a picture is: its colours and style, as SVG for a page, as PNG for a folder."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, LINE, GRID = "#24292f", "#59616b", "#b0b6be", "#e9ebee"
GROUND, BAND = "#ffffff", "#d3e5f4"
# Grey for what was there before, blue for what is proposed; they differ in lightness too.
COLORS = {"a": "#878d96", "b": "#0062ad"}

# A page gives these names other colours in the dark.
_VARIABLES = {
    INK: "--ink",
    FAINT: "--faint",
    LINE: "--line",
    GRID: "--grid",
    GROUND: "--ground",
    BAND: "--band",
    COLORS["a"]: "--a",
    COLORS["b"]: "--b",
}
_LONGEST_NAME = 24
# Inches; a phone shows it at about its size, so letters must not be smaller than these.
WIDTH = 4.4
_STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.facecolor": GROUND,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.edgecolor": "none",
    "legend.facecolor": GROUND,
    "legend.framealpha": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "lightning_perf",
}


@dataclass(frozen=True)
class Picture:
    """A picture and what a page says about it."""

    name: str
    figure: Figure
    caption: str
    """What it shows, in a sentence or two."""
    description: str
    """The same for those who do not see it, with the numbers."""

    def svg(self) -> str:
        """Return the picture as an element of a page, in colours that the page names."""
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with style():
            self.figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        text = buffer.getvalue()
        text = text[text.index("<svg ") :]
        # Of the names, only those of clip paths and markers are used; two pictures share the rest.
        text = re.sub(r'(<(?:g|text)) id="[^"]*"', r"\1", text)
        text = re.sub(r'(["#(])([mp][0-9a-f]{10})\b', rf"\1{self.name}_\2", text)
        for color, variable in _VARIABLES.items():
            text = text.replace(color, f"var({variable})")
        # The page decides about sizes.
        return re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"', r"\1", text, count=2)


def save_pictures(drawn: list[Picture], folder: Path) -> list[Path]:
    """Write each as ``<name>.png`` into a folder; files of the same name are replaced."""
    written = []
    with style():
        for picture in drawn:
            written.append(folder / f"{picture.name}.png")
            picture.figure.savefig(written[-1], dpi=200)
    return written


def short(name: str) -> str:
    """Return a name that fits into a picture."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def require_matplotlib() -> None:
    """Raise ImportError with the way out if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ImportError(
            "Pictures need matplotlib, which is not installed. "
            "Run: pip install 'lightning-perf[demo]'"
        )


@contextmanager
def style() -> Iterator[None]:
    """Draw in the style of this package within a block."""
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield
