"""A result for people to read on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_perf.benchmark import findings
from lightning_perf.benchmark.result import Result


def print_report(result: Result) -> None:
    """Print `table`: in colour on a terminal, without spaces at the ends of lines into a pipe."""
    console = Console()
    if console.is_terminal:
        console.print(table(result))
        return
    with console.capture() as captured:
        console.print(table(result))
    for line in captured.get().splitlines():
        print(line.rstrip())


def table(result: Result) -> RenderableType:
    """Return everything a reader needs to believe or doubt the result, at most 80 columns wide."""
    parts: list[RenderableType] = [
        Text(),
        Text(findings.verdict(result), style="bold"),
        _figures(result),
        _learning(result),
    ]
    for key, name in (("a", result.a), ("b", result.b)):
        if statuses := getattr(result, f"statuses_{key}"):
            parts.append(_items(f"Items of {name}", statuses))
    parts.append(Text(f"\n{findings.ending(result)}", style="dim"))
    if warnings := findings.warnings(result):
        parts.append(_warnings(warnings))
    return Group(*parts)


def _figures(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for heading in (f"A: {result.a}", f"B: {result.b}"):
        table.add_column(Text(heading), justify="right", overflow="fold")
    table.add_column("", overflow="fold")
    for figure in findings.figures(result):
        style = "bold" if figure.name == "speed-up" else ""
        cells = (Text(cell) for cell in (figure.name, figure.a))
        table.add_row(*cells, Text(figure.b, style=style), Text(figure.note))
    return table


def _learning(result: Result) -> RenderableType:
    style = {True: "green", False: "bold red", None: "yellow"}[result.losses_agree]
    text = Text.assemble(("\nLearns the same: ", "bold"), (findings.learning(result), style))
    return Group(text, Padding(Text(result.learning_summary), (0, 0, 0, 2)))


def _items(title: str, statuses: list[dict[str, Any]]) -> RenderableType:
    items = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for status in statuses:
        active = status["active"]
        items.add_row(
            Text("active" if active else "skipped", style="green" if active else "dim"),
            Text(status["item"]),
            Text(status["text"], style="" if active else "dim"),
        )
    return Group(Text(f"\n{title}", style="bold"), Padding(items, (0, 0, 0, 2)))


def _warnings(warnings: list[str]) -> Table:
    marked = Table.grid(padding=(0, 1, 0, 0))
    for warning in warnings:
        marked.add_row(*(Text(text, style="yellow") for text in ("!", warning)))
    return marked
