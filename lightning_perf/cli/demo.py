"""``lightning-perf demo``: from nothing to a measured speed-up on real data."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.cli.report import (
    add_output,
    new_folder,
    print_written,
    reported_failure,
    write_report,
)

if TYPE_CHECKING:
    from lightning_perf._hardware import Hardware
    from lightning_perf.benchmark import Result

DESCRIPTION = """\
Train torchvision's ResNet-18 on scikit-learn's handwritten digits twice: with
plain Lightning and with the preset for this machine. Shows how much faster it
became and whether it still learns the same, and writes a report, pictures and
the preset into a new folder. Takes two to three minutes on two cores; a GPU is
used if there is one.
"""
EXAMPLES = """\
examples:
  lightning-perf demo
  lightning-perf demo --output try_2 --budget 300
  lightning-perf demo --quick-check      does everything work? In a minute

Open DIR/report.html in a browser afterwards. The exit status is 0 if there is
an answer, 1 if the machine was too busy to tell or the preset does not learn
the same, 2 after an error.
"""
NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}

# Image size, batch size, steps of the learning check: large enough that convolutions dominate,
# small enough for two cores.
_CPU_SIZES = (48, 32, 40)
_GPU_SIZES = (224, 64, 100)
_CHECK_SIZES = (32, 8, 4)
_CHECK_BUDGET = 15.0
_SMALLEST = 20  # below, the last layers see a single pixel, and learn next to nothing

_TASK = """\
# What the demo trained, as LightningCLI reads it.
model:
  class_path: lightning_perf.benchmark.demo_task.DigitClassifier
data:
  class_path: lightning_perf.benchmark.demo_task.Digits
  init_args:
    image_size: {image_size}
    batch_size: {batch_size}
trainer:
  devices: 1
"""
_NEXT = """
What next
  Use it in Python   Trainer(**lightning_perf.presets.trainer_kwargs("auto", max_epochs=3))
  Use it in YAML     python train.py fit --config {preset} --config yours.yaml
  Prove it on yours  lightning-perf bench --config train.py:make --a none --b auto
                     where make() returns your LightningModule and its data
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = subparsers.add_parser(
        "demo",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_output(parser, "lightning_perf_demo")
    parser.add_argument(
        "--budget",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="time the comparison may take; it seldom takes all of it (default: %(default)g)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="optimizer steps after which losses and accuracy are compared; fewer if they would "
        "cost more than half of the budget (default: 40 on a CPU, 100 on a GPU)",
    )
    parser.add_argument(
        "--image-size", type=int, metavar="PIXELS", help="default: 48 on a CPU, 224 on a GPU"
    )
    parser.add_argument(
        "--quick-check",
        action="store_true",
        help="only see that everything works: small images, few steps, a number of little worth",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 if there is an answer and both learn the same, else 1."""
    _require_packages()
    from rich.console import Console

    from lightning_perf import presets
    from lightning_perf._hardware import detect
    from lightning_perf.benchmark.report import print_report

    console = Console(highlight=False, soft_wrap=True)
    hardware = detect()
    preset, reason = presets.auto(replace(hardware, device_count=1))  # it trains on one
    if preset == "none":
        raise RuntimeError(f"There is no preset for this machine, so nothing to show: {reason}.")
    image_size, batch_size, steps = _sizes(arguments, hardware)
    console.print(
        f"ResNet-18 on handwritten digits enlarged to {image_size}x{image_size}, batch "
        f"{batch_size}:\nplain Lightning against preset {preset}.\n{reason}.\n"
        f"{expectation(hardware)}"
    )
    with new_folder(arguments.output, overwrite=arguments.overwrite) as folder:
        task, copy = folder / "train.yaml", folder / f"{preset}.yaml"
        task.write_text(_TASK.format(image_size=image_size, batch_size=batch_size), "utf-8")
        shutil.copyfile(presets.path(preset), copy)
        budget_s = _CHECK_BUDGET if arguments.quick_check else arguments.budget
        with reported_failure(folder):
            result = _compare(task, preset, budget_s, steps)
        print_report(result)
        written = write_report(result, folder)
    mine = {
        copy.name: "the preset, to copy into your project",
        task.name: f"what was trained: lightning-perf bench --config {task}",
    }
    print_written(folder, written | mine)
    console.print(_NEXT.format(preset=copy.name), end="")
    return 1 if result.speedup is None or result.losses_agree is False else 0


def expectation(hardware: Hardware) -> str:
    """Say, before anything is measured, whether much is to be gained on this machine and why."""
    if hardware.device != "cpu":
        return "The GPU is used by both."
    if hardware.native_bf16:
        return "Computing in bfloat16 is where most of a speed-up on a CPU comes from."
    return (
        "Expect little: most of a speed-up on a CPU comes from computing in bfloat16, which takes\n"
        "instructions (AVX512-BF16 or AMX) that this one does not have."
    )


def _sizes(arguments: argparse.Namespace, hardware: Hardware) -> tuple[int, int, int]:
    """Return image size, batch size, and the steps over which the learning is compared."""
    image_size, batch_size, steps = _CPU_SIZES if hardware.device == "cpu" else _GPU_SIZES
    if arguments.quick_check:
        image_size, batch_size, steps = _CHECK_SIZES
    if arguments.image_size is not None:
        image_size = arguments.image_size
    if image_size < _SMALLEST:
        raise ValueError(
            f"--image-size {image_size} is too small for ResNet-18: give at least {_SMALLEST}."
        )
    return image_size, batch_size, steps if arguments.steps is None else arguments.steps


def _compare(task: Path, preset: str, budget_s: float, steps: int) -> Result:
    from lightning_perf.benchmark import compare
    from lightning_perf.cli.bench import shown_progress

    with shown_progress() as progress:
        return compare(
            task,
            "none",
            preset,
            budget_s=budget_s,
            quick=True,
            learning_steps=steps,
            validate=True,
            progress=progress,
        )


def _require_packages() -> None:
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ImportError(
            f"The demo needs {' and '.join(missing)}. Run: pip install 'lightning-perf[demo]'"
        )
