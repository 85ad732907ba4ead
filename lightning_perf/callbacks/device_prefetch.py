"""The next batches, fetched and copied to the device while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_perf import _compat
from lightning_perf._attributes import instance_attribute
from lightning_perf._batches import map_tensors
from lightning_perf._item import PerfCallback
from lightning_perf.callbacks._ahead_loader import AheadLoader, Prepare
from lightning_perf.data.buffer_pool import BufferPool, Lease

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


class DevicePrefetch(PerfCallback):
    """Fetch the next batches while a step runs, and copy them to a CUDA device meanwhile.

    A thread takes them from the loaders; on CUDA it copies them on a stream of its own, through
    pinned memory that is used again. Order and content are those of a plain run, errors come at the
    step of their batch, and a checkpoint holds the place of the last batch that a step was given.

    Do not use it with a loader that hands out the same memory again and again: the next batch would
    overwrite the present one.

    Args:
        depth: Batches to have ready at most; each takes the memory of a batch, on CUDA on the
            device.
        strict: See `PerfCallback`.

    Raises:
        ValueError: ``depth`` is no number of at least 1.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.callbacks import DevicePrefetch
        >>> trainer = Trainer(accelerator="cpu", callbacks=[DevicePrefetch()])

    Source: PyTorch tuning guide, "Enable asynchronous data loading and augmentation".
    """

    guide: ClassVar[str] = "T enable asynchronous data loading; K 5.2"
    changes: ClassVar[frozenset[str]] = frozenset({"batches"})
    exact: ClassVar[bool] = True

    def __init__(self, depth: int = 1, *, strict: bool | None = None) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(
                f"DevicePrefetch(depth={depth!r}) was asked for; it is a number of at least 1. To "
                "prefetch nothing, leave the item out."
            )
        super().__init__(strict=strict)
        self.depth = depth

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Put loaders that fetch in advance into the loops, and end their threads."""
        prepare, where = self._prepare(trainer, module)
        loaders: WeakSet[AheadLoader] = WeakSet()
        told: set[str] = set()

        def tell(reason: str) -> None:
            if reason not in told:
                told.add(reason)
                self.has_no_effect(reason)

        def ahead(combined: CombinedLoader, mode: str) -> CombinedLoader:
            if type(combined) is not CombinedLoader:
                tell(f"{type(combined).__name__} is a combined loader of its own kind.")
                return combined
            loader = AheadLoader(
                combined.iterables,
                mode,
                self.depth,
                device=trainer.strategy.root_device,
                prepare=prepare,
                tell=tell,
            )
            loaders.add(loader)
            return loader

        with ExitStack() as stack:
            stack.callback(_close, loaders)
            for source, mode in _compat.loader_sources(trainer):
                make = _Made(source.dataloader, mode, ahead)
                stack.enter_context(instance_attribute(source, "dataloader", make))
            batches = "1 batch" if self.depth == 1 else f"{self.depth} batches"
            yield f"{batches} ahead, {where}"

    def _prepare(self, trainer: Trainer, module: LightningModule) -> tuple[Prepare | None, str]:
        """Return what the thread does to a batch, and what is said of it."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            return None, "fetched by a thread"
        owners: list[tuple[Any, type]] = [(module, LightningModule)]
        datamodule = trainer.datamodule  # type: ignore[attr-defined]  # public, but not declared
        if datamodule is not None:
            owners.append((datamodule, LightningDataModule))
        for owner, base in owners:
            for hook in _HOOKS:
                if is_overridden(hook, owner, parent=base):
                    name = f"{type(owner).__name__}.{hook}"
                    return None, f"fetched by a thread; {name} expects them on the host"
        return copying(device, BufferPool()), "copied on a stream of their own"


def copying(device: torch.device, pool: BufferPool) -> Prepare:
    """Return what copies a batch to a CUDA device beside what runs there.

    Args:
        device: The device.
        pool: Where pinned memory comes from, for tensors that are not in such memory already.

    Returns:
        A function that takes the batch and starts the copy. It returns a function that gives the
        copied batch, for the stream that is then the current one.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here

    def start(batch: Any) -> Callable[[], Any]:
        leases: list[Lease] = []

        def pinned(tensor: Tensor) -> Tensor:
            if not _stageable(tensor):
                return tensor
            lease = pool.lease(tuple(tensor.shape), tensor.dtype, pinned=True)
            leases.append(lease)
            return lease.tensor.copy_(tensor)

        with torch.cuda.stream(stream):
            copied = move_data_to_device(map_tensors(batch, pinned), device)
            done = stream.record_event()
        for lease in leases:
            lease.release(after=done)

        def give() -> Any:
            current = torch.cuda.current_stream(device)
            current.wait_event(done)

            def used(tensor: Tensor) -> Tensor:
                if tensor.device.type == "cuda":
                    # Its memory belongs to the other stream: it must not be reused there before
                    # this one is done with it.
                    tensor.record_stream(current)
                return tensor

            return map_tensors(copied, used)

        return give

    return start


def _stageable(tensor: Tensor) -> bool:
    """Return whether a copy in a buffer is the same tensor: no strides, no type of its own."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_pinned()
    )


class _Made:
    """Gives the loaders of a loop as one that fetches in advance."""

    def __init__(
        self,
        make: Callable[[], Any],
        mode: str,
        ahead: Callable[[CombinedLoader, str], CombinedLoader],
    ) -> None:
        self._make = make
        self._mode = mode
        self._ahead = ahead

    def __call__(self) -> Any:
        loaders = self._make()
        if isinstance(loaders, CombinedLoader):
            return self._ahead(loaders, _compat.mode_of(loaders))
        return self._ahead(CombinedLoader(loaders, self._mode), self._mode)  # type: ignore[arg-type]  # a literal


def _close(loaders: WeakSet[AheadLoader]) -> None:
    for loader in loaders:
        loader.close()
