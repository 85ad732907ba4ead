"""Pictures of a result: step times and losses."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_perf.benchmark.result import Result
from lightning_perf.benchmark.statistics import turn_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Grey for what was there before, blue for what is proposed; they differ in lightness too.
_COLORS = {"a": "#8a8f98", "b": "#0068b5"}
_BAND = "#dcebf7"
_INK = "#2b2f36"


def pictures(result: Result, folder: str | Path) -> list[Path]:
    """Draw ``step_times.png`` and ``losses.png``; a picture without data is left out.

    Args:
        result: What to draw.
        folder: Where to write them; it must exist. Files of the same name are replaced.

    Returns:
        The files written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib, which is not installed. "
            "Run: pip install 'lightning-perf[demo]'"
        ) from error
    style: dict[Any, Any] = {
        "font.size": 10,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": "#b9bec6",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#eceef1",
        "xtick.color": "#5b616b",
        "ytick.color": "#5b616b",
        "legend.edgecolor": "none",
        "legend.framealpha": 1,
    }
    written = []
    with matplotlib.rc_context(style):
        for name, draw in (("step_times.png", _step_times), ("losses.png", _losses)):
            figure = draw(result)
            if figure is not None:
                written.append(Path(folder) / name)
                figure.savefig(written[-1], dpi=150)
    return written


def _step_times(result: Result) -> Figure | None:
    from matplotlib.figure import Figure

    times = {key: _counted_times(result, key) for key in ("a", "b")}
    if result.speedup is None or not all(times.values()):
        return None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_times(left, result, times)
    _draw_ratios(right, result)
    return figure


def _counted_times(result: Result, key: str) -> list[float]:
    return [
        seconds
        for turn in result.turns
        if turn["variant"] == key and turn["counts"]
        for seconds in turn["times"][result.discarded_steps :]
    ]


def _draw_times(axes: Axes, result: Result, times: dict[str, list[float]]) -> None:
    """Draw both distributions over a range that a few stalls do not stretch."""
    import numpy as np

    longest = max(float(np.quantile(values, 0.98)) for values in times.values())
    shortest = min(min(values) for values in times.values())
    unit, name = (1000.0, "ms") if longest < 1 else (1.0, "s")
    bars = min(60, max(12, round(2 * math.sqrt(min(map(len, times.values()))))))
    edges = (np.linspace(0.97 * shortest, 1.03 * longest, bars + 1) * unit).tolist()
    for key, values in times.items():
        scaled = np.clip(np.asarray(values) * unit, edges[0], edges[-1])
        typical = getattr(result, f"step_seconds_{key}") * unit
        label = f"{key.upper()}: {getattr(result, key)}, {typical:.3g} {name}"
        shares = np.full(len(scaled), 100 / len(scaled))
        axes.hist(scaled, edges, weights=shares, color=_COLORS[key], alpha=0.65, label=label)
        axes.axvline(typical, ymax=0.85, color=_COLORS[key], linewidth=1.5)
    axes.set_title("Step times")
    axes.set_xlabel(f"time per step ({name}); the last bar holds all longer ones")
    axes.set_ylabel("share of steps (%)")
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.2)
    axes.legend(loc="upper left", ncols=2)


def _draw_ratios(axes: Axes, result: Result) -> None:
    """Draw the ratio of each pair of turns, launch by launch, and the estimate over it."""
    from matplotlib.ticker import FormatStrFormatter, MaxNLocator

    launches = _ratios(result)
    if result.interval is not None and result.speedup is not None:
        low, high = result.interval
        axes.axhspan(low, high, color=_BAND, zorder=0, label=f"{result.level:.0%} interval")
        axes.axhline(result.speedup, color=_COLORS["b"], linewidth=1.5, label="speed-up")
    axes.axhline(1, color=_INK, linewidth=1, linestyle=(0, (4, 3)), label="no difference")
    first = 1
    for number, ratios in launches.items():
        places = range(first, first + len(ratios))
        axes.plot(places, ratios, "o", color=_COLORS["b"], alpha=0.75, markersize=5, mew=0)
        first += len(ratios) + 1
        if len(launches) > 1 and number != max(launches):
            axes.axvline(first - 1, color="#e2e5e9", linewidth=1)
    several = f", {len(launches)} launches" if len(launches) > 1 else ""
    axes.set_title(f"Speed-up in each pair of turns{several}")
    axes.set_xlabel("pair of turns")
    axes.set_ylabel("time of A / time of B")
    axes.yaxis.set_major_formatter(FormatStrFormatter("%.2f"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.35)
    axes.legend(loc="upper left", ncols=3, fontsize=9)


def _ratios(result: Result) -> dict[int, list[float]]:
    """Return the speed-up of each pair that counts, by launch."""
    pairs: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for turn in result.turns:
        if turn["counts"]:
            pairs[turn["launch"], turn["pair"]][turn["variant"]] = turn_value(
                turn["times"], discard=result.discarded_steps, window=result.window
            )
    launches: dict[int, list[float]] = defaultdict(list)
    for (launch, _), values in sorted(pairs.items()):
        if len(values) == 2:
            launches[launch].append(values["a"] / values["b"])
    return launches


def _losses(result: Result) -> Figure | None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    learning = result.learning
    if not learning or not learning["losses_a"] or not learning["losses_b"]:
        return None
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    for key, width in (("a", 4.0), ("b", 1.5)):
        losses = learning[f"losses_{key}"]
        batches = range(1, len(losses) + 1)
        label = f"{key.upper()}: {getattr(result, key)}"
        upper.plot(batches, losses, color=_COLORS[key], linewidth=width, label=label)
    upper.set_title("Training loss, from the same weights and the same batches")
    upper.set_ylabel("loss")
    upper.legend(loc="upper right")
    _draw_differences(lower, learning)
    lower.set_xlabel("batch")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _draw_differences(axes: Axes, learning: dict[str, Any]) -> None:
    pairs = zip(learning["losses_a"], learning["losses_b"], strict=False)
    relative = [100 * (b - a) / abs(a) if a else math.nan for a, b in pairs]
    axes.axhline(0, color="#b9bec6", linewidth=1)
    axes.plot(range(1, len(relative) + 1), relative, color=_COLORS["b"], linewidth=1.5)
    allowed = learning["allowed_max"]
    title = "Difference of B: none, bit for bit" if learning["identical"] else "Difference of B"
    if allowed is not None:
        for bound in (-100 * allowed, 100 * allowed):
            axes.axhline(bound, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
        title += f" (dashed: the {100 * allowed:.3g} % that rounding may explain)"
    axes.set_title(title)
    axes.set_ylabel("% of A's loss")
    axes.margins(y=0.2)
