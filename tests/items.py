"""One row per exported item: how the contract test builds and runs it. Exceptions live here."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cpu_graphs import cpu_graphs
from lightning.pytorch import Callback, LightningModule, Trainer
from models import Classifier, LateClassifier, conv_net, images, mlp, trainer
from torch import nn

from lightning_perf import callbacks
from lightning_perf._batches import map_tensors
from lightning_perf._item import PerfCallback
from lightning_perf._knobs import knobs


@dataclass(frozen=True)
class Row:
    """An item with the arguments and the state of the process in which it acts on a CPU."""

    cls: type[PerfCallback]
    arguments: dict[str, Any] = field(default_factory=dict)
    net: Callable[[], nn.Module] = conv_net
    """Makes a network on which it acts; takes 3x8x8 images, gives four classes."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer with which it acts."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Puts the process into a state in which the item has something to do."""
    idle_model: Callable[[], LightningModule] | None = None
    """A model for which the item has a reason not to act, if it depends on the model."""
    acts_on_cpu: bool = True
    emulated: bool = False
    """Whether it acts on a CPU only because ``around`` stands in for another device."""
    changes_learning: bool = False
    """Whether it is there to change what is learned."""
    tolerance: float = 0.0
    """Largest relative difference of the losses, for items that are not exact."""
    wrong: tuple[tuple[dict[str, Any], str], ...] = ()
    """Wrong arguments with a part of the message."""

    @property
    def id(self) -> str:
        return self.cls.__name__

    def item(self, **arguments: Any) -> PerfCallback:
        """Build the item."""
        return self.cls(**self.arguments, **arguments)

    def model(self, *, late: bool = False) -> Classifier:
        """Make a model on which it acts; ``late`` ones get their layers in `configure_model`."""
        return LateClassifier(self.net) if late else Classifier(self.net())

    def run(self, module: LightningModule, *others: Callback, **kwargs: Any) -> Trainer:
        """Train with ``others`` as callbacks, or test if that is what the item is made for."""
        run = trainer(**{**self.trainer, "callbacks": list(others), **kwargs})
        if "fit" in self.cls.functions:
            run.fit(module, images(), images())
        else:
            run.test(module, images(), verbose=False)
        return run


class ClassifierWithLBFGS(Classifier):
    """Its optimizer calls the closure several times in a step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2)


class ClassifierOfOneLayer(Classifier):
    """Its network is a single layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(192, 4))

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs.flatten(1)), labels)


class ClassifierWithItsOwnChoice(Classifier):
    """Its author has chosen the implementation of the optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, foreach=False)


class ClassifierOfIterators(Classifier):
    """Its steps take batches from the loader themselves."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


def drawn(batch: Any) -> Any:
    """Return a copy of a batch, and draw random numbers of every kind."""
    torch.rand(3), random.random(), np.random.rand()
    return map_tensors(batch, torch.Tensor.clone)


def conv_net_with_biases() -> nn.Sequential:
    """The same as `conv_net`, but its convolutions have the bias that the norms subtract."""
    net = conv_net()
    net[0], net[3] = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    return net


class ResidualBlock(nn.Module):
    """Changes buffers in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.conv(x)).relu()


def residual_net() -> nn.Sequential:
    """A network of repeated blocks."""
    blocks = nn.Sequential(*(ResidualBlock() for _ in range(3)))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), blocks, *head)


