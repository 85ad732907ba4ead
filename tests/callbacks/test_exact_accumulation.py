"""In a Trainer, gradients at each step are those of one big batch, whatever the window."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from big_batch import Big, Stream, loader, rows
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from models import Classifier, images, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf._item import statuses
from lightning_perf.callbacks import ExactAccumulation

EXACT = 1e-9
UNEVEN = [4, 2, 3, 1, 2]


def fit(module: Big, data: Any, weight: Any = "batches", **kwargs: Any) -> Trainer:
    callbacks = [ExactAccumulation(weight), *kwargs.pop("callbacks", [])]
    run = trainer(callbacks=callbacks, **kwargs)
    run.fit(module, data)
    assert statuses(run)[0].active, statuses(run)
    return run


def stock(module: Big, data: Any, **kwargs: Any) -> Trainer:
    run = trainer(**kwargs)
    run.fit(module, data)
    return run


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


# --- windows


def test_a_short_last_window(caplog: pytest.LogCaptureFixture) -> None:
    options = {"accumulate_grad_batches": 4, "max_epochs": 2}
    stock(without := Big(), loader(rows([4] * 5)), **options)
    assert [error > 0.5 for error in without.errors] == [False, True, False, True]
    fit(module := Big(), loader(rows([4] * 5)), **options)
    assert len(module.errors) == 4
    assert max(module.errors) < EXACT
    assert "windows corrected: 2 of 4; their micro-batches count 4 times as much" in said(caplog)


def test_equal_windows_are_left_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    trained = []
    for weight in (None, "batches", "samples", lambda batch: 7):
        run = fit if weight else stock
        options = {"weight": weight} if weight else {}
        run(
            module := Big(),
            loader(rows([4] * 8)),
            accumulate_grad_batches=4,
            max_epochs=2,
            **options,
        )
        trained.append(weights_of(module))
    assert all(torch.equal(trained[0], other) for other in trained[1:])
    assert said(caplog).count("windows corrected: 0 of 4.") == 3


@pytest.mark.parametrize(
    ("options", "steps", "corrected"),
    [
        ({"max_steps": 2}, 2, 0),
        ({"max_steps": 3, "max_epochs": 5}, 3, 1),
        ({"limit_train_batches": 6}, 2, 1),
        ({"limit_train_batches": 0.5}, 2, 1),
        ({"max_epochs": 2}, 6, 2),
        ({"val_check_interval": 2}, 3, 1),
    ],
)
def test_the_last_window_whatever_ends_it(
    options: dict[str, Any], steps: int, corrected: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Validated(Big):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

    run = trainer(callbacks=[ExactAccumulation()], accumulate_grad_batches=4, **options)
    run.fit(module := Validated(), loader(rows([4] * 10)), loader(rows([4])))
    assert len(module.errors) == steps
    assert max(module.errors) < EXACT
    assert f"windows corrected: {corrected} of {steps}" in said(caplog)


@pytest.mark.parametrize("batches", [3, 5, 8])
def test_streams_of_unknown_length(batches: int) -> None:
    stream = DataLoader(Stream(rows([4] * batches)), batch_size=None)
    fit(module := Big(), stream, accumulate_grad_batches=4, max_epochs=2)
    assert max(module.errors) < EXACT


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_smaller_last_batch_of_a_loader(drop_last: bool) -> None:
    data = TensorDataset(*rows([13])[0])
    batches = DataLoader(data, batch_size=3, shuffle=True, drop_last=drop_last)
    fit(module := Big(), batches, "samples", accumulate_grad_batches=3, max_epochs=2)
    assert len(module.errors) == 4
    assert max(module.errors) < EXACT


@pytest.mark.parametrize(("weight", "sizes"), [("batches", [4] * 5), ("samples", UNEVEN)])
def test_accumulation_that_changes_by_epoch(weight: str, sizes: list[int]) -> None:
    schedule = GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})
    fit(module := Big(), loader(rows(sizes)), weight, max_epochs=3, callbacks=[schedule])
    assert len(module.errors) == 5 + 3 + 2
    assert max(module.errors) < EXACT


@pytest.mark.parametrize("stream", [True, False])
def test_a_window_longer_than_the_epoch_is_said_once(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = rows([4] * 3)
    batches = DataLoader(Stream(data), batch_size=None) if stream else loader(data)
    fit(module := Big(), batches, accumulate_grad_batches=8, max_epochs=3)
    assert max(module.errors) < EXACT
    assert said(caplog).count("accumulate_grad_batches=8 is more than the 3 batches") == 1


def test_an_epoch_that_is_cut_off_in_mid_window() -> None:
    class Cut(Big):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 5 else None

    fit(module := Cut(), loader(rows([4] * 7)), accumulate_grad_batches=4, max_epochs=2)
    assert len(module.errors) == 3
    assert max(module.errors) < EXACT


class SaveAndStop(Callback):
    """Saves in the middle of the second window, and stops there."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx == 5:
            trainer.save_checkpoint("mid.ckpt")
            trainer.should_stop = True


