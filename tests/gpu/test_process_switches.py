"""The process switches on a CUDA device. Their logic is tested on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from models import Classifier, images, trainer
from torch.autograd.profiler import emit_nvtx

from lightning_perf._item import statuses
from lightning_perf._knobs import knobs, read_knobs
from lightning_perf._preserve_state import preserve_rng
from lightning_perf.callbacks import CudnnBenchmark, DisableDebugAPIs, MatmulPrecision
from lightning_perf.callbacks.matmul_precision import matmul_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Observe(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.seen.append(read_knobs())


def fit(item: Callback, samples: int = 64) -> tuple[list[dict[str, Any]], str]:
    before, observe = read_knobs(), Observe()
    run = trainer(accelerator="cuda", callbacks=[item, observe])
    run.fit(Classifier(), images(samples))
    assert read_knobs() == before
    assert statuses(run)[0].active
    return observe.seen, statuses(run)[0].text


def test_the_benchmark_is_on_from_the_tenth_batch() -> None:
    seen, _ = fit(CudnnBenchmark())

    assert [knobs["cudnn_benchmark"] for knobs in seen] == [False] * 9 + [True] * 7


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="no TF32"
)
def test_products_use_tf32_in_a_run_and_not_after_it() -> None:
    a, b = torch.randn(2, 512, 512, device="cuda")
    exact = a @ b
    with matmul_precision("high"):
        assert not torch.equal(a @ b, exact)
    assert torch.equal(a @ b, exact)

    seen, _ = fit(MatmulPrecision("high"))

    assert all(knobs["matmul_precision"] == "high" for knobs in seen)


def test_sync_debug_mode_is_off_during_the_run_and_back_after_it() -> None:
    torch.cuda.init()
    with knobs(sync_debug_mode=1):
        seen, text = fit(DisableDebugAPIs())

    assert all(knobs["sync_debug_mode"] == 0 for knobs in seen)
    assert "CUDA sync debug mode" in text


def test_nvtx_ranges_are_off_during_the_run_and_back_after_it() -> None:
    with emit_nvtx(record_shapes=True):
        seen, text = fit(DisableDebugAPIs())

    assert not any(knobs["emit_nvtx"] for knobs in seen)
    assert "NVTX ranges" in text


def test_generators_of_all_devices_are_put_back() -> None:
    torch.cuda.init()
    before = torch.cuda.get_rng_state_all()

    with preserve_rng():
        for index in range(torch.cuda.device_count()):
            torch.rand(3, device=f"cuda:{index}")

    assert all(map(torch.equal, before, torch.cuda.get_rng_state_all()))
