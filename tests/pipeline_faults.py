"""What goes wrong in a pipeline ends all processes, and says why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from pipelines import Classifier, convolutions, images, loader, make_trainer, pipeline
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_perf.strategies import PipelineStrategy

RANK = int(os.environ.get("RANK", 0))


@contextmanager
def raises(message: str, *, by: int | None = None) -> Iterator[None]:
    """An error in both processes; if one of them made it, the other says so."""
    told = by is not None and by != RANK
    expected = f"Stage {by} of the pipeline failed with .*{message}" if told else message
    with pytest.raises((RuntimeError, ValueError), match=expected):
        yield


class Broken(Classifier):
    def __init__(self, how: str) -> None:
        super().__init__(convolutions())
        self.how, self.accuracy = how, MulticlassAccuracy(5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "twice":
            self.net(batch[0])
        if self.how == "never":
            return torch.ones(1, requires_grad=True)
        if self.how == "early" and batch_idx == 1:
            raise ValueError("mistake before the network")
        loss = super().training_step(batch, batch_idx)
        if self.how == "late" and batch_idx == 1:
            raise ValueError("mistake after the network")
        if self.how == "metric":
            self.accuracy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long))
            self.log("accuracy", self.accuracy)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.how == "outside":
            self.net(torch.zeros(1, 3, 8, 8))


def errors_end_both_processes() -> None:
    for how, message, by in (
        ("twice", "called Broken.net twice", 1),
        ("never", "training_step did not call Broken.net", 0),
        ("early", "mistake before the network", None),
        ("late", "mistake after the network", 1),
        ("metric", "logs 'accuracy' with MulticlassAccuracy", 1),
        ("outside", "called outside of a training, validation, test or predict step", None),
    ):
        module = Broken(how)
        with raises(message, by=by):
            pipeline(module, images())
        # Weights of the other process are lost, and are not taken for good ones.
        here = [parameter.isfinite().all().item() for parameter in module.net.parameters()]
        assert any(here)
        assert not all(here)
        assert "forward" not in vars(module.net)


def wrong_batches() -> None:
    with raises("has 9 samples, which cannot be divided into chunks=4"):
        trainer = make_trainer(strategy=PipelineStrategy(), devices=2)
        trainer.fit(Classifier(convolutions()), loader(images(1, 1), batch_size=9))
    with raises("processes of PipelineStrategy have different batches"):
        trainer = make_trainer(strategy=PipelineStrategy(), devices=2)
        other = images() if RANK else TensorDataset(*(t[8:] for t in images().tensors))
        trainer.fit(Classifier(convolutions()), loader(other))


def wrong_modules() -> None:
    class Words(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    def fit(net: nn.Module, **options: Any) -> None:
        pipeline(Classifier(net), images(), network="net", **options)

    with raises("schedule='1f1b' needs as many chunks as stages.*chunks=2 or more"):
        fit(convolutions(), chunks=1)
    with raises("mat1 and mat2 shapes", by=1):
        fit(nn.Sequential(nn.Flatten(), nn.Linear(192, 7), nn.Linear(8, 5)))
    with raises("cannot be traced, which split_points need"):
        fit(Words(*convolutions()), split_points=["3"])
    with raises("defined among the modules of stage"):
        fit(Backwards(), split_points=["second"])


class Backwards(nn.Module):
    """Defines what it calls last between what it calls first."""

    def __init__(self) -> None:
        super().__init__()
        self.third, self.second = nn.Linear(9, 5), nn.Linear(8, 9)
        self.first = nn.Linear(192, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x.flatten(1))))


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__(convolutions())
        self.automatic_optimization = False


class Newton(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def wrong_ways_to_train() -> None:
    with raises("it optimizes manually"):
        pipeline(Manual(), images())
    with raises("cannot run LBFGS"):
        pipeline(Newton(convolutions()), images())
    scaled = MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))
    with raises("'16-mixed' scales losses"):
        pipeline(Classifier(convolutions()), images(), precision=None, plugins=[scaled])


FAULTS = (errors_end_both_processes, wrong_batches, wrong_modules, wrong_ways_to_train)
