"""Gradients that travel in half precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_perf.strategies.comm_hooks.base import CommHook, Complete

if TYPE_CHECKING:
    # `torch.distributed` exports it only where it is built.
    from torch._C._distributed_c10d import GradBucket


class CastHook(CommHook):
    """Averages gradients in half precision: half the bytes of float32.

    The gradient is divided by the number of ranks before it is cast, so that a sum that fits in
    float16 as a mean does not overflow.

    Args:
        start_iter: Number of backward passes whose gradients are averaged plainly before.

    Example:
        >>> from lightning_perf.strategies.comm_hooks import BF16Hook
        >>> BF16Hook(start_iter=100).name
        'bf16'
    """

    dtype: ClassVar[torch.dtype]

    def register(self, ddp: DistributedDataParallel) -> None:
        """See `CommHook.register`; every rank must call it.

        Raises:
            RuntimeError: The backend does not average the type, as gloo of PyTorch 2.6 does not
                bfloat16.
        """
        super().register(ddp)
        trial = torch.zeros(1, dtype=self.dtype, device=next(ddp.parameters()).device)
        try:
            dist.all_reduce(trial, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"The hook {self.name!r} was asked for, and {dist.get_backend(self._group)} of "
                f"PyTorch {torch.__version__} does not average {self.dtype}: {error}. Use another "
                "hook, or a newer PyTorch."
            ) from error

    def compressed(self, bucket: GradBucket) -> Complete:
        """Start to average one bucket in half precision."""
        buffer = bucket.buffer()
        half = (buffer / self.ranks).to(self.dtype)
        work = self.all_reduce(half)

        def complete() -> Tensor:
            work.wait()
            return buffer.copy_(half)

        return complete


class FP16Hook(CastHook):
    """Averages gradients in float16: three decimal digits, and nothing above 65504 or below 6e-8.

    What is larger becomes infinite: a gradient scaler skips such a step, without one it spoils the
    weights. What is smaller is lost. See `CastHook`.
    """

    name = "fp16"
    dtype = torch.float16


class BF16Hook(CastHook):
    """Averages gradients in bfloat16: the range of float32, two to three decimal digits.

    See `CastHook`.
    """

    name = "bf16"
    dtype = torch.bfloat16
