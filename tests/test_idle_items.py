"""An item with nothing to do adds no call of a Python function to a step, and no import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from items import ROWS, Row
from lightning.pytorch import Callback
from models import Classifier

from lightning_perf._item import PerfCallback, statuses
from lightning_perf._knobs import knobs


def has_an_idle_state(row: Row) -> bool:
    return not row.acts_on_cpu or row.idle_model is not None or row.around is not nullcontext


IDLE = [row for row in ROWS if has_an_idle_state(row)]


class Calls(Callback):
    """Counts the calls of Python functions from the end of one batch to the end of the next.

    The first batch of an epoch is left out: the hooks of epochs come between.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._now = 0

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self._now += event == "call"

    def on_train_start(self, trainer, pl_module) -> None:
        self._profile = sys.getprofile()
        sys.setprofile(self._count)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx:
            self.counts.append(self._now)
        self._now = 0

    def on_train_end(self, trainer, pl_module) -> None:
        sys.setprofile(self._profile)

    def on_exception(self, trainer, pl_module, exception) -> None:
        sys.setprofile(self._profile)

    def on_test_start(self, trainer, pl_module) -> None:
        self.on_train_start(trainer, pl_module)

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_test_end(self, trainer, pl_module) -> None:
        self.on_train_end(trainer, pl_module)


def calls(row: Row, items: Sequence[PerfCallback]) -> list[int]:
    """Return the calls in each step; items that act fail the test."""
    module = row.idle_model() if row.idle_model else Classifier()
    counter = Calls()
    run = row.run(module, *items, counter, max_epochs=2)
    assert not [status for status in statuses(run) if status.active]
    return counter.counts


@pytest.mark.parametrize("row", IDLE, ids=lambda row: row.id)
def test_an_idle_item_adds_no_call_to_a_step(row: Row) -> None:
    # What a collection in a step frees, of other tests too, may call functions of its own.
    with knobs(intra_op_threads=1, gc_enabled=False):
        calls(row, [])  # fills what is kept for later runs
        without = calls(row, [])
        assert len(without) >= 3
        assert min(without) > 50
        assert calls(row, [row.item(strict=False)]) == without


def test_a_call_that_an_item_adds_is_seen() -> None:
    """The test above would fail for an item that acts."""
    (row,) = [row for row in ROWS if row.id == "GarbageCollection"]
    counter = Calls()
    row.run(Classifier(), row.item(), counter, max_epochs=2)
    without = calls(row, [])
    assert all(a > b for a, b in zip(counter.counts, without, strict=True))


_IMPORTS = """
import sys
from lightning_perf._knobs import knobs
from test_idle_items import IDLE, calls
for row in IDLE:
    with knobs(intra_op_threads=1):
        calls(row, [])
        before = set(sys.modules)
        calls(row, [row.item(strict=False)])
    for name in sorted(set(sys.modules) - before):
        print("imported by", row.id, name)
print("looked at", len(IDLE))
"""


@pytest.mark.slow
def test_an_idle_item_imports_nothing() -> None:
    """What TorchInductor needs slows the steps of a plain training by some percent."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert f"looked at {len(IDLE)}" in done.stdout
    assert "imported by" not in done.stdout
