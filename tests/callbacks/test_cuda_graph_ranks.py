"""Graphs on two processes: gradients are reduced inside or outside, and the ranks agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import TORCHRUN, run_ranks

COMMON = """
import copy, logging, sys, warnings
import torch
from cpu_graphs import CPUGraph, cpu_graphs
from graph_runs import Record, Run, Steps, assert_same
from lightning.pytorch.strategies import DDPStrategy
from models import images, trainer
from torch.utils.data import DataLoader
from lightning_perf.callbacks import CUDAGraph
from lightning_perf._item import statuses

def run(module, *callbacks, samples=120, **kwargs):
    record = Record()
    torch.manual_seed(3)
    strategy = DDPStrategy(**kwargs.pop("ddp", {}))
    t = trainer(**{"devices": 2, "strategy": strategy, "max_epochs": 2, **kwargs,
                   "callbacks": [*callbacks, record]})
    t.fit(module, images(samples=samples), images())
    return Run(module, t, record)

def twins(make, scope, strict=True, graph=CPUGraph, **kwargs):
    torch.manual_seed(2)
    module = make()
    other = copy.deepcopy(module)
    stock = run(module, **kwargs)
    with cpu_graphs(graph) as graphs:
        result = run(other, CUDAGraph(scope, strict=strict), **kwargs)
        result.graphs = list(graphs)
    return stock, result
"""

TRAIN = """
for scope in ("network", "step"):
    for kwargs in ({}, {"accumulate_grad_batches": 2, "val_check_interval": 6},
                   {"precision": "bf16-mixed", "gradient_clip_val": 0.1}):
        stock, result = twins(Steps, scope, **kwargs)
        assert_same(stock, result)
        print("RESULT", scope, list(kwargs), result.replays)
        weights = torch.cat([p.detach().flatten() for p in result.module.parameters()])
        theirs = result.trainer.strategy.broadcast(weights)
        assert torch.equal(weights, theirs)
"""

APART = """
# The second rank gets another shape in its 14th batch, and says no to all in the third run.
class Uneven(Steps):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.global_step == 13 and self.global_rank == 1 and self.trainer.training:
            return batch[0][:2], batch[1][:2]
        return batch

class Refuses(Steps):
    def training_step(self, batch, batch_idx):
        result = super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            result["loss"] = result["loss"] * (1 + 0 * result["loss"].item())
        return result

stock, result = twins(Uneven, "step")
assert_same(stock, result)
print("UNEVEN", result.replays)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    stock, result = twins(Refuses, "step", strict=None)
assert_same(stock, result)
print("REFUSED", result.replays, [str(w.message) for w in caught if "CUDAGraph" in str(w.message)])

class Full(list):
    def append(self, operation):
        super().append(operation)
        if "convolution_backward" in str(operation[0]):
            raise RuntimeError("broke off in the backward")

class Breaks(CPUGraph):
    def __init__(self):
        super().__init__()
        self.operations = Full()

stock, result = twins(Steps, "step", strict=None, graph=Breaks)
assert_same(stock, result)
print("BROKE", result.replays)
for options in ({"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
    stock, result = twins(Steps, "step", strict=None, ddp=options)
    assert_same(stock, result)
    assert not result.replays
    stock, result = twins(Steps, "network", ddp=options)
    assert_same(stock, result)
    print("NETWORK", result.replays)
"""


@pytest.mark.slow
def test_two_ranks_learn_the_same_from_graphs(tmp_path: Path) -> None:
    output = run_ranks(COMMON + TRAIN, tmp_path, launcher=TORCHRUN)
    lines = [line for line in output.splitlines() if line.startswith("RESULT")]
    # 15 batches an epoch; networks warm up with three, DDP with eleven, and the step after a
    # validation, in which DDP does not broadcast buffers, has a signature of its own.
    assert sorted(lines) == sorted(
        2
        * [
            "RESULT network [] [27, 27]",
            "RESULT network ['accumulate_grad_batches', 'val_check_interval'] [27, 27]",
            "RESULT network ['precision', 'gradient_clip_val'] [27, 27]",
            "RESULT step [] [18]",
            "RESULT step ['accumulate_grad_batches', 'val_check_interval'] [9, 5, 2]",
            "RESULT step ['precision', 'gradient_clip_val'] [18]",
        ]
    )


@pytest.mark.slow
def test_ranks_replay_together_or_not_at_all(tmp_path: Path) -> None:
    output = run_ranks(COMMON + APART, tmp_path, launcher=TORCHRUN)
    assert output.count("UNEVEN [17]") == 2
    assert output.count("REFUSED []") == 2
    assert "on rank 1, training_step reads a value on the host" in output
    assert "eager: DDP looks for unused parameters" in output
    assert "eager: DDP moves gradients into its buckets" in output
    assert "the capture failed: RuntimeError: broke off in the backward" in output
    assert output.count("BROKE [0]") == 2
    assert output.count("NETWORK [27, 27]") == 4
