"""Finding the number of loader workers from how long steps wait for data."""

from __future__ import annotations

import math
from statistics import fmean, median

# Below this share of a step, waiting for data is not worth another process.
_WAIT_WORTH_A_WORKER = 0.05
# More workers stay only if steps got shorter by this share.
_GAIN_TO_STAY = 0.05
_FEWEST_BATCHES = 8
_SHORTEST_LOOK = 0.5  # seconds
_PASSED_OVER = 2  # batches at the beginning, which come late or early


class Search:
    """Finds the number of workers from how long steps wait for data.

    It goes up only, as far as that makes steps shorter, and one step back where it does not.

    Args:
        workers: The number that there is.
        most: The largest that is allowed.
    """

    def __init__(self, workers: int, most: int) -> None:
        self.workers = workers
        self.most = most
        self.result = ""
        """What was found, once the search is over."""
        self._before: tuple[int, float] | None = None
        self._start(_PASSED_OVER)

    def note(self, wait: float, rest: float) -> int | None:
        """Take the seconds that a batch was waited for, and those of the rest of its step.

        Returns:
            Another number of workers, if it is time for that.
        """
        if self.result:
            return None
        if self._pass_over:
            self._pass_over -= 1
            return None
        self._waits.append(wait)
        self._rests.append(rest)
        if len(self._waits) < _FEWEST_BATCHES or sum(self._waits + self._rests) < _SHORTEST_LOOK:
            return None
        # Several workers come at once, so waiting is uneven and its mean counts. The rest of a step
        # is even, but for a validation or a checkpoint now and then.
        return self._decide(fmean(self._waits), median(self._rests))

    def _start(self, pass_over: int) -> None:
        self._waits: list[float] = []
        self._rests: list[float] = []
        self._pass_over = pass_over

    def _decide(self, wait: float, rest: float) -> int | None:
        step, share = wait + rest, wait / (wait + rest)
        if self._before is not None:
            fewer, longer = self._before
            if step > longer * (1 - _GAIN_TO_STAY):
                self.result = f"{workers_text(self.workers)} did not make steps shorter"
                self.workers = fewer
                return fewer
        # What one process needs for a batch, if workers do nothing but that.
        alone = wait if not self.workers else self.workers * step
        needed = math.ceil(1.1 * alone / rest) if rest > alone / self.most else self.most
        wanted = min(max(needed, self.workers + 1), self.most)
        if share < _WAIT_WORTH_A_WORKER or wanted <= self.workers:
            self.result = f"steps wait for data {share:.0%} of the time"
            if share >= _WAIT_WORTH_A_WORKER:
                self.result += ", and more workers than CPUs are not tried"
            return None
        self._before = (self.workers, step)
        self.workers = wanted
        # Until what the old workers had begun is used up, and the new ones keep up.
        self._start(_PASSED_OVER + 4 * wanted)
        return wanted


def workers_text(number: int) -> str:
    """Return the number of workers in words."""
    return "no worker" if not number else "1 worker" if number == 1 else f"{number} workers"
