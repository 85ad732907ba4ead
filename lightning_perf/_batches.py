"""Seeing, and changing, every batch of every loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_perf._attributes import instance_attribute

LOOPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
"""The loops, by the names of Lightning's stages, and the step of each."""


@contextmanager
def every_batch(trainer: Trainer, convert: Callable[[Any], Any]) -> Iterator[None]:
    """Pass each batch of each loop through ``convert`` once it has reached the device.

    Callbacks have no hook for this. ``strategy.batch_to_device`` is called once for every batch of
    training, validation, testing and prediction, after the user's own transfer hooks.

    Args:
        trainer: The trainer of the run.
        convert: Takes the batch, any nested structure, and returns the one to use.
    """
    transfer = trainer.strategy.batch_to_device

    def batch_to_device(*args: Any, **kwargs: Any) -> Any:
        return convert(transfer(*args, **kwargs))

    with instance_attribute(trainer.strategy, "batch_to_device", batch_to_device):
        yield


def batches_unseen(module: LightningModule, loops: Iterable[str] = ("train",)) -> str | None:
    """Return the reason when `every_batch` never sees the batches of a loop, else ``None``.

    Args:
        module: The LightningModule.
        loops: Names from `LOOPS`.
    """
    for step in (LOOPS[loop] for loop in loops):
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            return (
                f"{type(module).__name__}.{step} takes `dataloader_iter`, so Lightning moves no "
                "batch itself. Take `batch` instead."
            )
    return None


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with ``function`` applied to each tensor in it.

    Follows mappings, lists, tuples, named tuples, dataclasses (frozen ones too), and objects with
    a ``to`` method that hold tensors as attributes. Containers keep their type. Nothing is changed
    in place, because a loader may hand out the same object again; what holds no tensor that
    changed is returned as it is.

    Args:
        batch: Any nested structure; leaves that are not tensors are kept.
        function: Takes a tensor and returns the one to use, the same object where nothing changes.
    """
    return _mapped(batch, function, set())


def _mapped(value: Any, function: Callable[[Tensor], Tensor], entered: set[int]) -> Any:
    # No closure: one that calls itself is a cycle, and keeps what `function` holds for a while.
    if isinstance(value, Tensor):
        return function(value)
    parts = parts_of(value)
    if not parts or id(value) in entered:
        return value
    entered.add(id(value))
    changed = {}
    for key, part in parts.items():
        new = _mapped(part, function, entered)
        if new is not part:
            changed[key] = new
    entered.discard(id(value))
    return _with_parts(value, parts, changed) if changed else value


def parts_of(value: Any) -> dict[Any, Any]:
    """Return what a container holds, by key, index or attribute name; empty for a leaf."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | MutableSequence):
        return dict(enumerate(value))
    if isinstance(value, type | nn.Module):
        return {}
    if is_dataclass(value) or callable(getattr(value, "to", None)):
        return {name: getattr(value, name) for name in _attributes(value) if hasattr(value, name)}
    return {}


def _attributes(value: Any) -> list[str]:
    names = list(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return names


def _with_parts(value: Any, parts: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a shallow copy of a container in which some parts are others."""
    if isinstance(value, tuple):
        items = tuple({**parts, **changed}.values())
        make = getattr(value, "_make", type(value))
        return make(items)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return cast(Any, type(value))({**parts, **changed})
    new = copy.copy(value)
    for key, part in changed.items():
        if isinstance(value, MutableMapping | MutableSequence):
            new[key] = part
        else:
            # A frozen dataclass refuses plain assignment.
            object.__setattr__(new, key, part)
    return new
