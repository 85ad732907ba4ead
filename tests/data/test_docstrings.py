"""The examples in docstrings of data run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from lightning_perf import data

MODULES = [module.name for module in pkgutil.iter_modules(data.__path__, f"{data.__name__}.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_everything_public_has_one() -> None:
    for name in data.__all__:
        assert ">>> " in (getattr(data, name).__doc__ or ""), name
