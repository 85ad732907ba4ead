"""What the backend `ccl` (oneCCL) brings on one machine, against gloo, for two ranks.

    python benchmarks/oneccl.py --results docs/results

Two things: blocking all-reduces of several sizes, and training steps in a Lightning run. Each
backend lives in a pair of processes of its own, on the same two cores. The pairs take turns in
random order, and the one that waits sleeps. A launch is two fresh pairs; intervals are over
launches. Needs Linux and `pip install 'lightning-perf[oneccl]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import result_file
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from lightning_perf.benchmark.statistics import interval
from lightning_perf.strategies import PerfDDPStrategy, oneccl
from lightning_perf.strategies.oneccl._build import VERSION

BACKENDS = ("gloo", "ccl")
RANKS = 2
SIZES = {f"{kib} KiB": kib << 10 for kib in (4, 16, 64, 256, 1024, 4096, 16384, 65536)}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TURN_SECONDS = 0.3


class Classifier(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def mlp() -> tuple[nn.Module, Tensor]:
    """Return 25.2 million parameters, 100 MB of gradients, and a batch."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(32, 2048)


def small_resnet() -> tuple[nn.Module, Tensor]:
    """Return 11.2 million parameters in many tensors, and a batch of small images."""
    return resnet18(num_classes=10), torch.randn(16, 3, 32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "MLP, 25 M parameters": mlp,
    "ResNet-18, 32 x 32": small_resnet,
}


