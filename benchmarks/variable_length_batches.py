"""The text of the benchmark variable_length.py, and the ways to make batches of it."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_perf.data import (
    LengthBucketBatchSampler,
    MemmapTokens,
    TokenBudgetBatchSampler,
    pad_collate,
)

LONGEST = 1024  # words; longer texts are cut there
BATCH_SIZE = 16
NO_WORD = 0
HELD_OUT = 100
VOCABULARY = 2000  # the rarer words are one
NAIVE = "naive"
FEW_LENGTHS = "token budget, 8 lengths"  # so that a compiled model or a graph sees few shapes

Batches = list[list[int]]


def corpus() -> list[list[int]]:
    """Return the texts of this Python as numbers of words, in random order."""
    texts = [text for topic in topics.values() for text in topic.split("\n\n")]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "lib2to3", "idlelib"} & set(path.parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the escapes in old sources
            tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
        texts += [text for node in nodes if (text := ast.get_docstring(node))]
    words = [re.findall(r"\w+|[^\w\s]", text)[:LONGEST] for text in texts]
    words = [text for text in words if len(text) > 4]
    counts = Counter(word for text in words for word in text)
    numbers = {
        word: i for i, (word, _) in enumerate(counts.most_common(VOCABULARY - 2), NO_WORD + 2)
    }
    random.Random(0).shuffle(words)
    return [[numbers.get(word, NO_WORD + 1) for word in text] for text in words]


class Texts(Dataset[Tensor]):
    """A share of the corpus, without what is held out.

    Args:
        path: The corpus, packed as `MemmapTokens`.
        share: How much of it.
    """

    def __init__(self, path: str | Path, share: float) -> None:
        packed = MemmapTokens(path)
        texts = [packed[i].long() for i in range(len(packed))]
        self.held_out, texts = texts[:HELD_OUT], texts[HELD_OUT:]
        self.data = texts[: int(len(texts) * share)]
        self.lengths = np.array([len(text) for text in self.data])
        # As many tokens as a naive batch has on average, if all of them were full.
        self.budget = max(int(self.lengths.max()), round(BATCH_SIZE * self.lengths.mean() / 0.9))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def collate_of(way: str, data: Texts) -> pad_collate:
    """Return what pads the batches of a way: to their longest text, or to one of few lengths."""
    longest = data.lengths.max()
    edges = np.geomspace(longest / 64, longest, 8).round().astype(int).tolist()
    return pad_collate(edges if way == FEW_LENGTHS else None, value=NO_WORD)


# Each way takes data, rank, number of ranks and epoch, and gives the batches of that rank.


def naive(data: Texts, rank: int, ranks: int, epoch: int) -> Batches:
    order = np.random.default_rng((0, epoch)).permutation(len(data))
    order = np.resize(order, -(-len(order) // ranks) * ranks)[rank::ranks]
    return [order[i : i + BATCH_SIZE].tolist() for i in range(0, len(order), BATCH_SIZE)]


def bucketed(data: Texts, rank: int, ranks: int, epoch: int) -> Batches:
    sampler = LengthBucketBatchSampler(data.lengths, BATCH_SIZE, num_replicas=ranks, rank=rank)
    sampler.set_epoch(epoch)
    return list(sampler)


def token_budget(data: Texts, rank: int, ranks: int, epoch: int) -> Batches:
    sampler = TokenBudgetBatchSampler(data.lengths, data.budget, num_replicas=ranks, rank=rank)
    sampler.set_epoch(epoch)
    return list(sampler)


def token_budget_few_lengths(data: Texts, rank: int, ranks: int, epoch: int) -> Batches:
    lengths = collate_of(FEW_LENGTHS, data).padded(data.lengths)
    sampler = TokenBudgetBatchSampler(lengths, data.budget, num_replicas=ranks, rank=rank)
    sampler.set_epoch(epoch)
    return list(sampler)


def transformers_groups(data: Texts, rank: int, ranks: int, epoch: int) -> Batches:
    from transformers.trainer_pt_utils import DistributedLengthGroupedSampler, LengthGroupedSampler

    lengths = data.lengths.tolist()
    if ranks == 1:
        generator = torch.Generator().manual_seed(epoch)
        order = list(LengthGroupedSampler(BATCH_SIZE, lengths=lengths, generator=generator))
    else:
        sampler = DistributedLengthGroupedSampler(
            BATCH_SIZE, num_replicas=ranks, rank=rank, lengths=lengths
        )
        sampler.set_epoch(epoch)
        order = list(sampler)
    return [order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE)]


def lhotse_buckets(data: Texts, rank: int, ranks: int, epoch: int) -> Batches:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    cuts = CutSet.from_cuts(
        MonoCut(id=str(i), start=0, duration=float(length), channel=0)
        for i, length in enumerate(data.lengths)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the cuts are in memory
        sampler = DynamicBucketingSampler(
            cuts,
            max_duration=data.budget,
            num_buckets=30,
            shuffle=True,
            world_size=ranks,
            rank=rank,
        )
    sampler.set_epoch(epoch)
    # It repeats some so that ranks have as many, and says so in their names.
    return [[int(cut.id.partition("_")[0]) for cut in batch] for batch in sampler]


WAYS: dict[str, Callable[[Texts, int, int, int], Batches]] = {
    NAIVE: naive,
    "length buckets": bucketed,
    "token budget": token_budget,
    FEW_LENGTHS: token_budget_few_lengths,
    "transformers, grouped by length": transformers_groups,
    "lhotse, dynamic buckets": lhotse_buckets,
}


def available() -> list[str]:
    return [
        way
        for way in WAYS
        if importlib.util.find_spec(way.partition(",")[0])
        or not way.startswith(("transformers", "lhotse"))
    ]


def plan_row(way: str, data: Texts, ranks: int, epochs: int) -> dict[str, Any]:
    """Return padding, balance and remainder of a way, over some epochs, without training."""
    padded = true = slowest = mean = steps = 0.0
    left_out = repeated = 0
    longest = {length: int(collate_of(way, data).padded(length)) for length in set(data.lengths)}

    def computed(batch: list[int]) -> int:
        return len(batch) * longest[data.lengths[batch].max()]

    for epoch in range(epochs):
        by_rank = [WAYS[way](data, rank, ranks, epoch) for rank in range(ranks)]
        tokens = np.array(
            [[computed(batch) for batch in step] for step in zip(*by_rank, strict=False)]
        )
        true += sum(data.lengths[batch].sum() for batches in by_rank for batch in batches)
        padded += sum(computed(batch) for batches in by_rank for batch in batches)
        slowest, mean = slowest + tokens.max(1).sum(), mean + tokens.mean(1).sum()
        steps += len(tokens)
        times = Counter(item for batches in by_rank for batch in batches for item in batch)
        left_out += len(data) - len(times)
        repeated += sum(times.values()) - len(times)
    return {
        "way": way,
        "ranks": ranks,
        "steps": steps / epochs,
        "padding_share": 1 - true / padded,
        "imbalance": slowest / mean,
        "left_out": left_out / epochs,
        "repeated": repeated / epochs,
        "batches_by_rank": [len(batches) for batches in by_rank],
    }
