from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_comparison import FAKE_WORKER

from lightning_perf.benchmark import Variant, VariantFailed, coordinator, launch, process
from lightning_perf.benchmark.coordinator import claims_exact, environment

EQUAL = [0.0100, 0.0101, 0.0099, 0.0100, 0.0102]


def status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def noted(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def alive(folder: Path) -> list[int]:
    """The noted processes that still exist, frozen ones too, once a kill has had time to act."""
    pids = noted(folder)
    deadline = time.monotonic() + 5
    while True:
        found = [pid for pid in pids if status(pid) != psutil.STATUS_ZOMBIE]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def test_stops_after_five_launches_when_decided(compare_fakes):
    result = compare_fakes({"steps": [0.02]}, {"steps": [0.0100, 0.0101, 0.0099, 0.0100, 0.0102]})
    assert result.stop_reason == "decided"
    assert result.launches == 5
    assert result.pairs >= 5 * launch.BLOCKS
    assert result.speedup == pytest.approx(2, rel=0.01)
    assert result.interval[0] > 1.9
    assert result.step_seconds_a == 0.02
    assert result.samples_per_s_a == 1600
    assert not result.quick


def test_stops_when_narrow_enough(compare_fakes):
    result = compare_fakes({"steps": [0.01]}, {"steps": [0.01, 0.01002, 0.00998, 0.01, 0.01001]})
    assert (result.stop_reason, result.launches) == ("narrow enough", 5)
    assert result.interval[0] < 1 < result.interval[1]
    assert result.verdict.startswith("no difference larger than")


def test_ten_launches_are_the_most(compare_fakes):
    result = compare_fakes({"steps": [0.01]}, {"steps": [0.009, 0.011] * 5})
    assert (result.stop_reason, result.launches) == ("all launches done", 10)
    assert result.interval[0] < 1 < result.interval[1]


def test_a_spent_budget_leaves_what_there_is(compare_fakes):
    result = compare_fakes({"steps": [0.01]}, {"steps": [0.005]}, budget_s=0.01)
    assert (result.stop_reason, result.launches) == ("budget spent", 1)
    assert result.pairs == launch.FEWEST_BLOCKS * 3
    assert result.quick
    assert any("one launch only" in warning for warning in result.warnings)


def test_quick_mode_is_one_launch_with_the_spread_of_launches_in_its_interval(compare_fakes):
    result = compare_fakes({"steps": [0.01]}, {"steps": [0.01]}, quick=True)
    assert (result.launches, result.quick, result.level) == (1, True, 0.95)
    assert result.interval[1] == pytest.approx(1.028, abs=0.002)


def test_both_orders_occur_and_every_turn_is_kept(compare_fakes):
    result = compare_fakes(quick=True)
    firsts = [turn["variant"] for turn in result.turns if turn["first"]]
    assert set(firsts) == {"a", "b"}
    assert len(result.turns) == 2 * result.pairs
    assert all(len(turn["times"]) == result.steps_per_turn for turn in result.turns)


def test_a_busy_machine_gives_no_number(compare_fakes, cpu_clock):
    cpu_clock(100.0)
    result = compare_fakes()
    assert result.speedup is None
    assert result.interval is None
    assert result.stop_reason == "machine busy"
    assert result.verdict.startswith("machine busy:")
    assert (result.launches, result.launches_dropped) == (0, 3)


def test_a_launch_on_a_busy_machine_ends_in_time(compare_fakes, cpu_clock, monkeypatch):
    cpu_clock(100.0)

    class Clock:
        """Each look at it takes an hour."""

        sleep = staticmethod(lambda seconds: None)
        process_time = staticmethod(time.process_time)
        hours = 0

        @classmethod
        def monotonic(cls) -> float:
            cls.hours += 1
            return 3600.0 * cls.hours

    monkeypatch.setattr(launch, "time", Clock)
    result = compare_fakes({"steps": [0.2]}, {"steps": [0.2]}, quick=True)
    assert result.stop_reason == "machine busy"
    assert {turn["pair"] for turn in result.turns} == {1}


def test_a_disturbed_block_drops_all_its_pairs(compare_fakes, monkeypatch):
    busy, calls = 0.0, 0

    def busy_seconds() -> float:
        nonlocal busy, calls
        calls += 1
        # Two looks for each block: the second look of block 5 finds a neighbour.
        busy += 100.0 if calls == 10 else 0.0
        return busy

    monkeypatch.setattr(launch, "busy_seconds", busy_seconds)
    result = compare_fakes({"steps": [0.2]}, {"steps": [0.2]}, quick=True)
    assert (result.pairs, result.pairs_dropped) == (12, 1)
    assert [turn["pair"] for turn in result.turns if not turn["counts"]] == [5, 5]


def test_a_restless_machine_gets_more_turns(compare_fakes):
    restless = {"steps": [0.01], "jitter": 0.3}
    result = compare_fakes(restless, restless, quick=True)
    calm = compare_fakes({"steps": [0.01]}, {"steps": [0.01]}, quick=True)
    assert calm.pairs == launch.BLOCKS * 4
    assert result.pairs > 2 * calm.pairs
    assert result.pairs * result.steps_per_turn * 0.02 < 1.5 * launch.LAUNCH_SECONDS


def test_remaining_budget_is_shared_by_the_launches_to_come(compare_fakes):
    slow = {"steps": [2.0]}
    result = compare_fakes(slow, slow, budget_s=400.0, quick=True)
    assert (result.steps_per_turn, result.discarded_steps, result.window) == (4, 1, 1)
    assert result.pairs == launch.FEWEST_BLOCKS


def test_progress_names_launch_and_estimate(compare_fakes):
    seen = []
    compare_fakes({"steps": [0.02]}, {"steps": [0.01]}, progress=seen.append)
    assert {progress.launch for progress in seen} == {1, 2, 3, 4, 5}
    assert {"starting", "warming up", "measuring"} <= {progress.phase for progress in seen}
    assert seen[0].speedup is None
    assert seen[-1].speedup == pytest.approx(2, rel=0.01)
    assert seen[-1].remaining_s < seen[0].remaining_s


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ({"batch_size": 16}, {"batch_size": 32}, "BATCH SIZES DIFFER: 16 in A, 32 in B"),
        ({"threads": 1}, {"threads": 2}, "Thread counts differ: 1 in A, 2 in B"),
        ({"faults": 5000}, {"faults": 1}, "A makes 5000 page faults per step, B 1"),
        ({"epoch_batches": 3}, {}, "An epoch of A has only 3 batches"),
        ({"left_out": ["EarlyStopping"]}, {}, "A runs without EarlyStopping"),
        ({"device": "cuda"}, {"device": "cuda"}, "was not frozen"),
    ],
)
def test_the_reader_is_warned(compare_fakes, a, b, words):
    result = compare_fakes(a, b, quick=True)
    assert any(words in warning for warning in result.warnings)


