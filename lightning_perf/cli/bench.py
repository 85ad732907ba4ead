"""``lightning-perf bench``: compare two variants of a training run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_perf.benchmark import Progress, Result, compare
from lightning_perf.benchmark.picture import require_matplotlib
from lightning_perf.cli.report import new_folder, print_written, reported_failure, write_report

EXAMPLES = """\
TASK is a LightningCLI file with `model:` and `data:` as class_path, or a
function that returns a LightningModule and its data. VARIANT is none for plain
Lightning, a preset, auto for that of this machine, or a YAML file with any of
  preset: cpu_bf16
  trainer: {precision: bf16-mixed}
  env: {OMP_NUM_THREADS: 2}

examples:
  lightning-perf bench --config train.yaml
  lightning-perf bench --config train.py:make --b mine.yaml --quick
  lightning-perf bench --config train.yaml --b cpu_bf16 --report cpu_bf16_report

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
    parser.add_argument("--config", required=True, metavar="TASK", help="what is trained")
    for key, default, text in (("a", "none", "the baseline"), ("b", "auto", "what is compared")):
        parser.add_argument(
            f"--{key}", default=default, metavar="VARIANT", help=f"{text} (default: %(default)s)"
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
    parser.add_argument(
        "--validate", action="store_true", help="compare the metrics of a validation after them too"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="new file for the whole result")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="new folder for report.html and pictures; a number is added to a name that is taken",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print the table, and return the exit status."""
    from lightning_perf.benchmark.report import print_report

    if arguments.json is not None:
        _require_writable(arguments.json)
    if arguments.report is None:
        result = _compare(arguments)
        print_report(result)
    else:
        require_matplotlib()
        with new_folder(arguments.report) as folder:
            with reported_failure(folder):
                result = _compare(arguments)
            print_report(result)
            written = write_report(result, folder)
        print_written(folder, written)
    return 1 if result.speedup is None or result.losses_agree is False else 0


def _compare(arguments: argparse.Namespace) -> Result:
    with shown_progress() as progress:
        result = compare(
            arguments.config,
            arguments.a,
            arguments.b,
            budget_s=arguments.budget,
            quick=arguments.quick,
            learning_steps=arguments.learning_steps,
            validate=arguments.validate,
            seed=arguments.seed,
            progress=progress,
        )
    if arguments.json is not None:
        result.save(arguments.json)
    return result


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
