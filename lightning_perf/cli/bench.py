"""``lightning-perf bench``: compare two variants of a training run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_perf.benchmark import Progress, compare

EXAMPLES = """\
examples:
  lightning-perf bench --config train.yaml
  lightning-perf bench --config train.yaml --b cpu_bf16 --json result.json
  lightning-perf bench --config train.py:make --b mine.yaml --quick

where train.yaml is a LightningCLI file with `model:` and `data:` as class_path,
make() returns a LightningModule and its data, and mine.yaml holds any of
  preset: cpu_bf16
  trainer: {precision: bf16-mixed}
  env: {OMP_NUM_THREADS: 2}

The exit status is 0 if there is an answer, 1 if the machine was too busy to
tell or the variants do not learn the same, 2 after an error.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = subparsers.add_parser(
        "bench",
        description="Measure how much faster variant B trains than A, and whether it learns\n"
        "the same. Each runs in processes of its own that take turns.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="TASK",
        help="what is trained: a LightningCLI file, or file.py:function, or module:function",
    )
    for key, default, text in (("a", "none", "baseline"), ("b", "auto", "what is compared")):
        parser.add_argument(
            f"--{key}",
            default=default,
            metavar="VARIANT",
            help=f"{text}: none for plain Lightning, a preset, auto, or a YAML file "
            "(default: %(default)s)",
        )
    parser.add_argument(
        "--budget",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time it may take (default: %(default)g)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one launch only: quick, and less certain"
    )
    parser.add_argument(
        "--learning-steps",
        type=int,
        default=60,
        metavar="STEPS",
        help="optimizer steps over which the learning is compared, 0 for no check "
        "(default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="new file for the whole result")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print the table, and return the exit status."""
    target: Path | None = arguments.json
    if target is not None:
        _require_writable(target)
    with shown_progress() as progress:
        result = compare(
            arguments.config,
            arguments.a,
            arguments.b,
            budget_s=arguments.budget,
            quick=arguments.quick,
            learning_steps=arguments.learning_steps,
            seed=arguments.seed,
            progress=progress,
        )
    if target is not None:
        result.save(target)
    from rich.console import Console

    from lightning_perf.benchmark.report import table

    Console().print(table(result))
    return 1 if result.speedup is None or result.losses_agree is False else 0


@contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """Show the progress of a comparison: one live line on a terminal, else a line per phase."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_per_phase()
        return
    with console.status("starting") as status:
        yield lambda progress: status.update(progress_line(progress))


def _line_per_phase() -> Callable[[Progress], None]:
    shown: set[tuple[int, str]] = set()

    def show(progress: Progress) -> None:
        phase = progress.launch, progress.phase
        if phase not in shown:
            shown.add(phase)
            print(progress_line(progress), file=sys.stderr, flush=True)

    return show


def progress_line(progress: Progress) -> str:
    """Put the progress of a comparison into one line."""
    parts = [f"launch {progress.launch}", progress.phase]
    if progress.pair:
        parts.append(f"pair {progress.pair}")
    parts.append(f"{max(0.0, progress.remaining_s):.0f} s left")
    if progress.speedup is not None:
        parts.append(f"speed-up so far {progress.speedup:.3f}")
    return ", ".join(parts)


def _require_writable(target: Path) -> None:
    """Refuse a file that could not be written, before minutes are spent on its content."""
    if target.exists():
        raise FileExistsError(
            f"{target} exists and is not overwritten. Choose another name, or remove it."
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent} to write {target.name} to.")
