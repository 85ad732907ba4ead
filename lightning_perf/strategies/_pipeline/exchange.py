"""What the processes of a pipeline tell each other apart from activations and gradients."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_perf._batches import map_tensors

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What went wrong in one process, as the others hear of it."""

    stage: int
    error: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return how this process tells of an error."""
        return cls(dist.get_rank(), f"{type(error).__name__}: {error}")

    def exception(self) -> RuntimeError:
        """Return what is raised in the other processes."""
        return RuntimeError(
            f"Stage {self.stage} of the pipeline failed with {self.error} Rank {self.stage} shows "
            "where."
        )


@dataclass(frozen=True)
class Like:
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """Return what this tensor looks like."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def zeros(self, device: torch.device | str) -> Tensor:
        """Return such a tensor."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def on_wire(self) -> Like:
        """Return how it is sent between stages: torch wants a gradient for each tensor."""
        return self if self.dtype.is_floating_point else Like(self.shape, torch.double)

    def off_wire(self, wire: Tensor) -> Tensor:
        """Return what was sent."""
        if not self.dtype.is_floating_point:
            return wire.detach().to(self.dtype)
        # A copy, as layers may change their input in place, which no leaf allows.
        return wire.clone() if wire.requires_grad else wire


def share(value: T | None, source: int) -> T:
    """Return in all processes what one of them has."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, source)
    shared: T = box[0]
    return shared


def gather(value: Any) -> list[Any]:
    """Return in all processes what each of them has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def done_by(stage: int, function: Callable[[], T]) -> T:
    """Return in all processes what a function returns in one of them.

    Raises:
        Exception: It raised; in that process its own error, in the others a `RuntimeError`.
    """
    result: T | Failure | None = None
    own: Exception | None = None
    if dist.get_rank() == stage:
        try:
            result = function()
        except Exception as error:
            own, result = error, Failure.of(error)
    told: Any = share(result, stage)
    if own is not None:
        raise own
    if isinstance(told, Failure):
        raise told.exception()
    done: T = told
    return done


def broadcast(tensor: Tensor, source: int) -> None:
    """Overwrite a tensor, of any layout and dtype, with that of another process."""
    flat = tensor.detach().contiguous()
    dist.broadcast(_bytes(flat), source)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)


def to_rank_zero(value: T, source: int, device: torch.device) -> T | None:
    """Return in rank 0 what another process has, any nested structure, its tensors on the CPU.

    Tensor by tensor: of all that is sent, only one lies on the device.

    Args:
        value: What this process has; that of the source is sent.
        source: Another rank than 0.
        device: Where the backend of the process group needs tensors.
    """
    rank = dist.get_rank()
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor.detach())
        # Its shape, dtype and strides, without the memory.
        return torch.empty_like(tensor, device="meta")

    skeleton = share(map_tensors(value, collect) if rank == source else None, source)
    if rank == source:
        for tensor in tensors:
            dist.send(_bytes(tensor.to(device).contiguous()), 0)
    if rank != 0:
        return None

    def receive(tensor: Tensor) -> Tensor:
        received = Like.of(tensor).zeros(device)
        dist.recv(_bytes(received), source)
        return torch.empty_like(tensor, device="cpu").copy_(received)

    filled: T = map_tensors(skeleton, receive)
    return filled


def likes(value: Any) -> tuple[Like, ...]:
    """Return what the tensors of any nested structure look like."""
    found: list[Like] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(Like.of(tensor))
        return tensor

    map_tensors(value, look)
    return tuple(found)


def fingerprint(value: Any) -> int:
    """Return a number that tells batches apart, from shapes and a few elements of each tensor."""
    samples: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        flat = tensor.detach().reshape(-1)
        samples.append(_bytes(flat[:: max(1, flat.numel() // 16)].contiguous()))
        return tensor

    map_tensors(value, look)
    content = torch.cat(samples).cpu().numpy().tobytes() if samples else b""
    return zlib.crc32(repr(likes(value)).encode() + content)


@contextmanager
def random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Draw torch's random numbers from this seed in a block, and leave the usual ones untouched."""
    devices = [] if device.type == "cpu" else [device.index or 0]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.get_device_module(device).manual_seed(seed)
        yield


def same_random_numbers(device: torch.device) -> None:
    """Give all processes the random numbers of rank 0, so that they draw the same batches."""
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    states = share(
        (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            accelerator and accelerator.get_rng_state(),
        ),
        0,
    )
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if accelerator:
        accelerator.set_rng_state(states[3])


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor: backends do not know all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)