def test_nothing_to_warn_of(compare_fakes):
    assert compare_fakes(quick=True).warnings == []


def test_batches_that_lie_ready_are_discarded_where_nothing_is_frozen(compare_fakes):
    fake = {"device": "cuda", "prefetched": 8}
    result = compare_fakes(fake, fake, quick=True)
    assert not result.frozen
    assert result.discarded_steps == 9


def test_equal_learning_needs_no_perturbed_runs(compare_fakes):
    result = compare_fakes(quick=True, learning_steps=7)
    assert result.losses_agree is True
    assert result.learning_steps == 7
    assert result.loss_difference_max == 0
    assert result.learning["metrics_b"] == {"steps": 7}


@pytest.mark.parametrize(("loss", "agree"), [(1.003, True), (1.5, False)])
def test_inexact_learning_is_judged_by_perturbed_runs(compare_fakes, loss, agree):
    b = {"losses": [loss, 0.5 * loss], "precision": "bf16-mixed"}
    result = compare_fakes(b=b, quick=True, learning_steps=7)
    assert result.losses_agree is agree
    assert result.learning["allowed_max"] > 0.01
    assert result.loss_difference_max == pytest.approx(loss - 1)


def test_exact_variants_must_be_bit_identical(compare_fakes):
    result = compare_fakes(b={"losses": [1.0, 0.5000001]}, quick=True, learning_steps=7)
    assert result.losses_agree is False


@pytest.mark.parametrize(("quick", "steps"), [(True, 25), (False, 15)])
def test_learning_takes_its_share_of_the_budget_and_says_so(compare_fakes, quick, steps):
    slow = {"steps": [1.0]}
    result = compare_fakes(slow, slow, quick=quick, learning_steps=60, budget_s=100)
    assert result.learning_steps == steps
    assert any(f"over {steps} optimizer steps instead of 60" in text for text in result.warnings)


