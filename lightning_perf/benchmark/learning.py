"""Whether a variant learns the same as the baseline.

Two rules, because each is blind to what the other sees. The losses of the variant may drift from
those of the baseline no more than the losses of the baseline itself do when its weights are
perturbed by about the precision of bfloat16: a yardstick taken on the user's own model, where a
fixed tolerance would be too wide for one model and too narrow for the next. And the first update
must agree tensor by tensor, see `lightning_perf.benchmark.first_update`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_perf.benchmark import first_update
from lightning_perf.benchmark.recorder import LearningRecord, record

__all__ = ["PERTURBATIONS", "LearningRecord", "LearningVerdict", "judge", "record"]

PERTURBATIONS = ((0.002, 1), (0.002, 2), (0.004, 3), (0.004, 4))
"""``(perturb, perturb_seed)`` of the four runs of the baseline that are `judge`'s yardstick. The
spacing of bfloat16 numbers is 0.4 %."""

# With 3, four of 60 harmless bf16-mixed runs of a network that memorised its data were refused;
# none with 5. A layer that stands still exceeds it a hundredfold, and faults too small for it are
# what the first update is compared for.
_FACTOR = 5


@dataclass
class LearningVerdict:
    """Whether B learns the same as A, and on what ground."""

    agree: bool | None
    """``None``: the two runs are not comparable."""
    summary: str
    """One sentence."""
    identical: bool = False
    """Whether all losses are bit-identical."""
    first_difference: int | None = None
    """Number, from 1, of the first batch whose losses differ."""
    max_relative_difference: float | None = None
    mean_relative_difference: float | None = None
    """Mean with sign: positive when B's losses are higher."""
    allowed_max: float | None = None
    """What the perturbed runs of A allow; ``None`` when they were not needed."""
    allowed_mean: float | None = None
    update_findings: list[str] = field(default_factory=list)
    """What differs in the first update, one line each."""
    metrics_a: dict[str, float] = field(default_factory=dict)
    metrics_b: dict[str, float] = field(default_factory=dict)
    losses_a: list[float] = field(default_factory=list)
    losses_b: list[float] = field(default_factory=list)


def judge(
    a: LearningRecord, b: LearningRecord, perturbed: Sequence[LearningRecord], *, exact: bool
) -> LearningVerdict:
    """Say whether B learns the same as A.

    Args:
        a: The baseline.
        b: The variant, recorded from the same seed with as many steps.
        perturbed: The baseline again, once for each of `PERTURBATIONS`. Not needed when the losses
            turn out bit-identical.
        exact: Whether everything that B changes claims to leave losses bit-identical. On a CPU it
            must then; on a GPU, where kernels may add in any order, the rule for inexact changes
            decides when it does not.
    """
    verdict = LearningVerdict(
        agree=None,
        summary="",
        metrics_a=a.metrics,
        metrics_b=b.metrics,
        losses_a=a.losses,
        losses_b=b.losses,
    )
    if reason := _not_comparable(a, b):
        verdict.summary = f"not comparable: {reason}"
        return verdict

    verdict.first_difference = _first_difference(a.losses, b.losses)
    verdict.identical = verdict.first_difference is None
    drift = _drift(a.losses, b.losses)
    if drift is not None:
        verdict.max_relative_difference, verdict.mean_relative_difference = drift.max, drift.mean

    exact = exact and a.device == "cpu"
    problems = _other_data(a, b)
    if not problems:
        problems = _losses_differ(verdict, a, perturbed, exact=exact)
        if a.update and b.update:
            files = [run.update for run in perturbed if run.update]
            verdict.update_findings = first_update.compare(a.update, b.update, files, exact=exact)
    problems += verdict.update_findings
    if not problems and not verdict.identical and verdict.allowed_max is None:
        verdict.summary = "not comparable: no perturbed run of the baseline can be compared with it"
        return verdict
    verdict.agree = not problems
    verdict.summary = _agreement(verdict, a, b) if verdict.agree else _disagreement(problems)
    return verdict


@dataclass(frozen=True)
class _Drift:
    """Relative differences between two runs' losses."""

    mean: float
    max: float
    expected_mean: float
    """What the mean may be by chance, given how far single losses are apart."""


