"""Two processes with gloo and the default flags of the Trainer share the items of each epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import TORCHRUN, run_ranks

pytestmark = pytest.mark.slow

_START = """
import warnings
from collections import Counter
import numpy as np
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from data_runs import ITEMS, LENGTHS, Notes, SaveAndStop, epochs_of, sampler, times
from models import trainer
from lightning_perf.callbacks import GarbageCollection
from lightning_perf.data import ResumableLoader

warnings.filterwarnings("ignore")

def planned(cls=DataLoader, kind="budget", workers=0, **options):
    return cls(range(ITEMS), batch_sampler=sampler(kind, **options), num_workers=workers)

def shuffled(workers=0):
    return ResumableLoader(range(ITEMS), batch_size=4, shuffle=True, num_workers=workers)

def resumable(workers=0):
    return planned(ResumableLoader, workers=workers)

class Data(LightningDataModule):
    def __init__(self, make):
        super().__init__()
        self.make = make
    def train_dataloader(self):
        return self.make()
    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

def both(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values

def fit(data, ckpt_path=None, **kwargs):
    module = Notes()
    run = trainer(**{"devices": 2, "strategy": "ddp", "max_epochs": 3, "limit_val_batches": 0,
                     **kwargs})
    run.fit(module, data, ckpt_path=ckpt_path)
    return module.seen["fit"]

def together(seen):
    counts = Counter()
    for mine in both(seen):
        counts.update(times(mine))
    return counts
"""


def ran(script: str, folder: Path) -> None:
    script += "\nprint(f'held on rank {dist.get_rank()}', flush=True)\n"
    output = run_ranks(_START + script, folder, launcher=TORCHRUN, environ={"OMP_NUM_THREADS": "1"})
    assert "held on rank 0" in output
    assert "held on rank 1" in output


def test_ranks_share_every_epoch_in_every_loop(tmp_path: Path) -> None:
    ran(
        """
for make in (planned, lambda: planned(kind="bucket"), resumable, shuffled):
    for data in (Data(make), make()):
        seen = fit(data)
        a, b = both(seen)
        epochs = [sorted(sum(x, ()) + sum(y, ())) for x, y in zip(epochs_of(a), epochs_of(b))]
        # PyTorch's distributed sampler repeats the first items where they do not come out even.
        assert len(a) == len(b)
        assert all(set(epoch) == set(range(ITEMS)) for epoch in epochs), epochs
        assert all(len(epoch) <= ITEMS + 1 for epoch in epochs), epochs
        first, second, third = epochs_of(seen)
        assert first != second != third
        if make is not shuffled:
            # In each step the lengths of both ranks are alike, but for a few in small data.
            means = [[LENGTHS[list(items)].mean() for _, items in mine] for mine in (a, b)]
            assert np.abs(np.subtract(*means)).mean() < 1, means

    module, run = Notes(), trainer(devices=2, strategy="ddp")
    run.validate(module, Data(make), verbose=False)
    run.test(module, make(), verbose=False)
    for loop in ("validate", "test"):
        counts = together(module.seen[loop])
        assert set(counts) == set(range(ITEMS)) and sum(counts.values()) <= ITEMS + 1, counts
    for data in (Data(make), make()):
        module = Notes()
        run.predict(module, data, return_predictions=False)
        assert together(module.seen["predict"]) == Counter(range(ITEMS))

# Uneven: 5 items of one length on two ranks, each once in prediction.
for drop_last in (False, True):
    odd = type(sampler("bucket"))([3] * 5, 1, drop_last=drop_last)
    module = Notes()
    run.predict(module, DataLoader(range(5), batch_sampler=odd), return_predictions=False)
    assert together(module.seen["predict"]) == Counter(range(5))
    assert sorted(both(len(module.seen["predict"]))) == [2, 3]

for make in (resumable, shuffled):
    for epoch in epochs_of(fit(make(), overfit_batches=2))[1:]:
        assert epoch == epochs_of(fit(make(), overfit_batches=2))[0]
assert len(fit(planned(), fast_dev_run=2)) == 2
reloaded = fit(Data(planned), reload_dataloaders_every_n_epochs=1)
assert reloaded == fit(planned())
""",
        tmp_path,
    )


def test_a_run_goes_on_where_it_stopped_on_as_many_ranks(tmp_path: Path) -> None:
    ran(
        """
for make, items in ((resumable, []), (shuffled, []), (planned, [GarbageCollection()])):
    for workers in (0, 2):
        straight = fit(make(workers=workers), callbacks=items)
        step = len(straight) // 3 + 2
        stop = [*items, SaveAndStop(step, "stopped.ckpt")]
        before = fit(make(workers=workers), callbacks=stop)
        after = fit(make(workers=workers), callbacks=items, ckpt_path="stopped.ckpt")
        assert len(before) == step
        assert before + after == straight, (make, workers)

# A checkpoint of one process, as one process would have saved it.
fit(resumable(), callbacks=[SaveAndStop(2, "stopped.ckpt")])
if dist.get_rank() == 0:
    import torch
    saved = torch.load("stopped.ckpt", weights_only=False)
    (state,) = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert state["given"] == 2 and state["order"]["ranks"] == 2
    state["order"].update(ranks=1, num_replicas=1)
    torch.save(saved, "stopped.ckpt")
dist.barrier()
try:
    fit(resumable(), ckpt_path="stopped.ckpt")
except RuntimeError as error:
    assert "ranks 1 (now 2)" in str(error), error
    assert "number of ranks, or from a checkpoint of the end of an epoch" in str(error), error
else:
    raise AssertionError
""",
        tmp_path,
    )