@pytest.mark.parametrize("other", ["inexact", "threads", "precision", "device", "callbacks"])
def test_exactness_is_claimed_only_if_nothing_else_differs(other):
    def description(**changes):
        environment = {"threads": 1, "precision": "32-true", "device": "cpu"}
        about = {"inexact": [], "callbacks": [], "environment": environment}
        for name, value in changes.items():
            (about if name in about else environment)[name] = value
        return about

    assert claims_exact({"a": description(), "b": description()})
    changed = ["Some"] if other in ("inexact", "callbacks") else "another"
    assert not claims_exact({"a": description(), "b": description(**{other: changed})})


@pytest.mark.parametrize("key", ["a", "b"])
@pytest.mark.parametrize("at", ["begin", "fit", "turn", "learn"])
@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("raise", ["no good", "its own line"]),
        ("exit", ["exit status 3", "last words"]),
        ("kill", ["SIGKILL", "out of memory", "last words"]),
    ],
)
def test_a_failing_variant_is_named_and_nothing_is_left(
    compare_fakes, tmp_path, key, at, does, words
):
    scripts = {side: {"pids": str(tmp_path)} for side in ("a", "b")}
    scripts[key] |= {"at": at, "does": does}
    with pytest.raises(VariantFailed) as caught:
        compare_fakes(**scripts, quick=True, learning_steps=5)
    for word in (f"'{key.upper()}: {key.upper()}'", *words):
        assert word in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 4
    assert not alive(tmp_path)


def test_a_hanging_variant_is_an_error(compare_fakes, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_TURN_PATIENCE", 0.1)
    script = {"pids": str(tmp_path)}
    with pytest.raises(VariantFailed, match="no answer for") as caught:
        compare_fakes(script, {**script, "at": "describe", "does": "hang"})
    assert "last words" in caught.value.details
    assert not alive(tmp_path)


def test_a_variant_that_ignores_the_end_is_killed(compare_fakes, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_GOODBYE", 0.2)
    script = {"pids": str(tmp_path), "at": "stop", "does": "ignore"}
    assert compare_fakes(script, script, quick=True).launches == 1
    assert not alive(tmp_path)


def test_an_interrupt_leaves_nothing(compare_fakes, tmp_path):
    def interrupt(progress):
        if progress.phase == "measuring":
            raise KeyboardInterrupt

    script = {"pids": str(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        compare_fakes(script, script, progress=interrupt)
    assert not alive(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_the_coordinator_even_frozen_ones(tmp_path, number):
    pids = tmp_path / "pids"
    pids.mkdir()
    script = {"pids": str(pids)}
    hanging = {**script, "at": "turn", "does": "hang"}
    fakes = {"a": script, "b": hanging}
    program = f"""
from lightning_perf.benchmark import Variant, compare, coordinator
coordinator.WORKER = ({sys.executable!r}, {str(FAKE_WORKER)!r})
compare("module:make", *(
    Variant(name, env={{"FAKE": script}})
    for name, script in { ({k: json.dumps(v) for k, v in fakes.items()})!r}.items()
))
"""
    # What a killed process leaves in its temporary folder goes with the test's.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, start_new_session=True, env=environment) as parent:
        try:
            deadline = time.monotonic() + 60
            while not any(status(pid) == psutil.STATUS_STOPPED for pid in noted(pids)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            os.kill(parent.pid, number)
    assert len(list(pids.iterdir())) == 4
    assert not alive(pids)


def test_malloc_is_settled_unless_somebody_did(monkeypatch, tmp_path):
    for name in coordinator._MALLOC:
        monkeypatch.delenv(name, raising=False)
    plain = environment(Variant("x"), tmp_path)
    assert coordinator._MALLOC.items() <= plain.items()
    own = environment(Variant("x", env={"MALLOC_ARENA_MAX": "1"}), tmp_path)
    assert {name for name in own if name.startswith("MALLOC_")} == {"MALLOC_ARENA_MAX"}
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    users = environment(Variant("x"), tmp_path)
    assert {name for name in users if name.startswith("MALLOC_")} == {"MALLOC_TOP_PAD_"}


def test_variants_do_not_share_what_they_compile(tmp_path):
    a, b = (environment(Variant(key), tmp_path / key) for key in "ab")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert a[name] != b[name]
    mine = environment(Variant("x", env={"TORCHINDUCTOR_CACHE_DIR": "mine"}), tmp_path)
    assert mine["TORCHINDUCTOR_CACHE_DIR"] == "mine"


@pytest.mark.parametrize("arguments", [{"budget_s": 0}, {"budget_s": -1}, {"learning_steps": -1}])
def test_impossible_numbers_are_refused(compare_fakes, arguments):
    with pytest.raises(ValueError, match="must"):
        compare_fakes(**arguments)
