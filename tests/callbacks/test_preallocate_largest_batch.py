"""The largest batch of a loader is found from lengths, and nothing is taken from the loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from lightning_perf.callbacks._largest_batch import (
    Largest,
    NoLargestBatchError,
    fetch,
    find_largest,
    item_size,
)
from lightning_perf.callbacks.preallocate import largest_batch

LENGTHS = [3, 9, 4, 1, 5, 9, 2, 6, 5, 30, 5, 8]


class Texts(Dataset[Tensor]):
    """Sequences of these lengths, which it counts reads of and may or may not tell."""

    def __init__(self, lengths: Any = LENGTHS, *, told: bool = True) -> None:
        self.sizes = lengths
        self.reads = 0
        if told:
            self.lengths = lengths

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return torch.full((int(self.sizes[index]),), index)


def pad(items: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(items, batch_first=True)


def loader(dataset: Any = None, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Texts() if dataset is None else dataset, collate_fn=pad, **kwargs)


def find(a_loader: DataLoader[Any], **kwargs: Any) -> Largest:
    return find_largest(a_loader, **{"max_reads": 1000, "say": pytest.fail, **kwargs})


def items(a_loader: DataLoader[Any], **kwargs: Any) -> list[list[Any]]:
    return [batch.items for batch in find(a_loader, **kwargs).batches]


class Shuffle(Sampler[int]):
    """One of the user's own: only some of the items."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(5).tolist())

    def __len__(self) -> int:
        return 5


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(5, ()))


class Buckets:
    """A batch sampler that is no subclass of torch's, with batches of several sizes."""

    def __init__(self, batches: list[list[int]], *, ends: bool = True) -> None:
        self.batches, self.ends, self.epochs = batches, ends, 0

    def __iter__(self) -> Iterator[list[int]]:
        self.epochs += 1
        while True:
            yield from self.batches
            if self.ends:
                return


# --- which batch


def test_any_items_may_meet_in_a_shuffled_loader() -> None:
    found = find(loader(batch_size=3, shuffle=True))

    assert [batch.items for batch in found.batches] == [[9, 1, 5]]
    assert str(found.batches[0]) == "3 items of up to 30 (padded 90)"
    assert found.how == "the lengths of Texts, as any items may meet"


def test_in_order_the_heaviest_batch_and_the_one_with_the_longest_item_are_found() -> None:
    lengths = [9, 9, 9, 9, 1, 1, 1, 1, 20]

    found = find(loader(Texts(lengths), batch_size=4))

    assert [batch.items for batch in found.batches] == [[0, 1, 2, 3], [8]]
    assert [str(batch) for batch in found.batches] == [
        "4 items of up to 9 (padded 36)",
        "1 item of size 20",
    ]


def test_of_equally_heavy_batches_one_is_enough() -> None:
    assert items(loader(Texts([5] * 8), batch_size=4)) == [[0, 1, 2, 3]]
    assert items(loader(Texts([9, 1, 9]), batch_size=2)) == [[0, 1]]


def test_only_the_batches_that_an_epoch_takes_count() -> None:
    assert items(loader(batch_size=3)) == [[9, 11, 10]]
    assert items(loader(batch_size=3), epoch=2) == [[1, 2, 0]]


