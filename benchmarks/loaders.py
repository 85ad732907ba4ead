"""What `LoaderSettings("auto")` finds on three loads, and what `DeviceTransforms` does on a CPU.

    python benchmarks/loaders.py --results docs/results

The loads: photographs that are decoded from JPEG and augmented, items that are waited for (a slow
disk, played by sleeping), and tensors in memory. On each, "auto" and every number of workers that
this machine has CPUs for train the same small network, in turns. Then an augmentation in the
dataset, image by image, against the same one by `DeviceTransforms`, on whole batches.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import result_file
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.io import decode_jpeg, encode_jpeg
from torchvision.transforms import v2

from lightning_perf._hardware import detect
from lightning_perf.benchmark.statistics import interval
from lightning_perf.callbacks import DeviceTransforms, LoaderSettings
from lightning_perf.callbacks.loader_settings import most_workers

SIZE = 64  # of the images that are trained on
PHOTOGRAPHS = 512
AUGMENT = v2.Compose(
    [v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4), v2.Normalize([0.5] * 3, [0.25] * 3)]
)


def tiles(size: int) -> list[Tensor]:
    """Return square parts of real photographs, as bytes of 3 x size x size."""
    photographs = [torch.tensor(image).permute(2, 0, 1) for image in load_sample_images().images]
    chance = random.Random(0)
    parts = []
    for number in range(PHOTOGRAPHS):
        photograph = photographs[number % len(photographs)]
        top, left = (chance.randrange(length - size) for length in photograph.shape[1:])
        parts.append(photograph[:, top : top + size, left : left + size].contiguous())
    return parts


class Photographs(Dataset[tuple[Tensor, int]]):
    """Decodes, crops and augments, as most image datasets do."""

    def __init__(self) -> None:
        self.files = [encode_jpeg(tile) for tile in tiles(320)]
        crop = v2.RandomResizedCrop(SIZE, antialias=True)
        self.transform = v2.Compose([crop, v2.ToDtype(torch.float32, scale=True), AUGMENT])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(decode_jpeg(self.files[index])), index % 2


class Sleeping(Dataset[tuple[Tensor, int]]):
    """Waits for each item without computing."""

    def __len__(self) -> int:
        return PHOTOGRAPHS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.003)
        return torch.zeros(3, SIZE, SIZE), index % 2


class Small(Dataset[tuple[Tensor, int]]):
    """Images in memory, augmented one by one, or as they are."""

    def __init__(self, augment: bool) -> None:
        self.images = [tile.float() / 255 for tile in tiles(SIZE)]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        return (AUGMENT(image) if self.augment else image), index % 2


def in_memory() -> Dataset[tuple[Tensor, ...]]:
    images = torch.stack(tiles(SIZE)).float() / 255
    return TensorDataset(images, torch.arange(len(images)) % 2)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 2, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 2),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rate(Callback):
    """Batches in a second: in the whole run, and in its second half, when workers were found."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.ends = [time.perf_counter()]

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def rates(self) -> dict[str, float]:
        half = len(self.ends) // 2
        return {
            "whole": (len(self.ends) - 1) / (self.ends[-1] - self.ends[0]),
            "settled": (len(self.ends) - 1 - half) / (self.ends[-1] - self.ends[half]),
        }


def train(dataset: Dataset[Any], workers: int, items: list[Callback], epochs: int) -> Any:
    """Train with a loader that somebody has set by hand, and items; return what `Rate` found."""
    torch.manual_seed(0)
    loader = DataLoader(
        dataset, 32, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    rate = Rate()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[*items, rate],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    return rate.rates()


def in_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> list[dict[str, Any]]:
    """Run all ways in each round, in random order, and compare them with the round's first one."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in random.Random(number).sample(list(ways), len(ways)):
            found[name].append(ways[name]())
            print(".", end="", flush=True)
    first = next(iter(ways))
    rows = []
    for name, mine in found.items():
        row: dict[str, Any] = {"way": name, "rounds": rounds}
        for part in ("settled", "whole"):
            row[f"{part}_batches_per_second"] = fmean(noted[part] for noted in mine)
            ratios = [
                noted[part] / theirs[part] for noted, theirs in zip(mine, found[first], strict=True)
            ]
            row[part], row[f"{part}_interval"] = interval(np.log(ratios).tolist())
        rows.append(row)
    return rows


def worker_rows(name: str, dataset: Dataset[Any], rounds: int, epochs: int) -> list[dict[str, Any]]:
    numbers = range(most_workers(detect(), 1) + 1)
    ways: dict[str, Callable[[], Any]] = {
        "auto": lambda: train(dataset, 0, [LoaderSettings(persistent_workers=True)], epochs)
    }
    ways |= {f"{n} workers": lambda n=n: train(dataset, n, [], epochs) for n in numbers}
    return [{"load": name, **row} for row in in_turns(ways, rounds)]


def transform_rows(rounds: int, epochs: int) -> list[dict[str, Any]]:
    most = most_workers(detect(), 1)
    plain, augmented = Small(augment=False), Small(augment=True)
    ways: dict[str, Callable[[], Any]] = {
        "in the dataset, no worker": lambda: train(augmented, 0, [], epochs),
        f"in the dataset, {most} workers": lambda: train(augmented, most, [], epochs),
        "DeviceTransforms, no worker": lambda: train(plain, 0, [DeviceTransforms(AUGMENT)], epochs),
        f"DeviceTransforms, {most} workers": lambda: train(
            plain, most, [DeviceTransforms(AUGMENT)], epochs
        ),
    }
    return [{"load": "transforms", **row} for row in in_turns(ways, rounds)]


def show(rows: list[dict[str, Any]]) -> str:
    lines = ["| load | way | settled, over the first way | whole run |", "|---" * 4 + "|"]
    for row in rows:
        cells = [
            f"{row[part]:.2f} ({row[f'{part}_interval'][0]:.2f} to "
            f"{row[f'{part}_interval'][1]:.2f})"
            for part in ("settled", "whole")
        ]
        lines.append(f"| {row['load']} | {row['way']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="2 to 10 (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="of each run")
    parser.add_argument("--results", type=Path, help="folder for the result file")
    arguments = parser.parse_args()
    if not 2 <= arguments.rounds <= 10:
        parser.error(f"--rounds {arguments.rounds}: 2 to 10 are needed for an interval")
    torch.set_num_threads(1)  # the other cores are the workers'
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    rows = []
    for name, dataset in (
        ("jpeg", Photographs()),
        ("sleeping", Sleeping()),
        ("memory", in_memory()),
    ):
        rows += worker_rows(name, dataset, arguments.rounds, arguments.epochs)
    rows += transform_rows(arguments.rounds, arguments.epochs)
    print("\n" + show(rows))
    if arguments.results:
        result_file.write(arguments.results, "loaders", rows=rows, epochs=arguments.epochs)


if __name__ == "__main__":
    main()
