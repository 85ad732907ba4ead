"""Fixtures of the tests of data."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
from hypothesis import HealthCheck, settings

# The same examples in each run, however slow the machine is.
settings.register_profile(
    "data",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("data")


@pytest.fixture(autouse=True)
def no_fork_server() -> Iterator[None]:
    """End the server that the start method of that name leaves for the whole session."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # no public way
