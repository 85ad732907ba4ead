"""Transforms of whole batches, on the device, after the transfer."""

from __future__ import annotations

import pkgutil
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_perf._batches import LOOPS, batches_unseen, every_batch
from lightning_perf._item import PerfCallback
from lightning_perf._preserve_state import preserve_rng


class DeviceTransforms(PerfCallback):
    """Transform each batch on the device, once, in the stages that are asked for.

    Transforms of whole batches on a GPU free the loader's workers from them. What is given takes
    the batch as it comes out of the loader and the transfer hooks, and returns the one to use:
    torchvision's v2 transforms, any module, any function. It runs without gradients, with random
    numbers of its own, which follow from the seed, the rank, the epoch and the batch: a resumed run
    has the same ones, and those of the model are as without it.

    A random transform of torchvision draws once for the whole batch. Do not use it instead of
    transforms of single samples where each sample should be changed in another way.

    Args:
        transform: A callable, or the dotted path of one that is not a class.
        stages: In which loops: ``"train"``, ``"validate"`` (the sanity check too), ``"test"``,
            ``"predict"``. For another transform in another loop, add a second `DeviceTransforms`.
        seed: Where its random numbers begin.
        strict: See `PerfCallback`.

    Raises:
        ValueError: No such transform, no such loop, or a negative seed.
        TypeError: In the run, where the transform returns nothing.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from torchvision.transforms import v2
        >>> from lightning_perf.callbacks import DeviceTransforms
        >>> flip = DeviceTransforms(v2.RandomHorizontalFlip())
        >>> trainer = Trainer(accelerator="cpu", callbacks=[flip])

    Source: ten techniques, 2.2.
    """

    guide: ClassVar[str] = "K 2.2"
    changes: ClassVar[frozenset[str]] = frozenset({"batches"})
    exact: ClassVar[bool] = False

    def __init__(
        self,
        transform: str | Callable[[Any], Any],
        *,
        stages: Sequence[str] = ("train",),
        seed: int = 0,
        strict: bool | None = None,
    ) -> None:
        super().__init__(strict=strict)
        _function_of(transform)
        if isinstance(stages, str) or not stages or not set(stages) <= LOOPS.keys():
            raise ValueError(
                f"DeviceTransforms(stages={stages!r}) was asked for; it is a list of some of "
                f"{', '.join(map(repr, LOOPS))}."
            )
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(
                f"DeviceTransforms(seed={seed!r}) was asked for; it is an integer of at least 0."
            )
        self.transform = transform
        self.stages = tuple(stages)
        self.seed = seed

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason: Lightning never moves a batch of one of the loops."""
        return batches_unseen(module, self._loops_of(trainer))

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Wrap what moves batches, and have the tensors of the transform on the device."""
        loops = self._loops_of(trainer)
        if not loops:
            yield f"for {' and '.join(self.stages)}, not in this run"
            return
        transform = _function_of(self.transform)
        device = trainer.strategy.root_device

        def convert(batch: Any) -> Any:
            stage = trainer.state.stage
            loop = "validate" if trainer.sanity_checking else stage and stage.value
            if loop not in loops:
                return batch
            place = (trainer.global_rank, list(LOOPS).index(loop), *_place(trainer, loop))
            with own_random_numbers((self.seed, *place), device), torch.no_grad():
                changed = transform(batch)
            if changed is None:
                raise TypeError(
                    f"{_name(transform)} was to return the transformed batch and returned None. "
                    "Return it, also where it is changed in place."
                )
            return changed

        with _on(device, transform), every_batch(trainer, convert):
            yield f"{_name(transform)} in {' and '.join(loops)}"

    def _loops_of(self, trainer: Trainer) -> tuple[str, ...]:
        """Return those of its loops that this run has."""
        function = trainer.state.fn
        here = {"train", "validate"} if function == "fit" else {function and function.value}
        return tuple(loop for loop in self.stages if loop in here)


@contextmanager
def own_random_numbers(seed: Sequence[int], device: torch.device) -> Iterator[None]:
    """Let a block draw from the generators of Python, NumPy and torch as if freshly seeded.

    Afterwards they go on as if the block had drawn nothing.

    Args:
        seed: Any numbers of at least 0; other ones give other random numbers.
        device: Where the block draws, besides the host.

    Example:
        >>> with own_random_numbers((0, 1), torch.device("cpu")):
        ...     first = torch.rand(1)
        >>> with own_random_numbers((0, 1), torch.device("cpu")):
        ...     first == torch.rand(1)
        tensor([True])
    """
    short, long = np.random.SeedSequence(tuple(seed)).generate_state(2, np.uint64).tolist()
    number = long >> 1  # torch takes 63 bits
    with preserve_rng():
        random.seed(number)
        np.random.seed(short & 0xFFFFFFFF)
        torch.default_generator.manual_seed(number)
        # Not `torch.manual_seed`: it also seeds devices that are not initialised, later on.
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(number)
        elif device.type == "mps":
            torch.mps.manual_seed(number)
        yield


def _place(trainer: Trainer, loop: str) -> tuple[int, int]:
    """Return epoch and batch. Each evaluation has the same numbers, so their results compare."""
    fit: Any = trainer.fit_loop  # what it counts is typed for its base class only
    if loop == "train":
        return trainer.current_epoch, fit.epoch_loop.batch_progress.current.ready
    if loop == "validate" and trainer.state.fn == "fit":
        return 0, fit.epoch_loop.val_loop.batch_progress.current.ready
    evaluation = getattr(trainer, f"{loop}_loop")
    return 0, evaluation.batch_progress.current.ready


@contextmanager
def _on(device: torch.device, transform: Callable[[Any], Any]) -> Iterator[None]:
    """Have the parameters and buffers of a transform on the device for a block."""
    if not isinstance(transform, nn.Module):
        yield
        return
    tensors = [*transform.parameters(), *transform.buffers()]
    before = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            if tensor.device != data.device:
                data.copy_(tensor.data)
                tensor.data = data


def _function_of(transform: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    asked = f"DeviceTransforms({transform!r}) was asked for"
    found: Any = transform
    if isinstance(transform, str):
        if "." not in transform:
            raise ValueError(
                f"{asked}; a transform is a callable that takes the batch and returns it, or the "
                "dotted path of one, such as 'my_project.data.augment'."
            )
        try:
            found = pkgutil.resolve_name(transform)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{asked}, but there is nothing at that path: {error}.") from error
    if isinstance(found, type) or not callable(found):
        kind = f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__
        raise ValueError(
            f"{asked}, which is {kind}. Give a callable that takes the batch: an object of a class "
            "of transforms; in YAML `class_path` and `init_args` make it."
        )
    function: Callable[[Any], Any] = found
    return function


def _name(transform: Callable[[Any], Any]) -> str:
    return getattr(transform, "__name__", type(transform).__name__)
