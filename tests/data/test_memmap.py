"""Packed files: what is read is what was packed, opening costs nothing, other files are refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_perf.data import MemmapArrays, MemmapTokens, TokenBudgetBatchSampler, pad_collate
from lightning_perf.data._packed_file import Region, packing

DOCUMENTS = [[5, 6, 7], [], [8, 9], [10]]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts"
    MemmapTokens.pack(path, DOCUMENTS)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    path = tmp_path / "pictures"
    rng = np.random.default_rng(0)
    arrays = {"image": rng.integers(0, 255, (7, 3, 4, 4), np.uint8), "label": np.arange(7.0)}
    MemmapArrays.pack(path, arrays)
    return path


def test_documents_and_blocks(texts: Path) -> None:
    whole = MemmapTokens(texts)
    assert [item.tolist() for item in (whole[i] for i in range(len(whole)))] == DOCUMENTS
    assert whole.lengths.tolist() == [3, 0, 2, 1]
    assert whole[-1].tolist() == [10]
    assert whole.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    blocks = MemmapTokens(texts, block=4)
    assert (len(blocks), blocks[0].tolist(), blocks.lengths.tolist()) == (1, [5, 6, 7, 8], [4])
    for index in (4, -5):
        with pytest.raises(IndexError, match="there are 4"):
            whole[index]


@given(
    st.lists(st.lists(st.integers(0, 60_000), max_size=8), max_size=6),
    st.sampled_from(["u2", "i4", "i8", ">i4"]),
)
@settings(max_examples=30)
def test_what_is_read_is_what_was_packed(tmp_path: Path, documents: Any, dtype: str) -> None:
    path = tmp_path / "texts"
    MemmapTokens.pack(path, iter(documents), dtype=dtype)
    dataset = MemmapTokens(path)
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents


def test_rows_are_those_of_the_arrays(pictures: Path) -> None:
    dataset = MemmapArrays(pictures)
    assert len(dataset) == 7
    row = dataset[5]
    assert (row["image"].dtype, row["image"].shape) == (torch.uint8, (3, 4, 4))
    assert row["image"].tolist() == dataset.arrays["image"][5].tolist()
    assert (row["label"].item(), row["label"].dtype) == (5.0, torch.float64)
    with pytest.raises(IndexError, match="there are 7"):
        dataset[7]


def test_rows_can_come_one_by_one(pictures: Path, tmp_path: Path) -> None:
    dataset, copy = MemmapArrays(pictures), tmp_path / "copy"
    MemmapArrays.pack(copy, dataset)
    assert copy.read_bytes() == pictures.read_bytes()
    MemmapArrays.pack(copy, [{"x": 1, "y": [1.5, 2]}, {"x": 2, "y": [0, 3.5]}])
    assert MemmapArrays(copy)[1]["y"].tolist() == [0, 3.5]


def test_nothing_is_copied_and_the_file_stays_as_it_is(texts: Path) -> None:
    dataset, before = MemmapTokens(texts), texts.read_bytes()
    assert dataset[0].data_ptr() == dataset.tokens.ctypes.data
    dataset[0].fill_(1)
    assert dataset[0].tolist() == [1, 1, 1]
    assert texts.read_bytes() == before
    assert MemmapTokens(texts)[0].tolist() == [5, 6, 7]
    texts.chmod(0o400)
    assert MemmapTokens(texts)[0].tolist() == [5, 6, 7]


def test_what_travels_to_a_worker_is_the_path(pictures: Path) -> None:
    dataset = MemmapArrays(pictures)
    sent = pickle.dumps(dataset)
    assert len(sent) < 500
    assert pickle.loads(sent)[3]["label"] == 3


class Mine(MemmapTokens):
    """A subclass reads the same files."""


@pytest.mark.parametrize(
    "start_method",
    [
        "fork",
        pytest.param("forkserver", marks=pytest.mark.slow),
        pytest.param("spawn", marks=pytest.mark.slow),
    ],
)
def test_workers_read_batches_of_a_budget(tmp_path: Path, start_method: str) -> None:
    path = tmp_path / "texts"
    documents = [list(range(1, 2 + i % 30)) for i in range(60)]
    MemmapTokens.pack(path, documents, dtype=np.uint16)
    dataset = (MemmapTokens if start_method != "fork" else Mine)(path)
    collate = pad_collate(None)
    loader = DataLoader(
        dataset,
        batch_sampler=TokenBudgetBatchSampler(dataset.lengths, 64),
        collate_fn=collate,
        num_workers=2,
        multiprocessing_context=start_method,
    )
    batches = [batch.long() for batch in loader]
    assert all(batch.numel() <= 64 for batch in batches)
    assert sum(int(batch.sum()) for batch in batches) == sum(map(sum, documents))
    assert collate.statistics.batches == len(batches)


def refused(path: Path, content: bytes, cls: Any = MemmapTokens) -> str:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)) as found:
        cls(path)
    return str(found.value)


def test_foreign_and_damaged_files_are_refused_with_the_reason(texts: Path) -> None:
    content = texts.read_bytes()
    assert "begins with b'\\x89PNG\\r\\n" in refused(texts, b"\x89PNG\r\n\x1a\n" + bytes(5000))
    assert "it is empty" in refused(texts, b"")
    for size in (9, 20, 60, 4095, 4096, len(content) - 1):
        assert f"truncated: it has {size:,} bytes" in refused(texts, content[:size]), size
    assert "more than the" in refused(texts, content + b"x")
    damaged = bytearray(content)
    damaged[40] ^= 1
    assert "checksum is wrong" in refused(texts, bytes(damaged))
    newer = bytearray(content)
    newer[8] = 2
    assert "version 2 of the format" in refused(texts, bytes(newer))
    assert "MemmapTokens packed it" in refused(texts, content, MemmapArrays)
    # As a transfer that changes the ends of lines leaves it.
    assert "no class of lightning_perf.data packed it" in refused(
        texts, content.replace(b"\r\n", b"\n")
    )
    with pytest.raises(FileNotFoundError):
        MemmapTokens(texts.with_name("none"))


def test_a_file_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "texts"

    def documents() -> Any:
        yield [1, 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MemmapTokens.pack(path, documents())
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for documents, message in (
        ([[1], [70_000]], "Document 1 has numbers from 70000 to 70000, which do not fit"),
        ([[1.5]], "Document 0 has the type float64"),
        ([[[1]]], r"shape \(1, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            MemmapTokens.pack(path, documents, dtype="u2")
    with pytest.raises(ValueError, match="tokens are integers"):
        MemmapTokens.pack(path, [], dtype="f4")
    for rows, message in (
        ({"a": [1, 2], "b": [1]}, r"lengths \{'a': 2, 'b': 1\}"),
        ({"a": ["x"]}, "'a' has the type <U1"),
        ([{"a": [1, 2]}, {"a": [1]}], r"Row 1 is a int64\[1\], and row 0 is a int64\[2\]"),
        ([3], "Row 0 is a int"),
        ([], "rows have a length, above 0"),
        (iter([]), "rows have a length"),
    ):
        with pytest.raises(ValueError, match=message):
            MemmapArrays.pack(path, rows)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="block=0"):
        MemmapTokens(path, block=0)


def test_many_arrays_have_room(tmp_path: Path) -> None:
    path = tmp_path / "many"
    MemmapArrays.pack(path, {f"ä{i}" * 20: np.full(2, i) for i in range(100)})
    assert MemmapArrays(path)[1]["ä99" * 20] == 99


_WORKERS = """
import sys
import psutil, torch
from torch.utils.data import DataLoader, get_worker_info
from lightning_perf.data import MemmapTokens

