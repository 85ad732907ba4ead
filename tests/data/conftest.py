"""Fixtures of the tests of data."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver

import pytest


@pytest.fixture(autouse=True)
def no_fork_server() -> Iterator[None]:
    """End the server that the start method of that name leaves for the whole session."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # no public way
