"""The training step as one graph: logging, gradients, hooks, and what a step may not do."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cpu_graphs import CPUStream, cpu_graphs
from graph_runs import Steps, assert_same, fit, twins
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from models import conv_net, images, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_perf import NoEffectWarning
from lightning_perf.callbacks import ChannelsLast, Compile, CUDAGraph
from lightning_perf.callbacks._graph import step as graph_step

# --- what a step may do


def test_the_number_of_the_batch_may_be_handed_on() -> None:
    class HandsOn(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.shared(batch, batch_idx)

        def shared(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

    stock, run = twins(HandsOn, "step")
    assert_same(stock, run)
    assert run.replays == [11]


def test_a_step_without_the_number_of_the_batch() -> None:
    class Short(Steps):
        def training_step(self, batch: Any) -> Tensor:
            return self.loss(batch)[0]

    stock, run = twins(Short, "step")
    assert_same(stock, run)
    assert run.replays == [11]


def test_every_way_to_log_a_tensor() -> None:
    class Logs(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, out = self.loss(batch)
            self.log("a", loss, True)
            self.log("b", out.max(), on_step=True, on_epoch=True, reduce_fx="max")
            self.log("c", loss * 2, on_step=False, on_epoch=True, sync_dist=True, batch_size=3)
            self.log_dict({"d": out.min(), "e": out.mean()}, prog_bar=True)
            return loss

    stock, run = twins(Logs, "step", logger=False)
    assert_same(stock, run)
    assert {"a", "b_step", "b_epoch", "c", "d", "e"} <= run.trainer.callback_metrics.keys()


def test_loggers_get_fresh_values(tmp_path: Any) -> None:
    kept = []

    class Keeps(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            kept.append((step, metrics))

    def run(*callbacks: Callback) -> list[Any]:
        kept.clear()
        torch.manual_seed(2)
        fit(Steps(), *callbacks, logger=Keeps(tmp_path), log_every_n_steps=2)
        return list(kept)

    expected = run()
    with cpu_graphs():
        assert run(CUDAGraph("step", strict=True)) == expected


def test_learning_rates_that_change() -> None:
    class Scheduled(Steps):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    stock, run = twins(Scheduled, "step")
    assert_same(stock, run)
    assert run.replays == [11]


def test_weights_that_are_averaged() -> None:
    stock, run = twins(Steps, "step", lambda: StochasticWeightAveraging(0.01, 1), max_epochs=3)
    assert_same(stock, run)
    assert sum(run.replays) > 10


def test_a_learning_rate_finder_before_the_run() -> None:
    class Finds(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.05

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    stock, run = twins(
        Finds, "step", lambda: LearningRateFinder(num_training_steps=8), enable_checkpointing=True
    )
    assert run.record.losses == stock.record.losses
    assert sum(run.replays) > 8


def test_a_buffer_that_changes_in_place_is_read_anew() -> None:
    class Weighs(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)[0] * self.weight

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.weight.fill_(1 / (1 + batch_idx))

    stock, run = twins(Weighs, "step")
    assert_same(stock, run)
    assert run.replays == [11]


def test_attributes_that_only_hooks_use_may_change() -> None:
    class Counts(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.batches, self.seen = 0, []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.batches += 1
            self.seen.append(batch_idx)

    stock, run = twins(Counts, "step")
    assert_same(stock, run)
    assert run.replays == [11]
    assert run.module.batches == 16


def test_parameters_without_a_gradient_keep_none() -> None:
    class Unused(Steps):
        def __init__(self) -> None:
            super().__init__(conv_net())
            self.unused = nn.Linear(4, 4)

    stock, run = twins(Unused, "step")
    assert_same(stock, run)
    assert run.replays == [11]
    assert run.module.unused.weight.grad is None


def test_an_optimizer_that_calls_the_closure_twice() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    class Closures(Steps):
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), lr=0.01)

    stock, run = twins(Closures, "step")
    assert_same(stock, run)
    assert run.replays == [25, 1]


def test_gradients_that_a_callback_reads_and_changes() -> None:
    class Noise(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            for parameter in pl_module.parameters():
                parameter.grad.add_(0.01)

        def on_after_backward(self, trainer, pl_module) -> None:
            first = next(pl_module.parameters())
            first.grad = first.grad * 0.5

    stock, run = twins(Steps, "step", Noise, accumulate_grad_batches=2)
    assert_same(stock, run)
    assert run.replays == [11]


def test_gradients_stay_where_the_graph_adds_to_them() -> None:
    places: list[int] = []

    class Look(Callback):
        def on_after_backward(self, trainer, pl_module) -> None:
            places.append(pl_module.net[0][0].weight.grad.data_ptr())

    stock, run = twins(Steps, "step", Look, val_check_interval=2)
    assert_same(stock, run)
    mine = places[16:]
    replayed = mine[3:7] + mine[8:15]
    assert len(set(replayed)) == 1


def test_gradients_that_validation_freed_must_be_attached_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_step._GraphedSteps, "_attach_gradients", lambda *_: None)
    stock, run = twins(Steps, "step", val_check_interval=2)
    with pytest.raises(AssertionError):
        assert_same(stock, run)


def test_without_the_recorder_logged_values_would_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = graph_step._GraphedSteps._replayed

    def silent(self: Any, graph: Any, *args: Any) -> Any:
        results = graph.replay
        monkeypatch.setattr(graph, "replay", lambda tensors: results(tensors) | {"logged": []})
        return replayed(self, graph, *args)

    monkeypatch.setattr(graph_step._GraphedSteps, "_replayed", silent)
    stock, run = twins(Steps, "step")
    assert run.record.losses == stock.record.losses
    assert run.record.metrics != stock.record.metrics


def test_without_a_copy_outputs_would_change_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_step, "map_tensors", lambda value, function: value)
    stock, run = twins(Steps, "step")
    assert run.record.losses == stock.record.losses
    assert not all(map(torch.equal, run.record.outputs, stock.record.outputs))


def test_eager_steps_run_on_the_stream_of_the_capture() -> None:
    streams: list[tuple[str, int]] = []

    class Look(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            streams.append(("step", id(CPUStream.current)))
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            streams.append(("update", id(CPUStream.current)))

    with cpu_graphs():
        fit(Look(), CUDAGraph("step", strict=True), max_epochs=1)
    # Three to warm up, the trial run, the capture, and the short batch.
    steps = {stream for name, stream in streams if name == "step"}
    assert len([name for name, _ in streams if name == "step"]) == 6
    assert len(steps) == 1
    assert not steps & {stream for name, stream in streams if name == "update" and stream} - steps


@dataclass
class Pair:
    images: Tensor
    labels: Tensor


def test_batches_of_any_structure() -> None:
    class Structured(Steps):
        def loss(self, batch: Any) -> Any:
            pair = batch["pair"]
            assert batch["nothing"] is None
            return super().loss((pair.images, pair.labels))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)[0]

    def data() -> Any:
        def collate(samples: list[Any]) -> dict[str, Any]:
            one, two = (torch.stack(part) for part in zip(*samples, strict=True))
            return {"pair": Pair(one, two), "nothing": None, "flag": True, "empty": ()}

        return DataLoader(images(samples=30).dataset, batch_size=4, collate_fn=collate)

    stock, run = twins(Structured, "step", data=data, validation=False)
    assert_same(stock, run)
    assert run.replays == [11]


# --- beside other items


@pytest.mark.parametrize("first", [True, False])
def test_beside_compile_the_step_stays_eager(first: bool) -> None:
    def other() -> Compile:
        return Compile(backend="eager")

    with pytest.warns(NoEffectWarning, match="reduce-overhead"):
        stock, run = twins(lambda: Steps(mlp()), "step", other, strict=None)
    assert_same(stock, run)
    assert not run.graphs


def test_beside_channels_last() -> None:
    stock, run = twins(lambda: Steps(conv_net()), "step", ChannelsLast)
    assert_same(stock, run)
    assert run.replays == [11]


def test_the_graph_is_gone_after_the_run() -> None:
    with cpu_graphs() as graphs:
        run = fit(Steps(), CUDAGraph("step", strict=True))
    loop = run.trainer.fit_loop.epoch_loop.automatic_optimization
    assert "_make_closure" not in vars(loop)
    graph = weakref.ref(graphs.pop())
    gc.collect()
    assert graph() is None
