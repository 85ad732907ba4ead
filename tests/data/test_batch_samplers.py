"""Batch samplers: every item once, like lengths together, the same on all ranks."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from lightning_perf.data import LengthBucketBatchSampler, TokenBudgetBatchSampler, pad_collate

EPOCHS = 20


def long_tailed(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    return np.clip(random.lognormal(4, 0.8, count), 4, 2000).astype(np.int64)


# Distributions: all alike, few lengths, a long tail, two heaps far apart, any.
LENGTHS = st.one_of(
    st.lists(st.just(7), min_size=1, max_size=150),
    st.lists(st.sampled_from([1, 2, 3, 100]), min_size=1, max_size=150),
    st.builds(long_tailed, st.integers(1, 400), st.integers(0, 5)).map(np.ndarray.tolist),
    st.lists(st.one_of(st.integers(1, 5), st.integers(400, 420)), min_size=1, max_size=150),
    st.lists(st.integers(1, 1000), min_size=1, max_size=150),
    st.lists(st.floats(0.125, 30), min_size=1, max_size=100),
)

Batches = list[list[list[int]]]


def all_ranks(make: Any, ranks: int, epoch: int = 0) -> Batches:
    """Return the batches of each rank in an epoch; all have as many as their length says."""
    found = []
    for rank in range(ranks):
        sampler = make(num_replicas=ranks, rank=rank)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(sampler) == len(batches)
        found.append(batches)
    return found


def require_sound(found: list[Batches], lengths: Any, *, drop_last: bool) -> None:
    """Every epoch holds each item once, but for the remainder; like lengths meet in each step."""
    lengths, ranks = np.asarray(lengths), len(found[0])
    assert len({len(batches) for epoch in found for batches in epoch}) == 1
    for epoch in found:
        times = Counter(item for batches in epoch for batch in batches for item in batch)
        assert all(batch for batches in epoch for batch in batches)
        if drop_last:
            assert set(times.values()) <= {1}
        else:
            assert times.keys() == set(range(len(lengths)))
            assert sum(times.values()) - len(times) < ranks
        # Steps do not mix lengths: of two steps one has the longer items, but for 5 %.
        steps = [
            lengths[[item for batch in step for item in batch]] for step in zip(*epoch, strict=True)
        ]
        for shorter, longer in pairwise(sorted(steps, key=lambda step: float(step.mean()))):
            assert shorter.max() <= longer.min() * 1.0500001


@given(LENGTHS, st.integers(1, 9), st.booleans(), st.integers(0, 3))
@settings(max_examples=8)
def test_buckets_hold_every_item_once(
    lengths: Any, batch_size: int, drop_last: bool, seed: int
) -> None:
    for ranks in (1, 2, 3):

        def make(**where: int) -> LengthBucketBatchSampler:
            return LengthBucketBatchSampler(
                lengths, batch_size, seed=seed, drop_last=drop_last, **where
            )

        found = [all_ranks(make, ranks, epoch) for epoch in range(EPOCHS)]
        require_sound(found, lengths, drop_last=drop_last)
        sizes = Counter(len(b) for epoch in found for batches in epoch for b in batches)
        assert max(sizes, default=0) <= batch_size
        # Of full size but for one or two steps of each epoch.
        assert sum(n for size, n in sizes.items() if size < batch_size) <= EPOCHS * 2 * ranks
        left_out = len(lengths) - sum(sizes[size] * size for size in sizes) // EPOCHS
        if drop_last:
            assert set(sizes) <= {batch_size}
            assert left_out < batch_size * ranks


@given(LENGTHS, st.floats(1, 20), st.booleans(), st.integers(0, 3))
@settings(max_examples=8)
def test_batches_keep_to_the_budget(lengths: Any, times: float, drop_last: bool, seed: int) -> None:
    budget = max(lengths) * times
    for ranks in (1, 2, 3):

        def make(**where: int) -> TokenBudgetBatchSampler:
            return TokenBudgetBatchSampler(lengths, budget, seed=seed, drop_last=drop_last, **where)

        found = [all_ranks(make, ranks, epoch) for epoch in range(EPOCHS)]
        require_sound(found, lengths, drop_last=drop_last)
        for epoch in found:
            for batches in epoch:
                for batch in batches:
                    assert len(batch) * max(lengths[item] for item in batch) <= budget * 1.000001


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["bucket", "budget"])
def test_twenty_epochs(kind: str, ranks: int) -> None:
    lengths = long_tailed(2003)

    def make(**where: int) -> Any:
        if kind == "bucket":
            return LengthBucketBatchSampler(lengths, 16, seed=3, **where)
        return TokenBudgetBatchSampler(lengths, 4000, seed=3, **where)

    found = [all_ranks(make, ranks, epoch) for epoch in range(EPOCHS)]
    require_sound(found, lengths, drop_last=False)
    orders = {str(epoch) for epoch in found}
    assert len(orders) == EPOCHS
    # Other items meet, not only the same batches in another order.
    mates = [{tuple(sorted(b)) for batches in epoch for b in batches} for epoch in found]
    assert all(len(a & b) < 0.5 * len(a) for a, b in pairwise(mates))
    assert found == [all_ranks(make, ranks, epoch) for epoch in range(EPOCHS)]


def test_few_tokens_are_padding_and_ranks_have_as_much_to_do() -> None:
    """Lengths that vary by a factor of 500."""
    lengths = long_tailed(20_000)
    for sampler in (
        LengthBucketBatchSampler(lengths, 16, num_replicas=2, rank=0),
        TokenBudgetBatchSampler(lengths, 8000, num_replicas=2, rank=1),
    ):
        report = sampler.report()
        assert report.padding_share < 0.05 < 0.4 < report.padding_share_before
        assert report.imbalance < 1.05 < report.imbalance_before
        assert report.batches == len(sampler)


def test_batches_of_a_budget_are_full() -> None:
    lengths = long_tailed(5000)
    sampler = TokenBudgetBatchSampler(lengths, 16_000)
    assert lengths.sum() / (16_000 * len(sampler)) > 0.85
    assert 0.95 * 16_000 < sampler.report().largest_batch <= 16_000


def test_the_report_counts_what_is_there() -> None:
    lengths = [10, 10, 4, 2]
    sampler = LengthBucketBatchSampler(lengths, 2, shuffle=False)
    report = sampler.report()
    assert (report.batches, report.largest_batch) == (2, 20)
    assert report.padding_share == pytest.approx(1 - 26 / 28)
    assert report.imbalance == report.imbalance_before == 1
    assert (report.left_out, report.repeated) == (0, 0)
    assert "padding 7.1%" in str(report)
    assert "no item left out" in str(report)
    two = LengthBucketBatchSampler([5] * 5, 1, num_replicas=2, rank=0)
    assert "1 repeated" in str(two.report())
    drop = LengthBucketBatchSampler([5] * 5, 2, drop_last=True)
    assert "1 items left out" in str(drop.report())
    assert LengthBucketBatchSampler([5] * 5, 8, drop_last=True).report().batches == 0


def test_any_of_the_longest_is_left_out_not_always_the_same() -> None:
    seen = set()
    sampler = LengthBucketBatchSampler([7] * 10, 4, drop_last=True)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        seen.update(item for batch in sampler for item in batch)
    assert seen == set(range(10))


def test_an_item_longer_than_the_budget() -> None:
    lengths = [10, 30, 20, 40]
    message = (
        r"max_tokens=25 .* 2 of 4 items are longer: item 3 has the length 40.*too_long='alone'"
    )
    with pytest.raises(ValueError, match=message):
        TokenBudgetBatchSampler(lengths, 25)
    alone = TokenBudgetBatchSampler(lengths, 25, too_long="alone")
    batches = list(alone)
    assert [1] in batches
    assert [3] in batches
    assert sorted(item for batch in batches for item in batch) == [0, 1, 2, 3]
    assert alone.report().largest_batch == 40


def test_a_budget_counts_what_a_collate_pads_to() -> None:
    lengths, collate = long_tailed(500), pad_collate((64, 256, 1024, 2048))
    sampler = TokenBudgetBatchSampler(collate.padded(lengths), 4096)
    items = [list(range(int(length))) for length in lengths]
    for batch in DataLoader(items, batch_sampler=sampler, collate_fn=collate):
        assert batch.numel() <= 4096


def test_without_shuffling_each_epoch_is_the_same() -> None:
    sampler = LengthBucketBatchSampler(long_tailed(100), 4, shuffle=False)
    first = list(sampler)
    sampler.set_epoch(5)
    assert list(sampler) == first
    assert sampler.epoch == 5


def test_an_iteration_can_start_later() -> None:
    sampler = TokenBudgetBatchSampler(long_tailed(100), 3000)
    whole = list(sampler)
    sampler.start_at(3)
    assert list(sampler) == whole[3:]
    assert list(sampler) == whole
    assert len(sampler) == len(whole)


def test_seeds_differ() -> None:
    a, b = (LengthBucketBatchSampler([5] * 50, 4, seed=seed) for seed in (0, 1))
    assert list(a) != list(b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 .* at least 1"),
        ({"lengths": []}, r"shape \(0,\)"),
        ({"lengths": [[1, 2]]}, r"shape \(1, 2\)"),
        ({"lengths": ["a"]}, "one number for each item"),
        ({"lengths": [3, 0, 2]}, "Item 1 has the length 0; lengths are positive"),
        ({"lengths": [3.0, float("nan")]}, "Item 1 has the length nan"),
        ({"seed": -1}, "seed=-1"),
        ({"num_replicas": 2}, "give both or none"),
        ({"num_replicas": 2, "rank": 2}, "rank=2 .* below that"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthBucketBatchSampler(**{"lengths": [1, 2, 3], "batch_size": 2, **arguments})


def test_too_long_has_two_values() -> None:
    with pytest.raises(ValueError, match=r"too_long='cut' .* 'error' or 'alone'"):
        TokenBudgetBatchSampler([1], 2, too_long="cut")  # type: ignore[arg-type]  # on purpose


def test_what_lightning_hands_in_is_followed() -> None:
    """Ranks of the strategy; one order for overfitting and prediction."""
    lengths = long_tailed(60)
    sampler = TokenBudgetBatchSampler(lengths, 3000, seed=4, drop_last=True, too_long="alone")
    arguments = sampler.__pl_saved_kwargs
    again = type(sampler)(**{**arguments, "sampler": DistributedSampler(lengths, 3, 1)})
    assert (again.num_replicas, again.rank, again.shuffle) == (3, 1, True)
    assert repr(again) == repr(sampler)
    once = type(sampler)(**{**arguments, "sampler": SequentialSampler(lengths)})
    assert not once.shuffle
    mine = LengthBucketBatchSampler(
        lengths, 2, num_replicas=2, rank=1, sampler=DistributedSampler(lengths, 3, 2)
    )
    assert (mine.num_replicas, mine.rank) == (2, 1)


def test_it_says_what_it_is_and_can_be_sent_to_another_process() -> None:
    sampler = TokenBudgetBatchSampler(long_tailed(60), 3000, seed=2)
    assert repr(sampler) == (
        "TokenBudgetBatchSampler(60 lengths, max_tokens=3000, too_long='error', shuffle=True, "
        "seed=2, drop_last=False)"
    )
    sampler.set_epoch(3)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


_LARGE = """
import resource, time
import numpy as np
from lightning_perf.data import TokenBudgetBatchSampler

lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 10_000_000), 1, 8000).astype(np.int64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
sampler = TokenBudgetBatchSampler(lengths, 16_000, num_replicas=2, rank=0)
batches, first = len(sampler), next(iter(sampler))
seconds = time.process_time() - began
peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
print(batches, seconds, peak)
assert peak < 1, peak
"""


@pytest.mark.slow
def test_ten_million_lengths_need_less_than_a_gigabyte(tmp_path: Any) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", _LARGE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
