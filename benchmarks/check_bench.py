"""Whether the benchmark tells the truth, on two small models where the truth is known.

    python benchmarks/check_bench.py --part aa slow --runs 20 --results check.jsonl

Parts:
    aa        A against A: the interval must contain 1.00
    slow      A against A plus a busy wait of 2.5 % of a step: must be found, with the right sign
    quick     A against A in quick mode
    learning  the learning check: passes two harmless changes, finds five faults

Each run is appended to the results file as a line of JSON; a check that is started again with the
same file goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf.benchmark import Progress, Result, Variant, compare, launch
from lightning_perf.benchmark.findings import machine

PARTS = ("aa", "slow", "quick", "learning")
MODELS = ("mlp", "conv")
SLOWER = 0.025


class Classifier(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def mlp() -> tuple[LightningModule, DataLoader[Any]]:
    """A step of mostly Python: 3 layers, batch 64, one thread."""
    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    return Classifier(net), _loader((64,), batch_size=64)


def conv() -> tuple[LightningModule, DataLoader[Any]]:
    """A step of mostly convolution: 3 layers with BatchNorm, 32x32, batch 16, all cores."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return Classifier(net), _loader((3, 32, 32), batch_size=16)


def _loader(shape: tuple[int, ...], *, batch_size: int) -> DataLoader[Any]:
    """Random inputs whose labels can be learned."""
    labels = torch.randint(10, (200 * batch_size,))
    inputs = torch.randn(len(labels), *shape) + labels.view(-1, *[1] * len(shape)) / 10
    return DataLoader(TensorDataset(inputs, labels), batch_size=batch_size, shuffle=True)


class Slower(Callback):
    """Waits for a share of the median step, which it measures in the first steps."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.ends: list[float] = []
        self.wait = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        now = perf_counter()
        if len(self.ends) < 50:
            self.ends.append(now)
        elif not self.wait:
            # From end to end, as the benchmark counts a step; the median leaves out the gate.
            self.wait = self.share * median(b - a for a, b in pairwise(self.ends))
        while perf_counter() < now + self.wait:
            pass


class ScaledGradients(Callback):
    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.02)


class ScaledLearningRate(Callback):
    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 1.02


class WrongMomentum(Callback):
    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 0.2


class FrozenLayer(Callback):
    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        next(module.parameters()).requires_grad_(False)


class OtherOrder(Callback):
    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        torch.manual_seed(12345)


def callback(name: str, **arguments: Any) -> Variant:
    path = f"{Path(__file__).stem}.{name}"
    return Variant(name, trainer={"callbacks": [{"class_path": path, "init_args": arguments}]})


HARMLESS = {
    "bf16-mixed": Variant("bf16-mixed", trainer={"precision": "bf16-mixed"}),
    "channels_last": Variant(
        "channels_last",
        trainer={"callbacks": [{"class_path": "lightning_perf.callbacks.ChannelsLast"}]},
    ),
}
FAULTS = ("ScaledGradients", "ScaledLearningRate", "WrongMomentum", "FrozenLayer", "OtherOrder")


def plan(parts: list[str], models: list[str], runs: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield what is to be run; the model's turns alternate, so that both see the same machine."""
    for part in parts:
        for number in range(seeds if part == "learning" else runs):
            if part != "learning":
                yield {"part": part, "model": models[number % len(models)], "number": number}
                continue
            for model in models:
                for change in (*HARMLESS, *FAULTS):
                    convolution_only = change in ("channels_last", "WrongMomentum")
                    if model == "conv" or not convolution_only:
                        yield {"part": part, "model": model, "change": change, "number": number}


def run(case: dict[str, Any], budget_s: float) -> dict[str, Any]:
    """Run one case and return what came out of it."""
    make = f"{Path(__file__).resolve()}:{case['model']}"
    if case["part"] == "learning":
        change = case["change"]
        b = HARMLESS[change] if change in HARMLESS else callback(change)
        with patch.object(launch, "LAUNCH_SECONDS", 1.0):  # the timing is of no interest here
            result = compare(make, "none", b, quick=True, seed=case["number"], progress=show)
        good = result.losses_agree is (change in HARMLESS)
        record = {"good": good, "losses_agree": result.losses_agree}
        return {**record, "said": result.learning_summary, **source(result)}
    b = callback("Slower", share=SLOWER) if case["part"] == "slow" else Variant("none")
    result = compare(
        make,
        "none",
        b,
        quick=case["part"] == "quick",
        budget_s=budget_s,
        learning_steps=0,
        seed=100 * case["number"],
        progress=show,
    )
    return outcome(result, slower=case["part"] == "slow")


def outcome(result: Result, *, slower: bool) -> dict[str, Any]:
    """Judge one timing: busy, good, or not, and with the wrong sign or not."""
    kept = ("speedup", "interval", "launch_speedups", "launches", "launches_dropped", "stop_reason")
    record: dict[str, Any] = {name: getattr(result, name) for name in kept}
    record |= {"seconds": round(result.seconds), "foreign_share": result.foreign_share}
    record |= source(result)
    if result.interval is None:
        return {"good": False, "busy": True, **record}
    low, high = result.interval
    good = high < 1 if slower else low <= 1 <= high
    half_width = (high - low) / 2
    return {"good": good, "wrong_sign": low > 1, "half_width": round(half_width, 4), **record}


def source(result: Result) -> dict[str, Any]:
    """Return where, when and with what a run took place."""
    versions = result.environment_b["versions"]
    return {"created": result.created, "machine": machine(result), "versions": versions}


def show(progress: Progress) -> None:
    if progress.pair <= 1:
        print(f"    launch {progress.launch}, {progress.phase}", flush=True)


def summary(records: list[dict[str, Any]]) -> str:
    """Return the table: one line for each part and change."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        name = " ".join([record["part"], record["model"], record.get("change", "")]).strip()
        groups.setdefault(name, []).append(record)
    lines = [f"{'':34}{'good':>9}{'busy':>6}{'wrong sign':>12}{'widest':>9}"]
    for name, group in groups.items():
        valid = [record for record in group if not record.get("busy")]
        widths = [record["half_width"] for record in valid if "half_width" in record]
        good = f"{sum(record['good'] for record in valid)} of {len(valid)}"
        wrong = sum(record.get("wrong_sign", False) for record in valid)
        lines.append(
            f"{name:34}{good:>9}{len(group) - len(valid):>6}{wrong:>12}"
            + (f"{max(widths):>8.1%}" if widths else "")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--runs", type=int, default=20, help="timings of each part")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the learning check")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for each timing")
    parser.add_argument("--results", type=Path, default=Path("check_bench.jsonl"))
    arguments = parser.parse_args()
    done = []
    if arguments.results.exists():
        lines = arguments.results.read_text(encoding="utf-8").splitlines()
        done = [json.loads(line) for line in lines]
    for case in plan(arguments.part, arguments.model, arguments.runs, arguments.seeds):
        if any(case.items() <= record.items() for record in done):
            continue
        print(" ".join(str(value) for value in case.values()), flush=True)
        record = case | run(case, arguments.budget)
        done.append(record)
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"    {record}", flush=True)
    print(summary(done))


if __name__ == "__main__":
    main()
