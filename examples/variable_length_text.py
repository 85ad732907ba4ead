"""Text of variable length, with and without Preallocate: when is the memory peak reached?

    python examples/variable_length_text.py
    python examples/variable_length_text.py --picture memory.png

Trains a small language model, byte by byte, on the paragraphs of Python's own documentation, once
plainly and once with Preallocate, in a process of its own each. Paragraphs are shuffled, so the
longest ones come at some time of the epoch. Without Preallocate the peak memory creeps up until
then; with it, the peak is there in the first step, and a batch that does not fit would fail there.
"""

import argparse
import json
import os
import subprocess
import sys
from pydoc_data.topics import topics
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_perf.benchmark.worker import peak_memory
from lightning_perf.callbacks import Preallocate

VARIANTS = {"plain": [], "Preallocate": [Preallocate()]}
# glibc otherwise keeps pieces of freed memory, by chance more or less of them.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}


class LanguageModel(LightningModule):
    """Predicts the next byte with a few transformer layers."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(256, width)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1] - 1, text.device)
        hidden = self.encoder(self.embedding(text[:, :-1]), mask=mask, is_causal=True)
        logits = self.head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(logits, text[:, 1:].flatten(), ignore_index=0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Peak(Callback):
    """Notes the peak memory of the process, and allocator retries on a GPU, after each step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.retries = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *step: object) -> None:
        if module.device.type == "cuda":
            self.bytes.append(torch.cuda.max_memory_reserved())
            self.retries = torch.cuda.memory_stats()["num_alloc_retries"]
        else:
            self.bytes.append(peak_memory() or 0)


def paragraphs(longest: int) -> list[Tensor]:
    """Return the paragraphs of Python's documentation as bytes, cut at a length."""
    texts = [text for topic in topics.values() for text in topic.split("\n\n")]
    data = [text.encode()[:longest] for text in texts if len(text) > 20]
    return [torch.tensor(list(text)) for text in data]


def train(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with a variant in this process, and return what was noted."""
    seed_everything(arguments.seed, verbose=False)
    texts = paragraphs(arguments.longest)
    data = DataLoader(
        texts,
        batch_size=arguments.batch_size,
        shuffle=True,
        collate_fn=lambda items: pad_sequence(items, batch_first=True),
    )
    peak = Peak()
    trainer = Trainer(
        callbacks=[*VARIANTS[variant], peak],
        max_steps=arguments.steps,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), data)
    return {"bytes": peak.bytes, "retries": peak.retries}


def in_a_process(variant: str, options: list[str]) -> dict[str, Any]:
    """Train with a variant in a fresh process, whose memory is its own."""
    command = [sys.executable, __file__, *options, "--only", variant]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**MALLOC, **os.environ}
    )
    noted: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return noted


def table(noted: dict[str, dict[str, Any]]) -> str:
    """Return when each variant had reached its peak memory, within 5 %."""
    lines = [f"{'':<14}{'after step 1':>14}{'at the end':>14}{'reached in':>14}{'retries':>10}"]
    for variant, each in noted.items():
        steps = each["bytes"]
        reached = next(i for i, size in enumerate(steps, start=1) if size > 0.95 * steps[-1])
        first, last = (f"{size / 2**20:.0f} MiB" for size in (steps[0], steps[-1]))
        step = f"step {reached}"
        lines.append(f"{variant:<14}{first:>14}{last:>14}{step:>14}{each['retries']:>10}")
    return "\n".join(lines)


def draw(noted: dict[str, dict[str, Any]], path: str) -> None:
    """Draw the peak memory over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for variant, each in noted.items():
        steps = range(1, len(each["bytes"]) + 1)
        axes.step(steps, [size / 2**20 for size in each["bytes"]], where="post", label=variant)
    axes.set(xlabel="step", ylabel="peak memory of the process (MiB)", ylim=(0, None))
    axes.set_title("When the peak is reached")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--longest", type=int, default=1500, help="bytes at which texts are cut")
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
