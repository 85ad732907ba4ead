"""The result of a comparison, put together from its launches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lightning_perf.benchmark import statistics
from lightning_perf.benchmark.coordinator import BUSY, Comparison
from lightning_perf.benchmark.launch import KEYS, Outcome, Start
from lightning_perf.benchmark.result import Result
from lightning_perf.benchmark.task import Task

_SHORT_EPOCH = 50
_MANY_FAULTS = 100


def summarize(comparison: Comparison) -> Result:
    """Return the result of a comparison that has run."""
    outcomes = comparison.outcomes
    good = [outcome for outcome in outcomes if outcome.enough]
    values = comparison.log_ratios
    turns = [turn for outcome in outcomes for turn in outcome.turns]
    foreign = median(turn.foreign_share for turn in turns)
    quick = len(values) == 1
    level = statistics.QUICK_LEVEL if quick else statistics.LEVEL
    estimate = _estimate(good, values)
    learning = comparison.learning
    first, last = outcomes[0], (good or outcomes)[-1]
    pairs = sum(len(outcome.log_ratios) for outcome in good)
    if estimate is None:
        verdict = f"{BUSY}: {foreign:.0%} of the CPU was used by others; no number can be given"
    else:
        verdict = statistics.verdict(
            estimate, level=level, launches=len(values), reason=comparison.stop_reason
        )
    sides: dict[str, Any] = {}
    for key in KEYS:
        side = _side(key, good, first, last)
        sides |= {f"{name}_{key}": value for name, value in side.items()}
    return Result(
        a=comparison.variants["a"].name,
        b=comparison.variants["b"].name,
        quick=quick,
        speedup=estimate[0] if estimate else None,
        interval=estimate[1] if estimate else None,
        level=level,
        verdict=verdict,
        stop_reason=comparison.stop_reason,
        launches=len(values),
        pairs=pairs,
        launches_dropped=len(outcomes) - len(values),
        pairs_dropped=len(turns) // 2 - pairs,
        launch_speedups=[math.exp(value) for value in values],
        speedup_of_minimum=_fastest(good),
        foreign_share=foreign,
        steps_per_turn=last.plan.steps,
        discarded_steps=last.plan.discard,
        window=last.plan.window,
        frozen=last.frozen,
        losses_agree=learning.agree if learning else None,
        learning_summary=learning.summary if learning else "not checked",
        learning_steps=comparison.learned_steps,
        loss_difference_max=learning.max_relative_difference if learning else None,
        loss_difference_mean=learning.mean_relative_difference if learning else None,
        learning=asdict(learning) if learning else None,
        environment_difference=_difference(sides["environment_a"], sides["environment_b"]),
        seed=comparison.seed,
        budget_s=comparison.budget_s,
        seconds=time.monotonic() - comparison.started,
        created=comparison.created.isoformat(timespec="seconds"),
        warnings=_warnings(comparison, last, sides),
        turns=[asdict(turn) for turn in turns],
        task=task_name(comparison.task),
        variant_a=asdict(comparison.variants["a"]),
        variant_b=asdict(comparison.variants["b"]),
        **sides,
    )


def task_name(task: Task) -> str:
    """Return what was trained as ``bench --config`` takes it, from the current folder."""
    where = Path(task.where)
    if where.is_relative_to(Path.cwd()):
        where = where.relative_to(Path.cwd())
    return where.as_posix() if task.function is None else f"{where.as_posix()}:{task.function}"


def _estimate(good: Sequence[Outcome], values: Sequence[float]) -> statistics.Estimate | None:
    if not values:
        return None
    if len(values) == 1:
        return statistics.quick_interval(good[0].log_ratios)
    return statistics.interval(values)


def _fastest(good: Sequence[Outcome]) -> float | None:
    if not good:
        return None
    return math.exp(fmean(statistics.hodges_lehmann(o.fastest_log_ratios) for o in good))


def _side(key: str, good: Sequence[Outcome], first: Outcome, last: Outcome) -> dict[str, Any]:
    """Return the fields of one variant, without their suffix."""
    start, description = first.starts[key], last.descriptions[key]
    turns = [(t, o) for o in good for t in o.turns if t.variant == key and t.counts]
    steps = [
        statistics.turn_value(turn.times, discard=outcome.plan.discard, window=outcome.plan.window)
        for turn, outcome in turns
    ]
    step = median(steps) if steps else None
    batch = start.batch_size
    per_step = [turn.faults / len(turn.times) for turn, _ in turns]
    waits = [turn.gap / turn.seconds for turn, _ in turns]
    return {
        "step_seconds": step,
        "samples_per_s": batch / step if batch and step else None,
        "batch_size": batch,
        "startup_seconds": _typical(good or [first], key, lambda s: s.startup_seconds),
        "first_step_seconds": start.first_step_seconds,
        "compile_seconds": max(0.0, start.first_step_seconds - step) if step else None,
        "peak_memory": description["peak_memory"],
        "peak_device_memory": description["peak_device_memory"],
        "data_wait": median(waits) if waits else None,
        "minor_faults": median(per_step) if per_step else None,
        "statuses": description["statuses"],
        "environment": description["environment"],
    }


def _typical(outcomes: Sequence[Outcome], key: str, value: Callable[[Start], float]) -> float:
    return median(value(outcome.starts[key]) for outcome in outcomes)


def _difference(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name in sorted(a.keys() | b.keys()):
        ours, theirs = a.get(name), b.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found |= _difference(ours, theirs, f"{prefix}{name}.")
        elif ours != theirs and not name.endswith("_CACHE_DIR"):
            found[prefix + name] = [ours, theirs]
    return found


def _warnings(comparison: Comparison, last: Outcome, sides: dict[str, Any]) -> list[str]:
    """Return what the reader must know before he believes the number."""
    said = []
    if sides["batch_size_a"] != sides["batch_size_b"]:
        said.append(
            f"BATCH SIZES DIFFER: {sides['batch_size_a']} in A, {sides['batch_size_b']} in B. The "
            "speed-up compares steps, not samples; compare samples per second."
        )
    threads = [sides[f"environment_{key}"]["threads"] for key in KEYS]
    if threads[0] != threads[1]:
        said.append(f"Thread counts differ: {threads[0]} in A, {threads[1]} in B.")
    faults = [sides[f"minor_faults_{key}"] or 0.0 for key in KEYS]
    if max(faults) > _MANY_FAULTS and max(faults) > 2 * min(faults):
        said.append(
            f"A makes {faults[0]:.0f} page faults per step, B {faults[1]:.0f}: part of the "
            "difference is the memory allocator's."
        )
    for key in KEYS:
        name, description = key.upper(), last.descriptions[key]
        if description["left_out"]:
            left_out = ", ".join(description["left_out"])
            said.append(f"{name} runs without {left_out}, which would end or interrupt the run.")
        epoch = description["epoch_batches"]
        if epoch is not None and epoch < _SHORT_EPOCH:
            said.append(
                f"An epoch of {name} has only {epoch} batches; the ends of epochs are part of what "
                "was measured."
            )
        if not last.starts[key].settled:
            said.append(f"The step time of {name} did not settle during the warm-up.")
    if not last.frozen:
        said.append("The waiting variant was not frozen: it has CUDA open, or this is Windows.")
    if comparison.learned_steps and comparison.learned_steps < comparison.learning_steps:
        said.append(
            f"The learning was compared over {comparison.learned_steps} optimizer steps instead of "
            f"{comparison.learning_steps}, to stay within the budget."
        )
    if not comparison.quick and len(comparison.log_ratios) == 1:
        said.append("The budget allowed one launch only; the interval is that of quick mode.")
    return said
