"""What recomputing spares and costs, seen in the first steps of a run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Trainer
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_perf._attributes import instance_attribute
from lightning_perf.callbacks._checkpoint.forward import Block, Stopwatch
from lightning_perf.callbacks._checkpoint.meter import Meter, readable, total_bytes, union

# After the first step, in which everything is new.
_TIMED_STEPS = 5


class FirstSteps:
    """Looks at the first training steps of a run, as they are, and says once what it saw.

    The first step tells bytes and FLOPs. In the next ones, the time of the recomputations, which
    alternate with the rest of the backward pass, is compared with the time of the rest. No step
    runs twice or without recomputation: the memory for that may not be there.

    Args:
        blocks: The blocks by name.
        stopwatch: Measures the recomputations, while it runs.
        say: Takes a line.
    """

    def __init__(
        self, blocks: Mapping[str, Block], stopwatch: Stopwatch, say: Callable[[str], None]
    ) -> None:
        self._blocks = blocks
        self._stopwatch = stopwatch
        self._say = say
        self._step = 0
        self._over = False
        self._inside = False
        self._in_backward = False
        self._flops = 0
        self._seconds = 0.0
        self._extra_times: list[float] = []
        self._calls: dict[bool, Counter[nn.Module]] = {False: Counter(), True: Counter()}

    @contextmanager
    def watching(self, trainer: Trainer) -> Iterator[None]:
        """Watch the steps of a trainer, for the length of a block of code."""
        strategy = trainer.strategy
        step, backward = strategy.training_step, strategy.backward

        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                self._next_step(trainer.lightning_module)
            with self._watched(backward=False):
                return step(*args, **kwargs)

        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            with self._watched(backward=True):
                return backward(*args, **kwargs)

        with (
            instance_attribute(strategy, "training_step", training_step),
            instance_attribute(strategy, "backward", watched_backward),
        ):
            yield
        if self._step and not self._over:
            self._end_step()
            self._report()

    def _next_step(self, module: nn.Module) -> None:
        if self._over:
            return
        if self._step:
            self._end_step()
        elif any(part._compiled_call_impl is not None for part in module.modules()):
            self._say("nothing is measured: the compiler decides what its code recomputes.")
            self._over = True
            return
        else:
            for block in self._blocks.values():
                block.recording, block.stopwatch = True, self._stopwatch
        self._step += 1
        if self._step > 1 + _TIMED_STEPS:
            self._report()

    @contextmanager
    def _watched(self, *, backward: bool) -> Iterator[None]:
        """Watch the forward or the backward pass; in manual optimization one is in the other."""
        outermost, outer = not self._inside, self._in_backward
        self._inside, self._in_backward = True, backward
        try:
            with self._measured() if outermost and not self._over else nullcontext():
                yield
        finally:
            self._inside, self._in_backward = not outermost, outer

    @contextmanager
    def _measured(self) -> Iterator[None]:
        if self._step == 1:
            hook = register_module_forward_pre_hook(self._count)
            try:
                with Meter() as meter:
                    yield
            finally:
                hook.remove()
            self._flops += meter.flops
        else:
            self._stopwatch.running = True
            start = self._stopwatch.now()
            try:
                yield
            finally:
                self._seconds += self._stopwatch.now() - start
                self._stopwatch.running = False

    def _count(self, module: nn.Module, args: Any) -> None:
        self._calls[self._in_backward][module] += 1

    def _end_step(self) -> None:
        if self._step == 1:
            for block in self._blocks.values():
                block.recording = False
            self._leave_alone()
            return
        recomputing = self._stopwatch.seconds
        if self._seconds > recomputing > 0:
            self._extra_times.append(recomputing / (self._seconds - recomputing))
        self._seconds = self._stopwatch.seconds = 0.0

    def _leave_alone(self) -> None:
        """Leave alone from now on what the model recomputes by itself."""
        names = [name for name, block in self._blocks.items() if self._recomputes_itself(block)]
        for name in names:
            self._blocks[name].left_alone = True
        if names:
            self._say(
                f"the model recomputes {_listed(names)} by itself, as the first step showed; left "
                "alone from now on."
            )

    def _recomputes_itself(self, block: Block) -> bool:
        """Say whether modules ran more often in the backward pass than we made them run."""
        before, after = self._calls[False], self._calls[True]
        ours = block.recomputations / max(1, block.calls)
        return after[block.module] > 0 or any(
            after[module] > before[module] * max(1.0, ours) for module in block.modules
        )

    def _report(self) -> None:
        self._over = True
        blocks = [block for block in self._blocks.values() if not block.left_alone]
        if not blocks:
            return
        profiles = [(block.kept, profile) for block in blocks for profile in block.profiles]
        if not profiles:
            self._say("no block was called with gradients in the first step: nothing is spared.")
            return
        before = total_bytes(union(profile.saved_inputs for _, profile in profiles))
        before += sum(profile.saved for _, profile in profiles)
        after = total_bytes(union(profile.inputs for _, profile in profiles))
        after += sum(profile.kept_bytes(kept) for kept, profile in profiles)
        again = sum(profile.flops for _, profile in profiles)
        extra = again - sum(profile.kept_flops(kept) for kept, profile in profiles)
        costs = [f"{extra / (self._flops - again):+.1%} FLOPs"] if self._flops > again else []
        if self._extra_times:
            costs.append(f"{statistics.median(self._extra_times):+.0%} time")
        count = f"{len(blocks)} block{'s keep' if len(blocks) > 1 else ' keeps'}"
        self._say(
            f"{count} {readable(after)} for the backward pass instead of {readable(before)} "
            f"({after / before - 1:.0%}); the recomputation adds {' and '.join(costs)} to forward "
            f"and backward."
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
