"""Reasons that are known before training, and wrong uses."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_graphs import cpu_graphs
from graph_runs import Steps, assert_same, twins
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from models import Classifier, images, mlp, trainer
from torch import Tensor, nn

from lightning_perf._item import statuses
from lightning_perf.callbacks import CUDAGraph
from lightning_perf.callbacks.cuda_graph import (
    _unsupported,
    _unsupported_for_steps,
    cuda_graphed,
)

both_scopes = pytest.mark.parametrize("scope", ["network", "step"])


def test_without_a_cuda_device_it_is_skipped() -> None:
    run = trainer(callbacks=[CUDAGraph(strict=False)])
    run.fit(Classifier(), images())
    (status,) = statuses(run)
    assert (status.active, status.text) == (
        False,
        "CUDA graphs need a CUDA device, and this run is on cpu.",
    )


def reason(module: Any, scope: str = "network", **kwargs: Any) -> str:
    with cpu_graphs() as graphs:
        callbacks = [*kwargs.pop("callbacks", []), CUDAGraph(scope, strict=False)]
        run = trainer(callbacks=callbacks, max_steps=5, max_epochs=5, **kwargs)
        run.fit(module, images())
        status = statuses(run)[-1]
        assert not status.active
        assert not any(graph.replays for graph in graphs[2:])
    return status.text


@both_scopes
def test_reasons_that_hold_for_both_scopes(scope: str) -> None:
    assert "detect_anomaly" in reason(Steps(), scope, detect_anomaly=True)
    assert "CUDAGraph() acts already" in reason(Steps(), scope, callbacks=[CUDAGraph()])

    class Odd(MixedPrecision):
        pass

    assert "Odd" in reason(Steps(), scope, plugins=[Odd("bf16-mixed", "cpu")])


def test_a_module_without_a_network() -> None:
    class Layers(Classifier):
        def __init__(self) -> None:
            super().__init__(net=nn.Flatten())
            self.one, self.two = nn.Linear(192, 8), nn.Linear(8, 4)

        def loss(self, batch: Any) -> Tensor:
            out = self.two(self.one(self.net(batch[0])))
            return nn.functional.cross_entropy(out, batch[1])

    assert "no attribute that is a network" in reason(Layers())


@pytest.mark.parametrize(
    "hook", ["backward", "on_before_backward", "on_before_zero_grad", "optimizer_zero_grad"]
)
def test_hooks_that_a_graph_would_pass_over(hook: str) -> None:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(Hooked, self), hook)(*args, **kwargs)

    Hooked = type("Hooked", (Steps,), {hook: method})
    assert f"Hooked overrides `{hook}`" in reason(Hooked(), "step")
    stock, run = twins(Hooked, "network")
    assert_same(stock, run)


def test_manual_optimization_has_no_step_to_record() -> None:
    class Manual(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss, _ = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            return {"loss": loss}

    assert "manual optimization" in reason(Manual(), "step")
    stock, run = twins(Manual, "network")
    assert run.record.losses == stock.record.losses
    assert set(run.replays) == {11}


def test_a_step_that_takes_the_iterator() -> None:
    class Iterates(Steps):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)[0]

    with pytest.warns(UserWarning, match="experimental"):
        assert "dataloader_iter" in reason(Iterates(), "step")


def test_strategies_that_shard_weights() -> None:
    devices = [torch.device("cpu")]
    strategy = FSDPStrategy(parallel_devices=devices, cluster_environment=LightningEnvironment())
    with cpu_graphs():
        assert "FSDPStrategy gathers and moves weights" in _unsupported(
            SimpleNamespace(strategy=strategy)
        )


def test_ddp_with_a_communication_hook() -> None:
    strategy = DDPStrategy(ddp_comm_hook=lambda state, bucket: None)
    assert "communication hook" in _unsupported_for_steps(SimpleNamespace(strategy=strategy))


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_and_collectives_in_a_graph(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimpleNamespace(strategy=DDPStrategy())
    assert _unsupported_for_steps(run) is None
    monkeypatch.setenv(variable, "max_split_size_mb:64, expandable_segments: True")
    assert "NCCL_GRAPH_REGISTER=0" in _unsupported_for_steps(run)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert _unsupported_for_steps(run) is None


def test_wrong_uses_are_explained() -> None:
    with pytest.raises(ValueError, match="was asked for; it is 'network'"):
        CUDAGraph("all")
    with pytest.raises(RuntimeError, match=re.escape("parameters are on cpu")):
        cuda_graphed(mlp()).__enter__()
    with pytest.raises(RuntimeError, match="parameters are on none"):
        cuda_graphed(nn.ReLU()).__enter__()