class Turns:
    """The side of the ranks: rank 0 is told when to work by lines on its standard input."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])

    def wait(self) -> None:
        """Wait for a turn; the other ranks sleep, whatever their backend does while it waits."""
        go = Path(os.environ["TURNS"])
        if self.rank == 0:
            sys.stdin.readline()
            self.number = getattr(self, "number", 0) + 1
            go.write_text(str(self.number))
            return
        self.number = getattr(self, "number", 0) + 1
        while not go.exists() or go.read_text() != str(self.number):
            time.sleep(0.001)

    def tell(self, seconds: list[float]) -> None:
        if self.rank == 0:
            print("TURN " + json.dumps(seconds), flush=True)


def time_all_reduces(turns: Turns, backend: str, sizes: list[int], dtype: torch.dtype) -> None:
    """Time blocking all-reduces of one size after the other, in as many turns as there are."""
    dist.init_process_group(backend, rank=turns.rank, world_size=RANKS)
    count = torch.zeros(1, dtype=torch.int64)
    for size in cycle(sizes):
        tensor = torch.zeros(size // dtype.itemsize, dtype=dtype)
        turns.wait()
        dist.all_reduce(tensor)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        # Rank 0 says how many fit in a turn.
        count[0] = max(3, min(2000, int(TURN_SECONDS / (time.perf_counter() - start))))
        dist.broadcast(count, 0)
        seconds = []
        for _ in range(int(count)):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - start)
        turns.tell(seconds)


class Clock(Callback):
    """Splits a run into turns of a few steps."""

    def __init__(self, turns: Turns, steps: int) -> None:
        self.turns, self.steps, self.seconds = turns, steps, list[float]()

    def on_train_start(self, *_: Any) -> None:
        self.turns.wait()
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.start)
        if len(self.seconds) == self.steps:
            self.turns.tell(self.seconds[1:])  # in the first one caches are cold
            self.seconds.clear()
            self.turns.wait()
        self.start = time.perf_counter()


def time_steps(turns: Turns, backend: str, model: str, steps: int) -> None:
    """Train until nobody asks any more."""
    torch.manual_seed(0)
    net, batch = MODELS[model]()
    data = TensorDataset(
        batch.repeat(64, *[1] * (batch.dim() - 1)), torch.zeros(64 * len(batch)).long()
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=PerfDDPStrategy(process_group_backend=backend),
        max_epochs=-1,
        callbacks=[Clock(turns, steps)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(net), DataLoader(data, batch_size=len(batch)))


def work(case: dict[str, Any]) -> None:
    # The coordinator ends it by closing its input.
    turns = Turns()
    if "model" in case:
        time_steps(turns, case["backend"], case["model"], case["steps"])
    else:
        sizes = [SIZES[size] for size in case["sizes"]]
        time_all_reduces(turns, case["backend"], sizes, TYPES[case["type"]])


class Pair:
    """Two ranks of one backend, which work in their turns only."""

    def __init__(self, stack: ExitStack, backend: str, case: dict[str, Any], port: int) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cores = sorted(os.sched_getaffinity(0))[:RANKS]
        self.errors = [folder / f"errors {rank}" for rank in range(RANKS)]
        self.ranks = []
        for rank in range(RANKS):
            environ = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TURNS": str(folder / "turn"),
            }
            command = [sys.executable, __file__, "--work", json.dumps({**case, "backend": backend})]
            with self.errors[rank].open("w") as errors:
                process = subprocess.Popen(
                    command,
                    env=environ,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=errors,
                )
            os.sched_setaffinity(process.pid, cores)
            self.ranks.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)

    def turn(self) -> list[float]:
        """Let it work once, and return the seconds of each step."""
        self.freeze(signal.SIGCONT)
        first = self.ranks[0]
        if first.stdin is None or first.stdout is None:
            raise RuntimeError("Rank 0 was started without pipes.")
        first.stdin.write("go\n")
        first.stdin.flush()
        for line in first.stdout:
            if line.startswith("TURN "):
                self.freeze(signal.SIGSTOP)
                return json.loads(line.removeprefix("TURN "))
        texts = "\n".join(path.read_text() for path in self.errors)
        raise RuntimeError(f"A rank ended:\n{texts}")

    def freeze(self, number: signal.Signals) -> None:
        for process in self.ranks:
            process.send_signal(number)


@contextmanager
def pairs(case: dict[str, Any]) -> Iterator[dict[str, Pair]]:
    port = random.SystemRandom().randrange(20000, 28000)
    with ExitStack() as stack:
        yield {
            backend: Pair(stack, backend, case, port + number)
            for number, backend in enumerate(BACKENDS)
        }


def launch(
    case: dict[str, Any], turns: int, generator: random.Random
) -> list[dict[str, list[float]]]:
    """Return the median of each turn, for each size and each backend."""
    found: list[dict[str, list[float]]] = [
        {backend: [] for backend in BACKENDS} for _ in case.get("sizes", [None])
    ]
    with pairs(case) as started:
        for _ in found:
            for backend in BACKENDS:
                started[backend].turn()  # the first turn is for connections and caches
        for _ in range(turns):
            for times in found:
                for backend in generator.sample(BACKENDS, len(BACKENDS)):
                    times[backend].append(median(started[backend].turn()))
    return found


def measure(case: dict[str, Any], launches: int, turns: int) -> list[dict[str, Any]]:
    """Return the speed-up of ccl over gloo, with its interval over launches, for each size."""
    generator = random.Random(0)
    found = [launch(case, turns, generator) for _ in range(launches)]
    rows = []
    for name, parts in zip(case.get("sizes", [None]), zip(*found, strict=True), strict=True):
        logs = [
            median(log(gloo / ccl) for gloo, ccl in zip(part["gloo"], part["ccl"], strict=True))
            for part in parts
        ]
        speedup, bounds = interval(logs)
        what = {"model": case["model"]} if name is None else {"size": name, "type": case["type"]}
        result = {"speedup": speedup, "interval": bounds, "launches": launches}
        rows.append({**what, **result, "turns": list(parts)})
    return rows


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if arguments.sizes:
        for name in arguments.types:
            yield {"sizes": arguments.sizes, "type": name}
    for model in arguments.models:
        yield {"model": model, "steps": arguments.steps}


def line(row: dict[str, Any]) -> str:
    what = row.get("model") or f"all-reduce of {row['size']}, {row['type']}"
    low, high = row["interval"]
    return f"| {what} | **{row['speedup']:.2f}** ({low:.2f} to {high:.2f}) | {row['launches']} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--types", nargs="*", choices=TYPES, default=list(TYPES))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--launches", type=int, default=5, help="2 to 10 (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="of each backend in a launch")
    parser.add_argument("--steps", type=int, default=6, help="training steps of a turn")
    parser.add_argument("--results", type=Path, help="folder for the result file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(json.loads(arguments.work))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended
    if not 2 <= arguments.launches <= 10:
        parser.error(f"--launches {arguments.launches}: 2 to 10 are needed for an interval")
    if arguments.steps < 2 or arguments.turns < 1:
        parser.error("--steps must be 2 or more, and --turns 1 or more")
    reason = oneccl.why_not()
    if reason is not None:
        parser.error(reason)
    rows = []
    print("| what | speed-up of ccl over gloo | launches |\n| --- | --- | --- |")
    for case in cases(arguments):
        for row in measure(case, arguments.launches, arguments.turns):
            rows.append(row)
            print(line(row), flush=True)
    if arguments.results:
        result_file.write(
            arguments.results,
            "oneccl",
            rows=rows,
            ranks=RANKS,
            threads_of_a_rank=1,
            kernel=platform.release(),
            oneccl=VERSION,
        )


if __name__ == "__main__":
    main()