@pytest.mark.parametrize("same_model", [True, False])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.filterwarnings("ignore:.*Serialization of dataclass")
def test_resuming_in_mid_window_counts_what_is_left_of_it(same_model: bool) -> None:
    """The gradients of the first part are lost, or, in the same model, of unknown weight."""
    data = loader(rows([4, 2, 3, 1, 2, 5, 1, 3, 2]))
    fit(
        module := Big(),
        data,
        "samples",
        accumulate_grad_batches=4,
        min_epochs=0,
        callbacks=[SaveAndStop()],
    )
    assert len(module.errors) == 1
    if not same_model:
        module = Big()
    module.window, module.errors = [], []
    run = trainer(callbacks=[ExactAccumulation("samples")], accumulate_grad_batches=4, max_epochs=2)
    run.fit(module, data, ckpt_path="mid.ckpt")
    assert len(module.errors) == 5
    assert max(module.errors) < EXACT


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_gradients_left_where_a_window_starts_with_no_batch() -> None:
    """Lightning clears gradients at the first batch of a window only, if there is one."""

    class Gaps:
        def __iter__(self) -> Any:
            data: list[Any] = rows([4] * 7)
            data[4] = None
            return iter(data)

    stock(without := Big(), Gaps(), accumulate_grad_batches=4)
    assert without.errors[1] > 0.5
    fit(module := Big(), Gaps(), accumulate_grad_batches=4)
    assert max(module.errors) < EXACT


def test_gradients_that_are_cleared_in_mid_window_do_not_count() -> None:
    class Clears(Big):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (1, 4):
                self.zero_grad()
                self.window = []

    fit(module := Clears(), loader(rows([4] * 7)), accumulate_grad_batches=4)
    assert len(module.errors) == 2
    assert max(module.errors) < EXACT


def test_an_epoch_without_backward_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Averaging weights, Lightning passes once more over the data for BatchNorm's statistics."""

    def trained(items: list[Callback]) -> Tensor:
        module = Classifier()
        averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
        run = trainer(callbacks=[*items, averaging], accumulate_grad_batches=2, max_epochs=2)
        run.fit(module, images())
        return weights_of(module)

    torch.manual_seed(0)
    expected = trained([])
    torch.manual_seed(0)
    assert torch.equal(trained([ExactAccumulation()]), expected)
    assert "is more than" not in said(caplog)


# --- steps


@pytest.mark.parametrize("skipped", [{0}, {1}, {3}, {4}, {0, 1, 2}, {0, 1, 2, 3}, {2, 4}])
@pytest.mark.parametrize("weight", ["batches", "samples"])
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_returns_none_does_not_count(weight: str, skipped: set[int]) -> None:
    class Skips(Big):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in skipped else super().training_step(batch, batch_idx)

    sizes = [4] * 5 if weight == "batches" else UNEVEN
    fit(module := Skips(), loader(rows(sizes)), weight, accumulate_grad_batches=4, max_epochs=2)
    assert max(module.errors) < EXACT


