"""What communication hooks and no_sync bring between two hosts, on links of several speeds.

    sudo python benchmarks/slow_network.py --results docs/results

The hosts are two network namespaces on this machine, joined by a link that `tc` slows; both are
removed at the end. Each case is a Lightning run of two ranks on scikit-learn's digits. In each
round all cases take their turn, in random order, and are compared with the round's plain one.
Needs Linux, root and the package iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import result_file
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf.benchmark.statistics import interval
from lightning_perf.strategies import PerfDDPStrategy

LINKS: dict[str, str | None] = {"unlimited": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
MICRO_BATCHES = 4
BUCKET_MB = 4

# Name: arguments of the strategy, micro-batches of a step, whether each of them is averaged.
CASES: dict[str, tuple[dict[str, Any], int, bool]] = {
    "plain": ({}, 1, True),
    "fp16": ({"ddp_comm_hook": "fp16"}, 1, True),
    "bf16": ({"ddp_comm_hook": "bf16"}, 1, True),
    "powersgd, rank 1": ({"ddp_comm_hook": "powersgd"}, 1, True),
    "powersgd, rank 4": (
        {"ddp_comm_hook": "powersgd", "matrix_approximation_rank": 4},
        1,
        True,
    ),
    "onebit": ({"ddp_comm_hook": "onebit"}, 1, True),
    "4 micro-batches, all averaged": ({}, MICRO_BATCHES, True),
    "4 micro-batches, no_sync": ({}, MICRO_BATCHES, False),
    "4 micro-batches, no_sync and bf16": ({"ddp_comm_hook": "bf16"}, MICRO_BATCHES, False),
}


def baseline_of(case: str) -> str:
    return "plain" if CASES[case][1] == 1 else "4 micro-batches, all averaged"


class Digits(LightningModule):
    """4.3 million parameters, 17 MB of gradients; averages where it is told to."""

    automatic_optimization = False

    def __init__(self, micro_batches: int, every: bool) -> None:
        super().__init__()
        hidden = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), *hidden, nn.Linear(1024, 10))
        self.micro_batches, self.every = micro_batches, every
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.losses.append(loss.item())
        last = (batch_idx + 1) % self.micro_batches == 0
        with self.trainer.strategy.accumulate(sync=last or self.every):
            self.manual_backward(loss / self.micro_batches)
        if last:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9)


class Clock(Callback):
    """Seconds and bytes of each optimizer step; bytes are those that this host sent."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == len(self.marks) + 1:
            self.marks.append((time.perf_counter(), sent_bytes()))


def sent_bytes() -> int:
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    (line,) = [
        line for line in Path("/proc/net/dev").read_text().splitlines() if f"{interface}:" in line
    ]
    return int(line.partition(":")[2].split()[8])


def loaders(batch_size: int = 32) -> tuple[DataLoader[Any], tuple[Tensor, Tensor]]:
    """Return a loader of 1500 digits, and the others."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    data = TensorDataset(x[:1500], y[:1500])
    return DataLoader(data, batch_size=batch_size, drop_last=True), (x[1500:], y[1500:])


def train(case: str, steps: int, **hook: Any) -> tuple[Digits, Clock]:
    options, micro_batches, every = CASES[case]
    if "ddp_comm_hook" in options:
        options = {"start_powerSGD_iter": 0, **options, **hook}
    torch.manual_seed(0)
    module, clock = Digits(micro_batches, every), Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=PerfDDPStrategy(bucket_cap_mb=BUCKET_MB, **options),
        max_steps=steps,
        max_epochs=-1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loaders()[0])
    return module, clock


def measure_link(steps: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds and bytes of each case in each round."""
    generator = random.Random(0)  # the same order on both hosts
    for number in range(rounds):
        for case in generator.sample(list(CASES), len(CASES)):
            _, clock = train(case, steps + 2)  # in the second step DDP rearranges its buckets
            seconds, sent = zip(*clock.marks[1:], strict=True)
            times = [after - before for before, after in pairwise(seconds)]
            bytes_ = (sent[-1] - sent[0]) / steps
            yield {"round": number, "case": case, "seconds": median(times), "bytes": bytes_}


