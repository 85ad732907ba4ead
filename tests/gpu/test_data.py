"""Data on a CUDA device: pinned memory that is used again only after its copy."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_perf.data import BufferPool, TokenBudgetBatchSampler, pad_collate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_pinned_memory_waits_for_the_copy() -> None:
    pool = BufferPool()
    busy = torch.randn(4096, 4096, device="cuda")
    lease = pool.lease((1024, 1024), pinned=True)
    assert lease.tensor.is_pinned()
    lease.tensor.fill_(1)
    address = lease.tensor.data_ptr()
    for _ in range(50):
        busy = busy @ busy / 4096  # the copy waits behind this
    copy = lease.tensor.to("cuda", non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    lease.release(after=done)
    if not done.query():
        other = pool.lease((1024, 1024), pinned=True)
        assert other.tensor.data_ptr() != address
        other.tensor.fill_(2)
        other.release()
        pool.clear()
    torch.cuda.synchronize()
    assert bool((copy == 1).all())


def test_memory_on_the_device_comes_again() -> None:
    pool = BufferPool()
    first = pool.lease((100, 100), torch.float16, "cuda")
    address = first.tensor.data_ptr()
    first.release()
    second = pool.lease((10_000,), torch.float16, "cuda:0")
    assert second.tensor.data_ptr() == address
    second.release()


def test_pinned_batches_of_a_budget() -> None:
    texts = [torch.full((n,), n) for n in range(1, 60)]
    lengths = [len(text) for text in texts]
    loader = DataLoader(
        texts,
        batch_sampler=TokenBudgetBatchSampler(lengths, 128),
        collate_fn=pad_collate(None),
        pin_memory=True,
        num_workers=2,
    )
    batches = list(loader)
    assert all(batch.is_pinned() for batch in batches)
    assert sum(int((batch != 0).sum()) for batch in batches) == sum(lengths)
