"""A combined loader whose next batches are fetched by a thread while a step runs."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

Prepare = Callable[[Any], Callable[[], Any]]
"""Takes a batch in the thread, and returns what gives the one to use where the step runs."""

# How long the end of a run waits for a batch that is being fetched.
_PATIENCE = 30.0


class Fetched(NamedTuple):
    """A batch that was fetched in advance."""

    give: Callable[[], Any]
    """Gives it where the step runs."""
    place: tuple[int, int]
    """Number of the batch, and of the loader."""
    states: list[Any]
    """The states of the loaders after it."""


class AheadLoader(CombinedLoader):
    """Gives what the same `CombinedLoader` would, some batches of it fetched in advance.

    Nothing is fetched in advance that draws random numbers of this process: they would come at
    another moment between those of the steps. So the thread leaves alone the first two batches, by
    which that is found out, and each batch for which a loader begins anew. A loader that has a
    state tells that of the last batch that was handed out.

    Args:
        iterables: As for `CombinedLoader`.
        mode: As for `CombinedLoader`.
        depth: Batches to have ready at most.
        device: Where the batches go; pinned memory is that of the thread's own device.
        prepare: What else the thread does to a batch.
        tell: Called with the reason where batches cannot be fetched in advance.
    """

    def __init__(
        self,
        iterables: Any,
        mode: Any,
        depth: int,
        *,
        device: torch.device,
        prepare: Prepare | None,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(iterables, mode)
        self.device = device
        self._order = mode
        self.depth = depth
        self._prepare = prepare
        self._tell = tell
        self._fetching = threading.Lock()
        self._thread: _Ahead | None = None
        self._next_index = 0
        self._may, self._known = True, False
        self._closed = False

    def __iter__(self) -> AheadLoader:
        self.stop()
        super().__iter__()
        self._next_index = 0
        self._may, self._known = not self._closed, False
        return self

    def __next__(self) -> Any:
        index = self._next_index
        self._next_index += 1
        if self._thread is not None:
            if self._thread.is_left():
                return self._thread.take()
            self.stop()
        batches = self._until_a_loader_begins(index) - index if self._may and index else 0
        if batches <= 0:
            return super().__next__()
        if not self._known:
            return self._first_look()
        self._thread = _Ahead(self, batches)
        return self._thread.take()

    def _first_look(self) -> Any:
        """Return the next batch, and find out whether reading it draws random numbers."""
        before = _random_state()
        out = super().__next__()
        self._known = True
        self._may = _same(before, _random_state())
        if not self._may:
            self._tell(
                "reading a batch draws random numbers in this process, and in advance they would "
                "be other ones. Give the loader workers."
            )
        return out

    def reset(self) -> None:
        """End the thread too."""
        self.stop()
        super().reset()

    def stop(self) -> None:
        """End the thread, if there is one; batches that it has are dropped."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()

    def close(self) -> None:
        """Fetch nothing in advance any more."""
        self._closed, self._may = True, False
        self.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the thread fetch nothing while the block runs."""
        with self._fetching:
            yield

    def fetch(self) -> Fetched:
        """Take the next batch, in the thread."""
        with self._fetching:
            batch, index, loader = super().__next__()
            give = partial(_itself, batch) if self._prepare is None else self._prepare(batch)
            states = [type(each).state_dict(each) for each in self.stateful]
            return Fetched(give, (index, loader), states)

    @property
    def stateful(self) -> list[Any]:
        """The loaders that have a state."""
        return [loader for loader in self.flattened if isinstance(loader, _Stateful)]

    def _until_a_loader_begins(self, index: int) -> float:
        """Return the next batch from ``index`` on for which a loader begins anew, or the end."""
        lengths = [sized_len(loader) for loader in self.flattened]
        known = [length for length in lengths if length is not None]
        total = sized_len(self)
        end = float("inf") if total is None else total
        if len(lengths) == 1 or self._order not in ("max_size_cycle", "sequential"):
            return end
        if len(known) < len(lengths):
            self._may = False
            self._tell("several loaders are combined, of which one does not know its length.")
            return index
        if self._order == "sequential":
            limits = self.limits or [float("inf")] * len(known)
            parts = (min(length, limit) for length, limit in zip(known, limits, strict=True))
            begins = list(accumulate(parts))
        else:
            begins = [-(-index // length) * length for length in known if length]
        return min(end, *(begin for begin in begins if begin >= index), end)


class _Ahead:
    """A thread that fetches some batches in their order."""

    def __init__(self, loader: AheadLoader, batches: float) -> None:
        self._loader = loader
        self._left = batches
        self._ready: deque[tuple[Fetched | None, BaseException | None]] = deque()
        self._some = threading.Semaphore(0)
        self._room = threading.Semaphore(loader.depth)
        self._ending = False
        self._told = [_LastGiven(each) for each in loader.stateful]
        self._thread = threading.Thread(
            target=self._run, args=(batches,), name="lightning_perf prefetch", daemon=True
        )
        self._thread.start()

    def is_left(self) -> bool:
        """Return whether there is a batch to take."""
        return self._left > 0

    def take(self) -> Any:
        """Return the next batch, or raise what fetching it raised."""
        self._some.acquire()
        fetched, error = self._ready.popleft()
        self._left -= 1
        self._room.release()
        if fetched is None:
            self._left = 0
            raise error or RuntimeError("nothing was fetched")
        for told, state in zip(self._told, fetched.states, strict=True):
            told.state = state
        return fetched.give(), *fetched.place

    def end(self) -> None:
        """Let the thread end."""
        self._ending = True
        self._room.release()
        self._thread.join(_PATIENCE)
        self._ready.clear()
        for told in self._told:
            told.end()
        if self._thread.is_alive():
            rank_zero_warn(
                f"DevicePrefetch waited {_PATIENCE:.0f} s for a batch that is being fetched, and "
                "goes on without it. The thread ends with it, or with the program. Look for what "
                "blocks in the dataset, or give the loader a `timeout`."
            )

    def _run(self, batches: float) -> None:
        loader, fetched = self._loader, 0
        if loader.device.type == "cuda":
            torch.cuda.set_device(loader.device)  # each thread has one of its own
        while fetched < batches:
            self._room.acquire()
            if self._ending:
                return
            fetched += 1
            try:
                self._ready.append((loader.fetch(), None))
            except BaseException as error:
                self._ready.append((None, error))
                return
            finally:
                self._some.release()


class _LastGiven:
    """Tells the state of a loader after the last batch that was given, in place of its own.

    It still does after the end, where batches were fetched and never given: a checkpoint may be
    saved after the run. It goes as soon as the loader is used again.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.state = loader.state_dict()
        self._last: Any = None
        vars(loader)["state_dict"] = self

    def __call__(self) -> Any:
        if self._last is None or self._own() == self._last:
            return self.state
        self._go()
        return self._own()

    def end(self) -> None:
        """Note where the loader itself is now."""
        self._last = self._own()
        if self._last == self.state:
            self._go()

    def _own(self) -> Any:
        return type(self._loader).state_dict(self._loader)

    def _go(self) -> None:
        if vars(self._loader).get("state_dict") is self:
            del vars(self._loader)["state_dict"]


def _itself(batch: Any) -> Any:
    return batch


def _random_state() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()


def _same(before: tuple[Any, Any, torch.Tensor], now: tuple[Any, Any, torch.Tensor]) -> bool:
    numpys = all(np.array_equal(a, b) for a, b in zip(before[1], now[1], strict=True))
    return before[0] == now[0] and numpys and torch.equal(before[2], now[2])
