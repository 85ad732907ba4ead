"""Shapes of batches that compiled code should not be made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_perf._batches import every_batch
from lightning_perf.callbacks._compile_report import stage_of
from lightning_perf.callbacks._loaders import every_loader, short_last_batch

# As many as Dynamo compiles of one function: full and short batches of training and validation
# fit, and so do a few padded lengths.
FEW_SHAPES = 8


def when_shapes_are_many(act: Callable[[], None]) -> Callable[[Any], Any]:
    """Return what looks at each batch and calls ``act`` once there were more than a few shapes."""
    shapes: set[tuple[torch.Size, ...]] = set()

    def look(batch: Any) -> Any:
        if len(shapes) <= FEW_SHAPES:
            shapes.add(tuple(tensor.shape for tensor in _tensors(batch)))
            if len(shapes) > FEW_SHAPES:
                act()
        return batch

    return look


@contextmanager
def short_batches_uncompiled(
    trainer: Trainer, say: Callable[[str, int, int], None]
) -> Iterator[None]:
    """Run the last batch of a loader without compiling for it where it is shorter than the others.

    Dynamo would compile code for any size, and from then on use it for all batches, since it fits
    them too. It is slower: for one, TorchInductor then leaves the layout of convolutions alone.

    Args:
        trainer: The trainer of the run.
        say: Told of each such loader: stage, samples in the last batch, samples in the others.
    """
    # Per stage, since a validation may have full batches of the size of a short training batch.
    short: dict[str, dict[int, int]] = {"train": {}, "evaluation": {}}
    stance = ExitStack()

    def stage() -> dict[int, int]:
        return short["train" if trainer.training else "evaluation"]

    def look(loader: DataLoader[Any]) -> None:
        samples = short_last_batch(loader)
        if samples and len(loader) > 1:
            # `short_last_batch` finds samples for a BatchSampler only, and that has a size.
            full = loader.batch_sampler.batch_size  # type: ignore[union-attr]  # see above
            stage()[full] = samples
            say(stage_of(trainer), samples, full)

    def choose(batch: Any) -> Any:
        stance.close()
        if (sizes := stage()) and _is_short(batch, sizes):
            stance.enter_context(torch.compiler.set_stance("eager_on_recompile"))
        return batch

    with stance, every_loader(trainer, look), every_batch(trainer, choose):
        yield


def _is_short(batch: Any, sizes: dict[int, int]) -> bool:
    """Say whether a batch has as many samples as the last batch of a loader.

    Args:
        batch: Any nested structure.
        sizes: Samples of full batches and of the last one.
    """
    found = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    return any(
        samples in found and full not in found and samples not in sizes
        for full, samples in sizes.items()
    )


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
