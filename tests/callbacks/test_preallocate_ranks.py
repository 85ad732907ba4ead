"""Preallocate on two ranks: all together, and DDP's reducer is none the wiser."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import TORCHRUN, run_ranks

START = """
import sys, warnings
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DistributedSampler
from models import trainer
from texts import Net, Texts, texts
from lightning_perf._item import statuses
from lightning_perf.callbacks import Preallocate

warnings.simplefilter("ignore")

def fit(module, data, *items, strategy=None, **kwargs):
    torch.manual_seed(1)
    strategy = strategy or DDPStrategy(process_group_backend="gloo")
    run = trainer(strategy=strategy, devices=2, max_epochs=2, callbacks=list(items), **kwargs)
    run.fit(module, data)
    return run
"""

SAME = (
    START
    + """
class Statistics(Net):
    def __init__(self, ran, manual):
        torch.manual_seed(0)
        super().__init__(ran)
        self.automatic_optimization = not manual
        self.norm, self.rare = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("widths", torch.zeros(()))
        self.losses = []

    def on_train_start(self):
        # Whether DDP broadcasts buffers at the first forward can be seen.
        self.widths += self.global_rank

    def training_step(self, batch, batch_idx):
        sequences, labels = batch
        self.note(tuple(sequences.shape))
        self.widths += sequences.shape[1] + self.global_rank
        hidden = self.norm(self.embed(sequences).flatten(0, 1)).view(*sequences.shape, 8).mean(1)
        if unused != "long" or sequences.shape[1] > 20:
            hidden = hidden + self.rare(hidden)
        loss = nn.functional.cross_entropy(self.out(hidden), labels) + self.widths * 1e-3
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)

CASES = {
    "plain": ({}, False, "", 1),
    "bucket views": ({"gradient_as_bucket_view": True}, False, "", 1),
    "accumulation": ({}, False, "", 2),
    "manual": ({}, True, "", 1),
    "unused": ({"find_unused_parameters": True}, False, "long", 1),
    "unused, accumulation": ({"find_unused_parameters": True}, False, "long", 2),
    "unused, manual": ({"find_unused_parameters": True}, True, "long", 1),
    "static graph": ({"static_graph": True}, False, "", 1),
}
for name, (options, manual, unused, accumulate) in CASES.items():
    outcomes = []
    for items in ([], [Preallocate(strict=False)]):
        module = Statistics(ran := [], manual)
        run = fit(
            module, texts(Texts([*[3, 5, 6, 4] * 3, 30]), batch_size=2), *items,
            strategy=DDPStrategy(process_group_backend="gloo", **options),
            accumulate_grad_batches=accumulate,
        )
        state = {key: value.tolist() for key, value in module.state_dict().items()}
        outcomes.append((module.losses, state, float(run.callback_metrics["loss_epoch"])))
    assert len(module.losses) == 8, module.losses
    assert ran[len(ran) - 8][1] < 20, "the first step must not be the one with the long item"
    active = statuses(run)[0].active
    assert active == (name != "static graph"), statuses(run)
    assert (len(ran) - len(module.losses), ran[0]) == ((1, (2, 30)) if active else (0, ran[0]))
    print("SAME" if outcomes[0] == outcomes[1] else "DIFFERENT", name, run.global_rank, flush=True)
"""
)

UNEQUAL = (
    START
    + """
# Without shuffling, rank 0 has a heaviest batch and another with the longest item, rank 1 has one.
lengths = [9, 5] * 4 + [1, 5] * 3 + [1, 5] + [20, 5]
data = Texts(lengths)
ran = []

class Together(Net):
    def training_step(self, batch, batch_idx):
        # Hangs if a rank runs more often than the other.
        torch.distributed.all_reduce(torch.ones(()))
        return super().training_step(batch, batch_idx)

def ranks_own():
    sampler = DistributedSampler(data, shuffle=False)
    return texts(data, batch_size=4, sampler=sampler)

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
fit(Together(ran), ranks_own(), Preallocate(), use_distributed_sampler=False)
print("RAN", rank, ran[:2], flush=True)

class Small(Net):
    def training_step(self, batch, batch_idx):
        torch.distributed.all_reduce(torch.ones(()))
        loss = super().training_step(batch, batch_idx)
        if rank == 1 and batch[0].shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Only on this rank.")
        return loss

try:
    fit(Small(tried := []), texts(data, batch_size=4, shuffle=True), Preallocate())
except torch.OutOfMemoryError as error:
    print("MEMORY", rank, len(tried), error, flush=True)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([data[0]] * 4)

run = fit(Net(ran := []), texts(Stream(), batch_size=2), Preallocate(strict=False))
print("STREAM", rank, len(ran), run.global_step, flush=True)
"""
)


@pytest.mark.slow
def test_losses_weights_and_buffers_are_those_of_a_run_without_it(tmp_path: Path) -> None:
    output = run_ranks(SAME, tmp_path, launcher=TORCHRUN, environ={"OMP_NUM_THREADS": "1"})

    lines = sorted(line for line in output.splitlines() if line.startswith(("SAME", "DIFF")))
    assert len(lines) == 16, output
    assert all(line.startswith("SAME") for line in lines), lines
    assert "the first backward as the plan for all" in output


@pytest.mark.slow
def test_ranks_with_unequal_batches_and_memory_act_together(tmp_path: Path) -> None:
    output = run_ranks(UNEQUAL, tmp_path, launcher=TORCHRUN, environ={"OMP_NUM_THREADS": "1"})

    lines = sorted(line for line in output.splitlines() if line[:3] in ("RAN", "MEM", "STR"))
    assert lines[2:4] == ["RAN 0 [(4, 9), (1, 20)]", "RAN 1 [(4, 5), (4, 5)]"], output
    for rank, where in enumerate(["Another rank ran out of memory.", "Out of memory; then "]):
        assert lines[rank].startswith(f"MEMORY {rank} 3 Preallocate: the largest input does not")
        assert where in lines[rank]
        assert "2 items fit (2 fitted, 3 did not)" in lines[rank]
    assert [line.rsplit(" ", 1)[0] for line in lines[4:]] == ["STREAM 0 4", "STREAM 1 4"]
