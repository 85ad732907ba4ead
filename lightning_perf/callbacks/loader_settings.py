"""One set of settings for all loaders, with as many workers as the steps need."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_perf._hardware import Hardware, detect
from lightning_perf._item import PerfCallback
from lightning_perf.callbacks._loader_workers import (
    ServedLoader,
    Settings,
    has_its_own_order,
    makes_torchs_iterators,
)
from lightning_perf.callbacks._loaders import every_loader
from lightning_perf.callbacks._worker_search import Search
from lightning_perf.callbacks.threads import sharing_ranks


class LoaderSettings(PerfCallback):
    """Give all loaders of a run, for training and evaluation, one consistent set of settings.

    Whoever made them. They are changed in place, so class, dataset, sampler, batch sampler,
    collate function, generator and all else stay. What `DataLoader` refuses without workers is left
    out without workers.

    ``"auto"`` measures how long steps wait for data. If that is more than a twentieth, workers are
    added, in the middle of the epoch, and stay if steps became shorter. No batch is lost, and the
    order stays. A dataset that is iterable keeps its number of workers, which decides what data
    come.

    Do not use ``"auto"`` where reading an item draws random numbers and a run must be repeated
    exactly: it is the number of workers that decides which ones. Give a number.

    Args:
        num_workers: ``"auto"``, a number, or ``None`` for that of each loader.
        pin_memory: Put batches into page-locked memory; ``None``, here and below, for what each
            loader has. Left out where no device copies from it.
        persistent_workers: Keep workers from epoch to epoch. Those of training then stay while
            others evaluate, with their memory.
        prefetch_factor: Batches that each worker prepares ahead.
        multiprocessing_context: How workers are started: ``"fork"``, ``"spawn"`` ...
        strict: See `PerfCallback`.

    Raises:
        ValueError: No such value, or nothing is asked for.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.callbacks import LoaderSettings
        >>> trainer = Trainer(accelerator="cpu", callbacks=[LoaderSettings()])

    Source: PyTorch tuning guide, "Enable asynchronous data loading and augmentation".
    """

    guide: ClassVar[str] = "T enable asynchronous data loading; K 2.1; L 2"
    changes: ClassVar[frozenset[str]] = frozenset({"batches"})
    exact: ClassVar[bool] = True

    def __init__(
        self,
        num_workers: int | str | None = "auto",
        *,
        pin_memory: bool | None = None,
        persistent_workers: bool | None = None,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        strict: bool | None = None,
    ) -> None:
        super().__init__(strict=strict)
        _require_valid(num_workers, prefetch_factor, multiprocessing_context)
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.prefetch_factor = prefetch_factor
        self.multiprocessing_context = multiprocessing_context
        if all(value is None for value in self._asked().values()):
            raise ValueError(
                "LoaderSettings(num_workers=None) was asked for, and nothing else: there is "
                "nothing to set. Give a setting, or 'auto'."
            )

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason: all that is asked for is pinned memory that no device copies from."""
        others = {name for name, value in self._asked().items() if value is not None}
        if others == {"pin_memory"} and self.pin_memory and not torch.accelerator.is_available():
            return "no device here copies from pinned memory."
        return None

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Set them on each loader before its workers start, and put them back."""
        most = most_workers(detect(), sharing_ranks())
        # Weak: with `reload_dataloaders_every_n_epochs` there are new ones all the time.
        served: WeakKeyDictionary[DataLoader[Any], bool] = WeakKeyDictionary()

        def serve(loader: DataLoader[Any]) -> None:
            if loader not in served:  # one may serve two loops
                served[loader] = True
                vars(loader)["_lightning_perf_served"] = _served(
                    loader, most, say=self.say, **self._asked()
                )

        try:
            with every_loader(trainer, serve):
                yield self._text(most)
        finally:
            for loader in list(served):
                vars(loader).pop("_lightning_perf_served").close()

    def _asked(self) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "persistent_workers": self.persistent_workers,
            "prefetch_factor": self.prefetch_factor,
            "multiprocessing_context": self.multiprocessing_context,
        }

    def _text(self, most: int) -> str:
        parts = [
            f"{name}={value}"
            for name, value in self._asked().items()
            if value is not None and name != "num_workers"
        ]
        if self.pin_memory and not torch.accelerator.is_available():
            parts[0] = "pin_memory left out, as no device copies from it"
        if self.num_workers == "auto":
            parts.insert(0, f"up to {most} workers, if steps wait for data")
        elif self.num_workers is not None:
            parts.insert(0, f"num_workers={self.num_workers}")
            if not self.num_workers:
                parts = [part for part in parts if part.startswith(("num_workers", "pin_memory"))]
        return ", ".join(parts)


@contextmanager
def loader_settings(
    loader: DataLoader[Any],
    num_workers: int | str | None = "auto",
    *,
    say: Callable[[str], None] = print,
    **settings: Any,
) -> Iterator[None]:
    """Set the settings of one loader, in place, for a block.

    Args:
        loader: Any `DataLoader`.
        num_workers: As for `LoaderSettings`.
        say: Takes a line for the user.
        settings: The others of `LoaderSettings`.

    Raises:
        ValueError: No such value.

    Example:
        >>> loader = DataLoader(range(4), num_workers=2, prefetch_factor=4)
        >>> with loader_settings(loader, 0):
        ...     loader.num_workers, loader.prefetch_factor
        (0, None)
        >>> loader.num_workers, loader.prefetch_factor
        (2, 4)
    """
    _require_valid(
        num_workers, settings.get("prefetch_factor"), settings.get("multiprocessing_context")
    )
    most = most_workers(detect(), sharing_ranks())
    served = _served(loader, most, num_workers=num_workers, say=say, **settings)
    try:
        yield
    finally:
        served.close()


def most_workers(hardware: Hardware, ranks: int) -> int:
    """Return how many workers each rank may have: its share of the CPUs that it may use.

    Args:
        hardware: The machine as this process sees it.
        ranks: Ranks that share the CPUs of this one, itself included.
    """
    cpus = hardware.logical_cpus
    if hardware.quota is not None:
        cpus = min(cpus, int(hardware.quota))
    return max(1, cpus // ranks)


def _served(
    loader: DataLoader[Any],
    most: int,
    *,
    say: Callable[[str], None],
    num_workers: int | str | None,
    multiprocessing_context: str | None = None,
    **settings: Any,
) -> ServedLoader:
    own = Settings.of(loader)
    changes = {name: value for name, value in settings.items() if value is not None}
    if multiprocessing_context is not None:
        context = multiprocessing.get_context(multiprocessing_context)
        changes["multiprocessing_context"] = context
    if changes.get("pin_memory") and not torch.accelerator.is_available():
        changes.pop("pin_memory")  # PyTorch would warn at each iteration
    search = None
    if num_workers is not None and has_its_own_order(loader):
        if num_workers not in ("auto", loader.num_workers):
            say(
                f"{type(loader.dataset).__name__} keeps {loader.num_workers} workers: of an "
                "iterable dataset they decide which data come."
            )
    elif num_workers == "auto":
        if makes_torchs_iterators(loader):
            search = Search(loader.num_workers, most)
        else:
            say(
                f"{type(loader).__name__} keeps {loader.num_workers} workers: its iterations are "
                "not PyTorch's, so nothing can be measured or changed within them. Give a number."
            )
    elif num_workers is not None:
        changes["num_workers"] = num_workers
    return ServedLoader(loader, replace(own, **changes), search, say)


def _require_valid(num_workers: object, prefetch_factor: object, context: object) -> None:
    if num_workers not in (None, "auto") and not _is_number(num_workers, 0):
        raise ValueError(
            f"num_workers={num_workers!r} was asked for; it is 'auto', a number of at least 0, or "
            "None."
        )
    if prefetch_factor is not None and not _is_number(prefetch_factor, 1):
        raise ValueError(
            f"prefetch_factor={prefetch_factor!r} was asked for; it is a number of at least 1."
        )
    known = multiprocessing.get_all_start_methods()
    if context is not None and context not in known:
        raise ValueError(
            f"multiprocessing_context={context!r} was asked for; here it is one of "
            f"{', '.join(map(repr, known))}."
        )


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
