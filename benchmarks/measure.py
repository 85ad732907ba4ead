"""Measures the presets and their items and writes docs/results.

    python benchmarks/measure.py --budget 600              # everything this machine can do
    python benchmarks/measure.py resnet50:cpu vit:Compile  # only these

Each comparison is one file, ``<date>_<task>_<variant>_<hardware>.json``; those of today that exist
are kept, so an interrupted run goes on where it stopped. docs/results/README.md gets a row for each
file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import launch_variants

from lightning_perf import callbacks, presets
from lightning_perf._hardware import detect
from lightning_perf.benchmark import Result, Variant, compare
from lightning_perf.benchmark.findings import ISA, RESULTS_HEADER, results_row

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results"
TASKS_FILE = os.path.relpath(HERE / "tasks.py")  # results name it as a reader would
TASKS = ("resnet50", "vit")
CONVOLUTIONS = ("mobilenet", "resnext")  # depthwise-separable, and grouped
DEEP = ("encoder24", "encoder24nodropout")
# These act wherever they are, so what they cost is measured by itself.
ALWAYS_ACTIVE = ("GarbageCollection", "Preallocate")
MARK = "<!-- rows below are written by benchmarks/measure.py -->"


def item(class_name: str, *, name: str | None = None, **arguments: object) -> Variant:
    path = f"lightning_perf.callbacks.{class_name}"
    entry = {"class_path": path, "init_args": {**arguments, "strict": False}}
    return Variant(name or class_name, trainer={"callbacks": [entry]})


def idle_items(*names: str, variant: str) -> Variant:
    """Return items on a model with nothing to do for them."""
    arguments: dict[str, dict[str, Any]] = {"KeepInFP32": {"modules": ["Linear"]}}
    entries = [
        {
            "class_path": f"lightning_perf.callbacks.{name}",
            "init_args": {**arguments.get(name, {}), "strict": False},
        }
        for name in names
    ]
    return Variant(variant, trainer={"callbacks": entries})


def hand_written(**options: bool) -> Variant:
    entry = {"class_path": "tasks.HandWrittenLoop", "init_args": options}
    return Variant("hand_written", trainer={"callbacks": [entry]})


Baseline = str | Variant | Callable[[], Variant]


def comparisons() -> Iterator[tuple[str, Baseline, str | Variant]]:
    """Yield task, baseline and variant of everything there is to measure on this machine.

    A function returns the baseline, where that takes long to find.
    """
    hardware = detect()
    preset = presets.resolve("auto", hardware)
    bf16 = preset == "cpu_bf16"
    for task in TASKS:
        yield task, "none", preset
        for variant in (
            item("ChannelsLast"),
            item("FusedOptimizer"),
            item("Compile", regions="whole"),
            Variant("bf16", trainer={"precision": "bf16-mixed"}),
        ):
            yield task, "none", variant
        # Against the preset, with what the preset does on this network.
        options = {"bf16": bf16, "channels_last": task == "resnet50", "fused": True}
        yield task, preset, hand_written(**options)
    for task in CONVOLUTIONS:
        yield task, "none", item("ChannelsLast")
    for task in DEEP:
        for policy in ("full", "selective", 0.4):
            name = f"checkpointing-{policy}"
            yield task, "none", item("ActivationCheckpointing", name=name, policy=policy)
    idle = [name for name in callbacks.__all__ if name not in ALWAYS_ACTIVE]
    yield "layers", "none", idle_items(*idle, variant="idle-items")
    for name in idle:
        yield "layers", "none", idle_items(name, variant=f"idle-{name}")
    yield from launch_variants.comparisons()
    # A window of the benchmark holds whole optimizer steps. With as many batches in one as from one
    # collection to the next, each window holds a collection; shorter ones would not see it.
    window = {"accumulate_grad_batches": 50}
    collecting = item("GarbageCollection", every_n_steps=50).trainer
    yield (
        "layers",
        Variant("accumulating", trainer=window),
        Variant("GarbageCollection", trainer={**collecting, **window}),
    )


def name_of(variant: str | Variant) -> str:
    return variant if isinstance(variant, str) else variant.name


def file_of(task: str, variant: str | Variant) -> Path:
    hardware = detect()
    kind = next((flag for flag in ISA if flag in hardware.isa), "cpu")
    if hardware.device != "cpu":
        kind = hardware.device_name.replace(" ", "-")
    return RESULTS / f"{date.today().isoformat()}_{task}_{name_of(variant)}_{kind}.json"


def write_table() -> None:
    page = RESULTS / "README.md"
    text, _, _ = page.read_text(encoding="utf-8").partition(MARK)
    rows = [
        results_row(Result.load(path), trained=path.stem.split("_")[1], link=path.name)
        for path in sorted(RESULTS.glob("*.json"))
        if "launch_speedups" in json.loads(path.read_text(encoding="utf-8"))  # not another script's
    ]
    page.write_text(text + "\n".join([MARK, "", RESULTS_HEADER, *rows]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", metavar="TASK:VARIANT", help="measure only these")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for each comparison")
    parser.add_argument("--learning-steps", type=int, default=30)
    parser.add_argument("--list", action="store_true", help="say what would be measured")
    arguments = parser.parse_args()
    for task, a, b in comparisons():
        label = f"{task}:{name_of(b)}"
        if arguments.only and label not in arguments.only:
            continue
        target = file_of(task, b)
        if arguments.list or target.exists():
            print(label, "(is there)" if target.exists() else "", flush=True)
            continue
        learns = name_of(b) != "hand_written"  # it has no Lightning step whose loss can be read
        result = compare(
            f"{TASKS_FILE}:{task}",
            a() if callable(a) else a,
            b,
            budget_s=arguments.budget,
            learning_steps=arguments.learning_steps if learns else 0,
        )
        result.save(target)
        print(f"{label}: {result.verdict}", flush=True)
    if not arguments.list:
        write_table()


if __name__ == "__main__":
    main()
