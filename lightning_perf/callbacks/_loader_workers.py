"""Changing the settings of a loader in place, also within an epoch, without losing order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_perf._attributes import instance_attribute
from lightning_perf.callbacks._worker_search import Search, workers_text

clock = time.perf_counter

_ITERATIONS = "_lightning_perf_iterations"

# torch keeps the context under this name; its property insists on workers.
_CONTEXT = "_DataLoader__multiprocessing_context"


@dataclass(frozen=True)
class Settings:
    """How a loader is served, by the names of `DataLoader`."""

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None
    multiprocessing_context: BaseContext | None
    timeout: float

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Settings:
        """Read them."""
        return cls(
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            persistent_workers=loader.persistent_workers,
            prefetch_factor=loader.prefetch_factor,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
        )

    def consistent(self) -> Settings:
        """Return them without what `DataLoader` refuses together with their number of workers."""
        if self.num_workers:
            return replace(self, prefetch_factor=self.prefetch_factor or 2)
        return replace(
            self,
            persistent_workers=False,
            prefetch_factor=None,
            multiprocessing_context=None,
            timeout=0,
        )

    def write(self, loader: DataLoader[Any]) -> None:
        """Set them in place: class, sampler, collate function and all else of the loader stay.

        `DataLoader` itself lets nobody do so later.
        """
        settings = vars(self.consistent()).copy()
        settings[_CONTEXT] = settings.pop("multiprocessing_context")
        vars(loader).update(settings)


class ServedLoader:
    """Settings of a loader that hold until `close`, and workers that may change in number.

    A plain run draws a seed for the workers at each iteration, but once only where they persist.
    The same is drawn here, whatever the settings: so the order of shuffled data is the same.

    Args:
        loader: The loader; it is changed in place.
        asked: The settings to set.
        search: What finds the number of workers, if that is not fixed.
        say: Tells the user a line.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        asked: Settings,
        search: Search | None,
        say: Callable[[str], None],
    ) -> None:
        self.loader = loader
        self.asked = asked
        self.search = search
        self.say = say
        self.own = Settings.of(loader)
        self.make: Callable[[], Any] = loader._get_iterator
        self.iterations = 0
        self.told_memory = False
        end_workers(loader)
        asked.write(loader)
        if makes_torchs_iterators(loader):
            vars(loader)["_get_iterator"] = self.iterator

    @property
    def iterations(self) -> int:
        """How many iterations there were; kept with the loader, so that probes can be undone."""
        return int(vars(self.loader)[_ITERATIONS])

    @iterations.setter
    def iterations(self, number: int) -> None:
        vars(self.loader)[_ITERATIONS] = number

    def iterator(self) -> ServedIterator:
        """Return a new iteration of the loader, in the place of torch's."""
        self.iterations += 1
        return ServedIterator(self)

    def open(self) -> Any:
        """Make torch's iterator of a new iteration."""
        with ExitStack() as stack:
            if self.iterations > 1 and self._persists(self.own):
                stack.enter_context(self.other_generator(self.iterations))
            return self.make()

    def again(self) -> None:
        """Draw, at a further iteration of persistent workers, what a plain run draws."""
        self.iterations += 1
        if not self._persists(self.own):
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)

    def other_generator(self, seed: int) -> Any:
        """Let the seed for workers come from somewhere else than the run's random numbers."""
        return instance_attribute(self.loader, "generator", torch.Generator().manual_seed(seed))

    def close(self) -> None:
        """End the workers and put everything back."""
        end_workers(self.loader)
        for name in ("_get_iterator", _ITERATIONS):
            vars(self.loader).pop(name, None)
        attributes = vars(self.own).copy()
        attributes[_CONTEXT] = attributes.pop("multiprocessing_context")
        vars(self.loader).update(attributes)

    @staticmethod
    def _persists(settings: Settings) -> bool:
        return settings.persistent_workers and settings.num_workers > 0


