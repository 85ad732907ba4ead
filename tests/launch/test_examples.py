"""The examples in the docstrings run, and nothing here imports torch."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

from lightning_perf import launch

MODULES = [f"{launch.__name__}.{module.name}" for module in pkgutil.iter_modules(launch.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name))]
    assert sum(bool(test.examples) for test in found) >= 10


def test_nothing_here_imports_torch() -> None:
    code = f"import sys, {', '.join(MODULES)}, lightning_perf.cli.launch\n"
    code += "assert not {'torch', 'lightning', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
