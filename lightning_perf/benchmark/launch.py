"""One launch: a pair of fresh processes that take turns, a few steps at a time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

from lightning_perf.benchmark.process import Message, Worker, busy_seconds, cpus
from lightning_perf.benchmark.statistics import hodges_lehmann, standard_error, turn_value

KEYS = ("a", "b")
BLOCKS = 12
FEWEST_BLOCKS = 6
SHARP = 0.01
"""Standard error below which more turns of a launch are useless: launches differ by as much."""
LAUNCH_SECONDS = 30.0
"""Longest time for the turns of one launch, on a restless machine or with a slow model."""

_START_TIMEOUT = 900.0  # imports, set-up, and the first step with all its compiling
_TURN_PATIENCE = 60.0
_WARM_UP_TURNS = 8
_WARM_UP_SECONDS = 0.3
_SAMPLE_SECONDS = 0.2
_SETTLED = 0.1
# Shorter turns lose to the cold start, longer ones to a machine whose speed changes, as shared ones
# do within tenths of a second.
_TURN_SECONDS = 0.03
_FEWEST_STEPS = 3
_COLD_SECONDS = 0.02  # what the other process pushed out of the caches is back after so long
_COLD_STEPS = 3
_BLOCK_SECONDS = 0.4  # the kernel counts busy time in ticks of 10 ms
_WINDOW = 5
_TOLERATED = 0.1  # share of the CPUs that others may take beyond those that nobody needs
_QUIET_WAIT = 3.0
_QUIET_WAITS = 20.0


@dataclass(frozen=True)
class TurnPlan:
    """How many steps a turn has, which of them count, and how many pairs of turns make a block."""

    steps: int
    discard: int
    window: int
    pairs: int = 1


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
    faults: int
    switches: int
    compiled: bool
    counts: bool
    """Whether this turn and its block are undisturbed; a pair counts if both its turns are."""
    foreign_share: float = 0.0
    """Share of the CPUs that other programs took during the block."""


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
    plan: TurnPlan = TurnPlan(_FEWEST_STEPS + 1, 1, 1)
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
    fast = min(step_a, step_b)
    counted = max(_FEWEST_STEPS, math.ceil(_TURN_SECONDS / fast))
    discard = _COLD_STEPS if fast < _COLD_SECONDS else 1
    if prefetched:
        discard = max(discard, prefetched + 1)
    many = counted >= 3 * _WINDOW
    window = accumulate * math.ceil(_WINDOW / accumulate) if many else accumulate
    steps = discard + math.ceil(counted / window) * window
    return TurnPlan(steps, discard, window, math.ceil(_BLOCK_SECONDS / (steps * (step_a + step_b))))


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
        """Let the two take turns until the ratio is sharp or ``seconds`` are over.

        Slow models get the fewest blocks anyway, and disturbed ones have twice the time.
        """
        seconds = min(seconds, LAUNCH_SECONDS)
        plan, log_ratios = self.outcome.plan, self.outcome.log_ratios
        steps_s = sum(start.step_seconds for start in self.outcome.starts.values())
        block_s = plan.pairs * plan.steps * steps_s
        most = max(FEWEST_BLOCKS, int(seconds / block_s))
        began, tried, good = time.monotonic(), 0, 0
        while good < most and tried < 2 * most:
            tried += 1
            good += self._block()
            sharp = good >= BLOCKS and standard_error(log_ratios) < SHARP
            if sharp or time.monotonic() - began > 2 * most * block_s:
                break
        self.outcome.enough = good >= FEWEST_BLOCKS and 2 * good > tried
        self.describe()

    def _plan(self) -> TurnPlan:
        """Size the turns by the faster of two quiet samples of each variant."""
        for key, worker in self.workers.items():
            start = self.outcome.starts[key]
            for _ in range(2):
                self._wait_until_quiet()
                steps = max(2, min(200, math.ceil(_SAMPLE_SECONDS / start.step_seconds)))
                report = self._run(worker, steps, _START_TIMEOUT, "warming up")
                start.step_seconds = min(start.step_seconds, fmean(report["times"]))
        descriptions = self.outcome.descriptions.values()
        return plan_turns(
            *(start.step_seconds for start in self.outcome.starts.values()),
            accumulate=math.lcm(*(d["accumulate"] for d in descriptions)),
            prefetched=0 if self.outcome.frozen else max(d["prefetched"] for d in descriptions),
        )

    def _block(self) -> bool:
        """Run some pairs, one after the other; return whether any of them counts."""
        self._wait_until_quiet()
        plan, log_ratios = self.outcome.plan, self.outcome.log_ratios
        done, first = len(log_ratios), len(self.outcome.turns) // 2 + 1
        busy, cpu, began = busy_seconds(), self._cpu_seconds(), time.monotonic()
        pairs = [self._pair(number) for number in range(first, first + plan.pairs)]
        available = (time.monotonic() - began) * len(cpus())
        cpu, busy = self._cpu_seconds() - cpu, busy_seconds() - busy
        foreign = max(0.0, (busy - cpu) / available)
        for pair in pairs:
            self._keep(pair, foreign)
        return len(log_ratios) > done

    def _pair(self, number: int) -> dict[str, Turn]:
        self._tell("measuring", number)
        order = self._random.sample(KEYS, 2)
        return {key: self._turn(key, number, first=key == order[0]) for key in order}

    def _turn(self, key: str, pair: int, *, first: bool) -> Turn:
        plan, start = self.outcome.plan, self.outcome.starts[key]
        expected = plan.steps * start.step_seconds
        report = self._run(self.workers[key], plan.steps, 5 * expected + 1, "training")
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
            report["faults"],
            report["switches"],
            compiled,
            counts=not compiled and len(report["times"]) == plan.steps,
        )

    def _keep(self, pair: dict[str, Turn], foreign_share: float) -> None:
        for turn in pair.values():
            turn.foreign_share = round(foreign_share, 3)
            turn.counts &= foreign_share <= self._spare_share() + _TOLERATED
        self.outcome.turns += pair.values()
        if all(turn.counts for turn in pair.values()):
            plan = self.outcome.plan
            a, b = (
                turn_value(pair[key].times, discard=plan.discard, window=plan.window)
                for key in KEYS
            )
            self.outcome.log_ratios.append(math.log(a / b))
            fastest_a, fastest_b = (min(pair[key].times[plan.discard :]) for key in KEYS)
            self.outcome.fastest_log_ratios.append(math.log(fastest_a / fastest_b))

    def _run(self, worker: Worker, steps: int, cap: float, phase: str) -> Message:
        command = {"do": "turn", "steps": steps, "cap": cap}
        return worker.ask(command, timeout=2 * cap + _TURN_PATIENCE, phase=phase)

    def _cpu_seconds(self) -> float:
        """Return what this comparison itself has worked."""
        # Finding children takes longer than some turns.
        return time.process_time() + sum(
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
