"""Transforms on a CUDA device: where they run, and whose random numbers they draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Classifier, images, trainer
from torch import Tensor, nn

from lightning_perf.callbacks import DeviceTransforms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Noise(nn.Module):
    """Adds noise that it draws on the device, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 0.1))
        self.drawn: list[float] = []

    def forward(self, batch: Any) -> Any:
        noise = torch.rand_like(batch[0])
        self.drawn.append(noise.sum().item())
        return batch[0] + self.scale * noise * 0, batch[1]


class Dropping(Classifier):
    """Draws on the device."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss([nn.functional.dropout(batch[0]), batch[1]])


def losses(*items: DeviceTransforms) -> list[float]:
    torch.manual_seed(0)
    module = Dropping()
    trainer(accelerator="gpu", callbacks=list(items), max_epochs=2).fit(module, images())
    return module.losses


def test_it_draws_on_the_device_from_a_stream_of_its_own() -> None:
    first, second = Noise(), Noise()
    plain = losses()
    assert losses(DeviceTransforms(first)) == pytest.approx(plain, rel=1e-4)
    losses(DeviceTransforms(second))
    assert first.drawn == pytest.approx(second.drawn)
    assert len(set(first.drawn)) == 8
    assert first.scale.device.type == "cpu"  # back where it was
