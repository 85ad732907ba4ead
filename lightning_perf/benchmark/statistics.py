"""From step times to a ratio and its interval. Pure functions, no random numbers.

Two processes of the same program differ persistently by 1 to 3 %, so a launch (a pair of fresh
processes) is one observation, however many turns it took; `interval` works on launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot, log, sqrt
from statistics import NormalDist, fmean, median, stdev

LEVEL = 0.98
"""Looking at the interval after each launch from the fifth on costs coverage: at 98 % a difference
that is not there is claimed in about 5 % of comparisons."""
QUICK_LEVEL = 0.95
LAUNCH_SPREAD = 0.014
"""Standard deviation of a launch's log ratio between identical programs, as seen on 42 pairs."""
MIN_LAUNCHES = 5
MAX_LAUNCHES = 10
HALF_WIDTH = 0.01
DECIDED = "decided"
NARROW = "narrow enough"
SPENT = "all launches done"

# Student's t at 99 % (two-sided 98 %), for 1 to 9 degrees of freedom.
_T = (31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821)

Estimate = tuple[float, tuple[float, float]]


def turn_value(times: Sequence[float], *, discard: int, window: int) -> float:
    """Return the typical step time of a turn: the median of the means of consecutive steps.

    Args:
        times: Step times in order.
        discard: Steps at the start that do not count.
        window: Steps per mean. A multiple of the period of anything periodic, such as gradient
            accumulation, keeps its cost in the value; the median resists stalls.
    """
    steps = times[discard:]
    windows = [steps[i : i + window] for i in range(0, len(steps) - window + 1, window)]
    return median(fmean(steps) for steps in windows)


def hodges_lehmann(values: Sequence[float]) -> float:
    """Return the median of all pairwise means: as robust as a median, nearly as sharp as a mean."""
    return median(_pairwise_means(values))


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of `hodges_lehmann`, from the interval of the signed-rank test."""
    n = len(values)
    if n < 2:
        return float("inf")
    means = sorted(_pairwise_means(values))
    z = NormalDist().inv_cdf(0.975)
    rank = n * (n + 1) / 4 - z * sqrt(n * (n + 1) * (2 * n + 1) / 24)
    first = max(0, int(rank))
    return (means[-1 - first] - means[first]) / (2 * z)


def interval(log_ratios: Sequence[float]) -> Estimate:
    """Return the speed-up and its interval at `LEVEL` from the log ratios of 2 to 10 launches."""
    n = len(log_ratios)
    half = _T[n - 2] * stdev(log_ratios) / sqrt(n)
    return _estimate(fmean(log_ratios), half)


def quick_interval(pair_log_ratios: Sequence[float]) -> Estimate:
    """Return the speed-up and its interval at `QUICK_LEVEL` from the pairs of a single launch."""
    error = hypot(standard_error(pair_log_ratios), LAUNCH_SPREAD)
    return _estimate(
        hodges_lehmann(pair_log_ratios), NormalDist().inv_cdf((1 + QUICK_LEVEL) / 2) * error
    )


def stop_reason(log_ratios: Sequence[float]) -> str | None:
    """Return why no further launch is needed, or ``None``."""
    n = len(log_ratios)
    if n < MIN_LAUNCHES:
        return None
    _, (low, high) = interval(log_ratios)
    if not low <= 1 <= high:
        return DECIDED
    if log(high / low) / 2 <= HALF_WIDTH:
        return NARROW
    return SPENT if n >= MAX_LAUNCHES else None


def verdict(estimate: Estimate, *, level: float, launches: int, reason: str) -> str:
    """Put a speed-up into words."""
    speedup, (low, high) = estimate
    bounds = f"{level:.0%} interval {low:.3f} to {high:.3f}"
    ran = f"{launches} launch{'es' if launches > 1 else ''}, stopped: {reason}"
    if low > 1:
        return f"{speedup:.3f}x faster, {bounds} ({ran})"
    if high < 1:
        return f"{1 / speedup:.3f}x slower, speed-up {speedup:.3f}, {bounds} ({ran})"
    largest = max(high, 1 / low) - 1
    if reason in (NARROW, SPENT):
        return f"no difference larger than {largest:.1%} ({ran})"
    return f"undecided: a difference of up to {largest:.1%} is possible, {bounds} ({ran})"


def _pairwise_means(values: Sequence[float]) -> list[float]:
    return [(x + y) / 2 for i, x in enumerate(values) for y in values[i:]]


def _estimate(center: float, half: float) -> Estimate:
    return exp(center), (exp(center - half), exp(center + half))