def test_a_last_batch_that_is_dropped_does_not_count() -> None:
    lengths = [2, 2, 2, 2, 50]
    assert items(loader(Texts(lengths), batch_size=2, drop_last=True)) == [[0, 1]]
    assert items(loader(Texts(lengths), batch_size=2)) == [[4]]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (SubsetRandomSampler([0, 2, 4]), [4, 2]),
        (WeightedRandomSampler([1.0, 0.0, 1.0] + [0.0] * 9, 12), [2, 0]),
        (RandomSampler(range(12), replacement=True, num_samples=4), [9, 1]),
        (DistributedSampler(range(12), num_replicas=2, rank=1), [9, 1]),
        (Shuffle(), [1, 4]),
        (Endless(), [1, 4]),
        ([3, 1, 0], [1, 3]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_items_that_the_sampler_can_give_count(sampler: Any, expected: list[int]) -> None:
    assert items(loader(batch_size=2, sampler=sampler)) == [expected]


def test_a_rank_that_does_not_shuffle_has_its_own_batches() -> None:
    def of_rank(rank: int) -> list[list[int]]:
        sampler = DistributedSampler(range(12), num_replicas=2, rank=rank, shuffle=False)
        return items(loader(batch_size=2, sampler=sampler))

    assert of_rank(0) == [[4, 6]]
    assert of_rank(1) == [[9, 11]]


def test_batch_samplers_of_any_kind_are_asked_for_their_batches() -> None:
    buckets = Buckets([[0, 7], [2, 3, 4, 6, 8, 10, 1, 5], [9]])

    found = find(loader(batch_sampler=buckets))

    assert [batch.items for batch in found.batches] == [[1, 5, 4, 8, 10, 2, 6, 3], [9]]
    assert found.how == "the lengths of Texts, among the batches of an epoch"
    assert buckets.epochs == 0


def test_a_batch_sampler_without_an_end_is_asked_for_an_epoch() -> None:
    endless = Buckets([[0], [1], [9]], ends=False)

    assert items(loader(batch_sampler=endless), epoch=2) == [[1]]
    assert items(loader(batch_sampler=endless)) == [[9]]


def test_a_shuffling_batch_sampler_of_torch_counts_as_shuffling() -> None:
    batches = BatchSampler(Shuffle(), 2, drop_last=False)
    assert items(DataLoader(Texts(), batch_sampler=batches, collate_fn=pad)) == [[1, 4]]


def test_without_batching_each_item_is_a_batch() -> None:
    whole = DataLoader(Texts(), batch_size=None, shuffle=True)

    assert items(whole) == [[9]]
    assert torch.equal(fetch(whole, [9]), torch.full((30,), 9))
    assert items(DataLoader(Texts(), batch_size=None), epoch=5) == [[1]]


# --- whose lengths


class Known(Sampler[int]):
    """Has lengths itself, as samplers that group by length do."""

    def __init__(self) -> None:
        self.lengths = LENGTHS

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, tuple(LENGTHS), np.array(LENGTHS), torch.tensor(LENGTHS), torch.tensor(LENGTHS) / 2],
    ids=["list", "tuple", "array", "tensor", "seconds"],
)
def test_lengths_may_be_any_sequence_of_numbers(lengths: Any) -> None:
    data = Texts(told=False)
    data.lengths = lengths
    assert items(loader(data, batch_size=2, shuffle=True)) == [[9, 1]]
    assert data.reads == 0


def test_samplers_may_have_the_lengths() -> None:
    data = Texts(told=False)
    batches = Buckets([[0, 1], [9]])
    batches.lengths = LENGTHS
    for each in (
        loader(data, batch_size=2, sampler=Known()),
        loader(data, batch_sampler=BatchSampler(Known(), 2, drop_last=False)),
        loader(data, batch_sampler=batches),
    ):
        assert "the lengths of" in find(each).how
    assert data.reads == 0


def test_parts_and_sums_of_datasets_have_the_lengths_of_their_items() -> None:
    data = Texts()
    parts = random_split(data, [6, 6], torch.Generator().manual_seed(0))
    longest = max(parts[0].indices, key=LENGTHS.__getitem__)

    ((position,),) = items(loader(parts[0], batch_size=1, shuffle=True))

    assert parts[0].indices[position] == longest
    lengths = [*(LENGTHS[index] for index in parts[0].indices), *LENGTHS]
    ((position,),) = items(loader(ConcatDataset([parts[0], data]), batch_size=1, shuffle=True))
    assert lengths[position] == 30
    assert data.reads == 0


@pytest.mark.parametrize(
    "lengths", [[1, 2], "twelve chars", [[1, 2]] * 12, [[1], [2, 3]] * 6, len, None]
)
def test_what_is_not_one_number_for_each_item_is_no_lengths(lengths: Any) -> None:
    data = Texts(told=False)
    data.lengths = lengths

    found = find(loader(data, batch_size=2, shuffle=True))

    assert found.batches[0].items == [9, 1]
    assert found.how.startswith("reading 12 of 12 items")


def test_a_million_known_lengths_are_enough_without_reading_an_item() -> None:
    lengths = torch.randint(1, 500, (1_000_000,))
    lengths[123_456] = 777
    data = Texts(lengths.tolist())

    shuffled = find(loader(data, batch_size=32, shuffle=True))
    in_order = find(loader(data, batch_size=32))
    grouped = find(loader(data, batch_sampler=BatchSampler(range(1_000_000), 32, drop_last=True)))

    assert shuffled.batches[0].items[0] == 123_456
    assert in_order.batches == grouped.batches
    assert in_order.batches[0].items[0] == 123_456
    assert data.reads == 0


def test_items_that_are_no_indices_are_read() -> None:
    class Cut(Texts):
        def __getitem__(self, key: Any) -> Tensor:
            index, length = key
            return torch.full((length,), index)

    batches = Buckets([[(0, 3), (1, 2)], [(9, 4)]])

    found = find(loader(Cut(), batch_sampler=batches))

    assert [batch.items for batch in found.batches] == [[(0, 3), (1, 2)], [(9, 4)]]
    assert found.how.startswith("reading 3 of 3 items")


# --- reading items


def test_unknown_lengths_are_read_once() -> None:
    data = Texts(told=False)

    found = find(loader(data, batch_size=3, shuffle=True))

    assert found.batches[0].items == [9, 1, 5]
    assert data.reads == 0, "the guard puts the counter back"
    assert found.how == (
        "reading 12 of 12 items (`lengths` in the dataset would spare it), as any items may meet"
    )


