"""A result for people to read: a table, a sentence, pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_perf.benchmark.pictures import pictures
from lightning_perf.benchmark.result import Result

__all__ = ["pictures", "table", "verdict"]

# Peak memory of identical runs differs by up to 1 %.
_SAME_MEMORY = 0.02
# The fastest and the typical steps agree this well when nothing but speed differs.
_SAME_RATIO = 0.03

Format = Callable[[float], str]


def verdict(result: Result) -> str:
    """Say in one sentence whether B is faster and whether it learns the same."""
    learning = {
        True: "it learns the same",
        False: "BUT IT DOES NOT LEARN THE SAME",
        None: "whether it learns the same is not known",
    }[result.losses_agree]
    return f"{result.b} against {result.a}: {result.verdict}; {learning}."


def table(result: Result) -> RenderableType:
    """Return everything a reader needs to believe or doubt the result, at most 80 columns wide."""
    parts: list[RenderableType] = [
        Text(),
        Text(verdict(result), style="bold"),
        _figures(result),
        _learning(result),
    ]
    for key, name in (("a", result.a), ("b", result.b)):
        if statuses := getattr(result, f"statuses_{key}"):
            parts.append(_items(f"Items of {name}", statuses))
    parts += [Text(f"! {warning}", style="yellow") for warning in _warnings(result)]
    parts.append(Text(_ending(result), style="dim"))
    return Group(*parts)


def _figures(result: Result) -> Table:
    figures = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    figures.add_column("")
    figures.add_column(f"A: {result.a}", justify="right")
    figures.add_column(f"B: {result.b}", justify="right")
    figures.add_column("", overflow="fold")
    if result.speedup is not None and result.interval is not None:
        low, high = result.interval
        figures.add_row(
            "speed-up",
            "1",
            Text(f"{result.speedup:.3f}", style="bold"),
            f"{result.level:.0%} interval {low:.3f} to {high:.3f}",
        )

    def row(name: str, field: str, form: Format, note: Callable[[float, float], str]) -> None:
        a, b = getattr(result, f"{field}_a"), getattr(result, f"{field}_b")
        if a is None and b is None:
            return
        known = a is not None and b is not None
        cells = ["-" if value is None else form(value) for value in (a, b)]
        figures.add_row(name, *cells, note(a, b) if known else "")

    row("step time", "step_seconds", _seconds, lambda a, b: "")
    row("samples/s", "samples_per_s", lambda value: f"{value:.4g}", lambda a, b: "")
    row("peak memory", "peak_memory", _bytes, _less_memory)
    row("peak GPU memory", "peak_device_memory", _bytes, _less_memory)
    row("start-up", "startup_seconds", _seconds, lambda a, b: "until the first batch")
    row("first step extra", "compile_seconds", _seconds, lambda a, b: _pays_back(result))
    row("waiting for data", "data_wait", lambda value: f"{value:.1%}", lambda a, b: "of the time")
    for name in ("precision", "threads"):
        cells = [str(getattr(result, f"environment_{key}").get(name, "")) for key in ("a", "b")]
        if any(cells):
            figures.add_row(name, *cells)
    if result.learning:
        metrics = [result.learning[f"metrics_{key}"] for key in ("a", "b")]
        for name in sorted(metrics[0].keys() & metrics[1].keys()):
            figures.add_row(
                name.replace("_", " "),
                *(f"{metric[name]:.4g}" for metric in metrics),
                f"after {result.learning_steps} steps each",
            )
    return figures


def _learning(result: Result) -> RenderableType:
    answer = {True: "yes", False: "NO", None: "not known"}[result.losses_agree]
    style = {True: "green", False: "bold red", None: "yellow"}[result.losses_agree]
    text = Text.assemble(("\nLearns the same: ", "bold"), (answer, style))
    return Group(text, Padding(Text(result.learning_summary), (0, 0, 0, 2)))


def _items(title: str, statuses: list[dict[str, Any]]) -> RenderableType:
    items = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for status in statuses:
        active = status["active"]
        items.add_row(
            Text("active" if active else "skipped", style="green" if active else "dim"),
            status["item"],
            Text(status["text"], style="" if active else "dim"),
        )
    return Group(Text(f"\n{title}", style="bold"), Padding(items, (0, 0, 0, 2)))


def _warnings(result: Result) -> list[str]:
    warnings = list(result.warnings)
    fastest = result.speedup_of_minimum
    if result.speedup and fastest and abs(math.log(result.speedup / fastest)) > _SAME_RATIO:
        warnings.append(
            f"The fastest steps alone give a speed-up of {fastest:.3f}, the typical ones "
            f"{result.speedup:.3f}: the two variants differ in stalls, not only in speed."
        )
    return warnings


def _ending(result: Result) -> str:
    dropped = f" ({result.pairs_dropped} dropped)" if result.pairs_dropped else ""
    lost = f" ({result.launches_dropped} dropped)" if result.launches_dropped else ""
    quick = (
        "\nQuick mode: with one launch, the interval takes its width from the usual spread of "
        "launches. Measure without it before you rely on a few per cent."
        if result.quick
        else ""
    )
    return (
        f"\n{result.launches} launch{'' if result.launches == 1 else 'es'}{lost} and "
        f"{result.pairs} pairs of turns{dropped} of {result.steps_per_turn} steps in "
        f"{result.seconds:.0f} s; stopped: {result.stop_reason}; others used "
        f"{result.foreign_share:.0%} of the CPU.{quick}"
    )


def _seconds(value: float) -> str:
    number, unit = (value, "s") if value >= 1 else (1000 * value, "ms")
    return f"{number:#.3g}".rstrip(".") + f" {unit}"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _less_memory(a: float, b: float) -> str:
    change = b / a - 1 if a else 0.0
    return "the same" if abs(change) < _SAME_MEMORY else f"{change:+.0%}"


def _pays_back(result: Result) -> str:
    """Say after how many steps the extra start-up of B is earned back."""
    if not (result.step_seconds_a and result.step_seconds_b):
        return "compiling and the like"
    extra = sum(
        getattr(result, f"{what}_b") - getattr(result, f"{what}_a")
        for what in ("startup_seconds", "first_step_seconds")
    )
    saved = result.step_seconds_a - result.step_seconds_b
    if extra <= 0 or saved <= 0 or result.speedup is None or result.speedup <= 1:
        return "compiling and the like"
    return f"paid back after {math.ceil(extra / saved)} steps"
