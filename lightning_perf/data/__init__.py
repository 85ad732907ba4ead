"""Data at the speed of training: balanced batches, exact resuming, mapped files, reused memory."""

from lightning_perf.data.buffer_pool import BufferPool
from lightning_perf.data.length_bucket_batch_sampler import LengthBucketBatchSampler
from lightning_perf.data.memmap import MemmapArrays, MemmapTokens
from lightning_perf.data.pad_collate import pad_collate
from lightning_perf.data.resumable_loader import ResumableLoader
from lightning_perf.data.token_budget_batch_sampler import TokenBudgetBatchSampler

__all__ = [
    "BufferPool",
    "LengthBucketBatchSampler",
    "MemmapArrays",
    "MemmapTokens",
    "ResumableLoader",
    "TokenBudgetBatchSampler",
    "pad_collate",
]
