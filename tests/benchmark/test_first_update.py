"""What rounding does to a first update, and what only a fault does, on updates made up for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_perf.benchmark.first_update import compare

Update = dict[str, np.ndarray]
LAYERS = 12


def drawn(seed: int) -> Update:
    generator = np.random.default_rng(seed)
    update: Update = {}
    for layer in range(LAYERS):
        update[f"parameter/{layer}.weight"] = generator.normal(size=(40, 30))
        update[f"parameter/{layer}.bias"] = generator.normal(size=40)
        update[f"buffer/{layer}.running_mean"] = generator.normal(size=40)
    for name in [name for name in update if name.startswith("parameter/")]:
        update[name.replace("parameter/", "momentum_buffer/")] = 10 * update[name]
    return update


def turned(update: Update, by: float, seed: int) -> Update:
    """The same lengths in other directions, as rounding makes of a deep network's gradients."""
    other, cosine = drawn(seed), 1 - by
    result = dict(update)
    for name, value in update.items():
        if not name.startswith("buffer/"):
            sideways = other[name] * (np.linalg.norm(value) / np.linalg.norm(other[name]))
            result[name] = cosine * value + np.sqrt(1 - cosine**2) * sideways
    return result


def found(tmp_path: Path, b: Update, noise: float, a: Update | None = None) -> list[str]:
    """Compare with an update whose perturbed runs are turned by so much."""
    a = drawn(0) if a is None else a
    updates = {"a": a, "b": b, **{f"p{i}": turned(a, noise, 100 + i) for i in range(4)}}
    for name, update in updates.items():
        np.savez(tmp_path / f"{name}.npz", **update)
    files = [tmp_path / f"{name}.npz" for name in updates]
    return compare(files[0], files[1], files[2:], exact=False)


@pytest.mark.parametrize("noise", [1e-6, 0.01, 0.1, 0.5, 0.8])
def test_directions_that_rounding_turns_are_no_fault(tmp_path: Path, noise: float) -> None:
    assert found(tmp_path, turned(drawn(0), 1.2 * noise, 1), noise) == []


@pytest.mark.parametrize("noise", [1e-6, 0.01, 0.5])
def test_a_factor_shared_by_all_is_found_where_b_rounds_as_finely_as_a(
    tmp_path: Path, noise: float
) -> None:
    b = {name: value * 1.02 for name, value in turned(drawn(0), 1e-6, 1).items()}
    said = "; ".join(found(tmp_path, b, noise))
    assert "the change of the parameters is 1.02 times that of A (median of 24 tensors)" in said
    assert "the optimizer's momentum_buffer is 1.02 times that of A" in said


def everywhere(update: Update, factor: float) -> Update:
    return {name: value * factor for name, value in update.items()}


def in_one_layer(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Update], Update]:
    def changed(update: Update) -> Update:
        return update | {"parameter/3.weight": change(update["parameter/3.weight"])}

    return changed


FAULTS = {
    "three times": (in_one_layer(lambda x: 3 * x), r"another amount: 3.weight \(3(\.0\d)? times\)"),
    "frozen": (in_one_layer(lambda x: 0 * x), "not moved in B by the first update: 3.weight"),
    "the other way": (in_one_layer(lambda x: -x), "moved elsewhere: 3.weight"),
    "other elements": (in_one_layer(lambda x: x[::-1]), "moved elsewhere: 3.weight"),
    "garbage": (in_one_layer(lambda x: x + 1e28 * (x > 2)), "moved elsewhere: 3.weight"),
    "not a number": (in_one_layer(lambda x: x / 0 * 0), "moved elsewhere: 3.weight"),
    "all by a half": (lambda update: everywhere(update, 1.5), r"parameters is 1\.5\d* times"),
}


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("noise", [1e-6, 0.05])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_in_coarse_rounding_too(tmp_path: Path, fault: str, noise: float) -> None:
    make, said = FAULTS[fault]
    findings = found(tmp_path, make(turned(drawn(0), noise, 1)), noise)
    assert any(re.search(said, finding) for finding in findings), findings


def test_a_small_factor_of_one_layer_is_found_where_b_rounds_as_finely(tmp_path: Path) -> None:
    b = in_one_layer(lambda x: 1.2 * x)(drawn(0))
    assert any("3.weight (1.2 times)" in finding for finding in found(tmp_path, b, 1e-6))


@pytest.mark.parametrize("factor", [0.1, 20, 5000])
def test_what_is_zero_but_for_rounding_may_have_any_size(tmp_path: Path, factor: float) -> None:
    names = [f"{kind}/5.bias" for kind in ("parameter", "momentum_buffer")]
    a, b = drawn(0), turned(drawn(0), 0.01, 1)
    for name in names:
        a[name] = a[name] * 1e-6
        b[name] = b[name] * 1e-6 * factor
    assert found(tmp_path, b, 0.01, a) == []


def test_elements_that_are_zero_but_for_rounding_do_not_count(tmp_path: Path) -> None:
    """So the part of the keys in the bias of an attention's projection."""
    a, b = drawn(0), turned(drawn(0), 1e-6, 1)
    a["parameter/5.bias"][:10] *= 1e-6
    b["parameter/5.bias"][:10] *= 0.8
    assert found(tmp_path, b, 1e-6, a) == []


def test_statistics_that_move_by_another_amount_are_found(tmp_path: Path) -> None:
    b = turned(drawn(0), 0.05, 1)
    b["buffer/2.running_mean"] = 2 * b["buffer/2.running_mean"]
    (finding,) = found(tmp_path, b, 0.05)
    assert finding == "other change of a buffer: 2.running_mean (2 times)"


def test_statistics_that_only_b_moves_are_found_beside_others_that_both_move(
    tmp_path: Path,
) -> None:
    a, b = drawn(0), turned(drawn(0), 0.05, 1)
    a["buffer/2.running_mean"] *= 0
    (finding,) = found(tmp_path, b, 0.05, a)
    assert finding == "other change of a buffer: 2.running_mean (inf times)"
