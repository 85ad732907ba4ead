"""An input that does not fit: an error that says what would, and a run that is as before."""

from __future__ import annotations

import logging
import re
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.memory import is_oom_error
from models import trainer
from texts import Net, Texts, texts
from torch import Tensor, nn

from lightning_perf.callbacks import Preallocate
from lightning_perf.callbacks._out_of_memory import (
    is_out_of_memory,
    largest_fitting,
    memory_in_use,
)

CPU_ALLOCATOR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"


class Small(Net):
    """Has memory for so many tokens in a batch; what it tried is noted outside."""

    def __init__(
        self,
        tried: list[Any],
        tokens: int,
        error: Exception | None = None,
        *,
        backward: bool = False,
        widest: int = 1000,
    ) -> None:
        super().__init__(tried)
        self.norm = nn.BatchNorm1d(8)
        self.tokens, self.widest, self.in_backward = tokens, widest, backward
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sequences, _ = batch
        self.norm(self.embed(sequences).flatten(0, 1))  # statistics change before memory is out
        loss = super().training_step(batch, batch_idx)
        if sequences.numel() <= self.tokens and sequences.shape[1] <= self.widest:
            return loss
        if not self.in_backward:
            raise self.error
        loss.register_hook(self.fail)
        return loss

    def fail(self, gradient: Tensor) -> None:
        raise self.error


class AtTheEnd(Callback):
    """Notes what is left when the run is interrupted."""

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self.left = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.gradients = [p.grad for p in pl_module.parameters()]


def message(module: Any, item: Preallocate | None = None, data: Any = None) -> str:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    end = AtTheEnd()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(callbacks=[item or Preallocate(), end]).fit(module, data or texts(batch_size=8))
    assert all(torch.equal(before[name], end.left[name]) for name in before)
    assert end.gradients == [None] * len(end.gradients)
    return str(caught.value)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."),
        MemoryError("no more"),
        RuntimeError(f"{CPU_ALLOCATOR} 8 bytes."),
        RuntimeError("MPS backend out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: str(error)[:12],
)
def test_it_says_what_did_not_fit_and_what_would(error: Exception, backward: bool) -> None:
    data = texts(Texts([50, 40, 30, *[10] * 13]), batch_size=8, shuffle=True)

    text = message(Small(tried := [], 200, error, backward=backward), data=data)

    assert text.startswith(
        "Preallocate: the largest input does not fit, 8 items of up to 50 (padded 400), found by "
        "the lengths of Texts, as any items may meet; shapes (8, 50), (8,). Out of memory; then "
    )
    assert re.search(r"[\d.]+ GiB resident, [\d.]+ GiB available of [\d.]+ GiB\. ", text)
    assert "4 items fit (4 fitted, 6 did not, 5 did not): take no more in a batch" in text
    assert str(error) in text
    assert tried == [(8, 50), (4, 50), (6, 50), (5, 50)]


def test_of_a_given_length_the_length_that_fits_is_found() -> None:
    text = message(Small([], 900), Preallocate(max_length=200, dim=1), texts(batch_size=6))
    assert "the first batch, tiled in dimension 1 from 9 to 200; shapes (6, 200), (6,)." in text
    (fitted,) = re.findall(r"(\d+) positions fit", text)
    assert 140 <= int(fitted) <= 150


def test_if_nothing_fits_it_says_so() -> None:
    assert "Not even 1 of the items fitted" in message(Small([], 3))


def test_what_fails_because_it_is_so_small_does_not_hide_the_report() -> None:
    class NeedsTwo(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            nn.BatchNorm1d(8)(self.embed(batch[0]).mean(1))
            return super().training_step(batch, batch_idx)

    text = message(NeedsTwo([], 59))
    assert "Not even 1 of the items fitted" in text


@pytest.mark.parametrize("item", [Preallocate(indices=[9]), Preallocate()], ids=["item", "hook"])
def test_what_cannot_be_divided_is_tried_once(item: Preallocate) -> None:
    class Hooked(Small):
        def largest_batch(self) -> Any:
            return [torch.zeros(2, 99, dtype=torch.long), torch.zeros(2, dtype=torch.long)]

    assert "It cannot be divided: leave out, or cut" in message(Hooked(tried := [], 9), item)
    assert len(tried) == 1


def test_the_second_of_two_may_be_the_one_that_does_not_fit() -> None:
    data = texts(Texts([9] * 8 + [70]), batch_size=8)
    text = message(Small(tried := [], 72, widest=69), data=data)
    assert "8 items of up to 9 (padded 72) and 1 item of size 70, found by the lengths" in text
    assert "shapes (8, 9), (8,) and (1, 70), (1,)." in text
    assert tried[:2] == [(8, 9), (1, 70)]
    assert "Not even 1 of the items fitted" in text


def test_lightning_takes_it_for_what_it_is() -> None:
    cuda = message(Small([], 9))
    cpu = message(Small([], 9, RuntimeError(f"{CPU_ALLOCATOR} 8 bytes.")))
    assert is_oom_error(torch.OutOfMemoryError(cuda))
    assert is_oom_error(torch.OutOfMemoryError(cpu))


def test_a_real_allocator_that_fails_is_recognised() -> None:
    class Greedy(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch[0].shape[1] > 20:
                torch.empty(2**60, dtype=torch.uint8)
            return loss

    with pytest.raises(torch.OutOfMemoryError, match="the largest input does not fit"):
        trainer(callbacks=[Preallocate()]).fit(Greedy(), texts())


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory")])
def test_other_errors_are_raised_as_they_are(error: Exception) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error), match=str(error)):
        trainer(callbacks=[Preallocate()]).fit(Small([], 9, error), texts())


def test_activations_of_what_failed_are_gone_before_less_is_tried() -> None:
    alive: list[Any] = []

    class Holds(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert not [ref for ref in alive if ref() is not None]
            held = torch.zeros(batch[0].numel())
            alive.append(weakref.ref(held))
            return super().training_step(batch, batch_idx)

    message(Holds([], 60))
    assert len(alive) > 2


@pytest.mark.parametrize("limit", [0, 1, 5, 17, 31, 99, 512, 999])
def test_the_largest_that_fits_is_found_in_few_trials(limit: int) -> None:
    for too_large in (limit + 1, 2 * limit + 2, 1000):
        tried: list[int] = []

        def fits(size: int, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= limit

        found = largest_fitting(fits, too_large)

        assert found <= limit
        assert limit - found <= max(0, too_large // 20)
        assert len(tried) <= 10
        assert all(0 < size < too_large for size in tried)


def test_memory_in_use_is_said_in_words() -> None:
    assert re.fullmatch(
        r"[\d.]+ GiB resident, [\d.]+ GiB available of [\d.]+ GiB",
        memory_in_use(torch.device("cpu")),
    )


def test_nothing_is_said_of_success(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        message(Small([], 9))
    assert not [r for r in caplog.records if "Preallocate: ran" in r.message]
