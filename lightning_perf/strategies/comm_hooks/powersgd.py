"""Gradients that travel as products of two thin matrices."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from lightning_perf.strategies.comm_hooks.base import (
    Complete,
    ErrorFeedback,
    Matrix,
    packed,
    unpacked,
)

# A matrix is compressed only if that saves at least half of its bytes.
_MIN_COMPRESSION = 2


class PowerSGDHook(ErrorFeedback):
    """Averages each gradient matrix M as a product ``P Q^T`` of low rank, with error feedback.

    One step of subspace iteration from the Q of the step before: ``P = M Q`` is summed over the
    ranks and orthogonalized, ``Q = M^T P`` is averaged. What the product lacks is added to the next
    gradient. Matrices that would not shrink by half, and vectors, are averaged as they are.

    It keeps a copy of all compressed gradients, and changes what is learned: more so with Adam,
    whose second moments see the approximation, and early in training.

    Args:
        matrix_approximation_rank: Columns of P and Q: more is closer to the gradient, and longer
            on the way.
        start_iter: Number of backward passes whose gradients are averaged plainly before.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", 2019.

    Example:
        >>> from lightning_perf.strategies.comm_hooks import PowerSGDHook
        >>> PowerSGDHook(matrix_approximation_rank=2, start_iter=10).name
        'powersgd'
    """

    name = "powersgd"

    def __init__(self, matrix_approximation_rank: int = 1, *, start_iter: int = 1000) -> None:
        super().__init__(start_iter=start_iter)
        if matrix_approximation_rank < 1:
            raise ValueError(
                f"matrix_approximation_rank={matrix_approximation_rank} was asked for; it is 1 or "
                "more."
            )
        self.matrix_approximation_rank = matrix_approximation_rank
        self._before: _OnTheWay | None = None

    def settings(self) -> dict[str, Any]:
        """Return the name and the rank."""
        return {**super().settings(), "matrix_approximation_rank": self.matrix_approximation_rank}

    def shrinks(self, rows: int, columns: int) -> bool:
        """Return whether both factors together have at most half the numbers of the matrix."""
        factors = (rows + columns) * self.matrix_approximation_rank
        return factors * _MIN_COMPRESSION <= rows * columns

    def start(self, buffer: Tensor, matrices: list[Matrix], rest: list[Tensor]) -> Complete:
        """Send the first factors of this bucket, then the second ones of the bucket before."""
        this = _OnTheWay(self, buffer, matrices, rest)
        self.flush()
        self._before = this
        return this.complete

    def flush(self) -> None:
        """Send the second factors of the latest bucket.

        While they wait for the first ones, those of the bucket after travel too. To wait for one
        bucket exactly, and not for what has arrived, keeps the order the same on all ranks.
        """
        before, self._before = self._before, None
        if before is not None:
            before.send_second()

    def second_factor(self, matrix: Matrix) -> Tensor:
        """Return an orthogonal Q to start from: of the step before, or random, alike on ranks."""
        shape = matrix.values.shape[1], self.matrix_approximation_rank
        factor = self.kept("factor", matrix.name, matrix.values.new_empty(shape))
        if factor is None:
            # Numbers that depend on the name only.
            generator = torch.Generator().manual_seed(crc32(matrix.name.encode()))
            factor = torch.randn(shape, generator=generator).to(matrix.values)
        return _orthogonal(factor)


class _OnTheWay:
    """One bucket: the first factors travel from the start, the second ones are computed of them."""

    def __init__(
        self, hook: PowerSGDHook, buffer: Tensor, matrices: list[Matrix], rest: list[Tensor]
    ) -> None:
        self.hook, self.buffer, self.matrices, self.rest = hook, buffer, matrices, rest
        self.starts = [hook.second_factor(matrix) for matrix in matrices]
        pairs = zip(matrices, self.starts, strict=True)
        firsts = [matrix.values @ start for matrix, start in pairs]
        first_sum = packed(firsts, buffer)
        self.firsts = unpacked(first_sum, firsts)
        self.rest_sum = packed(rest, buffer).div_(hook.ranks)
        self.first_work = hook.all_reduce(first_sum)
        self.works = [hook.all_reduce(self.rest_sum)] if rest else []

    def send_second(self) -> None:
        """Orthogonalize the first factors, and send the second ones."""
        self.first_work.wait()
        self.firsts = [_orthogonal(first) for first in self.firsts]
        pairs = zip(self.matrices, self.firsts, strict=True)
        seconds = [matrix.values.T @ first for matrix, first in pairs]
        second_sum = packed(seconds, self.buffer).div_(self.hook.ranks)
        self.seconds = unpacked(second_sum, seconds)
        self.works.append(self.hook.all_reduce(second_sum))

    def complete(self) -> Tensor:
        """Put the products into the bucket, and keep what they lack."""
        for work in self.works:
            work.wait()
        factors = zip(self.matrices, self.starts, self.firsts, self.seconds, strict=True)
        for matrix, start, first, second in factors:
            trusted = first.isfinite().all() & second.isfinite().all()
            product = first @ second.T
            self.hook.keep("factor", matrix.name, torch.where(trusted, second, start))
            self.hook.keep_error(matrix, product, trusted)
            matrix.values.copy_(product)
        for gradient, mean in zip(self.rest, unpacked(self.rest_sum, self.rest), strict=True):
            gradient.copy_(mean)
        return self.buffer


def _orthogonal(factor: Tensor) -> Tensor:
    """Return orthonormal columns that span the same space; more of them if it has too few."""
    orthogonal: Tensor = torch.linalg.qr(factor).Q
    return orthogonal
