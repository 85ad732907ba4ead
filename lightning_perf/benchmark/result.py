"""What a comparison found: one flat record, kept as JSON."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass
class Result:
    """Variant A against variant B. ``speedup`` above 1 means that B is faster.

    Names ending in ``_a`` and ``_b`` exist for both variants. Times are in seconds, memory in
    bytes; ``None`` stands for what could not be measured.
    """

    a: str
    """Name of variant A: a preset, ``"none"``, or the stem of its file."""
    b: str
    quick: bool
    """One launch only: its interval includes the spread typical of launches, not a measured one."""
    speedup: float | None
    """Time per step of A over that of B; ``None`` when the machine was too busy to tell."""
    interval: tuple[float, float] | None
    """Confidence interval of ``speedup`` at ``level``."""
    level: float
    verdict: str
    """The finding in one sentence."""
    stop_reason: str
    launches: int
    """Pairs of fresh processes that count."""
    pairs: int
    """Pairs of turns that count, over all launches."""
    launches_dropped: int
    pairs_dropped: int
    launch_speedups: list[float]
    speedup_of_minimum: float | None
    """The same ratio for the fastest steps: blind to stalls, so a difference points at them."""
    foreign_share: float
    """Median share of the CPUs that other programs took during the turns."""
    steps_per_turn: int
    discarded_steps: int
    """Steps at the start of each turn that do not count."""
    window: int
    """Steps averaged before the median of a turn is taken."""
    frozen: bool
    """Whether the waiting variant was frozen; it is not where it uses CUDA, nor on Windows."""

    step_seconds_a: float | None
    step_seconds_b: float | None
    samples_per_s_a: float | None
    samples_per_s_b: float | None
    batch_size_a: int | None
    batch_size_b: int | None
    startup_seconds_a: float
    """From the start of the process to the first batch (imports, set-up, loader start)."""
    startup_seconds_b: float
    first_step_seconds_a: float
    """The first step, which includes compiling; with a cold compile cache (first launch)."""
    first_step_seconds_b: float
    compile_seconds_a: float | None
    """The first step less an ordinary one."""
    compile_seconds_b: float | None
    peak_memory_a: int | None
    """Peak of the process's resident memory."""
    peak_memory_b: int | None
    peak_device_memory_a: int | None
    """Peak of allocated memory on the CUDA device."""
    peak_device_memory_b: int | None
    data_wait_a: float | None
    """Share of the step time between the end of a step and the start of the next: fetch and
    transfer of the batch."""
    data_wait_b: float | None
    minor_faults_a: float | None
    """Page faults per step; a large difference points at the memory allocator."""
    minor_faults_b: float | None

    losses_agree: bool | None
    """Whether B learns the same as A; ``None`` if not checked or not comparable."""
    learning_summary: str
    learning_steps: int
    loss_difference_max: float | None
    """Largest relative difference of the losses."""
    loss_difference_mean: float | None
    learning: dict[str, Any] | None
    """All fields of the `LearningVerdict`."""

    statuses_a: list[dict[str, Any]]
    """``item``, ``active`` and ``text`` of each item."""
    statuses_b: list[dict[str, Any]]
    environment_a: dict[str, Any]
    """``versions``, ``hardware``, ``knobs``, ``threads``, ``precision``, ``device``, ``variables``
    and so on."""
    environment_b: dict[str, Any]
    environment_difference: dict[str, list[Any]]
    """What differs between the two environments: name to the values in A and B."""

    seed: int
    budget_s: float
    seconds: float
    """Wall time of the whole comparison."""
    created: str
    """Date and time of the start, ISO 8601, with the offset from UTC."""
    warnings: list[str] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Every turn as measured, so that the statistics can be redone."""
    task: str = ""
    """What was trained, as ``bench --config`` takes it; empty in older results."""
    variant_a: dict[str, Any] = field(default_factory=dict)
    """``name``, ``preset``, ``trainer`` and ``env`` of the `Variant`."""
    variant_b: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON can hold it: flat keys, lists instead of tuples."""
        record = asdict(self)
        record["interval"] = None if self.interval is None else list(self.interval)
        return record

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the record as JSON.

        Raises:
            FileExistsError: There is such a file, and ``overwrite`` is false.
        """
        path = Path(path)
        if path.exists() and not overwrite:
            raise FileExistsError(
                f"{path} exists and is not overwritten. Choose another name, or remove it."
            )
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read what `save` wrote.

        Raises:
            ValueError: The file holds something else.
            FileNotFoundError: There is no such file.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            record = json.loads(text)
        except ValueError:
            record = None
        known = {entry.name for entry in fields(cls)}
        needed = {
            entry.name
            for entry in fields(cls)
            if entry.default is MISSING and entry.default_factory is MISSING
        }
        if not isinstance(record, dict) or not needed <= set(record) <= known:
            raise ValueError(f"{path} is not a result of this version of `lightning-perf bench`.")
        if record["interval"] is not None:
            record["interval"] = tuple(record["interval"])
        return cls(**record)
