"""Train ResNet-18 on handwritten digits with the preset for this machine.

    python examples/image_classification.py
    python examples/image_classification.py --preset none --epochs 5

Needs `pip install 'lightning-perf[demo]'`: the 1797 images come with scikit-learn. To measure what
the preset brings, rather than to look at two clocks:

    lightning-perf bench --config examples/image_classification.py:make --a none --b auto
"""

import argparse
import time

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Accuracy
from torchvision.models import resnet18

from lightning_perf.presets import resolve, trainer_kwargs


class DigitClassifier(LightningModule):
    """An ordinary LightningModule: nothing in it knows of lightning_perf."""

    def __init__(self, lr: float = 0.02):
        super().__init__()
        self.lr = lr
        self.net = resnet18(num_classes=10)
        self.accuracy = Accuracy("multiclass", num_classes=10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def loaders(image_size: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Four fifths of the digits for training and the rest, always the same, for validation."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
    images = nn.functional.interpolate(images, (image_size, image_size), mode="bilinear")
    data = TensorDataset(images.repeat(1, 3, 1, 1), torch.from_numpy(digits.target).long())
    train, val = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, 4 * batch_size)


def make() -> tuple[LightningModule, DataLoader]:
    """What `lightning-perf bench --config image_classification.py:make` trains."""
    return DigitClassifier(), loaders(image_size=48, batch_size=32)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="auto", help="a preset, or none (default: auto)")
    parser.add_argument("--epochs", type=int, default=2, help="default: 2")
    parser.add_argument("--image-size", type=int, default=32, help="in pixels (default: 32)")
    parser.add_argument("--batch-size", type=int, default=32, help="default: 32")
    parser.add_argument("--limit-batches", type=int, help="batches per epoch, to try it out")
    args = parser.parse_args()

    seed_everything(0, workers=True)
    train, val = loaders(args.image_size, args.batch_size)
    trainer = Trainer(
        # The preset's arguments and items, and your own arguments, which win.
        **trainer_kwargs(
            args.preset,
            max_epochs=args.epochs,
            limit_train_batches=args.limit_batches,
            logger=False,
            enable_checkpointing=False,
        )
    )
    start = time.perf_counter()
    trainer.fit(DigitClassifier(), train, val)
    print(
        f"Reads {trainer.callback_metrics['val_accuracy']:.1%} of the digits it has not seen, "
        f"after {trainer.global_step} steps in {time.perf_counter() - start:.0f} s "
        f"with preset {resolve(args.preset)}."
    )


if __name__ == "__main__":
    main()
