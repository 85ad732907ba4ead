"""The ``lightning-perf`` command: chooses the subcommand and reports errors in one line."""

import argparse
import difflib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import lightning_perf

COMMANDS = {
    "demo": "train a small network plainly and with the preset for this machine",
    "bench": "compare two variants of your own training run",
    "report": "show a saved result again, as a table and as a page",
    "presets": "list, show and locate the presets",
    "launch": "start a program with the cores, threads and allocator it should have",
}
EXAMPLES = """\
examples:
  lightning-perf demo                   what it does, on real data, in minutes
  lightning-perf presets list           the presets, and which one fits here
  lightning-perf bench --config train.yaml --a none --b auto
  lightning-perf COMMAND --help         everything about one command

Exit status: 0 done; 1 no clear answer, or the learning differs; 2 an error.
"""

_INTERRUPTED = 130  # as shells say it: 128 and the number of SIGINT
_OUTPUT_CLOSED = 141  # likewise, of SIGPIPE
_WRONG_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: The arguments; those of the process if None. Without any, the help is shown.

    Returns:
        The exit code: 0, what the subcommand says, or 2 after an error.
    """
    try:
        try:
            with _ended_by_sigterm():
                return _run(sys.argv[1:] if argv is None else argv)
        finally:
            # Here, because nobody can catch what goes wrong when the interpreter does it.
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. What is left to write goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OUTPUT_CLOSED


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; only the module of the chosen subcommand is imported."""
    parser = _Parser(
        prog="lightning-perf",
        description="Speed-ups for PyTorch Lightning, and the proof on your own model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=lightning_perf.__version__)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # The others only need to be known to the help text; importing them costs seconds.
    chosen = next((argument for argument in argv if argument in COMMANDS), None)
    for name, summary in COMMANDS.items():
        if name == chosen:
            import_module(f"lightning_perf.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser.parse_args(argv or ["--help"])


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command as an error does, so that temporary files and processes go."""

    def end(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler
        return
    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        if arguments.debug:
            raise
        print(f"lightning-perf: error: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Names the closest choice when a word is none of those it could be; takes whole words only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        wrong = _WRONG_CHOICE.search(message)
        if wrong:
            close = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=1)
            message += f". Did you mean {close[0]!r}?" if close else ""
        super().error(message)


if __name__ == "__main__":
    raise SystemExit(main())
