"""One launch: a pair of fresh processes that take turns, a few steps at a time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

from lightning_perf.benchmark.process import Message, Worker, busy_seconds, cpus
from lightning_perf.benchmark.statistics import hodges_lehmann, turn_value

KEYS = ("a", "b")
PAIRS = 12
FEWEST_PAIRS = 6
LAUNCH_SECONDS = 30.0
"""Longest time for the turns of one launch; slow models get fewer pairs, whose turns are longer."""

_START_TIMEOUT = 900.0  # imports, set-up, and the first step with all its compiling
_TURN_PATIENCE = 60.0
_WARM_UP_TURNS = 8
_WARM_UP_SECONDS = 0.3
_SETTLED = 0.1
_TURN_SECONDS = 0.2  # shorter turns lose to the cold start, longer ones to drift
_SLOW_TURN_SECONDS = 1.0
_FEW_STEPS, _MANY_STEPS = 4, 20
_WINDOW = 5
_TOLERATED = 0.1  # share of the CPUs that others may take beyond those that nobody needs
_QUIET_WAIT = 3.0
_QUIET_WAITS = 20.0


@dataclass(frozen=True)
class TurnPlan:
    """How many steps a turn has, and which of them count."""

    steps: int
    discard: int
    window: int


@dataclass
class Turn:
    """One turn as measured; ``pair`` and ``first`` tell its place."""

    launch: int
    pair: int
    variant: str
    first: bool
    times: list[float]
    seconds: float
    gap: float
    """Time between the end of a step and the start of the next, summed over the turn."""
    cpu_seconds: float
    foreign_share: float
    faults: int
    switches: int
    compiled: bool
    counts: bool
    """Whether this turn is undisturbed; a pair counts if both its turns are."""


@dataclass
class Start:
    """What it took a variant to get going."""

    startup_seconds: float = 0.0
    first_step_seconds: float = 0.0
    batch_size: int | None = None
    step_seconds: float = 0.0
    graphs: int = 0
    settled: bool = False


@dataclass
class Outcome:
    """What a launch found."""

    turns: list[Turn] = field(default_factory=list)
    log_ratios: list[float] = field(default_factory=list)
    """Of the pairs that count: logarithm of A's step time over B's."""
    fastest_log_ratios: list[float] = field(default_factory=list)
    starts: dict[str, Start] = field(default_factory=dict)
    descriptions: dict[str, Message] = field(default_factory=dict)
    plan: TurnPlan = field(default_factory=lambda: TurnPlan(_FEW_STEPS, 1, 1))
    enough: bool = False
    frozen: bool = True

    @property
    def value(self) -> float:
        """The one number that the launch is worth."""
        return hodges_lehmann(self.log_ratios)


def plan_turns(step_a: float, step_b: float, *, accumulate: int, prefetched: int) -> TurnPlan:
    """Choose the length of turns.

    Args:
        step_a: Seconds per step of A.
        step_b: The same of B.
        accumulate: Batches per optimizer step; a window holds whole optimizer steps.
        prefetched: Batches that may lie ready when a turn begins, and cost nothing.
    """
    fast, slow = sorted((step_a, step_b))
    steps = max(_FEW_STEPS, min(_MANY_STEPS, round(_SLOW_TURN_SECONDS / slow)))
    steps = max(steps, math.ceil(_TURN_SECONDS / fast))
    few = steps < _MANY_STEPS
    discard = max(1 if few else 3, prefetched + 1 if prefetched else 0)
    window = accumulate if few else accumulate * math.ceil(_WINDOW / accumulate)
    counted = max(steps - min(discard, 3), window if few else 3 * window)
    return TurnPlan(discard + math.ceil(counted / window) * window, discard, window)


class Launch:
    """Runs one pair of workers through start, warm-up and turns.

    Args:
        number: Number of the launch, from 1.
        workers: The processes by key, just started.
        jobs: The first message for each.
        seed: Seed of the training, and of the order of turns.
        tell: Called with a few words on what is going on, and the number of the pair.
    """

    def __init__(
        self,
        number: int,
        workers: dict[str, Worker],
        jobs: dict[str, Message],
        *,
        seed: int,
        tell: Callable[[str, int], None],
    ) -> None:
        self.number, self.workers, self.outcome = number, workers, Outcome()
        self._jobs, self._seed, self._tell = jobs, seed, tell
        self._random = random.Random(seed)
        self._patience_s = _QUIET_WAITS

    def start(self) -> None:
        """Bring both to their first batch: imports at the same time, the rest one by one."""
        self._tell("starting", 0)
        began = time.monotonic()
        for key, worker in self.workers.items():
            worker.phase = "importing"
            worker.send(self._jobs[key])
        for key, worker in self.workers.items():
            imported = worker.receive(_START_TIMEOUT)["received"] - began
            self.outcome.starts[key] = Start(startup_seconds=imported)
        for worker in self.workers.values():
            worker.freeze()
        for key, worker in self.workers.items():
            start, began = self.outcome.starts[key], time.monotonic()
            fit = {"do": "fit", "seed": self._seed}
            ready = worker.ask(fit, timeout=_START_TIMEOUT, phase="setting up the training")
            start.startup_seconds += ready["received"] - began
            start.batch_size = ready["batch_size"]
            # A stopped process does not stop its kernels; a waiting CUDA process is quiet anyway.
            worker.can_freeze &= ready["device"] != "cuda"
        self.outcome.frozen = all(worker.can_freeze for worker in self.workers.values())

    def warm_up(self) -> None:
        """Run both until nothing is compiled any more and the step time has settled."""
        for key, worker in self.workers.items():
            self._tell("warming up", 0)
            start = self.outcome.starts[key]
            first = self._run(worker, 1, _START_TIMEOUT, "in its first training step")
            start.first_step_seconds, start.graphs = first["times"][0], first["graphs"]
            previous, steps = start.first_step_seconds, 2
            for _ in range(_WARM_UP_TURNS):
                report = self._run(worker, steps, _START_TIMEOUT, "warming up")
                step = median(report["times"])
                steady = abs(math.log(step / previous)) < _SETTLED
                start.settled = steady and report["graphs"] == start.graphs
                start.graphs, start.step_seconds = report["graphs"], fmean(report["times"])
                if start.settled:
                    break
                previous, steps = step, max(2, min(500, math.ceil(_WARM_UP_SECONDS / step)))
        self.describe()
        self.outcome.plan = self._plan()

    def describe(self) -> None:
        """Ask both what they are made of."""
        for key, worker in self.workers.items():
            self.outcome.descriptions[key] = worker.ask(
                {"do": "describe"}, timeout=_TURN_PATIENCE, phase="describing itself"
            )

    def measure(self, seconds: float) -> None:
        """Let the two take turns for about ``seconds``, twice that if others disturb them."""
        expected = self.outcome.plan.steps * sum(
            start.step_seconds for start in self.outcome.starts.values()
        )
        pairs = max(FEWEST_PAIRS, min(PAIRS, int(seconds / expected)))
        began, number = time.monotonic(), 0
        while len(self.outcome.log_ratios) < pairs:
            number += 1
            self._tell("measuring", number)
            self._pair(number)
            if number == 2 * pairs or time.monotonic() - began > 2 * pairs * expected:
                break
        self.outcome.enough = 3 * len(self.outcome.log_ratios) >= 2 * pairs
        self.describe()

    def _plan(self) -> TurnPlan:
        """Size the turns by the faster of two quiet samples of each variant."""
        for key, worker in self.workers.items():
            start = self.outcome.starts[key]
            for _ in range(2):
                self._wait_until_quiet()
                steps = max(2, min(200, math.ceil(_TURN_SECONDS / start.step_seconds)))
                report = self._run(worker, steps, _START_TIMEOUT, "warming up")
                start.step_seconds = min(start.step_seconds, fmean(report["times"]))
        descriptions = self.outcome.descriptions.values()
        return plan_turns(
            *(start.step_seconds for start in self.outcome.starts.values()),
            accumulate=math.lcm(*(d["accumulate"] for d in descriptions)),
            prefetched=0 if self.outcome.frozen else max(d["prefetched"] for d in descriptions),
        )

    def _pair(self, number: int) -> None:
        self._wait_until_quiet()
        order = self._random.sample(KEYS, 2)
        turns = {key: self._turn(key, number, first=key == order[0]) for key in order}
        self.outcome.turns += turns.values()
        if all(turn.counts for turn in turns.values()):
            plan = self.outcome.plan
            a, b = (
                turn_value(turns[key].times, discard=plan.discard, window=plan.window)
                for key in KEYS
            )
            self.outcome.log_ratios.append(math.log(a / b))
            fastest_a, fastest_b = (min(turns[key].times[plan.discard :]) for key in KEYS)
            self.outcome.fastest_log_ratios.append(math.log(fastest_a / fastest_b))

    def _turn(self, key: str, pair: int, *, first: bool) -> Turn:
        plan, start = self.outcome.plan, self.outcome.starts[key]
        busy, cpu, began = busy_seconds(), self._cpu_seconds(), time.monotonic()
        expected = plan.steps * start.step_seconds
        report = self._run(self.workers[key], plan.steps, 5 * expected + 1, "training")
        seconds = time.monotonic() - began
        cpu, busy = self._cpu_seconds() - cpu, busy_seconds() - busy
        foreign = max(0.0, (busy - cpu) / (seconds * len(cpus())))
        compiled = report["graphs"] != start.graphs
        start.graphs = report["graphs"]
        return Turn(
            self.number,
            pair,
            key,
            first,
            report["times"],
            report["seconds"],
            report["gap"],
            round(cpu, 3),
            round(foreign, 3),
            report["faults"],
            report["switches"],
            compiled,
            counts=foreign <= self._spare_share() + _TOLERATED
            and not compiled
            and len(report["times"]) == plan.steps,
        )

    def _run(self, worker: Worker, steps: int, cap: float, phase: str) -> Message:
        command = {"do": "turn", "steps": steps, "cap": cap}
        return worker.ask(command, timeout=2 * cap + _TURN_PATIENCE, phase=phase)

    def _cpu_seconds(self) -> float:
        # Finding children takes longer than some turns.
        return sum(
            worker.cpu_seconds(children=self.outcome.descriptions[key]["loader_workers"] > 0)
            for key, worker in self.workers.items()
        )

    def _spare_share(self) -> float:
        """Return the share of the CPUs that the hungrier variant leaves to others."""
        needed: int = max(
            description["environment"]["threads"] + description["loader_workers"]
            for description in self.outcome.descriptions.values()
        )
        return max(0.0, 1 - needed / len(cpus()))

    def _wait_until_quiet(self) -> None:
        """Wait a few seconds until a short sample finds the CPUs free, some times in a launch."""
        began = time.monotonic()
        limit = min(_QUIET_WAIT, self._patience_s)
        while (waited := time.monotonic() - began) < limit:
            busy = busy_seconds()
            time.sleep(0.05)
            share = (busy_seconds() - busy) / (0.05 * len(cpus()))
            # The clock of the kernel ticks every 10 ms: allow for one tick.
            if share <= self._spare_share() + 2 * _TOLERATED:
                break
        self._patience_s -= waited
