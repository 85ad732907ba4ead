"""docs/presets.md says what the files say, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lightning_perf import presets

DOC = (Path(__file__).parents[2] / "docs" / "presets.md").read_text(encoding="utf-8")
PRECISION = {None: "float32", "bf16-mixed": "bfloat16, mixed", "16-mixed": "float16, mixed"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOC, flags=re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the table below a heading, the table's head first."""
    section = DOC.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [table[0], *table[2:]]


def trainer_section(name: str) -> dict:
    return yaml.safe_load(presets.path(name).read_text(encoding="utf-8"))["trainer"]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code: str) -> None:
    exec(compile(code, "docs/presets.md", "exec"), {})


def test_the_table_of_presets() -> None:
    table = {row[0].strip("`"): row for row in rows("Which preset for my machine")[1:]}
    assert set(table) == {*presets.names(), "none"}
    for name in presets.names():
        _, _, aliases, precision, measured = table[name]
        about = presets.metadata(name)
        assert tuple(re.findall(r"`(\w+)`", aliases)) == about.aliases
        assert precision == PRECISION[trainer_section(name).get("precision")]
        assert (measured == "*unmeasured*") == (about.measured is None), name


def test_the_table_of_lines() -> None:
    head, *table = rows("What each line does")
    for column, name in enumerate(head[1:-1], start=1):
        section = trainer_section(name.strip("`"))
        marked = {row[0].strip("`") for row in table if row[column] == "x"}
        items = {entry["class_path"].rpartition(".")[2] for entry in section["callbacks"]}
        assert marked == {key for key in section if key != "callbacks"} | items, name
