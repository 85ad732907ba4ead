"""Batches keep the structure of their items, have few lengths, and their padding is counted."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_perf.data import pad_collate


def words(*lengths: int) -> list[Tensor]:
    return [torch.arange(1, length + 1) for length in lengths]


@pytest.mark.parametrize(
    ("to", "length"), [(None, 9), (1, 9), (8, 16), (3, 9), ((4, 12, 40), 12), ([9], 9)]
)
def test_the_padded_length(to: Any, length: int) -> None:
    batch = pad_collate(to)(words(9, 3, 1))
    assert batch.shape == (3, length)
    assert batch[1, :3].tolist() == [1, 2, 3]
    assert not batch[1, 3:].any()
    assert batch[0, :9].tolist() == list(range(1, 10))


def test_a_batch_of_equal_lengths_is_padded_too() -> None:
    """Or the shape would depend on which items meet."""
    assert pad_collate(8)(words(3, 3)).shape == (2, 8)


class Pair(NamedTuple):
    words: Tensor
    label: int


@dataclass
class Sample:
    words: Any
    name: str


def test_the_structure_stays() -> None:
    collate = pad_collate(4)
    pair = collate([Pair(words(2)[0], 7), Pair(words(5)[0], 8)])
    assert type(pair) is Pair
    assert (tuple(pair.words.shape), pair.label.tolist()) == ((2, 8), [7, 8])
    sample = collate([Sample([1.5], "a"), Sample([2.5, 3.0], "b")])
    assert type(sample) is Sample
    assert (sample.words.tolist(), sample.name) == ([[1.5, 0, 0, 0], [2.5, 3, 0, 0]], ["a", "b"])
    nested = collate([{"a": (words(1)[0], {"b": [1, 2]})}, {"a": (words(2)[0], {"b": []})}])
    assert nested["a"][0].tolist() == [[1, 0, 0, 0], [1, 2, 0, 0]]
    assert nested["a"][1]["b"].tolist() == [[1, 2, 0, 0], [0, 0, 0, 0]]
    both = collate([[words(1)[0], words(2)[0]], [words(3)[0], words(4)[0]]])
    assert [tuple(part.shape) for part in both] == [(2, 4), (2, 4)]


def test_items_without_a_sequence_are_collated_as_by_torch() -> None:
    items = [(1, "a", torch.tensor(2.0)), (2, "b", torch.tensor(3.0))]
    collate = pad_collate(4)
    for mine, theirs in zip(collate(items), default_collate(items), strict=True):
        assert str(list(mine)) == str(list(theirs))
    assert collate.statistics.batches == 0


def test_each_field_has_its_value() -> None:
    batch = pad_collate(2, value={"labels": -100})(
        [{"words": [1], "labels": [1]}, {"words": [1, 2, 3], "labels": [1, 2, 3]}]
    )
    assert batch["words"].tolist() == [[1, 0, 0, 0], [1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[1, -100, -100, -100], [1, 2, 3, -100]]


def test_only_what_is_named_is_padded() -> None:
    items = [{"words": words(n)[0], "image": torch.ones(3, 5, 5)} for n in (2, 4)]
    assert pad_collate(8, only=["words"])(items)["image"].shape == (2, 3, 5, 5)
    assert pad_collate(8)(items)["image"].shape == (2, 8, 5, 5)
    with pytest.raises(
        ValueError, match=r"field 'words' .*only=\('image',\)` says that it is none"
    ):
        pad_collate(8, only=["image"])(items)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32, torch.float16, torch.bool])
def test_the_type_stays(dtype: torch.dtype) -> None:
    items = [torch.ones(n, 2, dtype=dtype) for n in (1, 3)]
    batch = pad_collate(4)(items)
    assert batch.dtype == dtype
    assert batch.shape == (2, 4, 2)
    assert batch.int().sum() == 8


def test_arrays_need_not_be_writable() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert pad_collate(None)([array, np.arange(2)]).tolist() == [[0, 1, 2], [0, 1, 0]]


def test_lists_of_several_types_take_the_wider_one() -> None:
    assert pad_collate(None)([[1, 2], [0.5]]).tolist() == [[1, 2], [0.5, 0]]


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"field 1 .*\(2, 3\), \(2, 4\).*only the first dimension"):
        pad_collate()([(1, torch.ones(2, 3)), (1, torch.ones(2, 4))])


@pytest.mark.parametrize("wrong", [0, -8, (), (8, 4), (4, 4), (0, 4), True])
def test_impossible_lengths_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="positive integer, edges that are positive and ascend"):
        pad_collate(wrong)


def test_an_item_beyond_the_last_edge_is_refused() -> None:
    with pytest.raises(ValueError, match=r"length 9, but the last edge .* is 8"):
        pad_collate((4, 8))(words(9, 1))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
    st.sampled_from([None, 1, 7, 8, (16, 32, 64)]),
)
def test_what_is_padded_is_counted(lengths: list[int], to: int | Sequence[int] | None) -> None:
    collate = pad_collate(to)
    batches = [collate(words(*lengths)), collate(words(*lengths[:1]))]
    found = collate.statistics
    assert (found.batches, found.items) == (2, len(lengths) + 1)
    assert found.tokens == sum(lengths) + lengths[0]
    assert found.padded_tokens == sum(batch.numel() for batch in batches)
    assert found.padding_share == pytest.approx(1 - found.tokens / found.padded_tokens)
    padded = collate.padded(lengths)
    assert padded.max() == batches[0].shape[1]
    assert (padded >= lengths).all()


def test_it_says_what_it_has_counted() -> None:
    collate = pad_collate(8)
    assert str(collate.statistics) == "0.0% padding: 0 tokens in 0 batches, 0 when padded"
    collate(words(6, 6))
    assert str(collate.statistics) == "25.0% padding: 12 tokens in 1 batches, 16 when padded"
    assert repr(collate) == "pad_collate(8, value=0)"
    assert repr(pad_collate([4, 8], only=("a",))) == "pad_collate((4, 8), value=0, only=('a',))"


def test_a_copy_in_another_process_has_its_own_counts_unless_a_loader_made_it() -> None:
    collate = pad_collate(8)
    other = pickle.loads(pickle.dumps(collate))
    other(words(1))
    assert (collate.statistics.batches, other.statistics.batches) == (0, 1)


def test_workers_count_together() -> None:
    """By other start methods than fork, too: see the tests of memory-mapped data."""
    collate = pad_collate(8)
    loader = DataLoader(
        words(*range(1, 11)),
        batch_size=2,
        num_workers=2,
        collate_fn=collate,
    )
    shapes = [tuple(batch.shape) for batch in loader]
    assert shapes == [(2, 8)] * 4 + [(2, 16)]
    assert (collate.statistics.batches, collate.statistics.tokens) == (5, 55)
