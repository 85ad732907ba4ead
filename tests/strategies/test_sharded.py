"""Items under a strategy that shards weights: they act rightly, or stand aside with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import TORCHRUN, run_ranks

_SCRIPT = """
import warnings
import torch
import torch.distributed as dist
from items import ROWS
from lightning.pytorch.strategies import ModelParallelStrategy
from models import Classifier, images, residual_net, trainer
from strategies.traffic import Wire
from torch.distributed.fsdp import fully_shard
from lightning_perf._item import statuses

class Sharded(Classifier):
    def configure_model(self):
        fully_shard(self.net[3])
        fully_shard(self.net)

def run(items, **kwargs):
    torch.manual_seed(1)
    module = Sharded(residual_net())
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    t = trainer(devices=2, strategy=strategy, callbacks=items, **kwargs)
    with Wire() as wire:
        t.fit(module, images(samples=32))
    return module.losses, statuses(t), wire

warnings.simplefilter("ignore")
active = []
for row in ROWS:
    with row.around():
        without, _, _ = run([], **row.trainer)
        losses, found, _ = run([row.item(strict=False)], **row.trainer)
    assert all(status.active or status.text for status in found)
    active += [status.item for status in found if status.active]
    worst = max(abs(a - b) for a, b in zip(losses, without))
    assert worst <= row.tolerance, (row.id, worst)
on_weights_or_none = ["DisableDebugAPIs", "GarbageCollection", "KeepInFP32", "Threads"]
on_batches = ["DevicePrefetch", "DeviceTransforms", "LoaderSettings"]
assert active == sorted(on_weights_or_none + on_batches), active

# Lightning sends the gradients of each micro-batch there; under DDP only those of the last one.
_, _, wire = run([], accumulate_grad_batches=2)
assert wire.calls["_reduce_scatter_base"] == 2 * 4, wire.calls
print("held", flush=True)
"""


@pytest.mark.slow
def test_every_item_under_fully_sharded_data_parallel(tmp_path: Path) -> None:
    output = run_ranks(_SCRIPT, tmp_path, launcher=TORCHRUN, environ={"OMP_NUM_THREADS": "1"})
    assert output.count("held") == 2
