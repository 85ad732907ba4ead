"""Copies beside the steps of a CUDA device: right content, right memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Classifier, images, trainer
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_perf._item import statuses
from lightning_perf.callbacks import DevicePrefetch
from lightning_perf.callbacks.device_prefetch import copying
from lightning_perf.data import BufferPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)


def test_losses_are_those_of_a_plain_run() -> None:
    def losses(*items: DevicePrefetch) -> list[float]:
        torch.manual_seed(0)
        module = Classifier()
        run = trainer(accelerator="gpu", callbacks=list(items), max_epochs=3)
        run.fit(module, images(64), images())
        run.test(module, images(), verbose=False)
        if items:
            assert statuses(run)[0].text.endswith("copied on a stream of their own")
        return module.losses + module.test_losses

    assert losses(DevicePrefetch(2)) == pytest.approx(losses(), rel=1e-4)


def test_many_copies_beside_long_kernels_have_the_right_content() -> None:
    pool = BufferPool()
    start = copying(DEVICE, pool)
    busy = torch.randn(4096, 4096, device=DEVICE)
    gives = []
    sums: list[Tensor] = []
    for number in range(64):
        gives.append(start({"x": torch.full((512, 1024), float(number)), "n": number}))
        if len(gives) > 2:
            batch = gives.pop(0)()
            busy = busy @ busy * 1e-4
            sums.append(batch["x"].double().mean())
            del batch  # its memory may be used again while the sum is still to come
    assert torch.stack(sums).tolist() == list(range(62))
    statistics = pool.statistics
    assert statistics.leased == statistics.abandoned == 0
    assert statistics.reused > 0


def test_layouts_types_and_places_are_those_of_a_plain_transfer() -> None:
    from lightning.fabric.utilities import move_data_to_device

    batch: Any = {
        "nhwc": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "pinned": torch.ones(3).pin_memory(),
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
        "empty": torch.ones(0),
        "scalar": torch.tensor(3),
        "text": ["a", "b"],
    }
    ahead, plain = copying(DEVICE, BufferPool())(batch)(), move_data_to_device(batch, DEVICE)
    assert ahead["text"] == plain["text"]
    for name in ("nhwc", "pinned", "empty", "scalar"):
        assert torch.equal(ahead[name], plain[name])
        assert ahead[name].device == plain[name].device
        assert ahead[name].stride() == plain[name].stride()
    assert isinstance(ahead["packed"], PackedSequence)
    assert ahead["packed"].batch_sizes.device == plain["packed"].batch_sizes.device


def test_hooks_that_expect_the_host_get_batches_there() -> None:
    class Hooked(Classifier):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert batch[0].device.type == "cpu"
            return batch

    run = trainer(accelerator="gpu", callbacks=[DevicePrefetch()])
    run.fit(Hooked(), images())
    assert "Hooked.on_before_batch_transfer expects them on the host" in statuses(run)[0].text
