"""``lightning-perf presets``: list, show and locate the presets."""

import argparse

from lightning_perf import presets

EXAMPLES = """\
examples:
  lightning-perf presets list
  lightning-perf presets show cuda_bf16 > my_preset.yaml
  python train.py fit --config "$(lightning-perf presets path auto)" \\
      --config mine.yaml

NAME is a preset, an alias such as hopper, or auto: the one for this machine.
"""
LIST_EXAMPLES = """\
examples:
  lightning-perf presets list
"""
SHOW_EXAMPLES = """\
examples:
  lightning-perf presets show auto
  lightning-perf presets show cuda_bf16 > my_preset.yaml
"""
PATH_EXAMPLES = """\
examples:
  lightning-perf presets path hopper
  python train.py fit --config "$(lightning-perf presets path auto)" \\
      --config mine.yaml
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand to the command's parser."""
    parser = subparsers.add_parser(
        "presets",
        description="List, show and locate the presets.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda _: parser.print_help())
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, run, text, examples in (
        ("list", _list, "list all presets, and which one fits this machine", LIST_EXAMPLES),
        ("show", _show, "print the file of a preset", SHOW_EXAMPLES),
        ("path", _path, "print where the file of a preset is", PATH_EXAMPLES),
    ):
        action = actions.add_parser(
            name,
            help=text,
            description=f"{text.capitalize()}.",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.set_defaults(run=run)
        if name != "list":
            action.add_argument(
                "name", metavar="NAME", help="preset, alias such as hopper, or auto"
            )


def _list(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("preset", "for", "aliases", "measured"):
        table.add_column(column)
    for name in presets.names():
        about = presets.metadata(name)
        table.add_row(
            name, about.hardware, ", ".join(about.aliases), about.measured or "unmeasured"
        )
    console = Console(highlight=False, markup=False)
    console.print(table)
    name, reason = presets.auto()
    console.print(f"\nauto is {name} here: {reason}.")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    print(presets.path(arguments.name).read_text(encoding="utf-8"), end="")
    return 0


def _path(arguments: argparse.Namespace) -> int:
    print(presets.path(arguments.name))
    return 0
