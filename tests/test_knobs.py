from __future__ import annotations

import pytest
import torch
from torch.autograd.profiler import emit_itt

from lightning_perf._knobs import KNOBS, knobs, read_knobs

needs_itt = pytest.mark.skipif(not torch.profiler.itt.is_available(), reason="built without ITT")

# One other value for each knob that can be written on any machine.
OTHER_VALUES = {
    "cudnn_benchmark": True,
    "cudnn_deterministic": True,
    "deterministic_algorithms": 1,
    "matmul_precision": "medium",
    "anomaly_mode": True,
    "anomaly_check_nan": False,
    "intra_op_threads": torch.get_num_threads() + 1,
    "gc_frozen": True,
    "gc_enabled": False,
    "gc_threshold": (123, 4, 5),
    "dynamo_optimize_ddp": False,
    "default_dtype": "float64",
}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_knob_is_set_and_put_back(name: str) -> None:
    before = read_knobs()

    with knobs(**{name: OTHER_VALUES[name]}):
        assert KNOBS[name].read() == OTHER_VALUES[name] != before[name]

    assert read_knobs() == before


def test_every_knob_can_be_written_with_what_was_read() -> None:
    before = read_knobs()

    for name, value in before.items():
        KNOBS[name].write(value)

    assert read_knobs() == before
    assert all(knob.doc for knob in KNOBS.values())


def test_knobs_are_put_back_after_an_error_in_the_block() -> None:
    before = read_knobs()

    with pytest.raises(ZeroDivisionError), knobs(cudnn_benchmark=True, matmul_precision="high"):
        1 / 0  # noqa: B018

    assert read_knobs() == before


def test_knobs_set_before_a_refused_one_are_put_back() -> None:
    before = read_knobs()

    with pytest.raises(ValueError, match=r"matmul_precision='fast'.*'highest', 'high', 'medium'"):  # noqa: SIM117
        with knobs(cudnn_benchmark=True, matmul_precision="fast"):
            pytest.fail("The block must not run.")

    assert read_knobs() == before


def test_nested_knobs_are_put_back_last_in_first_out() -> None:
    with knobs(matmul_precision="high"):
        with knobs(matmul_precision="medium"):
            assert KNOBS["matmul_precision"].read() == "medium"
        assert KNOBS["matmul_precision"].read() == "high"
    assert KNOBS["matmul_precision"].read() == "highest"


def test_an_unknown_knob_names_the_closest() -> None:
    with (
        pytest.raises(ValueError, match=r"no knob 'cudnn_benchmrk'.*mean 'cudnn_benchmark'"),
        knobs(cudnn_benchmrk=True),
    ):
        pytest.fail("The block must not run.")


def test_a_recording_profiler_can_be_seen_but_not_changed() -> None:
    with torch.autograd.profiler.profile():
        assert read_knobs()["autograd_profiler"] == "kineto"
        KNOBS["autograd_profiler"].write("kineto")
        with pytest.raises(RuntimeError, match="'none' was asked for, but 'kineto' is what runs"):
            KNOBS["autograd_profiler"].write("none")

    assert read_knobs()["autograd_profiler"] == "none"


@needs_itt
def test_emitted_ranges_pause_and_the_users_own_exit_still_works() -> None:
    with emit_itt():
        assert read_knobs()["emit_itt"] is True
        with knobs(emit_itt=False):
            assert torch._C._autograd._profiler_type().name == "NONE"
        assert read_knobs()["emit_itt"] is True
        assert read_knobs()["autograd_profiler"] == "none"

    assert read_knobs()["emit_itt"] is False


@needs_itt
@pytest.mark.parametrize("shapes", [True, False])
def test_emitted_ranges_keep_their_shapes(shapes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[bool] = []
    enter = emit_itt.__enter__

    def recording(self: emit_itt) -> object:
        entered.append(self.record_shapes)
        return enter(self)

    monkeypatch.setattr(emit_itt, "__enter__", recording)

    with emit_itt(record_shapes=shapes), knobs(emit_itt=False):
        pass

    assert entered == [shapes, shapes]


@needs_itt
def test_ranges_started_in_a_block_end_with_it() -> None:
    with knobs(emit_itt=True):
        assert read_knobs()["emit_itt"] is True

    assert read_knobs()["emit_itt"] is False


def test_reading_the_sync_debug_mode_does_not_initialise_cuda() -> None:
    initialized = torch.cuda.is_initialized()

    read_knobs()

    assert torch.cuda.is_initialized() == initialized
