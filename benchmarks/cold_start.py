"""What compiling costs: repeated blocks one by one against the whole network, from a cold cache.

    python benchmarks/cold_start.py encoder --runs 5 --results cold_start.jsonl

Each run is one comparison with one launch, so both sides compile with an empty cache of their own:
the first step holds all compiling, the turns after it the steady state. Each run is appended to the
results file as a line of JSON; started again with the same file, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

from lightning_perf.benchmark import Result, Variant, compare
from lightning_perf.benchmark.findings import machine

TASKS_FILE = os.path.relpath(Path(__file__).parent / "tasks.py")  # as a reader would name it
# On a CPU `auto` leaves convolutional networks alone, so their blocks are named.
BLOCKS: dict[str, str | list[str]] = {
    "encoder": "auto",
    "resnet50": [
        f"net.layer{stage}.{block}"
        for stage, blocks in enumerate((3, 4, 6, 3), start=1)
        for block in range(blocks)
    ],
}


def compiling(name: str, regions: str | list[str] | None) -> Variant:
    """Return a variant that compiles the regions, or nothing."""
    if regions is None:
        return Variant(name)
    arguments = {"regions": regions, "strict": True}
    entry = {"class_path": "lightning_perf.callbacks.Compile", "init_args": arguments}
    return Variant(name, trainer={"callbacks": [entry]})


def run(task: str, baseline: str, number: int, budget_s: float) -> dict[str, Any]:
    """Compare once, and return what is of interest."""
    result = compare(
        f"{TASKS_FILE}:{task}",
        compiling(baseline, "whole" if baseline == "whole" else None),
        compiling("blocks", BLOCKS[task]),
        quick=True,
        budget_s=budget_s,
        learning_steps=0,
        seed=number,
    )
    return {"task": task, "baseline": baseline, "number": number, **outcome(result)}


def outcome(result: Result) -> dict[str, Any]:
    """Return first and ordinary steps of both sides, and where they were measured."""
    kept = ("first_step_seconds", "step_seconds", "startup_seconds")
    record = {f"{name}_{key}": getattr(result, f"{name}_{key}") for name in kept for key in "ab"}
    kept = ("speedup", "interval", "foreign_share", "created")
    record |= {name: getattr(result, name) for name in kept}
    return record | {
        "compiled_a": [status["text"] for status in result.statuses_a],
        "compiled_b": [status["text"] for status in result.statuses_b],
        "machine": machine(result),
        "versions": result.environment_b["versions"],
    }


def summary(records: list[dict[str, Any]]) -> str:
    """Return a line for each pair of first steps, with the spread of their ratio."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(f"{record['task']}, {record['baseline']} against blocks", []).append(
            record
        )
    lines = []
    for name, group in groups.items():
        first_a, first_b = ([r[f"first_step_seconds_{key}"] for r in group] for key in "ab")
        ratios = [a / b for a, b in zip(first_a, first_b, strict=True)]
        steady = [r["speedup"] for r in group if r["speedup"] is not None]
        lines.append(
            f"{name}: {len(group)} runs; first step {median(first_a):.1f} s against "
            f"{median(first_b):.1f} s, ratio {median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}); speed-up of an ordinary step "
            + (f"{median(steady):.3f} ({min(steady):.3f} to {max(steady):.3f})" if steady else "—")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", default=["encoder"], metavar="TASK")
    parser.add_argument("--against", nargs="+", choices=("whole", "eager"), default=["whole"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for each run")
    parser.add_argument("--results", type=Path, default=Path("cold_start.jsonl"))
    arguments = parser.parse_args()
    if unknown := set(arguments.tasks) - BLOCKS.keys():
        parser.error(f"there is no task {', '.join(unknown)}; known are {', '.join(BLOCKS)}")
    records = []
    if arguments.results.exists():
        lines = arguments.results.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    done = {(r["task"], r["baseline"], r["number"]) for r in records}
    # The tasks take turns, so that all see the same machine.
    for number in range(arguments.runs):
        for task in arguments.tasks:
            for baseline in arguments.against:
                if (task, baseline, number) in done:
                    continue
                record = run(task, baseline, number, arguments.budget)
                records.append(record)
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(summary([record]), flush=True)
    print(summary(records))


if __name__ == "__main__":
    main()
