"""Counting what Dynamo does during a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning.pytorch import Trainer

# Dynamo's own counters and callbacks are private, but it offers no public ones.
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

_BREAKS_NAMED = 3


class CompileReport:
    """What was compiled in a run, when, and what kept it from being one graph.

    Args:
        trainer: The trainer of the run.
        say: Tells the user a line.
    """

    def __init__(self, trainer: Trainer, say: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._say = say
        self._first_epoch: dict[str, int] = {}
        self._breaks_before = Counter(counters["graph_break"])
        self._limits_before = _limit_hits()
        self.compiled = 0
        self.recompiled: Counter[int] = Counter()

    def note(self, *_: Any) -> None:
        """Count a compilation; later than the first epoch of its stage, it is a recompilation."""
        stage, epoch = stage_of(self._trainer), self._trainer.current_epoch
        self.compiled += 1
        if epoch > self._first_epoch.setdefault(stage, epoch):
            self.recompiled[epoch] += 1
            if self.recompiled[epoch] == 1:
                self._say(
                    f"compiling again in epoch {epoch} ({stage}): a shape, type or setting is new. "
                    "TORCH_LOGS=recompiles names it."
                )

    @property
    def graph_breaks(self) -> Counter[str]:
        """Reasons for which a region became several graphs, with how often."""
        return Counter(counters["graph_break"]) - self._breaks_before

    @property
    def limit_hits(self) -> int:
        """How often Dynamo gave up compiling code anew and ran it eagerly."""
        return _limit_hits() - self._limits_before

    def summary(self) -> str | None:
        """Return what happened in one line, ``None`` where nothing was compiled."""
        if not (self.compiled or self.limit_hits):
            return None
        parts = [_plural(self.compiled, "graph") + " compiled"]
        if self.recompiled:
            epochs = ", ".join(f"{n} in epoch {epoch}" for epoch, n in self.recompiled.items())
            parts.append(f"of them after the first epoch: {epochs}")
        if self.graph_breaks:
            reasons = [
                f"{reason.splitlines()[0]} ({n})"
                for reason, n in self.graph_breaks.most_common(_BREAKS_NAMED)
            ]
            breaks = _plural(self.graph_breaks.total(), "graph break")
            parts.append(f"{breaks}: {'; '.join(reasons)}")
        if self.limit_hits:
            parts.append(
                "Dynamo's recompile limit was reached, so new inputs run eagerly: pass "
                "dynamic=True, or pad batches to fewer lengths in the loader's collate_fn"
            )
        return ". ".join(parts) + "."


@contextmanager
def compile_report(trainer: Trainer, say: Callable[[str], None]) -> Iterator[CompileReport]:
    """Count Dynamo's work in a block; its counters are read, never cleared."""
    report = CompileReport(trainer, say)
    callback_handler.register_start_callback(report.note)
    try:
        yield report
    finally:
        with suppress(ValueError):  # `torch._dynamo.reset()` empties the list
            callback_handler.remove_start_callback(report.note)


def stage_of(trainer: Trainer) -> str:
    """Return what the trainer does at this moment: ``"train"``, ``"validate"`` ..."""
    stage = trainer.state.stage
    return stage.value if stage else "setup"


def _limit_hits() -> int:
    # PyTorch 2.6 says cache_size_limit, newer ones recompile limit or recompile_limit.
    return sum(
        times
        for reason, times in counters["unimplemented"].items()
        if "recompile" in reason.splitlines()[0] or "cache_size_limit" in reason
    )


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
