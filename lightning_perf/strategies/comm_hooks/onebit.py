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
            mean = torch.stack(
                [_mean_of(matrix.values, positive), _mean_of(matrix.values, ~positive)]
            )
            sent = torch.where(positive, mean[0], mean[1])
            self.keep_error(matrix, sent, mean.isfinite().all())
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
            total = buffer.new_zeros(sum(sizes))
            for message in everyones:
                # A copy, since a view as numbers must not start in the middle of one.
                mean = message[: numbers.numel()].clone().view(buffer.dtype).view(-1, 2)
                positive = _booleans(message[numbers.numel() :], sum(sizes))
                parts = total.split_with_sizes(sizes), positive.split_with_sizes(sizes)
                for part, sign, two in zip(*parts, mean, strict=True):
                    part += torch.where(sign, two[0], two[1])
            total /= self.ranks
            for matrix, part in zip(matrices, total.split_with_sizes(sizes), strict=True):
                matrix.values.copy_(part.view_as(matrix.values))
            for gradient, average in zip(rest, unpacked(rest_sum, rest), strict=True):
                gradient.copy_(average)
            return buffer

        return complete


def _mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen values, 0 if there is none."""
    return torch.where(chosen, values, 0).sum() / chosen.sum().clamp(min=1)


def _bits(signs: Tensor) -> Tensor:
    """Return bytes with eight booleans each, the first one in the lowest bit."""
    padded = nn.functional.pad(signs.to(torch.uint8), (0, -signs.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=signs.device)
    return (padded << shifts).sum(1, dtype=torch.uint8)


def _booleans(bits: Tensor, count: int) -> Tensor:
    """Return the first booleans of such bytes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, None] >> shifts & 1).bool().view(-1)[:count]
