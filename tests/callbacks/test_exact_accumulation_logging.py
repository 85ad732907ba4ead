"""Means over an epoch of what a training step logs use the weights of the gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from big_batch import Big, BigTokens, loader, rows, tokens
from lightning.pytorch import Trainer
from models import trainer

from lightning_perf.callbacks import ExactAccumulation

EXACT = 1e-9
UNEVEN = [4, 2, 3, 1, 2]


def fit(module: Big, data: Any, weight: Any, **kwargs: Any) -> Trainer:
    run = trainer(callbacks=[ExactAccumulation(weight)] if weight else [], **kwargs)
    run.fit(module, data)
    return run


@pytest.mark.parametrize("per_step", [True, False])
def test_means_over_an_epoch_use_the_same_weights(per_step: bool) -> None:
    class Logs(BigTokens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("other", float(batch_idx), on_step=per_step, on_epoch=True)
            self.log("own", float(batch_idx), on_step=per_step, on_epoch=True, batch_size=1)
            self.log("summed", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("step", float(batch_idx))
            # Without a mean to weigh it is there at once.
            assert self.trainer.callback_metrics["step"] == batch_idx
            loss += 0  # in place, after it was logged
            return loss

    data = tokens([[3, 4], [1, 1, 1], [9]])
    module = Logs()
    frozen = copy.deepcopy(module)
    run = fit(module, loader(data), "tokens", accumulate_grad_batches=3, max_steps=1)
    counts = torch.tensor([7.0, 3, 9])
    expected = frozen.together(data)
    name = "other_epoch" if per_step else "other"
    logged = run.callback_metrics
    torch.testing.assert_close(logged["loss"], expected.detach())
    torch.testing.assert_close(logged[name], counts @ torch.arange(3.0) / counts.sum())
    assert logged["own_epoch" if per_step else "own"] == 1
    assert logged["summed"] == 3
    assert logged["step"] == 2


def test_means_over_an_epoch_with_fractions_as_weights() -> None:
    data, module = rows(UNEVEN), Big()
    expected = copy.deepcopy(module).together(data).detach()
    run = fit(module, loader(data), lambda batch: len(batch[0]) / 8, accumulate_grad_batches=5)
    assert max(module.errors) < EXACT
    torch.testing.assert_close(run.callback_metrics["loss"], expected)


def test_whole_weights_are_added_up_as_integers() -> None:
    """In float32, sums end at 16 million; tokens of an epoch are more."""
    found: list[int] = []

    class Looks(Big):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            (loss,) = self.trainer._results.values()
            found.append(int(loss.cumulated_batch_size))

    fit(Looks(), loader(rows([4] * 3)), lambda batch: 2.0**24 + 1, accumulate_grad_batches=3)
    assert found == [2**24 + 1, 2 * (2**24 + 1), 3 * (2**24 + 1)]


def test_with_batches_logging_stays_as_it_is() -> None:
    values = [
        fit(Big(), loader(rows(UNEVEN)), weight, accumulate_grad_batches=5).callback_metrics["loss"]
        for weight in (None, "batches")
    ]
    assert values[0] == values[1]
