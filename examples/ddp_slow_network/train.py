"""Train on digits in two processes, with gradients that travel as a YAML file says.

    python examples/ddp_slow_network/train.py fit --config examples/ddp_slow_network/bf16.yaml

Beside it lie `plain.yaml` and `powersgd.yaml`. Each run prints what it sent for a step, and the
accuracy. On two machines start it on both with torchrun, and add `--trainer.num_nodes=2
--trainer.devices=1`. Needs `pip install 'lightning-perf[demo]'`.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Digits(LightningDataModule):
    """Scikit-learn's 1797 handwritten digits, 300 of them for validation."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
        self.train, self.val = TensorDataset(x[300:], y[300:]), TensorDataset(x[:300], y[:300])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class Classifier(LightningModule):
    """A wide network: many more weights than a step has work, so the link decides."""

    def __init__(self, width: int = 1024, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.print(f"epoch {self.current_epoch}: accuracy {self.accuracy.compute():.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


if __name__ == "__main__":
    LightningCLI(Classifier, Digits, seed_everything_default=0, save_config_callback=None)
