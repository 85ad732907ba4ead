"""Gradients that travel as signs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_perf.strategies.comm_hooks.base import (
    Complete,
    ErrorFeedback,
    Matrix,
    packed,
    unpacked,
)

_GATHER = sum(1 << 56 - 7 * bit for bit in range(8))
_REPEAT = sum(1 << 8 * byte for byte in range(8))
_DIAGONAL = sum(1 << 8 * byte + byte for byte in range(8)) - (1 << 64)  # as a signed number


class OneBitHook(ErrorFeedback):
    """Averages gradients of which only the signs travel, with error feedback.

    A matrix is sent as one bit for each number and two numbers, the mean of its positive and of its
    negative entries. What that lacks is added to the next gradient. Each rank gets the bits of all
    others, so the bytes that a rank receives grow with their number: 1/32 of float32 with two
    ranks, and nothing is saved with 32. Vectors are averaged as they are.

    It keeps a copy of all compressed gradients, and changes what is learned: more so with Adam,
    whose second moments see the signs, and early in training.

    Args:
        start_iter: Number of backward passes whose gradients are averaged plainly before.

    Source: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", 2014.

    Example:
        >>> from lightning_perf.strategies.comm_hooks import OneBitHook
        >>> OneBitHook(start_iter=10).name
        'onebit'
    """

    name = "onebit"

    def shrinks(self, rows: int, columns: int) -> bool:
        """Return whether there is anything to send."""
        return rows * columns > 0

    def start(self, buffer: Tensor, matrices: list[Matrix], rest: list[Tensor]) -> Complete:
        """Send the signs and means of this bucket to all ranks, and average the rest."""
        signs, means = [], []
        for matrix in matrices:
            positive = matrix.values >= 0
            mean = _means(matrix.values, positive)
            self.keep_error(matrix, _decoded(positive, mean), mean.isfinite().all())
            signs.append(positive)
            means.append(mean)
        sizes = [sign.numel() for sign in signs]
        numbers = packed(means, buffer).view(torch.uint8)
        mine = torch.cat([numbers, _bits(packed(signs, buffer.bool()[:0]))])
        everyones, gather = self.all_gather(mine)
        rest_sum = packed(rest, buffer).div_(self.ranks)
        works = [gather]
        if rest:
            works.append(self.all_reduce(rest_sum))

        def complete() -> Tensor:
            for work in works:
                work.wait()
            for rank, message in enumerate(everyones):
                # A copy, since a view as numbers must not start in the middle of one.
                mean = message[: numbers.numel()].clone().view(buffer.dtype).view(-1, 2)
                mean /= self.ranks
                positive = _booleans(message[numbers.numel() :], sum(sizes))
                parts = positive.split_with_sizes(sizes)
                for matrix, part, two in zip(matrices, parts, mean, strict=True):
                    share = _decoded(part.view_as(matrix.values), two)
                    if rank == 0:
                        matrix.values.copy_(share)
                    else:
                        matrix.values += share
            for gradient, average in zip(rest, unpacked(rest_sum, rest), strict=True):
                gradient.copy_(average)
            return buffer

        return complete


def _means(values: Tensor, positive: Tensor) -> Tensor:
    """Return the means of the positive and of the other values, 0 where there are none."""
    count, total = positive.sum(), values.sum()
    above = values.clamp(min=0).sum()
    sums = torch.stack([above, total - above])
    return sums / torch.stack([count, values.numel() - count]).clamp(min=1)


def _decoded(positive: Tensor, means: Tensor) -> Tensor:
    """Return the first mean where it is positive, else the second; faster than `torch.where`."""
    return positive.to(means.dtype).mul_(means[0] - means[1]).add_(means[1])


def _bits(signs: Tensor) -> Tensor:
    """Return bytes with eight booleans each, the first one in the lowest bit.

    Eight booleans are one 64-bit number. The product moves the lowest bit of byte i to bit 56 + i,
    and all others below 56 or out of the number.
    """
    padded = nn.functional.pad(signs.view(torch.uint8), (0, -signs.numel() % 8))
    return (padded.view(torch.int64) * _GATHER >> 56 & 255).to(torch.uint8)


def _booleans(bits: Tensor, count: int) -> Tensor:
    """Return the first booleans of such bytes."""
    repeated = bits.to(torch.int64) * _REPEAT  # the same byte eight times
    return ((repeated & _DIAGONAL).view(torch.uint8) != 0)[:count]
