"""Networks, data and counts for the tests of compiling."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from models import images, mlp, trainer
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy


def forget_compiled_code() -> None:
    """Forget what other tests compiled, so that graphs can be counted."""
    torch._dynamo.reset()
    counters.clear()


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.relu(self.linear(x)))


def deep(blocks: int = 3) -> nn.Sequential:
    """Repeated blocks between a first and a last layer, on 3x8x8 images."""
    stage = nn.Sequential(*[Block() for _ in range(blocks)])
    first = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(12, 16))
    return nn.Sequential(first, stage, nn.Linear(16, 4))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the item said, without its name."""
    messages = [record.getMessage() for record in caplog.records]
    start = "lightning_perf: Compile: "
    return [m.removeprefix(start) for m in messages if m.startswith(start)]


def listen(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    return caplog


def fit(module: LightningModule, *callbacks: Any, data: Any = None, **kwargs: Any) -> Trainer:
    data = images() if data is None else data
    run = trainer(callbacks=list(callbacks), **kwargs)
    run.fit(module, data, data)
    return run


class Parts(LightningModule):
    """Calls its children one by one, as LightningModules do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp()
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.heads = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 2), nn.ReLU())})
        self.last = nn.Linear(2, 4)
        self.loss = nn.CrossEntropyLoss()
        self.accuracy = MulticlassAccuracy(4)
        self.metrics = MetricCollection({"accuracy": MulticlassAccuracy(4)})
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.heads["a"](self.dropout(x)))

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        x, y = batch
        scores = self(x)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy)
        return self.loss(scores, y)

    def validation_step(self, batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def calls_of(module: nn.Module) -> dict[str, bool]:
    return {n: m._compiled_call_impl is not None for n, m in module.named_modules()}


def odd(samples: int = 10) -> DataLoader:
    return images(samples=samples, batch_size=4)


class Lengths(torch.utils.data.Dataset):
    """One sequence of 16 features per batch, each of another length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return torch.randn(index + 2, 16), torch.zeros(index + 2, dtype=torch.long)


def lengths(count: int) -> DataLoader:
    return DataLoader(Lengths(count), batch_size=None)


class Breaking(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.norm(x)


class Noting:
    """A backend that notes for each graph the sizes it is made for, and for each call the graph."""

    name = "noting"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[list[tuple[Any, ...]]] = []
        self.calls: list[int] = []
        monkeypatch.setitem(registry._BACKENDS, self.name, None)
        monkeypatch.setitem(registry._COMPILER_FNS, self.name, self._compile)

    @property
    def made_for_any_size(self) -> list[int]:
        """Graphs in which a size of an input is not a number."""
        return [
            number
            for number, inputs in enumerate(self.graphs)
            if any(not isinstance(size, int) for shape in inputs for size in shape)
        ]

    def _compile(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        number = len(self.graphs)
        examples = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        self.graphs.append([tuple(e.shape) for e in examples if isinstance(e, torch.Tensor)])

        def call(*args: Any) -> Any:
            self.calls.append(number)
            return graph.forward(*args)

        return call
