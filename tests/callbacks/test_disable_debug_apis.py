from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from models import Classifier, images, trainer
from torch.autograd.profiler import emit_itt

from lightning_perf import NoEffectWarning, _knobs
from lightning_perf._item import statuses
from lightning_perf._knobs import KNOBS, Knob, knobs, read_knobs
from lightning_perf.callbacks import DisableDebugAPIs
from lightning_perf.callbacks.disable_debug_apis import (
    debug_aids_off,
    debug_aids_on,
    slow_variables,
)

needs_itt = pytest.mark.skipif(not torch.profiler.itt.is_available(), reason="built without ITT")


class Observe(Callback):
    """Notes the switches in validation, where Lightning leaves anomaly mode alone."""

    def on_validation_start(self, trainer, pl_module) -> None:
        self.seen = read_knobs()


@pytest.fixture
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES", "PYTHONDEVMODE", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def run_with(**arguments: Any) -> tuple[dict[str, Any], str]:
    """What the switches were during validation, and the status text."""
    run = trainer(callbacks=[DisableDebugAPIs(strict=False), observe := Observe()], **arguments)
    run.validate(Classifier(), images(), verbose=False)
    return observe.seen, statuses(run)[0].text


@pytest.mark.parametrize("check_nan", [True, False])
def test_anomaly_mode_is_off_during_the_run_and_back_after_it(check_nan: bool) -> None:
    with knobs(anomaly_mode=True, anomaly_check_nan=check_nan):
        before = read_knobs()
        seen, text = run_with()
        assert read_knobs() == before

    assert seen["anomaly_mode"] is False
    assert text.startswith("off: anomaly mode")


def test_anomaly_mode_is_back_after_an_error() -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert not torch.is_anomaly_enabled()
            raise ZeroDivisionError

    with knobs(anomaly_mode=True):
        with pytest.raises(ZeroDivisionError):
            trainer(callbacks=[DisableDebugAPIs()]).fit(Failing(), images())
        assert torch.is_anomaly_enabled()


def test_anomaly_mode_asked_of_the_trainer_stays() -> None:
    class Checked(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert torch.is_anomaly_enabled()
            return super().training_step(batch, batch_idx)

    run = trainer(callbacks=[DisableDebugAPIs(strict=False)], detect_anomaly=True)
    with knobs(anomaly_mode=True):
        run.fit(Checked(), images())
        assert torch.is_anomaly_enabled()

    assert not statuses(run)[0].active
    assert "left as asked for: Trainer(detect_anomaly=True)" in statuses(run)[0].text


@needs_itt
def test_ranges_are_off_during_the_run_and_back_after_it() -> None:
    with emit_itt():
        seen, text = run_with()
        assert KNOBS["emit_itt"].read() is True

    assert seen["emit_itt"] is False
    assert text.startswith("off: ITT ranges")


def test_every_aid_is_switched_off_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVTX and sync debug mode need CUDA; here plain variables stand for all of them."""
    state = {"anomaly_mode": True, "sync_debug_mode": 2, "emit_nvtx": True, "emit_itt": True}
    before = dict(state)
    for name in state:
        stand_in = Knob(
            lambda name=name: state[name], lambda value, name=name: state.update({name: value}), ""
        )
        monkeypatch.setitem(_knobs.KNOBS, name, stand_in)

    assert set(debug_aids_on()) == set(state)
    with debug_aids_off() as names:
        assert not any(state.values())
        assert "CUDA sync debug mode" in names
    assert state == before

    with debug_aids_off(keep=frozenset({"emit_nvtx"})) as names:
        assert state == {**dict.fromkeys(state, False), "emit_nvtx": True}
    assert state == before


def test_a_recording_profiler_is_reported_and_goes_on_recording() -> None:
    with torch.autograd.profiler.profile() as profiler, knobs(anomaly_mode=True):
        seen, text = run_with()

    assert seen["autograd_profiler"] == "kineto"
    assert "left on: a profiler that is recording" in text
    assert any("conv" in event.name for event in profiler.function_events)


@pytest.mark.usefixtures("quiet_environment")
def test_nothing_left_on_is_said() -> None:
    with pytest.warns(NoEffectWarning, match=r"has no effect here: nothing is left on\.$"):
        trainer(callbacks=[DisableDebugAPIs()]).fit(Classifier(), images())


def test_profilers_of_the_trainer_are_named_and_left_alone() -> None:
    _, text = run_with(profiler="simple")
    assert "left as asked for: Trainer(profiler=SimpleProfiler)" in text


@needs_itt
def test_ranges_of_the_trainers_own_profiler_stay() -> None:
    class Emitting(PyTorchProfiler):
        """Stands for PyTorchProfiler(emit_nvtx=True), which needs CUDA."""

        def start(self, action_name: str) -> None: ...
        def stop(self, action_name: str) -> None: ...

    with emit_itt():
        seen, text = run_with(profiler=Emitting())

    assert seen["emit_itt"] is True
    assert "left as asked for: Trainer(profiler=Emitting)" in text


def test_deterministic_algorithms_are_named_and_left_alone() -> None:
    with knobs(deterministic_algorithms=1):
        seen, text = run_with()

    assert seen["deterministic_algorithms"] == 1
    assert "deterministic algorithms" in text


def test_variables_are_named_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")

    _, text = run_with()

    assert "must be unset before the process starts: CUDA_LAUNCH_BLOCKING=1" in text
    assert "TORCH_SHOW_CPP_STACKTRACES=1" in text


@pytest.mark.parametrize(
    ("variable", "value", "slow"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("CUDA_LAUNCH_BLOCKING", "", False),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", True),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0", True),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", False),
        ("TORCH_CPP_LOG_LEVEL", "INFO", True),
        ("TORCH_CPP_LOG_LEVEL", "WARNING", False),
        ("TORCH_LOGS", "+dynamo", True),
        ("NCCL_DEBUG", "TRACE", True),
        ("NCCL_DEBUG", "WARN", False),
        ("ONEDNN_VERBOSE", "1", True),
        ("OMP_NUM_THREADS", "1", False),
    ],
)
def test_which_variables_are_slow(variable: str, value: str, slow: bool) -> None:
    assert slow_variables({variable: value}) == ([f"{variable}={value}"] if slow else [])


def test_it_acts_on_all_ranks_if_one_has_something_left_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = trainer(callbacks=[DisableDebugAPIs(strict=True)])
    asked: list[tuple[bool, bool]] = []

    def another_rank_has(decision: bool, all: bool = True) -> bool:
        asked.append((decision, all))
        return True

    monkeypatch.setattr(run.strategy, "reduce_boolean_decision", another_rank_has)

    run.fit(Classifier(), images())

    assert asked == [(False, False)]
    assert statuses(run)[0].text.startswith("off: nothing here")