def learn(steps: int) -> Iterator[dict[str, Any]]:
    """Yield what each case has learned after the same number of steps."""
    for case in CASES:
        # Hooks that change the gradient start after a tenth of the run.
        late = case.startswith(("powersgd", "onebit"))
        module, _ = train(case, steps, start_powerSGD_iter=steps // 10 if late else 0)
        x, y = loaders()[1]
        with torch.no_grad():
            accuracy = (module.net(x).argmax(1) == y).float().mean().item()
        yield {"case": case, "loss": fmean(module.losses[-20:]), "accuracy": accuracy}


def work(arguments: argparse.Namespace) -> None:
    """Run on one host; the first one writes lines of JSON."""
    results = (
        learn(arguments.learn)
        if arguments.learn
        else measure_link(arguments.steps, arguments.rounds)
    )
    for result in results:
        if os.environ["NODE_RANK"] == "0":
            print("RESULT " + json.dumps(result), flush=True)


@contextmanager
def two_hosts(rate: str | None) -> Iterator[list[list[str]]]:
    """Set up two network namespaces and a link; yield how to start a command in each."""
    names = [f"lightning-perf-{os.getpid()}-{host}" for host in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [("c0", names[0]), ("c1", names[1])]
        ip("link", "add", "c0", "netns", names[0], "type", "veth", "peer", "c1", "netns", names[1])
        for host, (end, name) in enumerate(ends):
            ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", end)
            for interface in (end, "lo"):
                ip("-n", name, "link", "set", interface, "up")
            if rate is not None:
                shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                call("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", *shape)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def ip(*arguments: str) -> None:
    call("ip", *arguments)


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def on_both_hosts(rate: str | None, arguments: list[str]) -> list[dict[str, Any]]:
    """Run this script on both hosts and return what the first one found, with progress."""
    found = []
    with ExitStack() as stack:
        processes = []
        hosts = stack.enter_context(two_hosts(rate))
        for host, enter in enumerate(hosts):
            environ = {
                **os.environ,
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29777",
                "NODE_RANK": str(host),
                "LOCAL_RANK": "0",
                "GLOO_SOCKET_IFNAME": f"c{host}",
                "OMP_NUM_THREADS": "1",
            }
            command = [*enter, sys.executable, __file__, "--work", *arguments]
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                command, env=environ, text=True, stdout=subprocess.PIPE, stderr=errors
            )
            processes.append((process, errors))
        try:
            for line in processes[0][0].stdout or ():
                if line.startswith("RESULT "):
                    found.append(json.loads(line.removeprefix("RESULT ")))
                    print(".", end="", flush=True)
            for process, errors in processes:
                if process.wait(60) != 0:
                    errors.seek(0)
                    raise RuntimeError(f"A host failed:\n{errors.read()}")
        finally:
            for process, _ in processes:
                process.kill()
                process.communicate()
    print()
    return found


def summary(link: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each case: its speed-up over its baseline, round by round."""
    times: dict[str, list[float]] = {case: [] for case in CASES}
    sent: dict[str, list[float]] = {case: [] for case in CASES}
    for result in found:
        times[result["case"]].append(result["seconds"])
        sent[result["case"]].append(result["bytes"])
    rows = []
    for case in CASES:
        base = times[baseline_of(case)]
        row = {"link": link, "case": case, "baseline": baseline_of(case), "rounds": len(base)}
        row |= {"step_seconds": median(times[case]), "bytes_per_step": fmean(sent[case])}
        if case != row["baseline"]:
            logs = [
                torch.tensor(a / b).log().item() for a, b in zip(base, times[case], strict=True)
            ]
            row["speedup"], row["interval"] = interval(logs)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| link | case | against | speed-up | MB sent per step |", "|---|---|---|---|---|"]
    for row in rows:
        megabytes = f"{row['bytes_per_step'] / 1e6:.3g}"
        if "speedup" in row:
            low, high = row["interval"]
            speedup = f"**{row['speedup']:.2f}** ({low:.2f} to {high:.2f})"
            lines.append(
                f"| {row['link']} | {row['case']} | {row['baseline']} | {speedup} | {megabytes} |"
            )
        else:
            lines.append(f"| {row['link']} | {row['case']} | | 1 | {megabytes} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--rounds", type=int, default=5, help="2 to 10 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="measured in each turn")
    parser.add_argument("--learn", type=int, default=300, help="steps to compare what is learned")
    parser.add_argument("--results", type=Path, help="folder for the result file")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are removed
    if not 2 <= arguments.rounds <= 10:
        parser.error(f"--rounds {arguments.rounds}: 2 to 10 are needed for an interval")
    options = ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
    rows: list[dict[str, Any]] = []
    for link in arguments.links:
        print(f"{link} ", end="", flush=True)
        rows += summary(link, on_both_hosts(LINKS[link], [*options, "--learn", "0"]))
    learned = []
    if arguments.learn:
        print("learning ", end="", flush=True)
        learned = on_both_hosts(None, ["--learn", str(arguments.learn)])
    print(table(rows))
    for row in learned:
        print(f"{row['case']}: loss {row['loss']:.4f}, accuracy {row['accuracy']:.3f}")
    if arguments.results:
        result_file.write(
            arguments.results,
            "slow_network",
            rows=rows,
            learned=learned,
            learning_steps=arguments.learn,
            bucket_cap_mb=BUCKET_MB,
        )


if __name__ == "__main__":
    main()
