import random
from math import exp, log
from statistics import median, stdev

import pytest

from lightning_perf.benchmark import statistics
from lightning_perf.benchmark.statistics import (
    hodges_lehmann,
    interval,
    quick_interval,
    standard_error,
    stop_reason,
    turn_value,
    verdict,
)

LAUNCH_SD = 0.013


def compare(generator: random.Random, effect: float) -> tuple[list[float], str]:
    """Launches of a comparison by the stopping rule."""
    values: list[float] = []
    while True:
        values.append(generator.gauss(effect, LAUNCH_SD))
        reason = stop_reason(values)
        if reason:
            return values, reason


def outcomes(effect: float, runs: int = 1000) -> tuple[float, float, float]:
    """Share of comparisons that say faster, slower, and nothing."""
    generator = random.Random(1)
    bounds = [interval(compare(generator, effect)[0])[1] for _ in range(runs)]
    faster = sum(low > 1 for low, _ in bounds) / runs
    slower = sum(high < 1 for _, high in bounds) / runs
    return faster, slower, 1 - faster - slower


def test_a_against_itself_is_no_difference():
    faster, slower, nothing = outcomes(effect=0.0)
    assert nothing > 0.94
    assert abs(faster - slower) < 0.03


@pytest.mark.parametrize("sign", [1, -1])
def test_two_percent_are_found_and_never_with_the_wrong_sign(sign):
    faster, slower, _ = outcomes(effect=sign * 0.02)
    right, wrong = (faster, slower) if sign > 0 else (slower, faster)
    assert right > 0.9
    assert wrong == 0


def test_a_launch_is_one_observation_however_many_pairs_it_has():
    generator = random.Random(2)
    runs, missed_by_pairs, missed_by_quick = 500, 0, 0
    for _ in range(runs):
        launch = generator.gauss(0, 0.014)
        # Heavy tails, as real pairs have.
        pairs = [
            launch + generator.gauss(0, 0.015) * exp(generator.gauss(0, 0.6)) for _ in range(12)
        ]
        low, high = quick_interval(pairs)[1]
        missed_by_quick += not low <= 1 <= high
        missed_by_pairs += abs(hodges_lehmann(pairs)) > 1.96 * standard_error(pairs)
    assert missed_by_quick / runs < 0.08
    assert missed_by_pairs / runs > 0.3


def test_stops_when_decided_narrow_or_out_of_launches():
    steady = [0.001 * (-1) ** i for i in range(10)]
    wild = [0.05 * (-1) ** i for i in range(10)]
    assert stop_reason([0.5] * 4) is None
    assert stop_reason([log(2) + x for x in steady[:5]]) == statistics.DECIDED
    assert stop_reason(steady[:5]) == statistics.NARROW
    assert stop_reason(wild[:9]) is None
    assert stop_reason(wild) == statistics.SPENT


def test_interval_is_student_s_and_inverts_cleanly():
    values = [0.01, 0.02, 0.03, 0.015, 0.025]
    speedup, (low, high) = interval(values)
    half = 3.747 * stdev(values) / 5**0.5
    assert (speedup, low, high) == pytest.approx((exp(0.02), exp(0.02 - half), exp(0.02 + half)))
    inverse, bounds = interval([-value for value in values])
    assert (1 / inverse, 1 / bounds[1], 1 / bounds[0]) == pytest.approx((speedup, low, high))


@pytest.mark.parametrize("launches", range(2, 11))
def test_there_is_a_quantile_for_every_number_of_launches(launches):
    values = [0.01 * (i % 2) for i in range(launches)]
    low, high = interval(values)[1]
    assert low < exp(sum(values) / launches) < high


def test_turn_value_discards_the_start_and_resists_stalls():
    assert turn_value([9.0, 9.0, 1.0, 2.0, 3.0], discard=2, window=3) == 2.0
    assert turn_value([1.0] * 9 + [1000.0], discard=0, window=5) > 1.0
    assert turn_value([1.0] * 14 + [1000.0], discard=0, window=5) == 1.0


def test_a_window_keeps_what_happens_once_per_period():
    accumulating = [1.0, 1.0, 1.0, 3.0] * 6
    assert turn_value(accumulating, discard=0, window=4) == 1.5
    assert turn_value(accumulating, discard=3, window=4) == 1.5
    assert median(accumulating) == 1.0


def test_hodges_lehmann_resists_an_outlier():
    assert hodges_lehmann([1.0, 2.0, 3.0]) == 2.0
    assert hodges_lehmann([1.0, 1.1, 0.9, 1.0, 50.0]) < 1.2


def test_one_pair_has_no_standard_error():
    assert standard_error([0.1]) == float("inf")


@pytest.mark.parametrize(
    ("estimate", "reason", "words"),
    [
        ((1.034, (1.021, 1.047)), "decided", "1.034x faster, 98% interval 1.021 to 1.047"),
        ((0.8, (0.75, 0.85)), "decided", "1.250x slower, speed-up 0.800"),
        ((1.0, (0.995, 1.005)), "narrow enough", "no difference larger than 0.5%"),
        ((1.0, (0.98, 1.02)), "all launches done", "no difference larger than 2.0%"),
        ((1.0, (0.98, 1.02)), "budget spent", "undecided: a difference of up to 2.0% is possible"),
    ],
)
def test_verdict_says_what_was_found_and_why_it_stopped(estimate, reason, words):
    text = verdict(estimate, level=0.98, launches=6, reason=reason)
    assert text.startswith(words)
    assert text.endswith(f"(6 launches, stopped: {reason})")
