"""Convolution weights and image batches in NHWC memory format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_perf._attributes import instance_attribute
from lightning_perf._batches import batches_unseen, every_batch, map_tensors
from lightning_perf._item import Moment, PerfCallback
from lightning_perf.callbacks._regions import inside_compiled

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.ConvTranspose2d)
_VOLUME_CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv3d, nn.ConvTranspose3d)


class ChannelsLast(PerfCallback):
    """Run 2-D convolutions in NHWC (``torch.channels_last``) memory format.

    Before the strategy wraps the model, the 4-D weights of each convolution are laid out NHWC, and
    so is each 4-D tensor of each batch in all loops. Shapes, values, state-dict keys and the
    parameter objects stay the same. After the first batch it names the convolutions whose input
    or output was not NHWC after all. At the end of the run the weights get their format back.

    Do not use it when the model calls ``view`` on activations: a ``view`` that merges channels
    with another dimension raises on NHWC tensors (``reshape`` and ``flatten`` do not).

    Args:
        volumes: Convert 3-D convolutions and 5-D tensors to NDHWC too. This is often slower than
            the standard format: measure it.
        strict: See `PerfCallback`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.callbacks import ChannelsLast
        >>> trainer = Trainer(callbacks=[ChannelsLast()], accelerator="cpu", logger=False)
    """

    guide: ClassVar[str] = "T channels_last, K 3.2"
    changes: ClassVar[frozenset[str]] = frozenset({"model", "batches"})
    exact: ClassVar[bool] = False
    moment: ClassVar[Moment] = "before_wrap"

    def __init__(self, *, volumes: bool = False, strict: bool | None = None) -> None:
        super().__init__(strict=strict)
        self.volumes = volumes

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason when weights or batches cannot be converted."""
        if not _convolutions(module, volumes=self.volumes):
            return _no_convolution(module, volumes=self.volumes)
        if trainer.strategy.restore_checkpoint_after_setup:
            return (
                f"{type(trainer.strategy).__name__} shards the weights, which fixes their layout. "
                "Use a strategy that keeps whole weights, such as 'ddp'."
            )
        return batches_unseen(module)

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Convert weights and batches for the length of the run."""
        watch = _FormatWatch(module, _convolutions(module, volumes=self.volumes), self._say_fallen)

        def convert(batch: Any) -> Any:
            watch.next_batch()
            return batch_to_channels_last(batch, volumes=self.volumes)

        strides = _strides(module, volumes=self.volumes)
        with (
            closing(watch),
            _optimizer_state_follows(trainer, strides),
            _converted(strides),
            every_batch(trainer, convert),
        ):
            count = len(watch.names)
            yield f"{count} convolution{'' if count == 1 else 's'}"

    def _say_fallen(self, fallen: list[str], total: int) -> None:
        self.say(
            f"{len(fallen)} of {total} convolutions are not in NHWC and convert at each call: "
            f"{', '.join(fallen)}. Look before them for a permute, a view of another layout, or a "
            "layer without NHWC support."
        )


@contextmanager
def channels_last(model: nn.Module, *, volumes: bool = False) -> Iterator[Callable[[Any], Any]]:
    """Lay out the convolution weights of a model NHWC for the length of a block.

    Enter it before the optimizer is built and before the model is wrapped for several processes.

    Args:
        model: Any module; only 2-D convolutions in it are touched.
        volumes: Convert 3-D convolutions to NDHWC too.

    Yields:
        A function that lays out the 4-D tensors of a batch, any nested structure, in the same way.

    Raises:
        ValueError: If the model has no convolution to convert.

    Example:
        >>> import torch
        >>> from lightning_perf.callbacks.channels_last import channels_last
        >>> net = torch.nn.Conv2d(3, 8, 3)
        >>> with channels_last(net) as convert:
        ...     out = net(convert(torch.randn(2, 3, 8, 8)))
        >>> out.is_contiguous(memory_format=torch.channels_last)
        True
    """
    if not _convolutions(model, volumes=volumes):
        raise ValueError(_no_convolution(model, volumes=volumes))
    with _converted(_strides(model, volumes=volumes)):
        yield lambda batch: batch_to_channels_last(batch, volumes=volumes)


def batch_to_channels_last(batch: Any, *, volumes: bool = False) -> Any:
    """Return the batch, any nested structure, with its 4-D tensors laid out NHWC.

    Args:
        batch: Tensors of other ranks, and all that is no tensor, are kept as they are.
        volumes: Lay out 5-D tensors NDHWC too.
    """
    ranks = (4, 5) if volumes else (4,)

    def convert(tensor: Tensor) -> Tensor:
        dense = tensor.layout is torch.strided and not tensor.is_nested
        return _nhwc(tensor) if dense and tensor.dim() in ranks else tensor

    return map_tensors(batch, convert)


def match_optimizer_state(optimizer: Optimizer) -> None:
    """Give the state of each parameter, such as its momentum, the parameter's own strides.

    State restored from a checkpoint keeps the strides it was saved with. Where they differ from
    the parameter's, plain optimizers are slow, and the fused CPU kernels, which ignore strides,
    silently compute wrong updates.
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue
        for key, value in state.items():
            if isinstance(value, Tensor) and not same_layout(value, parameter):
                state[key] = _restrided(value, parameter.stride())


def same_layout(tensor: Tensor, other: Tensor) -> bool:
    """Return whether tensors of one shape are laid out alike; of several shapes, always true."""
    if tensor.shape != other.shape or tensor.stride() == other.stride():
        return True
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in strides)


