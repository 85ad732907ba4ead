"""Results of every kind that a page has to show."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmark.results import BUSY, environment, learning, result, turns, variant

from lightning_perf.benchmark import Result, VariantFailed
from lightning_perf.benchmark.page import failure_page, page
from lightning_perf.benchmark.pictures import pictures

NOT_COMPARABLE = {
    "losses_agree": None,
    "learning_summary": "not comparable: the two start from different weights",
    "learning": asdict(learning(agree=None, losses_b=[])),
}
UNEQUAL = {
    "losses_agree": False,
    "learning_summary": "B does not learn the same: its losses are off by +40% on average",
}
LONG = "a_name_that_somebody_chose_for_a_file_without_thinking_of_any_page_or_table"
MANY = {
    "quick": False,
    "launches": 10,
    "launch_speedups": [1.25 + 0.004 * number for number in range(10)],
    "turns": turns(launches=10, pairs=120),
    "statuses_b": [
        {"item": f"Item{number}", "active": number % 2 == 0, "text": "some reason " * number}
        for number in range(30)
    ],
}
FILE = variant(
    "mine", preset="cpu", trainer={"precision": "bf16-mixed"}, env={"OMP_NUM_THREADS": "2"}
)
OLD = {"task": "", "variant_a": {}, "variant_b": {}}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no learning check": {
        "learning": None,
        "losses_agree": None,
        "learning_summary": "not checked",
    },
    "not comparable": NOT_COMPARABLE,
    "does not learn the same": UNEQUAL,
    "busy": BUSY | {"warnings": []},
    "many": MANY,
    "long names": {"a": LONG, "b": LONG, "task": f"{LONG}/{LONG}.py:make"},
    "other batch sizes": {"batch_size_b": 64},
    "variant of a file": {"b": "mine", "variant_b": FILE},
    "old": OLD,
    "nothing known": {
        "environment_a": {},
        "environment_b": {},
        "peak_memory_a": None,
        "peak_memory_b": None,
        "batch_size_a": None,
        "batch_size_b": None,
        "statuses_b": [],
        "warnings": [],
    },
    "on a GPU": {
        "environment_b": environment("32-true") | {"device": "cuda:0"},
        "peak_device_memory_a": 3 * 2**30,
        "peak_device_memory_b": None,
    },
}


def shown(changes: dict[str, Any]) -> str:
    """Return the page of a result with these changes."""
    found: Result = result(**changes)
    return page(found, pictures(found))


def failed() -> str:
    """Return the page of a variant that failed."""
    details = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n' + "é" * 300
    error = VariantFailed("B: mine", "training", "ValueError: no <good>", details)
    return failure_page(error, ["lightning-perf", "bench", "--config", "my train.py:make"])
