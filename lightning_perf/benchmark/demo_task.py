"""What the demo trains: ResNet-18 on real handwritten digits."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchmetrics import Accuracy
from torchvision.models import resnet18

Batch = tuple[Tensor, Tensor]
Images = DataLoader[tuple[Tensor, ...]]

_STEPS_PER_EPOCH = 500


class DigitClassifier(LightningModule):
    """ResNet-18 from scratch, trained with momentum.

    Args:
        lr: Learning rate. The default reads nearly all digits after 40 steps; much above it,
            rounding alone makes two runs drift far apart.
    """

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = resnet18(num_classes=10)
        self.accuracy = Accuracy("multiclass", num_classes=10)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count the digits that are read correctly."""
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Digits(LightningDataModule):
    """scikit-learn's 1797 handwritten digits, enlarged from 8x8 pixels by interpolation.

    Args:
        image_size: Height and width in pixels.
        batch_size: Images per batch.
    """

    def __init__(self, image_size: int = 48, batch_size: int = 32) -> None:
        super().__init__()
        self.image_size = image_size
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Load the images and put a fifth of them, always the same, aside for validation."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                "The digits come with scikit-learn, which is not installed. "
                "Run: pip install 'lightning-perf[demo]'"
            ) from error
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
        labels = torch.from_numpy(digits.target).long()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        held_out = len(labels) // 5
        self.val, self.train = (
            TensorDataset(images[part], labels[part])
            for part in (order[:held_out], order[held_out:])
        )

    def train_dataloader(self) -> Images:
        """Return training images in random order, for an epoch of many passes."""
        # A single pass is so short that the ends of epochs would be a part of the timing.
        images = RandomSampler(self.train, num_samples=_STEPS_PER_EPOCH * self.batch_size)
        return DataLoader(self.train, self.batch_size, sampler=images)

    def val_dataloader(self) -> Images:
        """Return the images that were put aside."""
        return DataLoader(self.val, self.batch_size)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Enlarge the images on the device, to three channels."""
        images, labels = batch
        size = (self.image_size, self.image_size)
        large = nn.functional.interpolate(images, size, mode="bilinear", align_corners=False)
        return large.expand(-1, 3, -1, -1).contiguous(), labels
