"""Evaluation with folded norms in a Trainer, and training before and after it."""

from __future__ import annotations

import copy
import logging
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from models import Classifier, conv_net, images, mlp, trainer
from torch import nn

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf.callbacks import ChannelsLast, Compile, DropConvBias, FuseConvBN


class Trained(Classifier):
    """Its norms have statistics of their own."""

    def __init__(self, net: nn.Module | None = None) -> None:
        torch.manual_seed(4)
        super().__init__(net)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
        self.val_losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_losses.append(self.loss(batch).item())


class Norms(Callback):
    """Counts the norms that are computed in each batch, and keeps a checkpoint of the middle."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.computed: list[int] = []
        self.calls = 0

    @contextmanager
    def counting(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        batch_norm = nn.functional.batch_norm

        def count(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return batch_norm(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(nn.functional, "batch_norm", count)
            yield

    def on_test_batch_start(self, *args: Any) -> None:
        self.calls = 0

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.computed.append(self.calls)
        if self.path is not None:
            trainer.save_checkpoint(self.path)


def losses(module: Trained, run: Any, what: str) -> Any:
    if what == "validate":
        run.validate(module, images(), verbose=False)
        return module.val_losses
    if what == "test":
        run.test(module, images(), verbose=False)
        return module.test_losses
    return torch.cat(run.predict(module, images())).flatten().tolist()


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluation_agrees(what: str, inference_mode: bool) -> None:
    stock, item = Trained(), Trained()
    run = trainer(callbacks=[FuseConvBN()], inference_mode=inference_mode)
    found = losses(item, run, what)
    expected = losses(stock, trainer(inference_mode=inference_mode), what)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert found != expected
    (status,) = statuses(run)
    assert (status.active, status.text) == (True, "2 of 2 BatchNorm folded")


def test_norms_are_computed_in_the_first_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = Norms()
    with norms.counting(monkeypatch):
        trainer(callbacks=[FuseConvBN(), norms]).test(Trained(), images(), verbose=False)
    assert norms.computed == [2, 0, 0, 0]


def test_checkpoints_and_later_training_are_as_without_it(tmp_path: Path) -> None:
    stock, item = Trained(), Trained()
    for module, items in ((stock, []), (item, [FuseConvBN()])):
        path = tmp_path / f"{len(items)}.ckpt"
        run = trainer(callbacks=[*items, Norms(path)])
        run.fit(module, images())
        run.test(module, images(), verbose=False)
        run.fit_loop.max_epochs = 2
        run.fit(module, images())
    assert item.losses == stock.losses
    first, second = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in (0, 1))
    assert list(first["state_dict"]) == list(second["state_dict"])
    for name, value in stock.state_dict().items():
        assert torch.equal(value, item.state_dict()[name])
        assert torch.equal(first["state_dict"][name], second["state_dict"][name])


def test_weights_of_a_checkpoint_are_the_ones_that_fold(tmp_path: Path) -> None:
    run = trainer()
    run.fit(Trained(), images())
    run.save_checkpoint(tmp_path / "x.ckpt")
    stock, item = Classifier(), Classifier()
    path = {"ckpt_path": tmp_path / "x.ckpt", "verbose": False}
    trainer().test(stock, images(), **path)
    trainer(callbacks=[FuseConvBN()]).test(item, images(), **path)
    assert item.test_losses == pytest.approx(stock.test_losses, rel=1e-4)


class SwapsWeights(Callback):
    """Evaluates with averages, written into the model as most implementations do."""

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = copy.deepcopy(pl_module.state_dict())
        for parameter in pl_module.parameters():
            parameter.data.copy_(parameter.data * 1.5)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.kept)


def test_averages_written_before_the_first_batch_are_seen() -> None:
    stock, item = Trained(), Trained()
    trainer(callbacks=[SwapsWeights()]).test(stock, images(), verbose=False)
    trainer(callbacks=[FuseConvBN(), SwapsWeights()]).test(item, images(), verbose=False)
    assert item.test_losses == pytest.approx(stock.test_losses, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions_agree(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, item, norms = Trained(), Trained(), Norms()
    trainer(precision=precision).test(stock, images(), verbose=False)
    with norms.counting(monkeypatch):
        run = trainer(precision=precision, callbacks=[FuseConvBN(), norms])
        run.test(item, images(), verbose=False)
    assert norms.computed[1:] == [0, 0, 0]
    tolerance = 1e-6 if precision == "64-true" else 0.1
    assert item.test_losses == pytest.approx(stock.test_losses, rel=tolerance)


@pytest.mark.parametrize("order", [1, -1])
def test_with_other_items(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ChannelsLast has hooks on the convolutions for the first batch, and they must stay ours."""
    stock, item, norms = Trained(), Trained(), Norms()
    trainer().test(stock, images(), verbose=False)
    items = [FuseConvBN(), ChannelsLast(), DropConvBias()][::order]
    with norms.counting(monkeypatch):
        run = trainer(callbacks=[*items, norms])
        run.test(item, images(), verbose=False)
    assert norms.computed == [2, 0, 0, 0]
    assert item.test_losses == pytest.approx(stock.test_losses, rel=1e-4)


@pytest.mark.parametrize("order", [1, -1])
def test_compiled_networks_are_folded_after_the_first_batch(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, item, norms = Trained(), Trained(), Norms()
    trainer().test(stock, images(), verbose=False)
    items = [FuseConvBN(), Compile("whole", backend="eager")][::order]
    with norms.counting(monkeypatch):
        run = trainer(callbacks=[*items, norms])
        run.test(item, images(), verbose=False)
    assert all(status.active for status in statuses(run))
    assert norms.computed == [2, 0, 0, 0]
    assert item.test_losses == pytest.approx(stock.test_losses, rel=1e-4)


def test_it_is_not_involved_in_training() -> None:
    run = trainer(callbacks=[FuseConvBN()])
    run.fit(Trained(), images(), images())
    assert statuses(run) == ()


class Aside(Trained):
    """Its network is called by parts."""

    def loss(self, batch: Any) -> Any:
        x = batch[0]
        for layer in self.net:
            x = layer(x)
        return nn.functional.cross_entropy(x, batch[1])


def test_what_never_ran_folded_is_named(caplog: pytest.LogCaptureFixture) -> None:
    stock, item = Aside(), Aside()
    trainer().test(stock, images(), verbose=False)
    with caplog.at_level(logging.INFO):
        trainer(callbacks=[FuseConvBN()]).test(item, images(), verbose=False)
    assert item.test_losses == stock.test_losses
    (message,) = [r.message for r in caplog.records if "ran unfolded" in r.message]
    assert message.startswith("lightning_perf: FuseConvBN: 2 of 2 ran unfolded")
    assert message.endswith("net.0, net.3.")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mlp, "Trained has no BatchNorm"),
        (
            lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 4)),
            "0 of 1 BatchNorm folded; kept: 'net.2' .Sequential.forward returns its output",
        ),
    ],
)
def test_reasons_of_a_model(make: Any, message: str) -> None:
    with pytest.warns(NoEffectWarning, match=message):
        trainer(callbacks=[FuseConvBN()]).test(Trained(make()), images(), verbose=False)


def test_sharding_strategies_are_left_alone() -> None:
    run = trainer()
    run.strategy.__class__ = type(
        "ShardingStrategy", (type(run.strategy),), {"restore_checkpoint_after_setup": True}
    )
    assert "ShardingStrategy shards" in FuseConvBN().why_not(run, Trained(conv_net()))
