"""The caching allocator of a CUDA device with texts of growing length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from models import trainer
from texts import Net, Texts, texts
from torch import nn

from lightning_perf.callbacks import Preallocate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 1024
# Each batch of one text is a little longer than the one before, and fits into no freed block.
GROWING = [500 * i for i in range(1, 31)]


class Wide(Net):
    """Activations of 4 KiB for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 3)


class Memory(Callback):
    """Notes bytes reserved and allocator retries after each step."""

    def __init__(self) -> None:
        self.reserved: list[int] = []
        self.retries: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.reserved.append(torch.cuda.memory_reserved())
        self.retries.append(torch.cuda.memory_stats()["num_alloc_retries"])
        self.losses.append(outputs["loss"].item())


@pytest.fixture(autouse=True)
def _all_memory() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def run(*items: Preallocate, lengths: list[int] = GROWING) -> Memory:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seed_everything(2, verbose=False)
    memory = Memory()
    trainer(accelerator="cuda", callbacks=[*items, memory], max_epochs=1).fit(
        Wide(), texts(Texts(lengths), batch_size=1)
    )
    return memory


def limit(bytes_: int) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(bytes_ / total)


def test_what_is_reserved_is_there_in_the_first_step() -> None:
    plain, ahead = run(), run(Preallocate(strict=True))
    assert plain.reserved[0] < 0.5 * plain.reserved[-1]
    assert ahead.reserved[0] >= 0.95 * ahead.reserved[-1]
    assert ahead.reserved[-1] <= plain.reserved[-1]
    assert ahead.losses == pytest.approx(plain.losses, rel=1e-5)


def test_the_allocator_need_not_try_again() -> None:
    run(lengths=GROWING[-1:])
    needed = torch.cuda.max_memory_reserved()

    def retries(*items: Preallocate) -> int:
        torch.cuda.empty_cache()
        limit(needed + needed // 4)
        memory = run(*items)
        return memory.retries[-1] - memory.retries[0]

    assert retries() > 0
    assert retries(Preallocate(strict=True)) == 0


def test_random_numbers_of_the_device_are_as_without() -> None:
    drawn = []
    for items in ([], [Preallocate(strict=True)]):
        run(*items, lengths=GROWING[:4])
        drawn.append(torch.rand(4, device="cuda"))
    assert torch.equal(*drawn)


def test_what_does_not_fit_is_said_before_training_and_its_memory_is_free_again() -> None:
    run(lengths=GROWING[-1:])
    needed = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    limit(needed // 2)
    with pytest.raises(torch.OutOfMemoryError, match="the largest input does not fit") as caught:
        run(Preallocate(strict=True))
    assert "GiB reserved" in str(caught.value)
    del caught
    assert torch.cuda.memory_allocated() <= before + 2**20
