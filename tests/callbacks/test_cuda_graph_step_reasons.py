"""What a replay of a training step would not do again is found, and steps stay eager."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu_graphs import cpu_graphs
from graph_runs import Steps, assert_same, fit, twins
from lightning.pytorch import Callback
from models import conv_net, images, mlp, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_perf import NoEffectWarning
from lightning_perf.callbacks import CUDAGraph

Do = Callable[[Any, Tensor, int], Any]


class Updates(Metric):
    """Counts its updates, without looking at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.zeros(()), "sum")

    def update(self) -> None:
        self.count += 1

    def compute(self) -> Tensor:
        return self.count


class Faulty(Steps):
    """Does something in its step that a replay would not do."""

    def __init__(self, do: Do) -> None:
        super().__init__(mlp())
        self.do = do
        self.steps, self.accuracy = Updates(), MulticlassAccuracy(4)
        self.calls, self.weight = 0, 1.0
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss(batch)
        changed = self.do(self, loss, batch_idx)
        return loss if changed is None else changed


def _metric(self: Any, loss: Tensor, batch_idx: int) -> None:
    self.steps.update()


def _logs_metric(self: Any, loss: Tensor, batch_idx: int) -> None:
    self.log("accuracy", self.accuracy, metric_attribute="accuracy")


def _count(self: Any, loss: Tensor, batch_idx: int) -> None:
    self.calls += 1


FAULTS: dict[str, tuple[Do, str]] = {
    "item": (lambda self, loss, i: loss * loss.item(), "reads a value on the host"),
    "batch_idx": (lambda self, loss, i: loss * (i + 1), "uses `batch_idx`"),
    "batch_idx with a tensor first": (lambda self, loss, i: loss + loss * i, "uses `batch_idx`"),
    "batch_idx compared": (lambda self, loss, i: loss * 2 if i % 3 == 0 else loss, "`batch_idx`"),
    "batch_idx as an index": (lambda self, loss, i: loss * [1, 2, 3][min(i, 2)], "`batch_idx`"),
    "batch_idx in torch": (lambda self, loss, i: loss * torch.tensor(i + 0.5), "`batch_idx`"),
    "batch_idx in text": (lambda self, loss, i: self.log(f"loss{i}", loss), "uses `batch_idx`"),
    "step": (lambda self, loss, i: loss / (1 + self.global_step), "reads `trainer.global_step`"),
    "epoch": (lambda self, loss, i: loss / (1 + self.current_epoch), "`trainer.current_epoch`"),
    "logger": (lambda self, loss, i: self.logger and None, "reads `trainer.logger`"),
    "number logged": (lambda self, loss, i: self.log("x", 1.0), "logs the Python value 'x'"),
    "graph kept": (lambda self, loss, i: self.log("x", loss, enable_graph=True), "enable_graph"),
    "metric logged": (_logs_metric, "logs the torchmetrics object 'accuracy'"),
    "metric updated": (_metric, "changes steps."),
    "counter": (_count, "changes calls"),
    "list": (lambda self, loss, i: self.kept.append(loss.detach()), "changes kept"),
    "random": (lambda self, loss, i: loss * random.random(), "from Python or NumPy"),
    "print": (lambda self, loss, i: self.print("here"), "prints"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_replay_would_not_do_again(fault: str) -> None:
    do, message = FAULTS[fault]
    random.seed(0)
    with pytest.warns(NoEffectWarning, match="the training step is eager: training_step") as caught:
        stock, run = twins_reseeded(lambda: Faulty(do))
    assert message in str(caught[-1].message)
    assert_same(stock, run)
    assert not run.graphs


def twins_reseeded(make: Callable[[], Any]) -> tuple[Any, Any]:
    class Reseed(Callback):
        def on_fit_start(self, trainer, pl_module) -> None:
            random.seed(0)

    return twins(make, "step", Reseed, strict=None)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_steps_that_return_nothing() -> None:
    class Skips(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with (
        cpu_graphs() as graphs,
        pytest.warns(NoEffectWarning, match="returned None"),
    ):
        trainer(callbacks=[CUDAGraph("step")]).fit(Skips(), images())
    assert not graphs


def test_batches_changed_in_place() -> None:
    class Changes(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch[0].mul_(2)
            return super().training_step(batch, batch_idx)

    with pytest.warns(NoEffectWarning, match="changes its batch in place"):
        stock, run = twins(Changes, "step", strict=None)
    assert_same(stock, run)


def test_sparse_gradients() -> None:
    class Embeds(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 4, sparse=True)

        def loss(self, batch: Any) -> Any:
            loss, out = super().loss(batch)
            return loss + self.embedding(batch[1]).square().sum(), out

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    with pytest.warns(NoEffectWarning, match="sparse gradients"):
        stock, run = twins(Embeds, "step", strict=None)
    assert_same(stock, run)


@pytest.mark.parametrize(
    ("value", "message"),
    [(3, "batch[2] is the Python value 3"), ("a.png", "batch[2] is the Python value 'a.png'")],
)
def test_python_values_in_the_batch(value: Any, message: str) -> None:
    class Takes(Steps):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch[:2])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)[0]

    def data() -> Any:
        def collate(samples: list[Any]) -> Any:
            one, two = (torch.stack(part) for part in zip(*samples, strict=True))
            return one, two, value

        return DataLoader(images(samples=30).dataset, batch_size=4, collate_fn=collate)

    with pytest.warns(NoEffectWarning, match=re.escape(message)):
        stock, run = twins(Takes, "step", data=data, validation=False, strict=None)
    assert_same(stock, run)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_tensors_elsewhere() -> None:
    class Elsewhere(Steps):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return (*batch, torch.ones(4, device="meta"))

        def loss(self, batch: Any) -> Any:
            return super().loss(batch[:2])

    with pytest.warns(NoEffectWarning, match="tensors that are not on cpu"):
        twins(Elsewhere, "step", strict=None)


def test_shapes_that_change_all_the_time() -> None:
    class Crops(Steps):
        def __init__(self) -> None:
            super().__init__(conv_net())
            self.size = 40

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if self.trainer.training:
                self.size -= 1
            return batch[0].repeat(1, 1, 1, 5)[..., : max(self.size, 2)], batch[1]

    with pytest.warns(NoEffectWarning, match="33 different ones so far"):
        stock, run = twins(
            Crops, "step", data=lambda: images(samples=80, batch_size=2), max_epochs=1, strict=None
        )
    assert_same(stock, run)
    assert not run.graphs


def test_a_capture_that_meets_another_step_than_the_trial() -> None:
    calls = 0

    class Fickle(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nonlocal calls
            calls += 1
            if calls % 17 == 5:
                self.log("now", 1.0)
            return super().training_step(batch, batch_idx)

    with cpu_graphs(), pytest.warns(NoEffectWarning, match="something else than it did a moment"):
        fit(Fickle(), CUDAGraph("step"))


def test_an_error_of_the_user_is_the_users() -> None:
    class Breaks(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("mine")

    with cpu_graphs(), pytest.raises(KeyError, match="mine"):
        fit(Breaks(), CUDAGraph("step"))