class Seen(MemmapTokens):
    def __getitem__(self, index):
        assert "lightning" not in sys.modules, "importing it takes a worker seconds and memory"
        process, began = psutil.Process(), psutil.Process().memory_info().rss
        again = MemmapTokens(self.path, self.block)
        tokens = again[index]
        assert len(again) == 1_000_000 and tokens.shape == (1000,)
        grown = process.memory_info().rss - began
        return torch.tensor([get_worker_info().id, grown, int(tokens.sum())])

if __name__ == "__main__":
    dataset = Seen(sys.argv[1], block=1000)
    items = range(0, 1_000_000, 100_000)
    loader = DataLoader(dataset, num_workers=4, batch_size=None, sampler=items)
    found = torch.stack(list(loader))
    assert set(found[:, 0].tolist()) == {0, 1, 2, 3}
    assert found[:, 1].max() < 10 * 2**20, found
    assert found[-1, 2] == 7, found
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="makes a sparse file")
def test_a_thousand_million_tokens_open_at_once_in_four_workers(tmp_path: Path) -> None:
    """Four gigabytes that are not there: only one page is written."""
    path, count = tmp_path / "large", 10**9
    with packing(path, "MemmapTokens") as made:
        tokens = Region("<i4", (count,), made.room)
        made.regions = {"tokens": tokens, "ends": Region("<i8", (2,), tokens.end)}
        made.file.seek(tokens.offset + 900_000_000 * 4)
        made.file.write(np.array([7], "<i4").tobytes())
        made.file.seek(tokens.end)
        made.file.write(np.array([0, count], "<i8").tobytes())
    assert path.stat().st_size > 4 * 10**9
    assert path.stat().st_blocks * 512 < 10**6
    script = tmp_path / "workers.py"
    script.write_text(_WORKERS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="makes a sparse file")
def test_a_file_larger_than_the_memory_opens(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with packing(path, "MemmapArrays") as made:
        made.regions = {"image": Region("|u1", (2**23, 3, 200, 200), made.room)}
    assert os.path.getsize(path) > 10**12
    assert MemmapArrays(path)[2**23 - 1]["image"].sum() == 0
