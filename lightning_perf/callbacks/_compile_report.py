"""Counting what Dynamo does during a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from time import perf_counter
from typing import Any

from lightning.pytorch import Trainer

# Dynamo's own counters and callbacks are private, but it offers no public ones.
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

from lightning_perf._attributes import instance_attribute

_BREAKS_NAMED = 3


class CompileReport:
    """Tells after each epoch what was compiled in it, and what kept it from being one graph.

    Epochs in which nothing happened are passed over.

    Args:
        trainer: The trainer of the run.
        say: Tells the user a line.
    """

    def __init__(self, trainer: Trainer, say: Callable[[str], None]) -> None:
        self._trainer, self._say = trainer, say
        self._first_epochs: dict[str, int] = {}
        self._started = 0.0
        self._graphs_seen = _graphs()
        self._breaks_seen, self._limits_seen = Counter(counters["graph_break"]), _limit_hits()
        self._new: Counter[str] = Counter()
        self._again: Counter[str] = Counter()
        self._seconds = 0.0
        self._lines = 0
        self._totals: Counter[str] = Counter()

    def starts(self, *_: Any) -> None:
        """Note that Dynamo, or a backend behind it, begins to work."""
        self._started = perf_counter()

    def ends(self, *_: Any) -> None:
        """Note what came out; later than in the first epoch of its stage, it was compiled again.

        Counted are graphs, not calls: the backward pass and CUDA graphs have calls of their own.
        """
        if self._started:
            self._seconds += perf_counter() - self._started
            self._started = 0.0
        new, self._graphs_seen = max(0, _graphs() - self._graphs_seen), _graphs()
        if new:
            stage, epoch = stage_of(self._trainer), self._trainer.current_epoch
            first = self._first_epochs.setdefault(stage, epoch)
            (self._again if epoch > first else self._new)[stage] += new

    def tell(self) -> None:
        """Say what happened since the last time, if anything did."""
        self.ends()
        breaks = Counter(counters["graph_break"]) - self._breaks_seen
        limits = _limit_hits() - self._limits_seen
        self._breaks_seen, self._limits_seen = Counter(counters["graph_break"]), _limit_hits()
        new, again = self._new.total(), self._again.total()
        parts = []
        if new:
            parts.append(f"{_plural(new, 'graph')} compiled in {self._seconds:.0f} s")
        if again:
            parts.append(
                f"{_plural(again, 'graph')} compiled again ({', '.join(self._again)}) in "
                f"{self._seconds:.0f} s, as a shape, type or setting is new; "
                "TORCH_LOGS=recompiles names it"
            )
        if breaks:
            reasons = [
                f"{reason.splitlines()[0]} ({n})" for reason, n in breaks.most_common(_BREAKS_NAMED)
            ]
            parts.append(f"{_plural(breaks.total(), 'graph break')}: {'; '.join(reasons)}")
        if limits > 0:
            parts.append(
                "Dynamo's recompile limit was reached, so new inputs run uncompiled: pass "
                "dynamic=True, or pad batches to fewer lengths in the loader's collate_fn"
            )
        if parts:
            self._lines += 1
            self._say(f"{self._when()}: {'. '.join(parts)}.")
        self._totals.update(
            graphs=new + again, again=again, breaks=breaks.total(), seconds=round(self._seconds)
        )
        self._new, self._again, self._seconds = Counter(), Counter(), 0.0

    def tell_all(self) -> None:
        """Say the rest, and the sums if they were told in several lines."""
        self.tell()
        if self._lines > 1:
            totals = self._totals
            self._say(
                f"in all {_plural(totals['graphs'], 'graph')} compiled in {totals['seconds']} s, "
                f"{totals['again']} of them again, and "
                f"{_plural(totals['breaks'], 'graph break')}."
            )

    def _when(self) -> str:
        if self._trainer.state.fn == "fit":
            return f"epoch {self._trainer.current_epoch}"
        return stage_of(self._trainer)


@contextmanager
def compile_report(trainer: Trainer, say: Callable[[str], None]) -> Iterator[CompileReport]:
    """Count Dynamo's work in a block; its counters are read, never cleared."""
    report = CompileReport(trainer, say)
    epoch_ends = trainer.fit_loop.on_advance_end

    def on_advance_end() -> None:
        report.tell()
        epoch_ends()

    callback_handler.register_start_callback(report.starts)
    callback_handler.register_end_callback(report.ends)
    with ExitStack() as stack:
        stack.enter_context(instance_attribute(trainer.fit_loop, "on_advance_end", on_advance_end))
        stack.callback(report.tell_all)
        stack.callback(_forget, report)
        yield report


def stage_of(trainer: Trainer) -> str:
    """Return what the trainer does at this moment: ``"train"``, ``"validate"`` ..."""
    stage = trainer.state.stage
    if stage is None:
        return "setup"
    return "validate" if trainer.sanity_checking else stage.value


def _forget(report: CompileReport) -> None:
    with suppress(ValueError):  # `torch._dynamo.reset()` empties the lists
        callback_handler.remove_start_callback(report.starts)
    with suppress(ValueError):
        callback_handler.remove_end_callback(report.ends)


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _limit_hits() -> int:
    # PyTorch 2.6 says cache_size_limit, newer ones recompile limit or recompile_limit.
    return sum(
        times
        for reason, times in counters["unimplemented"].items()
        if "recompile" in reason.splitlines()[0] or "cache_size_limit" in reason
    )


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
