"""A loader that goes on with the next batch after a checkpoint in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler

from lightning_perf.data._epoch_samplers import InOrder, ShuffledByEpoch

T = TypeVar("T", covariant=True)

_NAMES_OF_ORDERS = ("seed", "shuffle", "num_replicas", "batch_size", "max_tokens", "drop_last")


class ResumableLoader(DataLoader[T]):
    """A `DataLoader` whose place in the epoch is in the checkpoint, so each item comes once.

    Lightning saves and restores the state of loaders that have one. What counts are the batches
    that were handed out, not those that workers have prepared in advance. The order of an epoch
    must follow from its number, to be had again: with ``shuffle=True`` it comes from a seed and the
    epoch; batch samplers of this package, `DistributedSampler`, and whatever else has
    ``set_epoch`` and ``epoch`` are such, too.

    In your own loop, call `set_epoch` before each epoch and save `state_dict` with the model.

    Do not use it for an `IterableDataset`: its order is its own, and torchdata's
    `StatefulDataLoader` can ask it for its state.

    Args:
        dataset: A dataset with a length.
        batch_size: As in `DataLoader`.
        shuffle: Another order in each epoch.
        sampler: As in `DataLoader`, with ``set_epoch`` and ``epoch``.
        batch_sampler: In the same way.
        seed: Together with the epoch what the order of ``shuffle`` comes from.
        options: All others of `DataLoader`.

    Raises:
        ValueError: An iterable dataset, or an order that does not follow from the epoch.
        RuntimeError: At the first batch after a checkpoint of the middle of an epoch, when the
            order is another now: another number of ranks, seed, batch size or length.

    Example:
        >>> loader = ResumableLoader(range(6), batch_size=2)
        >>> first = next(iter(loader))
        >>> state = loader.state_dict()
        >>> resumed = ResumableLoader(range(6), batch_size=2)
        >>> resumed.load_state_dict(state)
        >>> [batch.tolist() for batch in resumed]
        [[2, 3], [4, 5]]

    Source: tuning guide, "load balance"; ten techniques, 4.2.
    """

    guide: ClassVar[str] = "T load balance; K 4.2"
    """Section of the tuning guides."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                f"{type(dataset).__name__} is an IterableDataset: ResumableLoader cannot tell it "
                "where to go on. Use torchdata's StatefulDataLoader, which can ask it."
            )
        if batch_sampler is None and (sampler is None or type(sampler) is SequentialSampler):
            sampler = ShuffledByEpoch(dataset, seed) if shuffle else InOrder(dataset)
            shuffle = None
        super().__init__(dataset, batch_size, shuffle, sampler, batch_sampler, **options)
        self.seed = seed
        self._order = _order_of(self)
        if batch_sampler is not None and hasattr(batch_sampler, "set_epoch"):
            # Lightning tells the epoch to this one, and switches off its shuffling in overfitting;
            # otherwise it is an order of the dataset that nobody uses. `DataLoader` lets nobody set
            # it later, and no other way to give both.
            vars(self)["sampler"] = batch_sampler
        self._loaded: tuple[int, int] | None = None
        self._other_order = ""
        self._position = (self._order.epoch, 0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives; Lightning does it itself.

        Args:
            epoch: Its number, from 0.
        """
        self._order.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, how many of its batches were handed out, and what its order is."""
        epoch, given = self._loaded or self._position
        return {"epoch": epoch, "given": given, "order": self._describe()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where the state was taken.

        Should Lightning then ask for another epoch, because the checkpoint is of an epoch's end, it
        begins at its beginning.

        Args:
            state: From `state_dict`.
        """
        epoch, given, saved, mine = state["epoch"], state["given"], state["order"], self._describe()
        self._other_order = ", ".join(
            f"{name} {saved.get(name)} (now {mine.get(name)})"
            for name in {**saved, **mine}
            if saved.get(name) != mine.get(name)
        )
        if given >= len(self) and not self._other_order:
            epoch, given = epoch + 1, 0
        self._order.set_epoch(epoch)
        self._loaded = (epoch, given)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch names its private iterator
        return _Handed(self)

    @property
    def _index_sampler(self) -> Any:
        """What PyTorch takes the batches of indices from, once in each iteration."""
        return _From(self, super()._index_sampler)

    def _describe(self) -> dict[str, Any]:
        """Return all that the order depends on, but for the epoch."""
        described = {
            name: value
            for part in (self.batch_sampler, self._order)
            for name in _NAMES_OF_ORDERS
            if isinstance(value := getattr(part, name, None), bool | int | float)
        }
        in_a_group = dist.is_available() and dist.is_initialized()
        return {
            "sampler": type(self._order).__name__,
            "items": len(self.dataset),  # type: ignore[arg-type]  # no iterable dataset is here
            "batches": len(self),
            "ranks": dist.get_world_size() if in_a_group else 1,
            **described,
        }


class _From:
    """The batches of indices of an epoch, from the one on that is next."""

    def __init__(self, loader: ResumableLoader[Any], batches: Any) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        loaded = self._loader._loaded
        return islice(iter(self._batches), loaded[1] if loaded else 0, None)

    def __len__(self) -> int:
        return len(self._batches)


class _Handed(Iterator[T]):
    """An iteration that counts what it hands out."""

    def __init__(self, loader: ResumableLoader[T]) -> None:
        self._loader = loader
        self._begun = False
        self._begin()

    def _begin(self) -> None:
        loader = self._loader
        self._epoch = loader._order.epoch
        self._given = loader._loaded[1] if loader._loaded else 0
        self._batches = DataLoader.__iter__(loader)

    def __next__(self) -> T:
        loader = self._loader
        if not self._begun:
            self._begun = True
            self._first(loader)
        batch: T = next(self._batches)
        self._given += 1
        loader._position = (self._epoch, self._given)
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def _first(self, loader: ResumableLoader[T]) -> None:
        """Make sure that this is the epoch that is wanted now.

        Lightning says which it is only after this iteration was made, and its workers have begun.
        """
        wanted = loader._order.epoch
        if wanted == self._epoch and self._given and loader._other_order:
            raise RuntimeError(
                "The checkpoint was saved in the middle of an epoch, in another order than that "
                f"of this run: {loader._other_order}. Which items are left cannot be told. Resume "
                "with the same settings and number of ranks, or from a checkpoint of the end of an "
                "epoch."
            )
        loader._loaded, loader._other_order = None, ""
        if wanted != self._epoch:
            self._begin()


def _order_of(loader: DataLoader[Any]) -> Any:
    """Return what decides the order of a loader and can be told the epoch.

    Raises:
        ValueError: There is nothing of that kind.
    """
    # Not at the top: it imports Lightning, which loader workers should be spared.
    from lightning_perf import _compat

    batches = _compat.without_index_wrapper(loader.batch_sampler)
    for part in (batches, getattr(batches, "sampler", None), loader.sampler):
        if callable(getattr(part, "set_epoch", None)) and hasattr(part, "epoch"):
            return part
    kind = type(loader.sampler if type(batches).__name__ == "BatchSampler" else batches).__name__
    raise ValueError(
        f"The order of {kind} cannot be had again after a checkpoint: it has no `set_epoch` and no "
        "`epoch`. Use shuffle=True, a batch sampler of lightning_perf.data, or a sampler whose "
        "order follows from the epoch."
    )