def test_a_step_that_returns_a_dictionary() -> None:
    module = Big(out=lambda loss: {"more": 1, "loss": loss})
    fit(module, loader(rows(UNEVEN)), "samples", accumulate_grad_batches=4)
    assert max(module.errors) < EXACT


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.05}])
def test_training_is_as_on_big_batches(clip: dict[str, Any]) -> None:
    """Clipping, momentum and schedulers see the corrected gradients."""
    small, sizes = rows([4, 2, 3, 1, 2, 5, 1]), (4, 3)
    big = [
        tuple(torch.cat(parts) for parts in zip(*small[start : start + 4], strict=True))
        for start in (0, 4)
    ]
    assert sum(sizes) == len(small)
    stock(expected := Big(), loader(big), max_epochs=3, **clip)
    fit(module := Big(), loader(small), "samples", max_epochs=3, accumulate_grad_batches=4, **clip)
    torch.testing.assert_close(weights_of(module), weights_of(expected), rtol=EXACT, atol=1e-12)


class Single(Big):
    """The same in float32, for mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(tuple(part.float() for part in batch))


def precision(name: str) -> dict[str, Any]:
    if name == "fp16":
        return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    return {"precision": name}


@pytest.mark.parametrize("name", ["fp16", "bf16-mixed"])
@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.05}])
@pytest.mark.parametrize(("weight", "sizes"), [("batches", [4] * 5), ("samples", UNEVEN)])
def test_mixed_precision_with_and_without_a_scaler(
    weight: str, sizes: list[int], clip: dict[str, Any], name: str
) -> None:
    options = {"accumulate_grad_batches": 4, "max_epochs": 3, **clip}
    stock(without := Single(), loader(rows(sizes)), **options, **precision(name))
    assert max(without.errors) > 0.5
    fit(module := Single(), loader(rows(sizes)), weight, **options, **precision(name))
    assert max(module.errors) < 0.03  # half precision has that few digits


def test_weights_do_not_overflow_a_loss_that_is_scaled() -> None:
    """A loss times its tokens would: float16 ends at 65504."""
    run = fit(
        module := Single(),
        loader(rows([4] * 3)),
        lambda batch: 100_000 + len(batch[0]),
        accumulate_grad_batches=2,
        **precision("fp16"),
    )
    assert max(module.errors) < 0.03
    assert run.precision_plugin.scaler.get_scale() == 65536


# --- what is said


def test_unequal_micro_batches_that_count_the_same_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit(Big(), loader(rows([4, 2, 4, 4, 3])), accumulate_grad_batches=2)
    assert "windows with unequal micro-batches: 1; those of 2 and of 4 samples" in said(caplog)
    caplog.clear()
    fit(Big(), loader(rows([4, 4, 2])), accumulate_grad_batches=2)
    assert "unequal micro-batches" not in said(caplog)


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")
def test_batchnorm_in_training_is_named() -> None:
    module = Classifier()
    module.net[4].eval()
    run = trainer(callbacks=[ExactAccumulation()], accumulate_grad_batches=3)
    run.fit(module, images())
    assert statuses(run)[0].text == (
        "by batches; not one big batch for BatchNorm, which sees micro-batches: net.1"
    )


def test_its_text_names_a_callable() -> None:
    run = fit(Big(), loader(rows([4] * 3)), samples_of, accumulate_grad_batches=2)
    assert statuses(run)[0].text == "by samples_of"


def samples_of(batch: Any) -> int:
    return len(batch[0])


# --- undo


def test_nothing_is_left_on_strategy_and_results() -> None:
    class Look(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            self.inside = "training_step" in vars(trainer.strategy)
            copy.deepcopy(pl_module)
            pickle.dumps(pl_module.net)
            if batch_idx == 3 and trainer.current_epoch == 1:
                raise KeyError("stop")

    look = Look()
    run = trainer(
        callbacks=[ExactAccumulation("samples"), look], accumulate_grad_batches=4, max_epochs=2
    )
    with pytest.raises(KeyError):
        run.fit(Big(), loader(rows([4] * 5)))
    assert look.inside
    for name in ("training_step", "backward", "optimizer_step", "on_train_batch_start"):
        assert name not in vars(run.strategy)
    assert "log" not in vars(run.fit_loop.epoch_loop._results)


def test_a_second_fit_with_the_same_trainer() -> None:
    run = fit(module := Big(), loader(rows([4] * 5)), accumulate_grad_batches=4)
    run.fit_loop.max_epochs = 3
    run.fit(module, loader(rows([4] * 6)))
    assert len(module.errors) == 6
    assert max(module.errors) < EXACT
