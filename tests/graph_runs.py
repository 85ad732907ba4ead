"""Modules that show every difference between eager calls and replays, and runs to compare."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from cpu_graphs import CPUGraph, cpu_graphs
from lightning.pytorch import Callback, LightningModule, Trainer
from models import conv_net, images, trainer
from torch import Tensor, nn

from lightning_perf import NoEffectWarning
from lightning_perf.callbacks import CUDAGraph
from lightning_perf.callbacks.cuda_graph import cuda_graphed


class Steps(LightningModule):
    """BatchNorm, dropout, momentum, two logged values, and an output of its own."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or nn.Sequential(conv_net(), nn.Dropout(0.3), nn.Linear(4, 4))

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = batch
        out = self.net(images)
        return nn.functional.cross_entropy(out, labels), out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, out = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"mean": out.mean(), "max": out.max()}, on_epoch=True)
        return {"loss": loss, "out": out.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch)[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


class Record(Callback):
    """Keeps what each batch gave, and how often its hooks were called."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.outputs: list[Tensor] = []
        self.metrics: list[dict[str, float]] = []
        self.hooks: list[str] = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer) -> None:
        self.hooks.append("zero_grad")

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        self.hooks.append(f"backward {loss.item()}")

    def on_after_backward(self, trainer, pl_module) -> None:
        norm = sum(p.grad.norm().item() for p in pl_module.parameters() if p.grad is not None)
        self.hooks.append(f"gradients {norm}")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(outputs["loss"].item())
        self.outputs.append(outputs.get("out"))
        self.metrics.append({k: v.item() for k, v in trainer.callback_metrics.items()})


@dataclass
class Run:
    """What one run left."""

    module: LightningModule
    trainer: Trainer
    record: Record
    graphs: list[CPUGraph] = field(default_factory=list)

    @property
    def replays(self) -> list[int]:
        return [graph.replays for graph in self.graphs]


def fit(
    module: LightningModule,
    *callbacks: Callback,
    data: Callable[[], Any] = lambda: images(samples=30),
    validation: bool = True,
    **kwargs: Any,
) -> Run:
    """Train from a fixed seed and keep what came out."""
    record = Record()
    torch.manual_seed(3)
    run = trainer(**{"max_epochs": 2, **kwargs, "callbacks": [*callbacks, record]})
    run.fit(module, data(), images() if validation else None)
    return Run(module, run, record)


def twins(
    make: Callable[[], LightningModule],
    scope: str,
    *callbacks: Callable[[], Callback],
    graph: type[CPUGraph] = CPUGraph,
    strict: bool | None = True,
    **kwargs: Any,
) -> tuple[Run, Run]:
    """Train the same module without and with graphs."""
    torch.manual_seed(2)
    module = make()
    other = copy.deepcopy(module)
    plugins = kwargs.pop("plugins", list)
    stock = fit(module, *(c() for c in callbacks), plugins=plugins(), **kwargs)
    with cpu_graphs(graph) as graphs:
        item = CUDAGraph(scope, strict=strict)
        run = fit(other, item, *(c() for c in callbacks), plugins=plugins(), **kwargs)
        run.graphs = list(graphs)
    return stock, run


def assert_same(stock: Run, run: Run) -> None:
    """Compare everything, bit for bit."""
    assert run.record.losses == stock.record.losses
    assert run.record.metrics == stock.record.metrics
    for mine, theirs in zip(run.record.outputs, stock.record.outputs, strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)
    theirs = stock.module.state_dict()
    for name, value in run.module.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    assert sorted(run.record.hooks) == sorted(stock.record.hooks)
    assert run.trainer.callback_metrics == stock.trainer.callback_metrics
    assert run.trainer.global_step == stock.trainer.global_step


# --- networks without a Trainer


class Dense(nn.Sequential):
    """Three layers on 8 numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def inputs(count: int, *shape: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        yield torch.randn(*(shape or (4, 8)), generator=generator)


Step = Callable[[nn.Module, Tensor], Any]


def plain(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    out.square().sum().backward()
    return out


def train(net: nn.Module, step: Step, steps: int = 8, shape: tuple[int, ...] = ()) -> list[Any]:
    """Train with ``step`` doing forward and backward; return what it returned, and gradients."""
    torch.manual_seed(6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    kept = []
    for x in inputs(steps, *shape):
        optimizer.zero_grad()
        kept.append(step(net, x))
        kept.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        optimizer.step()
    return kept


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two) and one.requires_grad == two.requires_grad
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return list(one) == list(two) and same(list(one.values()), list(two.values()))
    return bool(one == two)


@contextmanager
def graphed(net: nn.Module, **kwargs: Any) -> Iterator[list[CPUGraph]]:
    with cpu_graphs() as graphs, cuda_graphed(net, **{"strict": True, **kwargs}):
        yield graphs


@contextmanager
def warned(message: str) -> Iterator[list[str]]:
    """Expect one warning, after which the network stays eager."""
    messages: list[str] = []
    with pytest.warns(NoEffectWarning, match=message) as caught:
        yield messages
    messages += [str(warning.message) for warning in caught]
    assert len(messages) == 1


def compare(make: Callable[[], nn.Module], step: Step = plain, **kwargs: Any) -> list[CPUGraph]:
    """Train without and with graphs and return the graphs, forward and backward in turn."""
    torch.manual_seed(1)
    net = make()
    other = copy.deepcopy(net)
    stock = train(net, step, **kwargs)
    with graphed(other) as graphs:
        item = train(other, step, **kwargs)
    assert same(stock, item)
    assert same(list(net.state_dict().values()), list(other.state_dict().values()))
    return graphs


def reason(make: Callable[[], nn.Module], step: Step = plain, **kwargs: Any) -> str:
    """Train with a network that stays eager, correctly, and return why."""
    torch.manual_seed(1)
    net = make()
    other = copy.deepcopy(net)
    state = random.getstate(), np.random.get_state()
    stock = train(net, step, **kwargs)
    random.setstate(state[0])
    np.random.set_state(state[1])
    with warned("") as caught, graphed(other, strict=None) as graphs:
        item = train(other, step, **kwargs)
        assert sum(graph.replays for graph in graphs) == 0
    assert same(stock, item)
    return caught[0]
