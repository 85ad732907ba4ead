"""What a result says, in words and figures: the same on a terminal, on a page, in a table row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_perf.benchmark import statistics
from lightning_perf.benchmark.result import Result

ISA = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""The instruction sets that decide how fast a CPU trains, the best first."""

RESULTS_HEADER = (
    "| date | trained | A | B | speed-up of B (interval) | launches | learns the same | machine "
    "| software | |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
"""The two lines above the rows of `results_row`."""

# Peak memory of identical runs differs by up to 1 %.
_SAME_MEMORY = 0.02
# The fastest and the typical steps agree this well when nothing but speed differs.
_SAME_RATIO = 0.03


@dataclass(frozen=True)
class Figure:
    """One line of the table: a quantity of both variants, and what to think of it."""

    name: str
    a: str
    b: str
    note: str = ""


def verdict(result: Result) -> str:
    """Say in one sentence whether B is faster and whether it learns the same."""
    learning = {
        True: "it learns the same",
        False: "BUT IT DOES NOT LEARN THE SAME",
        None: "whether it learns the same is not known",
    }[result.losses_agree]
    sizes = f"; {_other_sizes(result).upper()}" if other_batch_size(result) else ""
    return f"{result.b} against {result.a}: {result.verdict}; {learning}{sizes}."


def headline(result: Result) -> str:
    """Say the same in plain words, for a reader who has never heard of the benchmark."""
    a, b = plain_name(result.a), plain_name(result.b)
    learning = {
        True: ", and learns the same",
        False: ", BUT IT DOES NOT LEARN THE SAME",
        None: f"; whether it learns the same {_unknown(result)}",
    }[result.losses_agree]
    if result.losses_agree and not is_faster(result):
        learning = "; it learns the same"
    sizes = f" per step ({_other_sizes(result)})" if other_batch_size(result) else ""
    return f"{_speed(result, a, b)}{sizes}{learning}."


def plain_name(variant: str) -> str:
    """Return how to call a variant in a sentence."""
    return "plain Lightning" if variant == "none" else variant


def is_faster(result: Result) -> bool:
    """Return whether B is shown to be faster."""
    return result.interval is not None and result.interval[0] > 1


def is_slower(result: Result) -> bool:
    """Return whether B is shown to be slower."""
    return result.interval is not None and result.interval[1] < 1


def other_batch_size(result: Result) -> bool:
    """Return whether the steps of the two are not the same amount of work."""
    return result.batch_size_a != result.batch_size_b


def figures(result: Result) -> list[Figure]:
    """Return the lines of the table; what neither variant has is left out."""
    found = []
    if result.speedup is not None and result.interval is not None:
        low, high = result.interval
        note = f"{result.level:.0%} interval {low:.3f} to {high:.3f}"
        found.append(Figure("speed-up", "1", f"{result.speedup:.3f}", note))

    def add(name: str, field: str, form: Format, note: Callable[[Any, Any], str]) -> None:
        a, b = getattr(result, f"{field}_a"), getattr(result, f"{field}_b")
        if a is None and b is None:
            return
        known = a is not None and b is not None
        cell_a, cell_b = ("-" if value is None else form(value) for value in (a, b))
        found.append(Figure(name, cell_a, cell_b, note(a, b) if known else ""))

    add("step time", "step_seconds", seconds, _nothing)
    add("batch size", "batch_size", str, lambda a, b: "" if a == b else "NOT THE SAME")
    samples = _times_as_many if other_batch_size(result) else _nothing
    add("samples/s", "samples_per_s", _number, samples)
    add("peak memory", "peak_memory", size, _less_memory)
    add("peak GPU memory", "peak_device_memory", size, _less_memory)
    add("start-up", "startup_seconds", seconds, lambda a, b: "until the first batch")

    def extra(value: float) -> str:
        return seconds(value) if value else "none"

    add("first step extra", "compile_seconds", extra, lambda a, b: _pays_back(result))
    add("waiting for data", "data_wait", lambda value: f"{value:.1%}", lambda a, b: "of the time")
    for name in ("precision", "threads"):
        cells = [str(getattr(result, f"environment_{key}").get(name, "")) for key in ("a", "b")]
        if any(cells):
            found.append(Figure(name, *cells))
    return found + _metrics(result)


def learning(result: Result) -> str:
    """Answer whether B learns the same in a word or two."""
    answers = {True: "yes", False: "NO", None: "not known"}
    return answers[result.losses_agree]


def warnings(result: Result) -> list[str]:
    """Return what to know before the number is believed."""
    said = list(result.warnings)
    fastest = result.speedup_of_minimum
    if result.speedup and fastest and abs(math.log(result.speedup / fastest)) > _SAME_RATIO:
        said.append(
            f"The fastest steps alone give a speed-up of {fastest:.3f}, the typical ones "
            f"{result.speedup:.3f}: the two variants differ in stalls, not only in speed."
        )
    if result.quick and result.speedup is not None:
        said.append(
            "Quick mode: with one launch, the interval takes its width from the usual spread of "
            "launches. Measure without it before you rely on a few per cent."
        )
    return said


def ending(result: Result) -> str:
    """Say how much was measured, and why no more."""
    dropped = f" ({result.pairs_dropped} dropped)" if result.pairs_dropped else ""
    lost = f" ({result.launches_dropped} dropped)" if result.launches_dropped else ""
    return (
        f"{result.launches} launch{'' if result.launches == 1 else 'es'}{lost} and "
        f"{result.pairs} pairs of turns{dropped} of {result.steps_per_turn} steps in "
        f"{result.seconds:.0f} s; stopped: {result.stop_reason}; others used "
        f"{result.foreign_share:.0%} of the CPU."
    )


def machine(result: Result) -> str:
    """Name the machine: the GPU if it was used, else the CPU."""
    hardware = result.environment_b.get("hardware", {})
    if not hardware:
        return ""
    if not result.environment_b.get("device", "cpu").startswith("cpu"):
        return str(hardware["device_name"])
    isa = next((f" ({flag})" for flag in ISA if flag in hardware["isa"]), "")
    cores = hardware["cores"]
    return f"{hardware['cpu_name']}{isa}, {cores} core{'' if cores == 1 else 's'}"


def results_row(result: Result, *, trained: str = "", link: str = "") -> str:
    """Return a result as a line of a Markdown table, below `RESULTS_HEADER`.

    Args:
        result: What was found.
        trained: What to call the model and its data; as the result names them if empty.
        link: Address of the result's file, for the last column.
    """
    versions = result.environment_b.get("versions", {})
    ratio = result.verdict
    if result.speedup is not None and result.interval is not None:
        low, high = result.interval
        ratio = f"**{result.speedup:.3f}** ({low:.3f} to {high:.3f}, {result.level:.0%})"
        if other_batch_size(result):
            ratio += f" per step, **{_other_sizes(result)}**"
    agree = {True: "yes", False: "**no**", None: _unknown(result).removeprefix("was ")}
    software = (f"{name} {versions[name]}" for name in ("torch", "lightning") if name in versions)
    cells = [
        result.created[:10],
        trained or result.task,
        result.a,
        result.b,
        ratio,
        str(result.launches),
        agree[result.losses_agree],
        machine(result),
        ", ".join(software),
        f"[file]({link})" if link else "",
    ]
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return "".join(f"| {cell} " if cell else "| " for cell in escaped) + "|"


Format = Callable[[Any], str]


def seconds(value: float) -> str:
    """Return a time with its unit."""
    number, unit = (value, "s") if value >= 1 else (1000 * value, "ms")
    return f"{number:#.3g}".rstrip(".") + f" {unit}"


def size(value: float) -> str:
    """Return an amount of memory with its unit."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _speed(result: Result, a: str, b: str) -> str:
    if result.speedup is None or result.interval is None:
        return f"The machine was too busy to tell whether {b} is faster than {a}"
    if is_faster(result):
        return f"{b} trains {result.speedup:.3f}x faster than {a}"
    if is_slower(result):
        return f"{b} trains {1 / result.speedup:.3f}x slower than {a}"
    low, high = result.interval
    largest = max(high, 1 / low) - 1
    if result.stop_reason in (statistics.NARROW, statistics.SPENT):
        return f"{b} trains as fast as {a}, to within {largest:.1%}"
    return f"Whether {b} trains faster than {a} is undecided"


def _other_sizes(result: Result) -> str:
    return f"batch sizes differ: {result.batch_size_a} and {result.batch_size_b}"


def _unknown(result: Result) -> str:
    return "was not checked" if result.learning is None else "could not be compared"


def _metrics(result: Result) -> list[Figure]:
    if not result.learning:
        return []
    a, b = (result.learning[f"metrics_{key}"] for key in ("a", "b"))
    note = f"after {result.learning_steps} steps each"
    return [
        Figure(name.replace("_", " "), f"{a[name]:.4g}", f"{b[name]:.4g}", note)
        for name in sorted(a.keys() & b.keys())
    ]


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 10_000 else f"{value:,.0f}"


def _nothing(a: float, b: float) -> str:
    return ""


def _times_as_many(a: float, b: float) -> str:
    return f"B has {b / a:.3f}x as many"


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
