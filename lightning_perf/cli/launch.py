"""``lightning-perf launch``: start a program with what must be set before it starts."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from typing import Any, get_args

from lightning_perf.launch.libraries import Allocator, OpenMP
from lightning_perf.launch.options import NUMA, Options, launch_half

EXAMPLES = """\
Your own environment variables win. Options that you name are required: what
cannot be had is an error then, and else one line.

examples:
  lightning-perf launch -- python train.py
  lightning-perf launch --preset cpu --allocator jemalloc -- python train.py
  lightning-perf launch --instances 2 -- python predict.py
  torchrun --nproc-per-node=2 --no-python \\
      lightning-perf launch -- python train.py
  lightning-perf launch --dry-run -- python train.py

The exit status is that of the program; 128 and the number of the signal that
ended it; 126 or 127 if it cannot be started; 2 after another error.
"""

# Without any of these torch finds no device on Linux: NVIDIA's, AMD's, and Windows' below Linux.
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = subparsers.add_parser(
        "launch",
        usage="lightning-perf launch [options] -- PROGRAM [ARGUMENT ...]",
        description="Start a program on its cores, with the threads and allocator it should have.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", default="auto", metavar="NAME", help="whose launch half (default: %(default)s)")
    add("--instances", type=int, metavar="N", help="start it N times, each on a part of the cores")
    add("--allocator", choices=get_args(Allocator), help="what allocates memory")
    add("--openmp", choices=get_args(OpenMP), help="what runs the threads")
    add("--numa", metavar="WHERE", help=f"{', '.join(NUMA)}, or nodes such as 0,1")
    add("--bind-threads", action="store_true", default=None, help="keep each thread on one core")
    add("--huge-pages", action="store_true", default=None, help="huge pages for tensors")
    add("--interop-threads", type=int, metavar="N", help="inter-op threads of PyTorch")
    add("--env", action="append", metavar="NAME=VALUE", help="another variable, such as NCCL's")
    add("--dry-run", action="store_true", help="print what would be started, for a shell")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start the program, or print how; return the exit status."""
    if platform.system() != "Linux":
        raise RuntimeError(
            f"launch binds processes as Linux does; this is {platform.system()}. Start the program "
            "without it."
        )
    # Not before: they are for Linux only.
    from lightning_perf.launch.libraries import AUTO_ALLOCATOR, AUTO_OPENMP
    from lightning_perf.launch.machine import look_around
    from lightning_perf.launch.plan import make_plan
    from lightning_perf.launch.run import CannotStartError, as_shell, require_program, start

    command = arguments.program
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise ValueError("What is to be started? lightning-perf launch [options] -- PROGRAM ...")
    asked = _asked(arguments)
    try:
        path = require_program(command)
    except CannotStartError as error:
        print(f"lightning-perf: error: {error}", file=sys.stderr)
        return error.status
    preset, half = _options(arguments.preset)
    options = half.overridden(asked)
    plan = make_plan(look_around(os.environ, path), options, command, os.environ, preset)
    for note in plan.notes:
        print(f"lightning-perf: {note}", file=sys.stderr)
    if arguments.dry_run:
        for name, choice in (("allocator", AUTO_ALLOCATOR), ("openmp", AUTO_OPENMP)):
            if getattr(options, name) == "auto":
                print(f"# {name} auto is {choice.use}: {choice.reason} {choice.measured}")
        print(as_shell(plan), end="")
        return 0
    return start(plan)


def _options(name: str) -> tuple[str, Options]:
    """Return the preset that a name stands for, and its launch half."""
    from lightning_perf import presets
    from lightning_perf._hardware import detect

    # To ask for accelerators costs the import of torch, seconds before the program even starts.
    preset = presets.resolve(name, detect(accelerators=any(map(os.path.exists, _ACCELERATORS))))
    half = launch_half(preset)
    if half is None and name != "auto" and preset != "none":
        print(
            f"lightning-perf: Preset {preset} has no launch half; the defaults are used.",
            file=sys.stderr,
        )
    return preset, half or Options()


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the user named."""
    names = (
        "instances",
        "allocator",
        "openmp",
        "numa",
        "bind_threads",
        "huge_pages",
        "interop_threads",
    )
    asked = {name: getattr(arguments, name) for name in names}
    asked["named_env"] = dict(map(_variable, arguments.env)) if arguments.env else None
    return {name: value for name, value in asked.items() if value is not None}


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"--env {text} was asked for; it is NAME=VALUE.")
    return name, value
