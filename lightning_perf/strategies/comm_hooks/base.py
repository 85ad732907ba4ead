"""What all communication hooks share: a plain start, counting, state by parameter name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    # `torch.distributed` exports it only where it is built.
    from torch._C._distributed_c10d import GradBucket

Complete = Callable[[], Tensor]
"""Waits for what travels, and returns the bucket's buffer with the mean in it."""

_WIDER = (torch.float32, torch.float64)
"""What is worth compressing: half precision and integers are not, complex numbers have no order."""


@dataclass
class Traffic:
    """What was handed to collectives so far, on this rank.

    A ring of n ranks sends up to ``2 (n - 1) / n`` times the bytes of an all-reduce, and receives
    as many; with two ranks it sends just these bytes.
    """

    steps: int = 0
    """Backward passes whose gradients were averaged over the ranks."""
    collectives: int = 0
    bytes: int = 0

    def add(self, *tensors: Tensor) -> None:
        """Count one collective for each tensor."""
        self.collectives += len(tensors)
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class CommHook(ABC):
    """Averages the gradients of `DistributedDataParallel` in a way of its own, on any backend.

    Buckets of float32 and float64 are compressed, all others averaged as they are.

    The thread that runs the hook does everything: it issues each collective in the order of the
    buckets, which is the same on all ranks, and with the last bucket it completes them all. Issued
    from callbacks, as PyTorch's PowerSGD does, the order depends on the speed of threads, and ranks
    with different orders wait for each other for ever.

    Args:
        start_iter: Number of backward passes whose gradients are averaged plainly before.
    """

    name: ClassVar[str]

    def __init__(self, *, start_iter: int = 0) -> None:
        if start_iter < 0:
            raise ValueError(f"start_iter={start_iter} was asked for; it is 0 or more.")
        self.start_iter = start_iter
        self.iteration = 0
        self.traffic = Traffic()
        self._open: list[tuple[Future[Tensor], Complete]] = []

    def register(self, ddp: DistributedDataParallel) -> None:
        """Make ``ddp`` average its gradients with this hook; once for each DDP object.

        Args:
            ddp: A wrapped model that has not run a backward pass yet.
        """
        self._group = ddp.process_group
        self.ranks = dist.get_world_size(self._group)
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        # Not the method itself: DDP compares the annotations, which are strings here.
        ddp.register_comm_hook(None, lambda state, bucket: self.average(bucket))

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        """Start to average the gradients of one bucket; DDP calls it in the backward pass."""
        buffer = bucket.buffer()
        compress = self.iteration >= self.start_iter and buffer.dtype in _WIDER
        complete = self.compressed(bucket) if compress else self.plain(bucket)
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._open.append((future, complete))
        if bucket.is_last():
            self._complete()
        return future

    def _complete(self) -> None:
        buckets, self._open = self._open, []
        self.flush()
        for future, complete in buckets:
            future.set_result(complete())
        self.iteration += 1
        self.traffic.steps += 1

    @abstractmethod
    def compressed(self, bucket: GradBucket) -> Complete:
        """Start to average one bucket; return what completes it, once all buckets are started."""

    def plain(self, bucket: GradBucket) -> Complete:
        """Start to average one bucket as it is, as DDP does without a hook."""
        buffer = bucket.buffer().div_(self.ranks)
        work = self.all_reduce(buffer)

        def complete() -> Tensor:
            work.wait()
            return buffer

        return complete

    def flush(self) -> None:  # noqa: B027  # not every hook has something left
        """Start what is left of a backward pass, all of whose buckets were seen."""

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Sum a tensor over the ranks, in place, counted."""
        self.traffic.add(tensor)
        return dist.all_reduce(tensor, group=self._group, async_op=True)

    def all_gather(self, tensor: Tensor) -> tuple[list[Tensor], dist.Work]:
        """Gather a tensor of each rank, counted; return where they arrive."""
        self.traffic.add(tensor)
        everyones = [torch.empty_like(tensor) for _ in range(self.ranks)]
        return everyones, dist.all_gather(everyones, tensor, group=self._group, async_op=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must keep to go on as if it had not stopped."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of the same rank."""
        self.iteration = state["iteration"]

    def settings(self) -> dict[str, Any]:
        """Return what must be equal where a state is loaded."""
        return {"name": self.name}


