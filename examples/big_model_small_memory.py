"""Train a deep encoder on handwritten digits, with and without keeping its activations.

    python examples/big_model_small_memory.py
    python examples/big_model_small_memory.py --layers 24 --picture memory.png

Needs `pip install 'lightning-perf[demo]'`: the 1797 images come with scikit-learn. Each way of
training runs in a process of its own, whose memory is watched, and learns exactly the same. What
a step keeps, computes and takes is then measured in turns, in this process.
"""

import argparse
import json
import os
import subprocess
import sys
import threading

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf.callbacks import ActivationCheckpointing
from lightning_perf.callbacks.activation_checkpointing import StepCost, checkpointing_cost

WAYS = {
    "keep all": None,
    "every 2nd": {"every_n": 2},
    "selective": {"policy": "selective"},
    "full": {"policy": "full"},
}


class PixelReader(LightningModule):
    """Reads the 64 pixels of a digit as a sentence: an ordinary LightningModule."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        # Without dropout: drawing its random numbers again takes a CPU longer than all the rest.
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0, activation="gelu", batch_first=True
        )
        self.brightness, self.position = nn.Embedding(17, width), nn.Embedding(64, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pixels, digits = batch
        words = self.brightness(pixels) + self.position.weight
        return nn.functional.cross_entropy(self.head(self.encoder(words).mean(1)), digits)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def digits(batch_size: int) -> DataLoader:
    data = load_digits()
    pixels, labels = torch.from_numpy(data.data).long(), torch.from_numpy(data.target).long()
    return DataLoader(TensorDataset(pixels, labels), batch_size, shuffle=True, drop_last=True)


class PeakMemory:
    """The most memory that this process takes in a block, beyond what it has before."""

    def __enter__(self) -> "PeakMemory":
        self._process, self._over = psutil.Process(), threading.Event()
        self._before = self._most = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self._most = max(self._most, self._process.memory_info().rss)

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self.mebibytes = (self._most - self._before) / 2**20


def train(way: str, args: argparse.Namespace) -> dict[str, float]:
    """Train some steps one way; return the peak of the memory and the last loss."""
    fit(way, args, layers=2, steps=2)  # what is loaded on first use is not what we are after
    with PeakMemory() as peak:
        loss = fit(way, args, args.layers, args.steps)
    return {"peak": peak.mebibytes, "loss": loss}


def fit(way: str, args: argparse.Namespace, layers: int, steps: int) -> float:
    seed_everything(0, workers=True, verbose=False)
    options = WAYS[way]
    trainer = Trainer(
        callbacks=[] if options is None else [ActivationCheckpointing(**options)],
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(PixelReader(layers, args.width), digits(args.batch_size))
    return trainer.callback_metrics["loss"].item()


def train_apart(way: str) -> dict[str, float]:
    """The same in a process of its own."""
    print(f"Training: {way}", file=sys.stderr)
    command = [sys.executable, *sys.argv, "--only", way]
    # By default, glibc gives little of what is freed back to the system, and in the memory of the
    # process the difference hardly shows. A process reads this once, when it starts.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def costs(args: argparse.Namespace) -> dict[str, tuple[StepCost, float]]:
    """What a step costs each way, and how much longer it takes than without recomputation."""
    seed_everything(0, verbose=False)
    module, batch = PixelReader(args.layers, args.width), next(iter(digits(args.batch_size)))
    found: dict[str, tuple[StepCost, float]] = {}
    for way, options in WAYS.items():
        if options is not None:
            cost = checkpointing_cost(
                module, lambda: module.loss(batch), turns=args.turns, **options
            )
            found.setdefault("keep all", (cost.without, 0.0))
            found[way] = cost.recomputed, cost.extra_time
    return found


def draw(found: dict[str, tuple[StepCost, float]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    most = max(step.saved_bytes for step, _ in found.values())
    for way, (step, extra_time) in found.items():
        kept = step.saved_bytes / 2**20
        axes.plot(kept, 100 * extra_time, "o", markersize=9, clip_on=False)
        axes.annotate(way, (kept, 100 * extra_time), (8, 6), textcoords="offset points")
    axes.set_xlim(0, 1.2 * most / 2**20)
    axes.set_ylim(bottom=min(0, *axes.get_ylim()))
    axes.set_xlabel("kept for the backward pass (MiB)")
    axes.set_ylabel("additional time of a step (%)")
    axes.set_title("Recomputing activations: memory against time")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16, help="default: 16")
    parser.add_argument("--width", type=int, default=256, help="default: 256")
    parser.add_argument("--batch-size", type=int, default=8, help="default: 8")
    parser.add_argument("--steps", type=int, default=3, help="of each training (default: 3)")
    parser.add_argument("--turns", type=int, default=3, help="of each comparison (default: 3)")
    parser.add_argument("--picture", metavar="FILE", help="draw memory against time")
    parser.add_argument("--only", choices=WAYS, help="train one way and print JSON")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(train(args.only, args)))
        return

    trained = {way: train_apart(way) for way in WAYS}
    found = costs(args)
    print(f"{'':<10} {'kept':>10} {'peak':>10} {'FLOPs':>8} {'time':>6} {'loss':>10}")
    least = found["keep all"][0].flops
    for way, (step, extra_time) in found.items():
        print(
            f"{way:<10} {step.saved_bytes / 2**20:>6.0f} MiB {trained[way]['peak']:>6.0f} MiB "
            f"{step.flops / least - 1:>+8.1%} {extra_time:>+6.0%} {trained[way]['loss']:>10.6f}"
        )
    if args.picture:
        draw(found, args.picture)
        print(f"Memory against time: {args.picture}")


if __name__ == "__main__":
    main()
