"""Python's garbage collection at steps that are chosen, the same on all ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from time import perf_counter
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_perf._attributes import instance_attribute
from lightning_perf._item import Moment, PerfCallback
from lightning_perf._knobs import KNOBS, knobs

_EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")
_EVALUATION_ENDS = ("on_validation_end", "on_test_end", "on_predict_end")

_collectors: set[Collector] = set()


class GarbageCollection(PerfCallback):
    """Collect garbage every n steps, on all ranks at the same step, and not in between.

    Python looks for objects in unreachable reference cycles whenever enough new objects exist. Each
    rank then stops at a step of its own, and all others wait for it. A step is a batch of any loop;
    those that gradient accumulation puts together count one by one. Each evaluation ends with a
    collection, too.

    Do not use it where steps leave large tensors in reference cycles: they live for up to n steps.

    Args:
        every_n_steps: Batches from one collection to the next.
        empty_cache: After each collection also give the device's cached memory back to the driver.
            It is slow, since the next steps have to ask for it again: a last resort against
            fragmentation, or where another process needs the memory.
        strict: See `PerfCallback`.

    Raises:
        ValueError: ``every_n_steps`` is not a positive whole number.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[GarbageCollection(100)], accelerator="cpu", logger=False)

    Source: Linux tuning guide, section 4, "release and collect".
    """

    guide: ClassVar[str] = "L 4"
    changes: ClassVar[frozenset[str]] = frozenset({"gc_enabled", "gc_frozen"})
    exact: ClassVar[bool] = True
    moment: ClassVar[Moment] = "after_wrap"

    def __init__(
        self, every_n_steps: int = 50, *, empty_cache: bool = False, strict: bool | None = None
    ) -> None:
        super().__init__(strict=strict)
        _require_steps(every_n_steps)
        self.every_n_steps = every_n_steps
        self.empty_cache = empty_cache

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Count the batches of all loops, and collect."""
        strategy = trainer.strategy
        detail = f"every {self.every_n_steps} steps"
        empty_cache = _empty_cache_of(strategy.root_device) if self.empty_cache else None
        if self.empty_cache:
            device = strategy.root_device.type
            detail += "; cached memory given back" if empty_cache else f"; {device} has no cache"
        with ExitStack() as stack:
            collector = stack.enter_context(garbage_collection(self.every_n_steps, empty_cache))
            # Called once for each batch, however often an optimizer calls the training step.
            before = {"on_train_batch_start": collector.step}
            before |= dict.fromkeys(_EVALUATION_STEPS, collector.step)
            # Ranks may have had unequal numbers of batches: count from here again.
            before |= dict.fromkeys(_EVALUATION_ENDS, collector.collect)
            for name, act in before.items():
                call = _after(act, getattr(strategy, name))
                stack.enter_context(instance_attribute(strategy, name, call))
            yield detail
        if collector.times:
            self.say(
                f"{collector.times} collection{'' if collector.times == 1 else 's'} took "
                f"{collector.seconds:.2f} s and found {collector.objects} objects in cycles."
            )


class Collector:
    """Collects every so many steps, and counts.

    Args:
        every_n_steps: Steps from one collection to the next.
        then: Called after each.
    """

    def __init__(self, every_n_steps: int, then: Callable[[], None] | None = None) -> None:
        self.times = 0
        self.objects = 0
        self.seconds = 0.0
        self._every, self._then = every_n_steps, then
        self._steps, self._next = 0, every_n_steps
        self._frozen = False

    def step(self) -> None:
        """Count a step, and collect if it is time."""
        self._steps += 1
        if self._steps >= self._next:
            self.collect()

    def collect(self) -> None:
        """Collect now, and count the steps to the next time from here."""
        began = perf_counter()
        self._next = self._steps + self._every
        self.objects += gc.collect()
        if self._steps >= self._every and not self._frozen:
            # Modules, the model, compiled code: what there is after the first steps stays, and is
            # not looked at again. Only once, or garbage of later steps would stay too. Python
            # counts what is frozen one by one, which takes as long as a collection of it.
            self._frozen = True
            if not gc.get_freeze_count():
                gc.freeze()
        if self._then is not None:
            self._then()
        self.times += 1
        self.seconds += perf_counter() - began


@contextmanager
def garbage_collection(
    every_n_steps: int = 50, then: Callable[[], None] | None = None
) -> Iterator[Collector]:
    """Collect garbage every n steps in a block, and not in between.

    Args:
        every_n_steps: Steps from one collection to the next.
        then: Called after each, such as ``torch.cuda.empty_cache``.

    Yields:
        What is to be told of each step.

    Raises:
        ValueError: ``every_n_steps`` is not a positive whole number.

    Example:
        >>> with garbage_collection(every_n_steps=10) as collector:
        ...     for _ in range(20):
        ...         collector.step()
        >>> collector.times
        2
    """
    _require_steps(every_n_steps)
    _enable_in_forked_children()
    collector = Collector(every_n_steps, then)
    if gc.isenabled():
        _collectors.add(collector)
    try:
        # That it is frozen in the block is the collector's doing; the knob takes it back.
        with knobs(gc_frozen=KNOBS["gc_frozen"].read(), gc_enabled=False):
            yield collector
    finally:
        _collectors.discard(collector)


@cache
def _enable_in_forked_children() -> None:
    """Let forked loader workers, which take no steps, collect as ever.

    Python has no way to take this back, so it stays, and does nothing while nothing is collected.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_enable_where_collected)


def _enable_where_collected() -> None:
    if _collectors:
        gc.enable()


def _require_steps(every_n_steps: int) -> None:
    if not isinstance(every_n_steps, int) or every_n_steps < 1:
        raise ValueError(
            f"every_n_steps={every_n_steps!r} was asked for; it is a whole number of at least 1. "
            "To leave collecting to Python, remove GarbageCollection."
        )


def _empty_cache_of(device: torch.device) -> Callable[[], None] | None:
    """Return what gives cached memory of a device back, ``None`` where nothing is cached."""
    return getattr(torch.get_device_module(device), "empty_cache", None)


def _after(act: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def acting(*args: Any, **kwargs: Any) -> Any:
        act()
        return call(*args, **kwargs)

    return acting