def test_reading_is_bounded_and_says_so() -> None:
    reads: list[int] = []

    class Noted(Texts):
        def __getitem__(self, index: int) -> Tensor:
            reads.append(index)
            return super().__getitem__(index)

    data = Noted([1 + i % 97 for i in range(1000)], told=False)
    for kwargs in ({"shuffle": True}, {}):
        reads.clear()
        found = find(loader(data, batch_size=4, **kwargs), max_reads=100)
        assert len(reads) <= 100
        assert len(set(reads)) == len(reads)
        assert max(reads) > 900, "spread over all"
        assert "of 1,000 items" in found.how
        assert len(found.batches[0].items) == 4


def test_items_of_one_size_are_not_all_read() -> None:
    reads: list[int] = []

    class Images(Dataset[Tensor]):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> Tensor:
            reads.append(index)
            return torch.zeros(3, 4, 4)

    found = find(DataLoader(Images(), batch_size=8, shuffle=True))

    assert len(reads) <= 64
    assert len(found.batches[0].items) == 8
    assert found.how.startswith("reading 64 of 100,000 items, all of one size")


def test_long_reading_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_perf.callbacks._largest_batch._SECONDS_BETWEEN_REPORTS", -1.0)
    said: list[str] = []

    find(loader(Texts(told=False), batch_size=2, shuffle=True), say=said.append)

    assert said[0].startswith("reading items to find the longest: 1 of 12.")
    assert "`lengths`" in said[0]


def test_items_are_read_where_the_loader_reads_them() -> None:
    """A dataset may be usable only in a worker that `worker_init_fn` has prepared."""
    data = OnlyInWorkers()
    prepared = DataLoader(data, 2, collate_fn=pad, num_workers=1, worker_init_fn=open_data)

    assert items(prepared) == [[3, 2]]
    assert fetch(prepared, [3, 2]).shape == (2, 4)
    assert not OPENED


OPENED: list[int] = []


def open_data(worker: int) -> None:
    OPENED.append(worker)


class OnlyInWorkers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(OPENED[0] + 1 + index)


@dataclass
class Pair:
    first: Tensor
    second: list[int]


class Movable:
    def __init__(self) -> None:
        self.x = torch.zeros(5)

    def to(self, device: Any) -> Movable:
        return self


@pytest.mark.parametrize(
    ("item", "size"),
    [
        (torch.zeros(2, 3), 6),
        ((torch.zeros(7), 1), 8),
        ({"ids": [1, 2, 3], "label": 0.5}, 4),
        ("hello", 5),
        (b"hello", 5),
        (np.zeros((2, 2)), 4),
        ([np.float32(1.0), None], 1),
        (Pair(torch.zeros(3), [1]), 3),
        (Movable(), 5),
        (object(), 0),
    ],
)
def test_the_size_of_an_item_counts_all_numbers_in_it(item: Any, size: int) -> None:
    assert item_size(item) == size


# --- nothing is taken


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("generator", [True, False])
def test_the_order_stays_and_no_random_number_is_drawn(told: bool, generator: bool) -> None:
    class Noisy(Texts):
        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index) + torch.rand(1) + random.random() + np.random.rand()

    def order(look: bool) -> list[list[float]]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        own = torch.Generator().manual_seed(4) if generator else None
        each = loader(Noisy(told=told), batch_size=2, shuffle=True, generator=own)
        iterator = iter(each)
        taken = [next(iterator)]
        if look:
            largest_batch(each)
        return [batch.tolist() for batch in (*taken, *iterator, *each)]

    assert order(look=True) == order(look=False)


def test_workers_under_way_are_not_disturbed() -> None:
    each = loader(batch_size=2, num_workers=1, persistent_workers=True)
    iterator = iter(each)
    first = next(iterator)
    process = each._iterator

    batch = largest_batch(each)

    assert batch.shape == (2, 30)
    assert each._iterator is process
    assert len([first, *iterator]) == 6
    del each, iterator, process


# --- what cannot be looked ahead


class Unsized(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(index)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(2)])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DataLoader(Stream()), "Stream is an IterableDataset"),
        (lambda: DataLoader(Unsized(), sampler=[1, 2]), "Unsized has no length"),
        (
            lambda: loader(batch_sampler=iter([[0, 1], [2]])),
            "its sampler is a list_iterator, which can be iterated only once",
        ),
        (
            lambda: loader(batch_size=2, sampler=(i for i in range(12))),
            "its sampler is a generator, which can be iterated only once",
        ),
        (lambda: loader(batch_size=2, sampler=SubsetRandomSampler([])), "gives no items"),
        (lambda: loader(batch_sampler=Buckets([])), "gives no items"),
    ],
)
def test_a_loader_that_cannot_be_looked_ahead_says_why(make: Any, reason: str) -> None:
    with pytest.raises(NoLargestBatchError, match=reason):
        find(make())
    with pytest.raises(ValueError, match=f"The largest batch is not known: .*{reason}"):
        largest_batch(make())
