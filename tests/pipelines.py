"""Networks in a pipeline over two processes, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf.strategies import PipelineStrategy

CHUNKS = 4
BATCH = 8
EXACT = 1e-9


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True)),
        nn.Conv2d(8, 4, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 5),
    )


class Transformer(nn.Module):
    """Blocks in a ModuleList, a mask that each of them needs, and a skip over all of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.place = nn.Parameter(torch.randn(1, 7, 16) / 4)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True) for _ in range(4)
        )
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        first = hidden = self.embed(x) + self.place * self.scale
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.head(self.norm(hidden + first)).mean(1)


class Classifier(LightningModule):
    """An ordinary module: nothing in it knows of a pipeline."""

    def __init__(self, net: nn.Module, lr: float = 0.1) -> None:
        super().__init__()
        self.net, self.lr = net, lr
        self.losses: list[float] = []
        self.validated: list[float] = []

    def outputs(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.outputs(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.outputs(x), y)
        self.log("val_loss", loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["val_loss"].item())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.outputs(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Masked(Classifier):
    def outputs(self, x: Tensor) -> Tensor:
        return self.net(x, mask=torch.zeros(7, 7, dtype=x.dtype, device=x.device))


def images(batches: int = 5, rest: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    size = batches * BATCH + rest
    x = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.double)
    return TensorDataset(x, torch.randint(5, (size,), generator=generator))


def sequences(batches: int = 5, rest: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    size = batches * BATCH + rest
    x = torch.randn(size, 7, 6, generator=generator, dtype=torch.double)
    return TensorDataset(x, torch.randint(5, (size,), generator=generator))


def loader(data: TensorDataset, **kwargs: Any) -> DataLoader:
    return DataLoader(data, **{"batch_size": BATCH, **kwargs})


def make_trainer(**kwargs: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "precision": "64-true",
        "max_epochs": 2,
        "log_every_n_steps": 1,
    }
    return Trainer(**{**quiet, **kwargs})


def pipeline(module: Classifier, data: TensorDataset, **kwargs: Any) -> Trainer:
    """Train with one stage in each of the processes."""
    names = ("network", "split_points", "schedule", "chunks")
    options = {name: kwargs.pop(name) for name in names if name in kwargs}
    fit = {"ckpt_path": kwargs.pop("ckpt_path", None)}
    trainer = make_trainer(
        strategy=PipelineStrategy(**options), devices=kwargs.pop("devices", 2), **kwargs
    )
    trainer.fit(module, loader(data), loader(data), **fit)
    return trainer


def unsplit(module: Classifier, data: TensorDataset, **kwargs: Any) -> Classifier:
    """Train in one process, accumulating the micro-batches of each batch."""
    accumulate = CHUNKS * kwargs.pop("accumulate_grad_batches", 1)
    fit = {"ckpt_path": kwargs.pop("ckpt_path", None)}
    trainer = make_trainer(devices=1, accumulate_grad_batches=accumulate, **kwargs)
    trainer.fit(module, loader(data, batch_size=BATCH // CHUNKS), loader(data), **fit)
    # Lightning divides each by the number of those that it accumulates.
    losses = torch.tensor(module.losses, dtype=torch.double).reshape(-1, CHUNKS)
    module.losses = losses.sum(1).tolist()
    return module


def seeded(make: Callable[[], Any]) -> Any:
    """Return what is made from the same random numbers each time."""
    torch.manual_seed(0)
    return make()


def assert_same(found: Classifier, expected: Classifier, exact: float = EXACT) -> None:
    """Losses, validation and weights are the same, up to a relative difference."""
    close = partial(torch.testing.assert_close, rtol=exact, atol=exact)
    assert len(found.losses) > 0
    close(found.losses, expected.losses)
    close(found.validated, expected.validated)
    close(dict(found.state_dict()), dict(expected.state_dict()))
