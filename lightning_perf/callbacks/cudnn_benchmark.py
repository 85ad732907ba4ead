"""cuDNN's search for the fastest convolution, on only where input shapes repeat."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_perf._batches import batches_unseen, every_batch
from lightning_perf._item import Moment, PerfCallback
from lightning_perf._knobs import KNOBS, knobs

# Rank of the input of each kind of convolution, batch dimension included.
_RANKS: dict[type[nn.Module], int] = {
    nn.Conv1d: 3,
    nn.ConvTranspose1d: 3,
    nn.Conv2d: 4,
    nn.ConvTranspose2d: 4,
    nn.Conv3d: 5,
    nn.ConvTranspose3d: 5,
}
Signature = tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class ShapeCensus:
    """Decides from the shapes of batches whether searching once per shape pays.

    Args:
        batches: Batches to see before deciding. Ten: few enough to lose nothing by waiting, and
            enough that batches whose size varies at random show it.
        few: Most distinct shapes at that time for a yes. Four: training and validation batches,
            each with a shorter last one.
        most: Distinct shapes after which a yes is withdrawn. Each new shape costs a search in every
            layer, which takes as long as many steps; eight is twice what a usual run has.

    Attributes:
        seen: Batches seen.
        shapes: Distinct shapes seen.
        on: The present decision.
    """

    batches: int = 10
    few: int = 4
    most: int = 8
    seen: int = dataclasses.field(default=0, init=False)
    shapes: set[Signature] = dataclasses.field(default_factory=set, init=False)
    on: bool = dataclasses.field(default=False, init=False)

    def add(self, signature: Signature) -> bool:
        """Take in one batch; return whether the decision has just changed."""
        self.seen += 1
        self.shapes.add(signature)
        before = self.on
        if self.seen == self.batches:
            self.on = len(self.shapes) <= self.few
        elif self.on:
            self.on = len(self.shapes) <= self.most
        return self.on != before


class CudnnBenchmark(PerfCallback):
    """Let cuDNN time its convolution algorithms and keep the fastest, where shapes repeat.

    The search runs once per layer and input shape, so it pays where shapes repeat and costs dearly
    where each batch has a new one. It is therefore turned on only after ten batches of at most four
    distinct shapes, and off again, with a note, when new ones keep coming. Only the shapes of
    batches are seen, not those a model makes inside.

    Not for runs that must be reproducible: the fastest algorithm may differ from run to run.

    Args:
        strict: What to do when it cannot help: warn, raise (True) or keep quiet (False).

    Example:
        >>> CudnnBenchmark()
        CudnnBenchmark()

    Source: PyTorch Performance Tuning Guide, "Enable cuDNN auto-tuner".
    """

    guide: ClassVar[str] = "T cuDNN auto-tuner"
    changes: ClassVar[frozenset[str]] = frozenset({"cudnn_benchmark"})
    exact: ClassVar[bool] = False
    moment: ClassVar[Moment] = "before_wrap"  # the layers made in `configure_model` must exist

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return why a search cannot help this run, or ``None``."""
        device = device_kind(trainer)
        if device != "cuda":
            return f"cuDNN works on CUDA devices only; this run is on {device!r}."
        if not torch.backends.cudnn.enabled:
            return "cuDNN is turned off (torch.backends.cudnn.enabled)."
        if torch.backends.cudnn.benchmark:
            return "it is on already (Trainer(benchmark=True) or torch.backends.cudnn.benchmark)."
        if torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic:
            return "deterministic algorithms were asked for, and a search may pick others."
        if not convolution_ranks(module):
            return f"{type(module).__name__} has no convolution layer."
        return batches_unseen(module) if trainer.state.fn == "fit" else None

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str | None]:
        """Watch the batches of the run and turn the search on and off."""
        with cudnn_benchmark(module, say=self.say) as watch, every_batch(trainer, watch):
            yield f"from batch {ShapeCensus.batches} on, if shapes repeat"


@contextmanager
def cudnn_benchmark(
    model: nn.Module, *, say: Callable[[str], None] = lambda message: None
) -> Iterator[Callable[[Any], Any]]:
    """Let cuDNN search, for the length of a block, once the shapes of batches prove to repeat.

    Args:
        model: Any module; the ranks of its convolutions tell which tensors of a batch count.
        say: Is told in one line when the search stays off or goes off again.

    Yields:
        A function to be called with each batch, which looks at it and returns it as it is.

    Example:
        >>> import torch
        >>> from lightning_perf.callbacks.cudnn_benchmark import cudnn_benchmark
        >>> with cudnn_benchmark(torch.nn.Conv2d(3, 8, 3)) as watch:
        ...     for _ in range(10):
        ...         batch = watch(torch.ones(2, 3, 8, 8))
        ...     torch.backends.cudnn.benchmark
        True
    """
    census = ShapeCensus()
    ranks = convolution_ranks(model)

    def watch(batch: Any) -> Any:
        if census.add(signature(batch, ranks)):
            KNOBS["cudnn_benchmark"].write(census.on)
            if not census.on:
                say(
                    f"off again: {len(census.shapes)} distinct input shapes in {census.seen} "
                    "batches, and each new one costs a search. Pad to a few sizes."
                )
        elif census.seen == census.batches and not census.on:
            say(
                f"stays off: {len(census.shapes)} distinct input shapes in the first "
                f"{census.seen} batches. Pad to a few sizes."
            )
        return batch

    with knobs(cudnn_benchmark=False):
        yield watch


def device_kind(trainer: Trainer) -> str:
    """Return the kind of device the run computes on, such as ``"cuda"``."""
    kind: str = trainer.strategy.root_device.type
    return kind


def convolution_ranks(module: nn.Module) -> frozenset[int]:
    """Return the ranks of the inputs that the convolution layers of a model take."""
    return frozenset(
        rank
        for layer in module.modules()
        for kind, rank in _RANKS.items()
        if isinstance(layer, kind)
    )


def signature(batch: Any, ranks: frozenset[int]) -> Signature:
    """Return the shapes in a batch that decide the shapes of convolutions.

    Args:
        batch: Any nested structure of tensors.
        ranks: Ranks that convolutions take. Tensors of these ranks count; where there is none (the
            model makes its images from something else) all of at least two dimensions do.
    """
    shapes = [tuple(tensor.shape) for tensor in _tensors(batch)]
    images = tuple(shape for shape in shapes if len(shape) in ranks)
    return images or tuple(shape for shape in shapes if len(shape) >= 2)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _tensors(getattr(batch, field.name))