class ErrorFeedback(CommHook):
    """A hook that keeps what compression lost and adds it to the next gradient.

    Only matrices are compressed: parameters of two and more dimensions, whose rows are those of the
    dimension outermost in memory. Others are few numbers, and averaged as they are. What was lost
    is kept by the parameter's name, since DDP rearranges its buckets after the first backward pass.
    """

    def __init__(self, *, start_iter: int = 1000) -> None:
        super().__init__(start_iter=start_iter)
        self._kept: dict[str, dict[str, Tensor]] = {}

    def register(self, ddp: DistributedDataParallel) -> None:
        """See `CommHook.register`."""
        super().register(ddp)
        self._dense = {name for parameter, name in self._names.items() if _is_dense(parameter)}

    def compressed(self, bucket: GradBucket) -> Complete:
        """Start to average one bucket; what is no matrix, or would not shrink, as it is."""
        parameters = bucket.parameters()
        if any(parameter.is_complex() for parameter in parameters):
            # They are in the buffer as real numbers, and `gradients` gives half of those.
            return self.plain(bucket)
        matrices: list[Matrix] = []
        rest: list[Tensor] = []
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            name = self._names[parameter]
            if name in self._dense:
                # The bucket says that they are contiguous; DDP keeps the parameter's strides.
                gradient = gradient.as_strided(parameter.shape, parameter.stride())
            if gradient.dim() >= 2 and self.shrinks(*_rows_and_columns(gradient)):
                matrices.append(Matrix(name, gradient, self.kept("error", name, gradient)))
            else:
                rest.append(gradient)
        if not matrices:
            return self.plain(bucket)
        return self.start(bucket.buffer(), matrices, rest)

    @abstractmethod
    def shrinks(self, rows: int, columns: int) -> bool:
        """Return whether a matrix is worth compressing."""

    @abstractmethod
    def start(self, buffer: Tensor, matrices: list[Matrix], rest: list[Tensor]) -> Complete:
        """Start to average matrices and the rest, all of which lie in the buffer."""

    def kept(self, kind: str, name: str, like: Tensor) -> Tensor | None:
        """Return what was kept of a parameter, on the device and with the strides of ``like``."""
        tensors = self._kept.setdefault(kind, {})
        tensor = tensors.get(name)
        if tensor is not None and (tensor.device, tensor.stride()) != (like.device, like.stride()):
            tensor = tensors[name] = torch.empty_like(like).copy_(tensor)
        return tensor

    def keep(self, kind: str, name: str, tensor: Tensor) -> None:
        """Keep a tensor of a parameter until the next backward pass."""
        self._kept.setdefault(kind, {})[name] = tensor

    def keep_error(self, matrix: Matrix, sent: Tensor, trusted: Tensor) -> None:
        """Keep what of a matrix was not sent, or what was kept before, where it is not trusted.

        After an overflow, which a gradient scaler skips, the error would be infinite for ever.
        """
        if matrix.error is None:
            matrix.error = torch.zeros_like(matrix.gradient)
        error, values = as_matrix(matrix.error), matrix.values
        if not values.is_cpu:  # there a look at `trusted` would wait for the device
            torch.where(trusted, values - sent, error, out=error)
        elif trusted:
            torch.sub(values, sent, out=error)
        self.keep("error", matrix.name, matrix.error)

    def rescale(self, factor: float) -> None:
        """Multiply the errors, where a gradient scaler changed its factor.

        Factors of matrices serve as directions only.
        """
        for error in self._kept.get("error", {}).values():
            error *= factor

    def state_dict(self) -> dict[str, Any]:
        """Return the number of passes and what this rank keeps, on the CPU."""
        kept = {
            kind: {name: _copied(tensor) for name, tensor in tensors.items()}
            for kind, tensors in self._kept.items()
        }
        return {**super().state_dict(), "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of the same rank."""
        super().load_state_dict(state)
        self._kept = {kind: dict(tensors) for kind, tensors in state["kept"].items()}


class Matrix:
    """A gradient as a matrix, a view of the bucket that holds it, with the error added.

    Args:
        name: Name of the parameter.
        gradient: With the strides that it has in memory.
        error: What compression lost of the gradient before; added in place.
    """

    def __init__(self, name: str, gradient: Tensor, error: Tensor | None) -> None:
        self.name, self.gradient, self.error = name, gradient, error
        if error is not None:
            gradient += error
        self.values = as_matrix(gradient)


def as_matrix(gradient: Tensor) -> Tensor:
    """Return a dense tensor as a matrix, a view of its memory."""
    rows, columns = _rows_and_columns(gradient)
    return gradient.as_strided((rows, columns), (columns, 1))


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU; what is kept is changed in place."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def packed(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Return all numbers of the tensors in one vector, with the type of ``like``."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def unpacked(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return views of a vector with the shapes of the tensors it was packed from."""
    parts = vector.split_with_sizes([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _rows_and_columns(gradient: Tensor) -> tuple[int, int]:
    rows = gradient.shape[max(range(gradient.dim()), key=gradient.stride)]
    return rows, gradient.numel() // max(rows, 1)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the strides leave no gap, as in NCHW and NHWC."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
