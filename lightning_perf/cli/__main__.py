"""The ``lightning-perf`` command: chooses the subcommand and reports errors in one line."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import lightning_perf

COMMANDS = {
    "demo": "train a small network plainly and with the preset for this machine",
    "bench": "compare two variants of your own training run",
    "presets": "list, show and locate the presets",
}
EXAMPLES = """\
examples:
  lightning-perf demo
  lightning-perf presets list
  lightning-perf bench --config train.yaml --a none --b auto
  lightning-perf COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: The arguments; those of the process if None.

    Returns:
        The exit code: 0, what the subcommand says, or 2 after an error.
    """
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        if arguments.debug:
            raise
        print(f"lightning-perf: error: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; only the module of the chosen subcommand is imported."""
    parser = argparse.ArgumentParser(
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
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