class ServedIterator(Iterator[Any]):
    """An iteration of a loader whose workers may change in number while it is under way.

    The indices that are left go on where they are, to the next workers, once all batches of the old
    ones were given.
    """

    def __init__(self, served: ServedLoader) -> None:
        self._served = served
        self._inner = served.open()
        self._rest: Any = None
        self._given: float | None = None

    def _reset(self, loader: DataLoader[Any]) -> None:
        """Begin again, as `DataLoader` asks persistent workers to."""
        self._given = None
        if self._rest is None:
            self._served.again()
            self._inner._reset(loader)
            return
        # The iteration was left before the next workers could take over, and they begin this one.
        self._rest = None
        self.end()
        self._served.iterations += 1
        self._inner = self._served.open()

    def __len__(self) -> int:
        return len(self._served.loader)

    def __next__(self) -> Any:
        asked = clock()
        try:
            batch = next(self._inner)
        except StopIteration:
            if self._rest is None:
                self._tell_memory()
                raise
            self._hand_over()
            batch = next(self._inner)
        now, before = clock(), self._given
        self._given = now
        search = self._served.search
        if search is not None and before is not None:
            self._look(search, now - asked, asked - before)
        return batch

    def end(self) -> None:
        """End the workers, if there are any."""
        shut = getattr(self._inner, "_shutdown_workers", None)
        if shut is not None:
            shut()

    def __del__(self) -> None:
        if hasattr(self, "_inner"):
            self.end()

    def _look(self, search: Search, wait: float, rest: float) -> None:
        """Let the search see a step, and do what it says."""
        was_over = bool(search.result)
        workers = search.note(wait, rest)
        if workers is not None:
            self._prepare(workers)
        if search.result and not was_over:
            self._tell_memory()
            self._served.say(f"{workers_text(search.workers)}: {search.result}.")

    def _prepare(self, workers: int) -> None:
        """Give the present workers nothing more to do, and the next number to whoever follows."""
        self._rest, self._inner._sampler_iter = self._inner._sampler_iter, iter(())
        replace(self._served.asked, num_workers=workers).write(self._served.loader)

    def _hand_over(self) -> None:
        loader, served = self._served.loader, self._served
        order = "sampler" if loader.batch_sampler is None else "batch_sampler"
        rest, self._rest = self._rest, None
        seed = self._inner._base_seed
        self.end()
        with (
            instance_attribute(loader, order, _Rest(rest)),
            served.other_generator(seed % 2**63),
        ):
            self._inner = served.make()
        # Persistent workers begin the next epoch with it.
        self._inner._index_sampler = loader._index_sampler

    def _tell_memory(self) -> None:
        workers = getattr(self._inner, "_workers", ())
        if workers and not self._served.told_memory:
            self._served.told_memory = True
            used = memory_of(worker.pid for worker in workers)
            if used is not None:
                self._served.say(
                    f"{workers_text(len(workers))} with {used / 2**20:.0f} MiB of their own."
                )


class _Rest:
    """What is left of an order, as a sampler."""

    def __init__(self, rest: Iterator[Any]) -> None:
        self._rest = rest

    def __iter__(self) -> Iterator[Any]:
        return self._rest


def memory_of(processes: Iterator[int]) -> int | None:
    """Return the bytes that processes share with nobody, or ``None`` where nobody tells.

    Args:
        processes: Their numbers.
    """
    try:
        return sum(psutil.Process(number).memory_full_info().uss for number in processes)
    except psutil.Error:
        return None


def end_workers(loader: DataLoader[Any]) -> None:
    """End the persistent workers of a loader, if it has any."""
    iterator = loader._iterator
    loader._iterator = None
    for name in ("end", "_shutdown_workers"):
        if hasattr(iterator, name):
            getattr(iterator, name)()
            return


def makes_torchs_iterators(loader: DataLoader[Any]) -> bool:
    """Return whether a loader is served by torch's own code, whose iterations can be continued."""
    return type(loader)._get_iterator is DataLoader._get_iterator


def has_its_own_order(loader: DataLoader[Any]) -> bool:
    """Return whether the number of workers decides which data come."""
    return isinstance(loader.dataset, IterableDataset)
