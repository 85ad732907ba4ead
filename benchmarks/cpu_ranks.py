"""One process with all threads against one rank for each core, on the same batches in total.

    python benchmarks/cpu_ranks.py --results docs/results

Each turn is a Lightning run in fresh processes that trains all networks; in each round all variants
take their turn, in random order, and are compared with the round's single process. Inputs are
random: only the speed is of interest. Needs Linux and two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import result_file
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tasks import convnet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf.benchmark.statistics import interval
from lightning_perf.launch.topology import this_machine
from lightning_perf.strategies import CPUDDPStrategy

SINGLE = "one process"
VARIANTS = {SINGLE: None, "ranks, gloo": "gloo", "ranks, oneCCL": "ccl"}
WARM_UP = 5


class Recommender(nn.Module):
    """Embedding bags, the products of all pairs, and two small networks, as in DLRM.

    The tables are small, since their gradients are dense: gloo fails with sparse ones now and then,
    and oneCCL takes none.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems", 2019.
    """

    def __init__(self, tables: int = 8, rows: int = 5_000, width: int = 32) -> None:
        super().__init__()
        bags = (nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bags = nn.ModuleList(bags)
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width))
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 128), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        bags = [bag(sparse[:, index]) for index, bag in enumerate(self.bags)]
        vectors = torch.stack([bottom, *bags], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.tril_indices(*products.shape[1:], offset=-1)
        return self.top(torch.cat([bottom, products[:, rows, columns]], dim=1))


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def wide_perceptron() -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), *hidden, nn.Linear(1024, 10))


def conv_net() -> nn.Module:
    return convnet()[0].net


def recommendations(samples: int) -> list[Tensor]:
    # Few rows are asked for often, as of real users: about one of rank r in 1/r.
    ranks = torch.rand(samples, 8, 20).mul(torch.tensor(5_000.0).log()).exp().long() - 1
    return [torch.randn(samples, 13), ranks, torch.randint(2, (samples,))]


def images(samples: int) -> list[Tensor]:
    return [torch.randn(samples, 3, 64, 64), torch.randint(10, (samples,))]


def vectors(samples: int) -> list[Tensor]:
    return [torch.randn(samples, 64), torch.randint(10, (samples,))]


# Name: the network, its inputs and labels, samples of a step over all ranks.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Tensor]], int]] = {
    "small perceptron": (perceptron, vectors, 64),
    "wide perceptron": (wide_perceptron, vectors, 64),
    "small conv net": (conv_net, images, 64),
    "recommender (embedding bags)": (Recommender, recommendations, 512),
}


class Training(LightningModule):
    """Trains a network by plain SGD, and notes when each step ended."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        *inputs, labels = batch
        return nn.functional.cross_entropy(self.net(*inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(Callback):
    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.marks.append(time.perf_counter())


def step_seconds(network: str, backend: str | None, ranks: int, steps: int) -> float:
    make, inputs, samples = NETWORKS[network]
    torch.manual_seed(0)
    data = TensorDataset(*inputs(samples * 8))
    clock = Clock()
    strategy = CPUDDPStrategy(backend, ranks=ranks, by="core") if backend else "auto"
    Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=steps + WARM_UP,
        max_epochs=-1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Training(make()), DataLoader(data, batch_size=samples // (ranks if backend else 1)))
    marks = clock.marks[WARM_UP - 1 :]
    return median(after - before for before, after in pairwise(marks))


def work(arguments: argparse.Namespace) -> None:
    """Measure all networks as one variant; the first rank writes lines of JSON."""
    for network in arguments.networks:
        seconds = step_seconds(network, VARIANTS[arguments.work], arguments.ranks, arguments.steps)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            result = {"network": network, "variant": arguments.work, "seconds": seconds}
            print("RESULT " + json.dumps(result), flush=True)


def turn(variant: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--work", variant]
    command += ["--ranks", str(arguments.ranks), "--steps", str(arguments.steps)]
    command += ["--networks", *arguments.networks]
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
        output.seek(0)
        text = output.read()
    if done.returncode:
        raise RuntimeError(f"{variant} failed:\n{text}")
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def summary(network: str, variant: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the speed-up of a variant over one process, round by round."""
    seconds = {
        name: [r["seconds"] for r in found if (r["network"], r["variant"]) == (network, name)]
        for name in (SINGLE, variant)
    }
    pairs = zip(seconds[SINGLE], seconds[variant], strict=True)
    speedup, ends = interval([torch.tensor(a / b).log().item() for a, b in pairs])
    return {
        "network": network,
        "variant": variant,
        "speedup": speedup,
        "interval": ends,
        "rounds": len(seconds[variant]),
        "step_seconds": {name: median(times) for name, times in seconds.items()},
    }


def main() -> None:
    cores = len(this_machine().cores)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6, help="2 to 10 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="measured in each turn")
    parser.add_argument("--ranks", type=int, default=cores, help="(default: the cores)")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--results", type=Path, help="folder for the result file")
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    if not 2 <= arguments.rounds <= 10:
        parser.error(f"--rounds {arguments.rounds}: 2 to 10 are needed for an interval")
    if not 2 <= arguments.ranks <= cores:
        parser.error(f"--ranks {arguments.ranks}: 2 to the {cores} cores this process may use")
    found = []
    for _ in range(arguments.rounds):
        for variant in random.sample(list(VARIANTS), len(VARIANTS)):
            found += turn(variant, arguments)
            print(".", end="", flush=True)
    print("\n| network | variant | speed-up over one process |\n|---|---|---|")
    rows = []
    for variant in list(VARIANTS)[1:]:
        for network in arguments.networks:
            row = summary(network, variant, found)
            rows.append(row)
            low, high = row["interval"]
            print(f"| {network} | {variant} | **{row['speedup']:.2f}** ({low:.2f} to {high:.2f}) |")
    if arguments.results:
        result_file.write(arguments.results, "cpu_ranks", rows=rows, ranks=arguments.ranks)


if __name__ == "__main__":
    main()
