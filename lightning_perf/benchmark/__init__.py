"""Whether B is faster than A on your own model, by how much, and whether it learns the same.

Example:
    >>> result = compare("train.py:make", a="none", b="auto")  # doctest: +SKIP
    >>> print(result.verdict)  # doctest: +SKIP
    1.034x faster, 98% interval 1.021 to 1.047 (6 launches, stopped: decided)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_perf.benchmark.coordinator import Comparison, Progress, no_progress
from lightning_perf.benchmark.process import VariantFailed
from lightning_perf.benchmark.result import Result
from lightning_perf.benchmark.summary import summarize
from lightning_perf.benchmark.task import load_task
from lightning_perf.benchmark.variant import Variant, load_variant

__all__ = ["Progress", "Result", "Variant", "VariantFailed", "compare", "load_variant"]


def compare(
    make: Callable[[], tuple[Any, ...]] | str | Path,
    a: str | Path | Variant = "none",
    b: str | Path | Variant = "auto",
    *,
    budget_s: float = 600.0,
    quick: bool = False,
    learning_steps: int = 60,
    validate: bool = False,
    seed: int = 0,
    progress: Callable[[Progress], None] = no_progress,
) -> Result:
    """Measure how much faster B trains than A, each in processes of its own that take turns.

    Nothing is written into the project, and no process outlives the call.

    Args:
        make: What is trained: a function, ``"module:function"`` or ``"path.py:function"`` that
            returns a LightningModule and its data (a LightningDataModule or DataLoader), and if
            need be a dict of Trainer arguments; or a LightningCLI YAML file with ``model`` and
            ``data`` given by ``class_path``.
        a: The baseline: ``"none"`` for plain Lightning, a preset, an alias, ``"auto"``, a YAML file
            with any of ``preset``, ``trainer`` and ``env``, or a `Variant`.
        b: What is compared with it.
        budget_s: Seconds the comparison may take. A launch that has begun is finished, with fewer
            turns, and the first one always runs.
        quick: Stop after one launch; its interval is about 3 % wide on either side.
        learning_steps: Optimizer steps over which to check that both learn the same; 0 for no
            check. Fewer are taken where they would cost more than 30 % of the budget, 50 % in
            quick mode.
        validate: Also compare the metrics of a validation after those steps.
        seed: Seed of the first launch; each further launch adds one.
        progress: Called now and then with where the comparison is.

    Returns:
        The result; without a number if the machine was too busy.

    Raises:
        ValueError: ``make`` or a variant cannot be used as asked.
        VariantFailed: A variant raised an error, ran out of memory, was killed or hangs.
    """
    if budget_s <= 0:
        raise ValueError(f"The budget must be a positive number of seconds, not {budget_s}.")
    if learning_steps < 0:
        raise ValueError(f"learning_steps must not be negative, it is {learning_steps}.")
    comparison = Comparison(
        task=load_task(make),
        variants={"a": load_variant(a), "b": load_variant(b)},
        budget_s=budget_s,
        quick=quick,
        learning_steps=learning_steps,
        validate=validate,
        seed=seed,
        progress=progress,
    )
    comparison.run()
    return summarize(comparison)
