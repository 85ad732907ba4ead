"""Text of variable length: when is the memory peak reached, and how much is padding?

    python examples/variable_length_text.py
    python examples/variable_length_text.py --picture memory.png

Trains a small language model, word by word, on the paragraphs of Python's own documentation, for
one epoch in each of three ways, each in a process of its own. Paragraphs are shuffled, so the
longest ones come at any time. Without Preallocate the peak memory creeps up until then; with it,
the peak is there in the first step, and a batch that does not fit would fail there. The third way
puts paragraphs of like lengths together, as many as a budget of tokens allows, so that all batches
need about the same memory and little of it is padding; lengths are padded to few edges, and the
network is compiled.

Shown is what the process needed beyond what it had before training; on a GPU, what PyTorch reserved
there, and how often it had to give memory back and try again. `--picture` needs matplotlib; to
compile, a C++ compiler is needed, and without one the run says so and goes on.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_perf.benchmark.worker import peak_memory
from lightning_perf.callbacks import Compile, Preallocate
from lightning_perf.data import TokenBudgetBatchSampler, pad_collate

BUDGET = "token budget"
VARIANTS = {
    "plain": [],
    "Preallocate": [Preallocate()],
    BUDGET: [Preallocate(), Compile(dynamic=True, strict=False)],
}
# glibc otherwise keeps pieces of freed memory, by chance more or less of them.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
NO_WORD = 0


class Paragraphs(Dataset[Tensor]):
    """The paragraphs of Python's documentation as numbers of words and signs."""

    def __init__(self, longest: int) -> None:
        texts = [text for topic in topics.values() for text in topic.split("\n\n")]
        words = [re.findall(r"\w+|[^\w\s]", text)[:longest] for text in texts]
        words = [paragraph for paragraph in words if len(paragraph) > 4]
        counts = Counter(word for paragraph in words for word in paragraph)
        numbers = {word: number for number, word in enumerate(counts, start=NO_WORD + 1)}
        self.vocabulary = len(numbers) + 1
        self.data = [torch.tensor([numbers[word] for word in paragraph]) for paragraph in words]
        # The sampler needs this. Preallocate looks for it too; without it, it reads the paragraphs.
        self.lengths = [len(paragraph) for paragraph in self.data]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


class LanguageModel(LightningModule):
    """Predicts the next word with a few transformer layers."""

    def __init__(self, vocabulary: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1] - 1, text.device)
        hidden = self.encoder(self.embedding(text[:, :-1]), mask=mask, is_causal=True)
        words = self.head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(words, text[:, 1:].flatten(), ignore_index=NO_WORD)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Peak(Callback):
    """Notes, after each step, the peak memory since training began."""

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.before = 0 if module.device.type == "cuda" else peak_memory() or 0
        self.bytes: list[int] = []
        self.retries = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *step: object) -> None:
        if module.device.type == "cuda":
            self.bytes.append(torch.cuda.max_memory_reserved())
            self.retries = torch.cuda.memory_stats()["num_alloc_retries"]
        else:
            self.bytes.append((peak_memory() or 0) - self.before)


def loader_of(variant: str, data: Paragraphs, arguments: argparse.Namespace) -> DataLoader[Any]:
    """Return the batches of a variant."""
    if variant != BUDGET:
        size = arguments.batch_size
        return DataLoader(data, size, shuffle=True, collate_fn=pad_collate(None, value=NO_WORD))
    # Two in a doubling: 32, 48, 64, 96 and so on.
    powers = [2**power for power in range(5, (arguments.longest - 1).bit_length() + 1)]
    edges = sorted(powers + [power * 3 // 2 for power in powers])
    collate = pad_collate(edges, value=NO_WORD)
    padded = collate.padded(data.lengths)
    sampler = TokenBudgetBatchSampler(padded, arguments.max_tokens, seed=arguments.seed)
    return DataLoader(data, batch_sampler=sampler, collate_fn=collate)


def train(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with a variant in this process, and return what was noted."""
    seed_everything(arguments.seed, verbose=False)
    data = Paragraphs(arguments.longest)
    loader = loader_of(variant, data, arguments)
    trainer = Trainer(
        callbacks=[*VARIANTS[variant], peak := Peak()],
        max_epochs=1,
        max_steps=arguments.steps,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
    )
    trainer.fit(LanguageModel(data.vocabulary), loader)
    padding = loader.collate_fn.statistics.padding_share
    return {"bytes": peak.bytes, "retries": peak.retries, "padding": padding}


def in_a_process(variant: str, options: list[str]) -> dict[str, Any]:
    """Train with a variant in a fresh process, whose memory is its own."""
    print(f"Training: {variant}", file=sys.stderr)
    command = [sys.executable, __file__, *options, "--only", variant]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**MALLOC, **os.environ}
    )
    noted: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return noted


def table(noted: dict[str, dict[str, Any]]) -> str:
    """Return when each variant had reached its peak memory, within 5 %."""
    columns = f"{'after step 1':>14}{'at the end':>14}{'reached in':>14}{'retries':>10}"
    lines = [f"{'':<14}{columns}{'padding':>10}"]
    for variant, each in noted.items():
        steps = each["bytes"]
        reached = next(i for i, size in enumerate(steps, start=1) if size >= 0.95 * steps[-1])
        first, last = (f"{size / 2**20:.0f} MiB" for size in (steps[0], steps[-1]))
        step = f"step {reached}"
        rest = f"{each['retries']:>10}{each['padding']:>10.0%}"
        lines.append(f"{variant:<14}{first:>14}{last:>14}{step:>14}{rest}")
    return "\n".join(lines)


def draw(noted: dict[str, dict[str, Any]], path: str) -> None:
    """Draw the peak memory over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for variant, each in noted.items():
        steps = range(1, len(each["bytes"]) + 1)
        sizes = [size / 2**20 for size in each["bytes"]]
        axes.step(steps, sizes, where="post", label=variant)
    axes.set(
        title="Peak memory so far, with texts of variable length",
        xlabel="step",
        ylabel="MiB more than before training",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=-1, help="stop so early (default: an epoch)")
    parser.add_argument("--batch-size", type=int, default=16, help="paragraphs (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="budget (default: 2048)")
    parser.add_argument("--longest", type=int, default=800, help="words to cut at (default: 800)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", metavar="FILE", help="draw the memory over the steps")
    parser.add_argument("--only", choices=VARIANTS, help="one variant, in this process")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(train(arguments.only, arguments)))
        return
    noted = {variant: in_a_process(variant, sys.argv[1:]) for variant in VARIANTS}
    print(table(noted))
    if arguments.picture:
        draw(noted, arguments.picture)
        print(f"Picture: {arguments.picture}")


if __name__ == "__main__":
    main()
