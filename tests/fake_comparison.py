"""A comparison of fake workers, on a machine that is exactly as busy as a test says."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_perf.benchmark import Result, Variant, compare, coordinator, launch

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")

Compare = Callable[..., Result]


def fake_variant(name: str, **script: Any) -> Variant:
    return Variant(name, env={"FAKE": json.dumps(script)})


@pytest.fixture
def cpu_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set how many CPU seconds the machine works between two looks at its clock."""

    def busy(seconds: float) -> None:
        clock = itertools.count()
        monkeypatch.setattr(launch, "busy_seconds", lambda: next(clock) * seconds)

    busy(0.0)
    return busy


@pytest.fixture
def compare_fakes(monkeypatch: pytest.MonkeyPatch, cpu_clock: Callable[[float], None]) -> Compare:
    """Compare two scripted workers instead of real ones."""
    monkeypatch.setattr(coordinator, "WORKER", (sys.executable, str(FAKE_WORKER)))
    monkeypatch.setattr(launch, "_QUIET_WAIT", 0.0)

    def run(
        a: dict[str, Any] | None = None, b: dict[str, Any] | None = None, **arguments: Any
    ) -> Result:
        options = {"budget_s": 1000.0, "learning_steps": 0, **arguments}
        return compare(
            "module:make", fake_variant("A", **a or {}), fake_variant("B", **b or {}), **options
        )

    return run
