"""The pictures of a result: step times, ratios, losses."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_perf.benchmark import findings
from lightning_perf.benchmark.picture import (
    BAND,
    COLORS,
    INK,
    LINE,
    WIDTH,
    Picture,
    short,
    style,
)
from lightning_perf.benchmark.result import Result
from lightning_perf.benchmark.statistics import turn_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHED = (0, (4, 3))
_STEPS = [1, 2, 5, 10]  # between the numbers of an axis
_MANY = 300  # dots


def pictures(result: Result) -> list[Picture]:
    """Draw what the result has data for."""
    with style():
        drawn = (draw(result) for draw in (_draw_steps, _draw_ratios, _draw_losses))
        return [picture for picture in drawn if picture is not None]


def _draw_steps(result: Result) -> Picture | None:
    """Draw the distributions of step times one above the other, over a common range."""
    times = {key: np.asarray(_counted_times(result, key)) for key in ("a", "b")}
    if result.speedup is None or not all(map(len, times.values())):
        return None
    figure = Figure(figsize=(WIDTH, 3.7), layout="constrained")
    figure.suptitle("How long the steps took", x=0.01, ha="left")
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    # A few stalls must not stretch the range.
    longest = max(float(np.quantile(values, 0.98)) for values in times.values())
    shortest = min(float(values.min()) for values in times.values())
    unit, name = (1000.0, "ms") if longest < 1 else (1.0, "s")
    bars = min(50, max(14, round(2 * math.sqrt(min(map(len, times.values()))))))
    edges = (np.linspace(0.98 * shortest, 1.02 * longest, bars + 1) * unit).tolist()
    typical = {}
    for axes, (key, values) in zip(panels, times.items(), strict=True):
        seconds = getattr(result, f"step_seconds_{key}")
        typical[key] = f"{short(getattr(result, key))}, typically {findings.seconds(seconds)}"
        scaled = np.clip(values * unit, edges[0], edges[-1])
        shares = np.full(len(scaled), 100 / len(scaled))
        axes.hist(scaled, edges, weights=shares, color=COLORS[key])
        axes.axvline(seconds * unit, color=INK, linewidth=1.5)
        axes.set_title(f"{key.upper()}: {typical[key]}")
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("% of steps")
        axes.margins(y=0.12)
    panels[-1].set_xlabel(f"time per step ({name})")
    numbers = " and ".join(f"{len(times[key]):,} of {key.upper()}" for key in times)
    return Picture(
        "step_times",
        figure,
        f"The steps that count, {numbers}. The line marks the typical step; the last bar holds all "
        "that took longer.",
        f"Histograms of step times. A: {typical['a']}. B: {typical['b']}.",
    )


def _counted_times(result: Result, key: str) -> list[float]:
    return [
        seconds
        for turn in result.turns
        if turn["variant"] == key and turn["counts"]
        for seconds in turn["times"][result.discarded_steps :]
    ]


def _draw_ratios(result: Result) -> Picture | None:
    """Draw the speed-up of each pair of turns, launch by launch, and the interval below."""
    launches = ratios(result)
    if result.speedup is None or result.interval is None or not launches:
        return None
    rows = len(launches)
    # A launch that does not count may have a row too; then it is not known which one that is.
    estimates = result.launch_speedups if len(result.launch_speedups) == rows else []
    values = np.concatenate(list(launches.values()))
    low, high = limits = _range(values, [*result.interval, *estimates])
    figure = Figure(figsize=(WIDTH, 2.1 + 0.34 * rows + 0.9 / rows), layout="constrained")
    figure.suptitle("Speed-up in each pair of turns", x=0.01, ha="left")
    axes = figure.subplots()
    for row, launch in enumerate(launches.values()):
        # From the first pair at the top to the last at the bottom, so that drift shows as a slant.
        heights = row + np.linspace(-0.3, 0.3, len(launch)) if len(launch) > 1 else [row]
        _dots(axes, launch, heights, limits, many=len(values) > _MANY)
    for row, estimate in enumerate(estimates):
        axes.plot([estimate] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=2.5)
    _draw_interval(axes, result.speedup, result.interval, row=rows)
    axes.axvline(1, color=INK, linewidth=1.2, linestyle=_DASHED)
    axes.set_yticks(range(rows + 1), [*(f"launch {number}" for number in launches), "all"])
    axes.set_ylim(rows + 0.6, -0.6)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("speed-up (time of A / time of B)\n← B slower | B faster →")
    outside = int(((values < low) | (values > high)).sum())
    return Picture(
        "ratios",
        figure,
        _ratios_caption(result, rows, outside),
        f"Speed-up of each of {len(values)} pairs of turns in {rows} "
        f"launch{'' if rows == 1 else 'es'}; over all {result.speedup:.3f}, "
        f"{result.level:.0%} interval {result.interval[0]:.3f} to {result.interval[1]:.3f}.",
    )


def ratios(result: Result) -> dict[int, list[float]]:
    """Return the speed-up of each pair that counts, by launch."""
    pairs: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for turn in result.turns:
        # The result holds the plan of the last launch; turns of another may be shorter.
        counted = len(turn["times"]) - result.discarded_steps
        if turn["counts"] and counted > 0:
            pairs[turn["launch"], turn["pair"]][turn["variant"]] = turn_value(
                turn["times"], discard=result.discarded_steps, window=min(result.window, counted)
            )
    launches: dict[int, list[float]] = defaultdict(list)
    for (launch, _), values in sorted(pairs.items()):
        if len(values) == 2:
            launches[launch].append(values["a"] / values["b"])
    return launches


def _draw_interval(axes: Axes, speedup: float, interval: tuple[float, float], *, row: int) -> None:
    axes.axvspan(*interval, color=BAND, zorder=0, linewidth=0)
    axes.errorbar(
        speedup,
        row,
        xerr=[[speedup - interval[0]], [interval[1] - speedup]],
        fmt="D",
        color=COLORS["b"],
        markersize=7,
        linewidth=3,
        capsize=6,
        capthick=2,
    )


def _range(values: Any, also: list[float]) -> tuple[float, float]:
    """Return a range that holds all dots but those far off, everything else, and 1."""
    low, high = np.quantile(values, [0.02, 0.98])
    spread = (high - low) / 2
    low = min(max(float(low - spread), float(values.min())), *also, 1)
    high = max(min(float(high + spread), float(values.max())), *also, 1)
    margin = 0.06 * (high - low) or 0.05
    return low - margin, high + margin


def _dots(
    axes: Axes, launch: list[float], heights: Any, limits: tuple[float, float], *, many: bool
) -> None:
    """Draw the pairs of a launch; what lies outside becomes a triangle at the edge."""
    values, places = np.asarray(launch), np.asarray(heights)
    style: dict[str, Any] = {"color": COLORS["b"], "linestyle": "none", "mew": 0}
    style |= {"alpha": 0.45, "markersize": 3} if many else {"alpha": 0.7, "markersize": 5}
    low, high = limits
    inside = (values >= low) & (values <= high)
    axes.plot(values[inside], places[inside], marker="o", **style)
    for marker, edge, beyond in (("<", low, values < low), (">", high, values > high)):
        edges = np.full(int(beyond.sum()), edge)
        axes.plot(edges, places[beyond], marker=marker, clip_on=False, **style)


def _ratios_caption(result: Result, rows: int, outside: int) -> str:
    caption = (
        "A dot is a pair of turns, one of A and one of B, from the first at the top to the last"
    )
    caption += " at the bottom of each launch" if rows > 1 else " at the bottom"
    if rows == len(result.launch_speedups):
        caption += "; the bar through them is what the launch is worth"
    else:
        caption += "; launches that were disturbed too much are there too, and do not count"
    caption += (
        f". The diamond is the speed-up, its whiskers and the shade are the {result.level:.0%} "
        "interval. On the dashed line there is no difference."
    )
    if outside:
        several = f"{outside} pairs lie" if outside > 1 else "1 pair lies"
        caption += f" {several} further out, at the triangles."
    return caption


def _draw_losses(result: Result) -> Picture | None:
    """Draw both training losses on one axis, and how far they are apart."""
    learning = result.learning
    if not learning or not learning["losses_a"] or not learning["losses_b"]:
        return None
    figure = Figure(figsize=(WIDTH, 4.3), layout="constrained")
    figure.suptitle("Training loss", x=0.01, ha="left")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    for key, width in (("a", 4.5), ("b", 1.6)):
        losses = learning[f"losses_{key}"]
        label = f"{key.upper()}: {short(getattr(result, key))}"
        style: dict[str, Any] = {"marker": "o"} if len(losses) == 1 else {}
        x = range(1, len(losses) + 1)
        upper.plot(x, losses, color=COLORS[key], linewidth=width, label=label, **style)
    upper.set_ylabel("loss")
    upper.legend()
    _draw_differences(lower, learning)
    lower.set_xlabel("batch")
    lower.xaxis.set_major_locator(MaxNLocator(steps=_STEPS, integer=True))
    allowed = learning["allowed_max"]
    caption = "Both start from the same weights and train on the same batches. "
    if learning["identical"]:
        caption += "All losses are the same, bit for bit."
    elif allowed is None:
        caption += "Below: how far the losses of B are from those of A."
    else:
        caption += (
            f"Below: how far the losses of B are from those of A; up to {100 * allowed:.3g}% "
            "(dashed) could come from rounding alone."
        )
    words = f"Learns the same: {findings.learning(result)}. {result.learning_summary}."
    return Picture(
        "losses",
        figure,
        caption,
        f"Training loss of A and B over {len(learning['losses_a'])} batches. {words}",
    )


def _draw_differences(axes: Axes, learning: dict[str, Any]) -> None:
    pairs = zip(learning["losses_a"], learning["losses_b"], strict=False)
    relative = [100 * (b - a) / abs(a) if a else math.nan for a, b in pairs]
    style: dict[str, Any] = {"marker": "o"} if len(relative) == 1 else {}
    axes.axhline(0, color=LINE, linewidth=1)
    x = range(1, len(relative) + 1)
    axes.plot(x, relative, color=COLORS["b"], linewidth=1.6, **style)
    if learning["allowed_max"] is not None:
        for bound in (-100 * learning["allowed_max"], 100 * learning["allowed_max"]):
            axes.axhline(bound, color=INK, linewidth=1, linestyle=_DASHED)
    axes.set_ylabel("B - A (%)")
    axes.margins(y=0.2)
