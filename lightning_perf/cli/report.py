"""``lightning-perf report``: a saved result as a page and pictures, in a folder."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_perf.benchmark import Result, VariantFailed

EXAMPLES = """\
examples:
  lightning-perf report result.json
  lightning-perf report result.json --output for_my_colleagues

result.json is what `lightning-perf bench --json` or `demo` wrote; nothing is
measured again. The folder gets
  report.html   everything on one page; no other file and no network needed
  row.md        a row for a Markdown table of results
  report.json   the whole result
and each picture as a PNG file.
"""
PAGE, RESULT = "report.html", "report.json"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = subparsers.add_parser(
        "report",
        description="Show a saved result again: the table here, the page in a folder.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json", help="a saved result")
    add_output(parser, "lightning_perf_report")
    parser.set_defaults(run=run)


def add_output(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the arguments of `new_folder`."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(default),
        metavar="DIR",
        help="new folder for report and pictures; a number is added to a name that is taken "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the files in the folder instead"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table, write the folder, return 0."""
    from lightning_perf.benchmark import Result
    from lightning_perf.benchmark.report import print_report

    result = Result.load(arguments.result)
    print_report(result)
    with new_folder(arguments.output, overwrite=arguments.overwrite) as folder:
        written = write_report(result, folder)
    print_written(folder, written)
    return 0


def write_report(result: Result, folder: Path) -> dict[str, str]:
    """Write page, row, pictures and the result itself; return what each file is, by its name."""
    from lightning_perf.benchmark.findings import RESULTS_HEADER, results_row
    from lightning_perf.benchmark.page import page
    from lightning_perf.benchmark.picture import require_matplotlib, save_pictures

    result.save(folder / RESULT, overwrite=True)
    require_matplotlib()
    from lightning_perf.benchmark.pictures import pictures

    drawn = pictures(result)
    (folder / PAGE).write_text(page(result, drawn), encoding="utf-8")
    row = f"{RESULTS_HEADER}\n{results_row(result)}\n"
    (folder / "row.md").write_text(row, encoding="utf-8")
    return {
        PAGE: "open it in a browser: everything on one page",
        RESULT: "the same, and every step as measured",
        "row.md": "a row for a Markdown table of results",
        **{path.name: "" for path in save_pictures(drawn, folder)},
    }


@contextmanager
def reported_failure(folder: Path) -> Iterator[None]:
    """Write the page for a variant that fails, and let the error go on."""
    from lightning_perf.benchmark import VariantFailed

    try:
        yield
    except VariantFailed as error:
        _write_failure(error, folder)
        raise


def print_written(folder: Path, files: dict[str, str]) -> None:
    """Say what was written where."""
    print(f"\nWritten to {folder}")
    for name, meaning in files.items():
        print(f"  {name:<15} {meaning}".rstrip())


@contextmanager
def new_folder(wanted: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Make a folder of that name, numbered if it is taken; remove it if an error leaves no report.

    Args:
        wanted: Its path. A folder that is there is not taken as long as it is empty.
        overwrite: Take it in any case.
    """
    folder, number = wanted, 1
    while not overwrite and _taken(folder):
        number += 1
        folder = wanted.with_name(f"{wanted.name}_{number}")
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        # What was measured is worth keeping, whatever goes wrong with its pictures.
        if made and not any((folder / name).exists() for name in (PAGE, RESULT)):
            shutil.rmtree(folder)
        raise


def _taken(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def _write_failure(error: VariantFailed, folder: Path) -> None:
    from lightning_perf.benchmark.page import failure_page

    command = ["lightning-perf", *sys.argv[1:]]
    (folder / PAGE).write_text(failure_page(error, command), encoding="utf-8")
    print(f"What happened is written to {folder / PAGE}", file=sys.stderr)