def _convolutions(model: nn.Module, *, volumes: bool) -> dict[str, nn.Module]:
    kinds = _CONVOLUTIONS + (_VOLUME_CONVOLUTIONS if volumes else ())
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _no_convolution(model: nn.Module, *, volumes: bool) -> str:
    dimensions = "2-D or 3-D" if volumes else "2-D"
    reason = (
        f"{type(model).__name__} has no {dimensions} convolution, and the NHWC format helps only "
        "those. Remove ChannelsLast for this model."
    )
    if not volumes and _convolutions(model, volumes=True):
        reason += " For its 3-D convolutions, measure ChannelsLast(volumes=True)."
    return reason


def _strides(model: nn.Module, *, volumes: bool) -> dict[Tensor, tuple[int, ...]]:
    """Return the weights to convert, with the strides that they have now."""
    ranks = (4, 5) if volumes else (4,)
    strides: dict[Tensor, tuple[int, ...]] = {}
    for convolution in _convolutions(model, volumes=volumes).values():
        for weight in chain(convolution.parameters(), convolution.buffers()):
            lazy = isinstance(weight, UninitializedParameter | UninitializedBuffer)
            if not lazy and weight.dim() in ranks and weight.is_contiguous():
                strides[weight] = weight.stride()
    return strides


@contextmanager
def _converted(strides: dict[Tensor, tuple[int, ...]]) -> Iterator[None]:
    for weight in strides:
        _replace_data(weight, _nhwc(weight.detach()))
    try:
        yield
    finally:
        for weight, stride in strides.items():
            _replace_data(weight, _restrided(weight.detach(), stride))


def _replace_data(weight: Tensor, data: Tensor) -> None:
    """Change the layout of a weight, and of its gradient, without changing the object."""
    weight.data = data
    if weight.grad is not None:
        weight.grad = _restrided(weight.grad, data.stride())


def _nhwc(tensor: Tensor) -> Tensor:
    """Return a 4-D or 5-D tensor with exactly the strides of NHWC or NDHWC."""
    out = tensor.contiguous(memory_format=_FORMATS[tensor.dim()])
    stride, step = [1], out.shape[1]
    for size in reversed(out.shape[2:]):
        stride.insert(1, step)
        step *= size
    stride.insert(0, step)
    # One channel, or one pixel, fits both formats and keeps its NCHW strides. Kernels then choose
    # NCHW for what follows, and DDP complains that gradients of 1x1 convolutions have others.
    if out.stride() != tuple(stride):
        out = out.as_strided(out.shape, stride)
    # Ops on the subclasses of torchvision return plain tensors.
    return out if isinstance(out, type(tensor)) else out.as_subclass(type(tensor))


def _restrided(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return out.copy_(tensor)


@contextmanager
def _optimizer_state_follows(
    trainer: Trainer, strides: dict[Tensor, tuple[int, ...]]
) -> Iterator[None]:
    """Lay out optimizer state like its weight: NHWC when restored, as without the item when saved.

    Entered around `_converted`, so that at the end it follows the weights back.
    """
    strategy = trainer.strategy
    load, save = strategy.load_optimizer_state_dict, strategy.optimizer_state

    def load_optimizer_state_dict(checkpoint: Mapping[str, Any]) -> None:
        load(checkpoint)
        follow()

    def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
        saved: dict[str, Any] = save(optimizer)
        state = dict(saved.get("state", {}))
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for index, weight in enumerate(parameters):
            if index in state and weight in strides:
                state[index] = {
                    key: _restrided(value, strides[weight]) if _is_like(value, weight) else value
                    for key, value in state[index].items()
                }
        return {**saved, "state": state} if saved else saved

    def follow() -> None:
        for optimizer in strategy.optimizers:
            match_optimizer_state(optimizer)

    try:
        with (
            instance_attribute(strategy, "load_optimizer_state_dict", load_optimizer_state_dict),
            instance_attribute(strategy, "optimizer_state", optimizer_state),
        ):
            yield
    finally:
        follow()


def _is_like(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape


class _FormatWatch:
    """Looks during the first batch whether convolutions get and give NHWC tensors.

    Not at those in compiled modules: the compiler chooses formats itself, and would compile again
    once a hook is gone.

    Args:
        model: What holds the convolutions.
        convolutions: The modules to look at, by name.
        report: Called with the names of those that fell back, if any, and the number of all.
    """

    def __init__(
        self,
        model: nn.Module,
        convolutions: dict[str, nn.Module],
        report: Callable[[list[str], int], None],
    ) -> None:
        self._model = model
        self.names = {module: name for name, module in convolutions.items()}
        self._report = report
        self._fallen: dict[str, None] = {}
        self._handles: list[RemovableHandle] = []
        self._called = False
        self._closed = False

    def next_batch(self) -> None:
        """Start looking at the first batch, and stop once a batch went through the model."""
        if self._closed:
            return
        if self._called:
            self.close()
        elif not self._handles:
            compiled = inside_compiled(self._model)
            eager = [module for module in self.names if module not in compiled]
            self._handles = [module.register_forward_hook(self._look) for module in eager]
            self._closed = not eager

    def close(self) -> None:
        """Remove the hooks, so that later steps cost nothing, and report."""
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._fallen:
            self._report(list(self._fallen), len(self.names))
            self._fallen.clear()

    def _look(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():  # a step of the LightningModule is compiled
            return
        self._called = True
        if not all(_is_nhwc(tensor) for tensor in (*args, output)):
            self._fallen[self.names[module]] = None


def _is_nhwc(tensor: Any) -> bool:
    """Return whether the channels lie next to each other, or it makes no difference."""
    if not isinstance(tensor, Tensor) or tensor.dim() not in _FORMATS:
        return True
    return tensor.shape[1] == 1 or tensor.stride(1) == 1