ROWS = [
    Row(
        callbacks.ActivationCheckpointing,
        net=residual_net,
        idle_model=lambda: Classifier(mlp()),
        wrong=(
            ({"blocks": "encoder"}, "'auto' or a list"),
            ({"blocks": ["nett"]}, "Did you mean 'net'"),
            ({"blocks": ["BatchNorm"]}, "Did you mean 'BatchNorm2d'"),
            ({"policy": "partial"}, "'selective'"),
            ({"policy": 1.5}, "from 0 to 1"),
            ({"every_n": 0}, "at least 1"),
        ),
    ),
    Row(
        callbacks.CUDAGraph,
        around=cpu_graphs,
        emulated=True,
        idle_model=lambda: Classifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 4))),
        wrong=(({"scope": "model"}, "network"),),
    ),
    Row(callbacks.ChannelsLast, idle_model=lambda: Classifier(mlp()), tolerance=1e-4),
    Row(
        callbacks.Compile,
        {"backend": "eager"},
        idle_model=ClassifierOfOneLayer,
        tolerance=1e-4,
        wrong=(
            ({"regions": ["nett"], "backend": "eager"}, "net"),
            ({"mode": "fastest"}, "mode"),
            ({"backend": "inductr"}, "backend"),
        ),
    ),
    Row(
        callbacks.CudnnBenchmark,
        acts_on_cpu=False,
    ),
    Row(
        callbacks.DevicePrefetch,
        wrong=(
            ({"depth": 0}, "at least 1"),
            ({"depth": 1.5}, "at least 1"),
            ({"depth": "all"}, "leave the item out"),
        ),
    ),
    Row(
        callbacks.DeviceTransforms,
        {"transform": "items.drawn", "stages": ["train", "test"]},
        idle_model=ClassifierOfIterators,
        wrong=(
            ({"transform": "flip"}, "dotted path"),
            ({"transform": "items.flip"}, "nothing at that path"),
            ({"transform": "items.ROWS"}, "which is list"),
            ({"transform": "torchvision.transforms.v2.Normalize"}, "class_path"),
            ({"transform": "items.drawn", "stages": "train"}, "a list of some of"),
            ({"transform": "items.drawn", "stages": ["val"]}, "'validate'"),
            ({"transform": "items.drawn", "seed": -1}, "at least 0"),
        ),
    ),
    Row(
        callbacks.DisableDebugAPIs,
        around=lambda: knobs(anomaly_mode=True),
    ),
    Row(
        callbacks.DropConvBias,
        net=conv_net_with_biases,
        idle_model=Classifier,
        tolerance=1e-4,
    ),
    Row(
        callbacks.ExactAccumulation,
        trainer={"accumulate_grad_batches": 3},
        idle_model=ClassifierWithLBFGS,
        changes_learning=True,
        wrong=(
            ({"weight": "token"}, "'tokens'"),
            ({"weight": "items.no_such_function"}, "nothing at that path"),
            ({"weight": "items.ROWS"}, "there is a list"),
        ),
    ),
    Row(callbacks.FuseConvBN, idle_model=lambda: Classifier(mlp()), tolerance=1e-4),
    Row(callbacks.FusedOptimizer, idle_model=ClassifierWithItsOwnChoice, tolerance=1e-4),
    Row(
        callbacks.GarbageCollection,
        {"every_n_steps": 2},
        wrong=(
            ({"every_n_steps": 0}, "at least 1"),
            ({"every_n_steps": -50}, "at least 1"),
            ({"every_n_steps": 2.5}, "whole number"),
            ({"every_n_steps": "often"}, "whole number"),
        ),
    ),
    Row(
        callbacks.KeepInFP32,
        {"modules": ["Linear"]},
        trainer={"precision": "bf16-mixed"},
        idle_model=lambda: Classifier(conv_net().bfloat16()),
        tolerance=0.03,
        wrong=(
            ({"modules": []}, "give names"),
            ({"modules": ["BatchNorm2"]}, "'BatchNorm2d'"),
            ({"modules": ["net.9"]}, "'net.8'"),
        ),
    ),
    Row(
        callbacks.LoaderSettings,
        wrong=(
            ({"num_workers": "many"}, "'auto', a number"),
            ({"num_workers": -1}, "at least 0"),
            ({"num_workers": None}, "nothing to set"),
            ({"prefetch_factor": 0}, "at least 1"),
            ({"multiprocessing_context": "thread"}, "'spawn'"),
        ),
    ),
    Row(
        callbacks.MatmulPrecision,
        {"precision": "highest"},  # the default; lower ones act on some CPUs
        acts_on_cpu=False,
        wrong=(({"precision": "low"}, "highest"),),
    ),
    Row(
        callbacks.Preallocate,
        wrong=(
            ({"max_length": 8}, "Give both"),
            ({"dim": 1}, "Give both"),
            ({"max_length": 8, "dim": 4}, "no tensor with such a dimension"),
            ({"max_length": 2, "dim": 1}, "is 3 long there"),
            ({"max_length": 8, "dim": 1, "indices": [0]}, "Give one of them"),
            ({"indices": []}, "at least one item"),
            ({"indices": [16]}, "a dataset of 16"),
            ({"max_reads": 0}, "at least 1"),
        ),
    ),
    Row(
        callbacks.Threads,
        {"intra_op": 1},
        around=lambda: knobs(intra_op_threads=2),
        tolerance=1e-4,
        wrong=(({"intra_op": 0}, "intra_op"), ({"intra_op": "many"}, "auto")),
    ),
]

REFUSED: dict[tuple[str, str], str] = {}
"""Pairs of items that cannot act together, with a part of what is said; all other pairs can."""
