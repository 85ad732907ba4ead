"""Runs launches until the answer is clear or the budget is spent."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import lightning_perf
from lightning_perf.benchmark import statistics
from lightning_perf.benchmark.launch import KEYS, Launch, Outcome
from lightning_perf.benchmark.process import Message, Worker
from lightning_perf.benchmark.task import Task
from lightning_perf.benchmark.variant import Variant

if TYPE_CHECKING:
    from lightning_perf.benchmark.learning import LearningRecord, LearningVerdict

WORKER = (sys.executable, "-m", "lightning_perf.benchmark.worker")
BUDGET_SPENT = "budget spent"
QUICK = "quick mode"
BUSY = "machine busy"

_BUSY_LAUNCHES = 3  # give up after so many launches in a row that were disturbed
_LEARNING_SHARE = 0.3  # of the budget
_QUICK_LEARNING_SHARE = 0.5  # one launch takes little of it
_FEWEST_LEARNING_STEPS = 8
_LEARNING_PATIENCE = 300.0

# glibc decides by chance, for the life of a process, how often memory goes back to the kernel; that
# alone makes identical processes differ. All three are needed: setting one of them turns off the
# automatic threshold, and every large tensor becomes a mapping of its own.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}


@dataclass(frozen=True)
class Progress:
    """Where a comparison is."""

    phase: str
    launch: int
    pair: int
    remaining_s: float
    speedup: float | None
    """Estimate from the launches so far."""


@dataclass
class Comparison:
    """What is compared, and what has been found so far."""

    task: Task
    variants: dict[str, Variant]
    budget_s: float
    quick: bool
    learning_steps: int
    validate: bool
    seed: int
    progress: Callable[[Progress], None]
    started: float = field(default_factory=time.monotonic)
    created: datetime = field(default_factory=lambda: datetime.now().astimezone())
    outcomes: list[Outcome] = field(default_factory=list)
    learning: LearningVerdict | None = None
    learned_steps: int = 0
    stop_reason: str = ""

    @property
    def log_ratios(self) -> list[float]:
        """The launches that count."""
        return [outcome.value for outcome in self.outcomes if outcome.enough]

    @property
    def remaining_s(self) -> float:
        """What is left of the budget; negative once it is overdrawn."""
        return self.budget_s - (time.monotonic() - self.started)

    def run(self) -> None:
        """Launch until there is a reason to stop."""
        with tempfile.TemporaryDirectory(
            prefix="lightning_perf-", ignore_cleanup_errors=True
        ) as folder:
            while not self.stop_reason:
                began = time.monotonic()
                self._launch(Path(folder), len(self.outcomes) + 1)
                self.stop_reason = self._why_stop(time.monotonic() - began)

    def _why_stop(self, last_launch_s: float) -> str:
        latest = [outcome.enough for outcome in self.outcomes[-_BUSY_LAUNCHES:]]
        values = self.log_ratios
        if self.quick and values:
            return QUICK
        if reason := statistics.stop_reason(values):
            return reason
        if len(latest) == _BUSY_LAUNCHES and not any(latest):
            return BUSY
        # The first launch also checks the learning, which the next will not.
        if self.remaining_s < (last_launch_s if len(self.outcomes) > 1 else self._launch_s()):
            return BUDGET_SPENT if values else BUSY
        return ""

    def _launch_s(self) -> float:
        """Estimate the length of a launch from what the first one took without the learning."""
        first = self.outcomes[0]
        starts = sum(s.startup_seconds + s.first_step_seconds for s in first.starts.values())
        return starts + sum(turn.seconds for turn in first.turns)

    def _launch(self, folder: Path, number: int) -> None:
        def tell(phase: str, pair: int) -> None:
            values = self.log_ratios
            speedup = math.exp(fmean(values)) if values else None
            self.progress(Progress(phase, number, pair, self.remaining_s, speedup))

        began = time.monotonic()
        with self._workers(folder, number) as (workers, jobs):
            launch = Launch(number, workers, jobs, seed=self.seed + number - 1, tell=tell)
            launch.start()
            launch.warm_up()
            launch.measure(self._measuring_seconds(time.monotonic() - began))
            self.outcomes.append(launch.outcome)
            if number == 1 and self.learning_steps:
                tell("checking that both learn the same", 0)
                self._learn(workers, launch.outcome, folder)

    def _measuring_seconds(self, start_s: float) -> float:
        """Return how long the turns of this launch may take, to leave time for those to come."""
        to_come = 1 if self.quick else max(1, statistics.MIN_LAUNCHES - len(self.outcomes))
        return (self.remaining_s - (to_come - 1) * start_s) / to_come

    @contextmanager
    def _workers(
        self, folder: Path, number: int
    ) -> Iterator[tuple[dict[str, Worker], dict[str, Message]]]:
        workers: dict[str, Worker] = {}
        jobs: dict[str, Message] = {}
        try:
            for key in KEYS:
                variant, own = self.variants[key], folder / f"{key}-{number}"
                own.mkdir()
                jobs[key] = {
                    "do": "begin",
                    "sys_path": sys.path,
                    "task": asdict(self.task),
                    "variant": asdict(variant),
                    "folder": str(own),
                }
                workers[key] = Worker(
                    WORKER,
                    name=f"{key.upper()}: {variant.name}",
                    env=environment(variant, folder / f"{key}-compiled"),
                    log=own / "output.txt",
                )
            yield workers, jobs
        finally:
            for worker in workers.values():
                worker.stop()

    def _learn(self, workers: dict[str, Worker], outcome: Outcome, folder: Path) -> None:
        """Let both train from the same start, untimed, and judge whether they learn the same."""
        from lightning_perf.benchmark.learning import PERTURBATIONS, judge

        for worker in workers.values():
            finish = {"do": "finish"}
            worker.ask(finish, timeout=_LEARNING_PATIENCE, phase="ending the timed training")
        exact = claims_exact(outcome.descriptions)
        step_s = {
            key: outcome.starts[key].step_seconds * outcome.descriptions[key]["accumulate"]
            for key in KEYS
        }
        runs_s = (1 if exact else 1 + len(PERTURBATIONS)) * step_s["a"] + step_s["b"]
        share = _QUICK_LEARNING_SHARE if self.quick else _LEARNING_SHARE
        affordable = int(share * self.budget_s / runs_s)
        steps = min(self.learning_steps, max(_FEWEST_LEARNING_STEPS, affordable))

        def record(key: str, perturb: float = 0.0, perturb_seed: int = 0) -> LearningRecord:
            command = {
                "do": "learn",
                "steps": steps,
                "seed": self.seed,
                "update": str(folder / f"{key}-{perturb_seed}.update"),
                "perturb": perturb,
                "perturb_seed": perturb_seed,
                "validate": self.validate and not perturb,
            }
            timeout = _LEARNING_PATIENCE + 20 * steps * step_s[key]
            phase = "checking the learning"
            return _record(workers[key].ask(command, timeout=timeout, phase=phase)["record"])

        a, b = record("a"), record("b")
        perturbed = []
        if a.losses != b.losses and not (exact and a.device == "cpu"):
            perturbed = [record("a", size, seed) for size, seed in PERTURBATIONS]
        self.learning = judge(a, b, perturbed, exact=exact)
        self.learned_steps = steps


def environment(variant: Variant, compiled: Path) -> dict[str, str]:
    """Return the environment variables for the process of a variant.

    Args:
        variant: Its own variables win over everything.
        compiled: Folder for what it compiles. With a shared one, the second variant would find the
            work of the first.
    """
    settled = any(name.startswith("MALLOC_") for name in (*os.environ, *variant.env))
    package = str(Path(lightning_perf.__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **({} if settled else _MALLOC),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled),
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        "PYTHONPATH": os.pathsep.join([package, *([path] if path else [])]),
        **variant.env,
    }


def claims_exact(descriptions: dict[str, Message]) -> bool:
    """Return whether everything in which the variants differ promises bit-identical losses."""
    a, b = (descriptions[key] for key in KEYS)
    same = ("threads", "precision", "device")
    return (
        not a["inexact"]
        and not b["inexact"]
        and a["callbacks"] == b["callbacks"]
        and all(a["environment"][name] == b["environment"][name] for name in same)
    )


def no_progress(progress: Progress) -> None:
    """Show nothing."""


def _record(message: Message) -> LearningRecord:
    from lightning_perf.benchmark.learning import LearningRecord

    update = message["update"]
    return LearningRecord(**message | {"update": None if update is None else Path(update)})
