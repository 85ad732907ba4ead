"""What pages show is true: code runs, commands and YAML are understood, links lead somewhere."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from items import ROWS, Row
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from pages import CARDS, DOCS, PAGES, ROOT, anchors, blocks, commands, links, name, prose

from lightning_perf.benchmark import load_variant
from lightning_perf.cli import PerfCLI
from lightning_perf.cli.__main__ import COMMANDS, parse
from lightning_perf.launch.options import read_launch_section

HEADINGS = [
    "What it does",
    "Use it",
    "Changes and undo",
    "Needs",
    "Exactness",
    "Measured",
    "When not to use it",
    "Combines with",
    "Support",
    "How it works",
    "Source",
]
SUPPORT = {
    "": ["CPU", "CUDA", "MPS"],
    **dict.fromkeys(
        ["Single device", "DDP", "FSDP", "DeepSpeed", "Linux", "macOS", "Windows"],
        ("works", "skips itself", "refused", "—"),
    ),
}
# Texts that show command lines.
SOURCES = [*PAGES, *(ROOT / "lightning_perf").rglob("*.py"), *(ROOT / "examples").rglob("*.*")]
PATH = re.compile(r"`((?:lightning_perf|tests|docs|examples|benchmarks)/[\w./-]*(?:\.\w+|/))`")

every_page = pytest.mark.parametrize("page", PAGES, ids=name)
every_card = pytest.mark.parametrize("card", CARDS, ids=name)


def with_blocks(language: str) -> pytest.MarkDecorator:
    # The Chinese README has the code of the English one.
    pages = [page for page in PAGES if blocks(page, language) and page.name != "README.zh.md"]
    return pytest.mark.parametrize("page", pages, ids=name)


def section(card: Path, heading: str) -> str:
    return card.read_text("utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0].strip()


@every_card
def test_a_card_has_the_fixed_headings(card: Path) -> None:
    assert re.findall(r"^## (.*)$", card.read_text("utf-8"), re.MULTILINE) == HEADINGS


@every_card
def test_a_card_shows_python_yaml_and_the_way_without_a_trainer(card: Path) -> None:
    assert blocks(card, "python")
    assert blocks(card, "yaml")
    assert "Without a Trainer: " in section(card, "Use it")


@every_card
def test_a_support_table_says_one_of_four_things_in_each_cell(card: Path) -> None:
    lines = [line for line in section(card, "Support").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    (head, _, *rows) = rows
    assert head == ["", *SUPPORT[""]]
    assert [row[0] for row in rows] == [row for row in SUPPORT if row]
    for label, *cells in rows:
        assert len(cells) == len(head) - 1, label
        assert all(cell.startswith(SUPPORT[label]) for cell in cells), cells


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_card_says_what_the_class_says(row: Row) -> None:
    card = DOCS / "items" / f"{row.cls.__module__.rpartition('.')[2]}.md"
    assert card.read_text("utf-8").startswith(f"# {row.id}\n")
    assert section(card, "Exactness").startswith("Exact." if row.cls.exact else "Not exact")
    if row.acts_on_cpu and not row.emulated:
        assert "| Single device | works" in section(card, "Support")


def test_the_index_of_items_and_the_code_of_the_chinese_readme_are_fresh() -> None:
    refresh = runpy.run_path(str(DOCS / "site" / "refresh.py"))
    for page, text in refresh["fresh_pages"]().items():
        assert page.read_text("utf-8") == text, "Run: python docs/site/refresh.py"


def test_the_chinese_index_has_the_same_items() -> None:
    def index(page: Path) -> list[tuple[str, str]]:
        rows = re.findall(r"^\| \[(`\w+`)\]\(.*\) \| .* \| (.*) \|$", page.read_text("utf-8"), re.M)
        return [tuple(row) for row in rows]

    assert index(DOCS / "README.zh.md") == index(ROOT / "README.md") != []


class ParseOnly:
    """Reads a configuration as a CLI does, and builds nothing: the devices may not be here."""

    def instantiate_classes(self) -> None:
        return


class ParsePerf(ParseOnly, PerfCLI):
    """PerfCLI that only parses."""


class ParseStock(ParseOnly, LightningCLI):
    """LightningCLI that only parses."""


Understand = Callable[[str], None]


@pytest.fixture
def understand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Understand:
    """Read a YAML block with the parser it is for, but for what is in the reader's project."""
    file = tmp_path / "config.yaml"
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(file)])

    def read(text: str) -> None:
        content = yaml.safe_load(text)
        if "env" in content:
            file.write_text(text)
            load_variant(file)
        if "launch" in content:
            read_launch_section(text)
        section = content.get("fit", content)
        known = {key: section[key] for key in ("preset", "trainer") if key in section}
        file.write_text(yaml.safe_dump(known))
        cli = ParsePerf if "preset" in known else ParseStock
        options = {"parser_kwargs": {"exit_on_error": False}}
        cli(BoringModel, run=False, seed_everything_default=False, **options)

    return read


@with_blocks("yaml")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")  # LightningCLI's own
def test_yaml_is_understood(page: Path, understand: Understand) -> None:
    for block in blocks(page, "yaml"):
        understand(block)


def test_yaml_with_a_mistake_is_not_understood(understand: Understand) -> None:
    with pytest.raises(ArgumentError, match="max_epoch"):
        understand("trainer:\n  max_epoch: 3\n")


@pytest.fixture(scope="module")
def forked_scripts() -> Iterator[subprocess.Popen[str]]:
    """A process that runs scripts in forks of itself, each of which need not import torch anew."""
    command = [sys.executable, str(Path(__file__).with_name("forked_scripts.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.mark.slow
@with_blocks("python")
def test_python_runs(page: Path, tmp_path: Path, forked_scripts: subprocess.Popen[str]) -> None:
    script, output = tmp_path / "page.py", tmp_path / "output.txt"
    script.write_text("\n".join(blocks(page, "python")), "utf-8")
    print(script, output, sep="\t", file=forked_scripts.stdin, flush=True)
    assert int(forked_scripts.stdout.readline()) == 0, output.read_text("utf-8")


@pytest.mark.parametrize(
    "source", [file for file in SOURCES if commands(file.read_text("utf-8"))], ids=name
)
def test_commands_are_understood(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def understood(words: list[str]) -> bool:
        try:
            parse(words)
        except SystemExit as end:  # help ends with 0
            return end.code == 0
        return True

    for words, only_named in commands(source.read_text("utf-8")):
        if only_named and words[0] in COMMANDS:
            understood([words[0], "--help"])
            told = capsys.readouterr().out
            unknown = [word for word in words if word.startswith("--") and word not in told]
            assert not unknown, words
        elif words[0] != "COMMAND":
            assert understood(words), f"{words}: {capsys.readouterr().err}"


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    for path in PATH.findall(prose(page.read_text("utf-8"))):
        assert (ROOT / path).exists(), path


@every_page
def test_extras_that_are_named_exist(page: Path) -> None:
    extras = (ROOT / "pyproject.toml").read_text("utf-8").partition("optional-dependencies]")[2]
    for extra in re.findall(r"(?:\.|lightning-perf)\[(\w+)\]", page.read_text("utf-8")):
        assert re.search(rf"^{extra} = ", extras, re.MULTILINE), extra
