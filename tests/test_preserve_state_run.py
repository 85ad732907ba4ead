"""A run with a rehearsal in it is, bit for bit, the run without: everything a training has."""

from __future__ import annotations

import gc
import random
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from models import trainer as make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_perf._preserve_state import preserve_state
from lightning_perf.callbacks import Preallocate


class Noisy(Dataset[Any]):
    """Sequences of several lengths, augmented with numbers from all three generators."""

    def __init__(self) -> None:
        self.lengths = [3 + 7 * i % 11 for i in range(88)]
        self.data = torch.randn(88, 13, 4, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        noise = random.random() + np.random.rand() + torch.rand(1).item()
        return self.data[index, : self.lengths[index]] + noise, index % 3, index


def collate(items: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    inputs, labels, indices = zip(*items, strict=True)
    padded = nn.utils.rnn.pad_sequence(list(inputs), batch_first=True)
    return padded, torch.tensor(labels), torch.tensor(indices)


class Everything(LightningModule):
    """Has every kind of state that training changes, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.rest = nn.Sequential(nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
        self.accuracy = MulticlassAccuracy(3)
        self.seen: list[tuple[float, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels, indices = batch
        # A step that draws from all three generators as well.
        inputs = inputs * (1 + 0.1 * (random.random() + np.random.rand()))
        loss = nn.functional.cross_entropy(
            self.rest(self.norm(self.first(inputs + torch.rand_like(inputs)).mean(1))), labels
        )
        self.accuracy(self.rest(self.norm(self.first(inputs).mean(1))), labels)
        self.seen.append((loss.item(), indices.tolist()))
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        schedule = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Record(Callback):
    """Keeps, after each batch, all that a run consists of."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        scaler = trainer.precision_plugin.scaler
        self.states.append(
            deepcopy(
                {
                    "weights and statistics": pl_module.state_dict(),
                    "optimizer": trainer.optimizers[0].state_dict(),
                    "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
                    "scaler": scaler.state_dict(),
                    "metric": (pl_module.accuracy.metric_state, pl_module.accuracy.update_count),
                    "counters": trainer.fit_loop.state_dict(),
                    "logged": trainer.logged_metrics,
                    "for callbacks": trainer.callback_metrics,
                    "torch": torch.get_rng_state(),
                    "NumPy": np.random.get_state(),
                    "Python": random.getstate(),
                }
            )
        )


class Probe(Callback):
    """A warm-up of its own: updates included, and batches from the loader."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        with preserve_state(trainer, pl_module):
            for batch in trainer.train_dataloader:
                pl_module.norm(pl_module.first(batch[0])[:, 0]).sum().backward()
            trainer.optimizers[0].step()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (Tensor, np.ndarray)):
        return bool((torch.as_tensor(one) == torch.as_tensor(other)).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def train(*callbacks: Callback, workers: int, accumulate: int) -> tuple[Everything, list[Any]]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    module, record = Everything(), Record()
    loader = DataLoader(
        Noisy(),
        batch_size=8,
        shuffle=True,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    make_trainer(
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        callbacks=[record, *callbacks],
    ).fit(module, loader)
    del loader
    gc.collect()  # ends persistent workers
    return module, record.states


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("warm_up", [Preallocate, Probe])
def test_the_next_twenty_losses_and_all_that_goes_with_them_are_the_same(
    warm_up: type[Callback], workers: int, accumulate: int
) -> None:
    plain, states = train(workers=workers, accumulate=accumulate)
    warm, warm_states = train(warm_up(), workers=workers, accumulate=accumulate)

    assert len(plain.seen) == 22
    assert warm.seen == plain.seen
    for one, other in zip(states, warm_states, strict=True):
        assert [what for what in one if not same(one[what], other[what])] == []