def _drift(a: Sequence[float], b: Sequence[float]) -> _Drift | None:
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if math.isfinite(x) and math.isfinite(y)]
    if not pairs:
        return None
    # A loss that happens to lie near zero must not blow up its relative difference.
    floor = 1e-3 * statistics.fmean(abs(x) for x, _ in pairs) or 1.0
    relative = [(y - x) / max(abs(x), floor) for x, y in pairs]
    mean = statistics.fmean(relative)
    square = statistics.fmean(r * r for r in relative)
    by_chance = math.sqrt(square / len(relative))
    return _Drift(mean, max(abs(r) for r in relative), max(abs(mean), by_chance))


def _not_comparable(a: LearningRecord, b: LearningRecord) -> str | None:
    for name, run in (("A", a), ("B", b)):
        if run.error:
            return f"{name}: {run.error}"
    if a.initial_weights != b.initial_weights:
        return "the two start from different weights"
    if (step := _first_not_finite(a.losses)) is not None:
        return f"A's own loss is not finite at batch {step}"
    return None


def _other_data(a: LearningRecord, b: LearningRecord) -> list[str]:
    if (batch := _first_difference(a.batches, b.batches)) is not None:
        return [f"it trains on other data, in order or contents, from batch {batch} on"]
    if len(a.batches) != len(b.batches):
        return [f"it trains on {len(b.batches)} batches where A trains on {len(a.batches)}"]
    return []


def _losses_differ(
    verdict: LearningVerdict,
    a: LearningRecord,
    perturbed: Sequence[LearningRecord],
    *,
    exact: bool,
) -> list[str]:
    """Judge the losses, filling in what is allowed."""
    if (step := _first_not_finite(verdict.losses_b)) is not None:
        return [f"its loss is not finite at batch {step}"]
    if len(verdict.losses_b) != len(a.losses):
        return [f"it has a loss for {len(verdict.losses_b)} batches, A for {len(a.losses)}"]
    if verdict.identical:
        return []
    if exact:
        return [
            f"its losses differ from batch {verdict.first_difference} on, though its changes "
            "claim to be exact"
        ]
    yardstick = [d for run in perturbed if not run.error and (d := _drift(a.losses, run.losses))]
    if not yardstick:
        return []
    verdict.allowed_mean = _FACTOR * max(d.expected_mean for d in yardstick)
    verdict.allowed_max = _FACTOR * max(d.max for d in yardstick)
    mean, largest = verdict.mean_relative_difference or 0.0, verdict.max_relative_difference or 0.0
    problems = []
    if abs(mean) > verdict.allowed_mean:
        problems.append(
            f"its losses are off by {_percent(mean, '+')} on average, "
            f"{_percent(verdict.allowed_mean)} is allowed"
        )
    if largest > verdict.allowed_max:
        problems.append(
            f"its losses are off by up to {_percent(largest)}, "
            f"{_percent(verdict.allowed_max)} is allowed"
        )
    return problems


def _agreement(verdict: LearningVerdict, a: LearningRecord, b: LearningRecord) -> str:
    compared = "and the first update agrees tensor by tensor"
    if not (a.update and b.update):
        compared = "the first update was not compared"
    if verdict.identical:
        return f"losses are bit-identical over {len(a.losses)} batches, {compared}"
    return (
        f"losses drift by {_percent(verdict.mean_relative_difference, '+')} on average "
        f"({_percent(verdict.allowed_mean)} allowed) and by "
        f"{_percent(verdict.max_relative_difference)} at most "
        f"({_percent(verdict.allowed_max)} allowed), {compared}"
    )


def _percent(value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    digits = ".0f" if abs(value) >= 0.1 else ".2g"
    return f"{100 * value:{sign}{digits}}%"


def _disagreement(problems: Sequence[str]) -> str:
    return "B does not learn the same: " + "; ".join(problems)


def _first_difference(a: Sequence[float | str], b: Sequence[float | str]) -> int | None:
    """Return the number, from 1, of the first element whose bits differ."""
    for number, (x, y) in enumerate(zip(a, b, strict=False), start=1):
        # The text of a float tells all its bits that matter, and NaN equals NaN.
        if repr(x) != repr(y):
            return number
    return None


def _first_not_finite(losses: Sequence[float]) -> int | None:
    return next((i for i, loss in enumerate(losses, start=1) if not math.isfinite(loss)), None)
