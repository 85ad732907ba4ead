"""What batches of like lengths bring on text of lengths as they come, on one rank and on two.

    python benchmarks/variable_length.py --results docs/results

The text is that of the machine's own Python: its help topics and the docstrings of its standard
library. Two things are measured. The plans alone: padding, balance between ranks, items that are
left out or repeated. And training: a small language model reads the same epochs in each way, in a
process of its own; in each round all ways take their turn, in random order, and are compared with
the round's naive one. Peers take part where they are installed: transformers (its sampler that
groups by length), lhotse (dynamic buckets with a budget), torchdata (its loader that can resume).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import result_file
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from variable_length_batches import (
    BATCH_SIZE,
    NAIVE,
    NO_WORD,
    VOCABULARY,
    WAYS,
    Texts,
    available,
    collate_of,
    corpus,
    plan_row,
)

from lightning_perf.benchmark.statistics import interval
from lightning_perf.data import MemmapTokens, ResumableLoader, pad_collate

EVALUATIONS = 10  # of what is learned, in a run


class Planned:
    """A batch sampler of some way; Lightning tells it the epoch."""

    def __init__(self, way: str, data: Texts, ranks: int) -> None:
        self.way, self.data, self.ranks, self.epoch = way, data, ranks, 0
        self.length = min(len(WAYS[way](data, rank, ranks, 0)) for rank in range(ranks))

    @property
    def sampler(self) -> Planned:
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return iter(WAYS[self.way](self.data, rank, self.ranks, self.epoch))


class LanguageModel(LightningModule):
    """Predicts the next word with two transformer layers; a rank's loss is the mean over words."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def loss(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1] - 1)
        hidden = self.encoder(self.embedding(text[:, :-1]), mask=mask, is_causal=True)
        words = self.head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(words, text[:, 1:].flatten(), ignore_index=NO_WORD)

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        return self.loss(text)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Seconds of training, true and padded tokens, and what is learned at some moments of it."""

    def __init__(self, data: Texts) -> None:
        self.data = data
        self.seconds = 0.0
        self.true = self.padded = 0
        self.curve: list[tuple[float, float]] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.every = max(1, int(trainer.estimated_stepping_batches) // EVALUATIONS)
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: LanguageModel, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self.true += int((batch != NO_WORD).sum())
        self.padded += batch.numel()
        if trainer.global_step == 3:  # what is done once is over
            self.seconds, self.true, self.padded = 0.0, 0, 0
            self.curve.clear()
            self.began = time.perf_counter()
        if trainer.global_step % self.every == 0:
            self.seconds += time.perf_counter() - self.began
            self.curve.append((self.seconds, self.held_out_loss(module)))
            if dist.is_initialized():
                dist.barrier()  # or what one rank still evaluates would be the other's waiting
            self.began = time.perf_counter()

    def on_train_end(self, trainer: Trainer, module: LanguageModel) -> None:
        self.seconds += time.perf_counter() - self.began
        self.curve.append((self.seconds, self.held_out_loss(module)))

    @torch.no_grad()
    def held_out_loss(self, module: LanguageModel) -> float:
        words = sum(len(text) - 1 for text in self.data.held_out)
        texts = sorted(self.data.held_out, key=len)
        batches = [texts[i : i + BATCH_SIZE] for i in range(0, len(texts), BATCH_SIZE)]
        collate = pad_collate(None, value=NO_WORD)
        return (
            sum(
                float(module.loss(collate(batch))) * sum(len(text) - 1 for text in batch)
                for batch in batches
            )
            / words
        )


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in one way in this process, and its other ranks if any, and return what was noted."""
    torch.manual_seed(arguments.seed)
    data = Texts(arguments.texts, arguments.share)
    loader = DataLoader(
        data,
        batch_sampler=Planned(arguments.work, data, arguments.rank_count),
        collate_fn=collate_of(arguments.work, data),
    )
    clock = Clock(data)
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.rank_count,
        strategy="ddp" if arguments.rank_count > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=arguments.epochs,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), loader)
    mine = torch.tensor([clock.true, clock.padded], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(mine)
    true, padded = mine.tolist()
    return {
        "tokens_per_second": true / clock.seconds,
        "padding_share": 1 - true / padded,
        "seconds": clock.seconds,
        "steps": trainer.global_step,
        "curve": clock.curve,
    }


def in_a_process(way: str, ranks: int, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in one way in a process of its own."""
    options = {"work": way, "rank-count": ranks, "seed": seed}
    options |= {name: getattr(arguments, name) for name in ("texts", "share", "epochs")}
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in options.items())]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        # Files and no pipes: a rank that hangs would hold them open.
        done = subprocess.run(
            command, stdout=output, stderr=errors, env={"OMP_NUM_THREADS": "1", **os.environ}
        )
        output.seek(0)
        errors.seek(0)
        if done.returncode:
            raise RuntimeError(f"{way} on {ranks} ranks failed:\n{errors.read()}")
        (line,) = [line for line in output if line.startswith("RESULT ")]
    print(".", end="", flush=True)
    noted: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return noted


def seconds_to(loss: float, curve: list[tuple[float, float]]) -> float:
    """Return when a curve first is at a loss, between its points in a straight line."""
    (before, high), *rest = curve
    for after, low in rest:
        if low <= loss:
            share = (high - loss) / (high - low) if high > low else 1.0
            return before + max(0.0, share) * (after - before)
        before, high = after, low
    return float("inf")


def compare(ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in all ways in turns, and return a row for each: its speed-up over the naive one."""
    chance = random.Random(0)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(arguments.rounds):
        ways = chance.sample(available(), len(available()))
        rounds.append({way: in_a_process(way, ranks, number, arguments) for way in ways})
    print()
    rows = []
    for way in available():
        mine = [each[way] for each in rounds]
        row: dict[str, Any] = {"way": way, "ranks": ranks, "rounds": len(rounds)}
        for name in ("tokens_per_second", "padding_share", "steps"):
            row[name] = fmean(noted[name] for noted in mine)
        row["final_loss"] = fmean(noted["curve"][-1][1] for noted in mine)
        if way != NAIVE:
            rates = [
                noted["tokens_per_second"] / each[NAIVE]["tokens_per_second"]
                for noted, each in zip(mine, rounds, strict=True)
            ]
            row["speedup"], row["speedup_interval"] = interval(np.log(rates).tolist())
            sooner = [
                seconds_to(loss, theirs) / seconds_to(loss, own)
                for own, theirs in (
                    (noted["curve"], each[NAIVE]["curve"])
                    for noted, each in zip(mine, rounds, strict=True)
                )
                for loss in [max(own[-1][1], theirs[-1][1])]  # the lowest that both reach
            ]
            logs = np.log(sooner).tolist()
            row["sooner"], row["sooner_interval"] = interval(logs)
        rows.append(row)
    return rows


def loader_rows(data: Texts, rounds: int) -> list[dict[str, Any]]:
    """Return what a batch costs in loaders that can resume, over PyTorch's, with two workers."""
    collate = pad_collate(None, value=NO_WORD)

    def shuffled(cls: Any) -> Any:
        order = {"shuffle": True} if cls is ResumableLoader else {"sampler": RandomSampler(data)}
        return cls(data, batch_size=BATCH_SIZE, collate_fn=collate, num_workers=2, **order)

    kinds: dict[str, Any] = {"torch": DataLoader, "ResumableLoader": ResumableLoader}
    if importlib.util.find_spec("torchdata"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        kinds["torchdata, StatefulDataLoader"] = StatefulDataLoader
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name in random.Random(number).sample(list(kinds), len(kinds)):
            batches = iter(shuffled(kinds[name]))
            next(batches)  # workers have started
            began, count = time.perf_counter(), sum(1 for _ in batches)
            seconds[name].append((time.perf_counter() - began) / count)
    return [
        {
            "loader": name,
            "milliseconds_per_batch": 1000 * median(times),
            "over_torch": median(
                mine / torchs for mine, torchs in zip(times, seconds["torch"], strict=True)
            ),
        }
        for name, times in seconds.items()
    ]


def show(plans: list[dict[str, Any]], runs: list[dict[str, Any]], loaders: list[Any]) -> str:
    lines = [
        "| ranks | way | steps | padding | imbalance | left out | repeated |",
        "|---" * 7 + "|",
    ]
    for row in plans:
        numbers = f"{row['padding_share']:.1%} | {row['imbalance']:.3f}"
        rest = f"{row['left_out']:.0f} | {row['repeated']:.0f}"
        lines.append(f"| {row['ranks']} | {row['way']} | {row['steps']:.0f} | {numbers} | {rest} |")
    lines += ["", "| ranks | way | true tokens/s | sooner at the same loss | final loss |"]
    lines.append("|---" * 5 + "|")
    for row in runs:
        cells = ["1", "1"]
        if "speedup" in row:
            cells = [
                f"**{row[name]:.2f}** ({row[f'{name}_interval'][0]:.2f} to "
                f"{row[f'{name}_interval'][1]:.2f})"
                for name in ("speedup", "sooner")
            ]
        cells.append(f"{row['final_loss']:.3f}")
        lines.append(f"| {row['ranks']} | {row['way']} | {' | '.join(cells)} |")
    for row in loaders:
        lines.append(f"\n{row['loader']}: {row['over_torch']:.2f} times the time of PyTorch's")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="2 to 10 (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="of each run")
    parser.add_argument("--share", type=float, default=0.5, help="of the corpus")
    parser.add_argument("--plans-only", action="store_true", help="train nothing")
    parser.add_argument("--results", type=Path, help="folder for the result file")
    for name, kind in (("work", str), ("texts", str), ("rank-count", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        result = train(arguments)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print("RESULT " + json.dumps(result), flush=True)
        return
    if not 2 <= arguments.rounds <= 10:
        parser.error(f"--rounds {arguments.rounds}: 2 to 10 are needed for an interval")
    with tempfile.TemporaryDirectory() as folder:
        arguments.texts = str(Path(folder) / "texts")
        MemmapTokens.pack(arguments.texts, corpus())
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Measure everything, print it and write it down."""
    data = Texts(arguments.texts, arguments.share)
    plans = [plan_row(way, data, ranks, 3) for ranks in arguments.ranks for way in available()]
    runs: list[dict[str, Any]] = []
    loaders: list[dict[str, Any]] = []
    if not arguments.plans_only:
        for ranks in arguments.ranks:
            print(f"{ranks} ranks ", end="", flush=True)
            runs += compare(ranks, arguments)
        loaders = loader_rows(data, arguments.rounds)
    print(show(plans, runs, loaders))
    if arguments.results:
        result_file.write(
            arguments.results,
            "variable_length",
            plans=plans,
            runs=runs,
            loaders=loaders,
            texts=len(data),
            words=int(data.lengths.sum()),
            lengths=np.percentile(data.lengths, [0, 5, 25, 50, 75, 95, 100]).tolist(),
            batch_size=BATCH_SIZE,
            budget=data.budget,
            epochs=arguments.epochs,
        )


if __name__ == "__main__":
    main()
