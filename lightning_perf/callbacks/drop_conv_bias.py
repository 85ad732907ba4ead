"""No bias in convolutions before a normalization, which subtracts it anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_perf._attributes import instance_attribute
from lightning_perf._conv_norm import CONVOLUTIONS, Flow, find_pairs, list_kept
from lightning_perf._item import Moment, PerfCallback
from lightning_perf.callbacks._conv_norm_bias import (
    CHANNELS,
    Bias,
    dropped,
    mismatch,
    require_grad,
)


class DropConvBias(PerfCallback):
    """Compute convolutions without their bias where a normalization follows and subtracts it.

    Before the strategy wraps the model, the data flow of its `forward` methods is traced. A
    convolution (1-D to 3-D, transposed too) whose output goes only to one BatchNorm, InstanceNorm
    or GroupNorm with one channel per group is from then on computed without bias wherever the norm
    subtracts the mean of its input. The running mean takes the bias up, so evaluation agrees
    before, during and after the run. All other convolutions stay, each with its reason.

    The bias keeps its place in parameters, optimizer and checkpoints, and its value; it gets no
    gradient. In a model of your own, ``bias=False`` is simpler where old checkpoints do not matter.

    Args:
        strict: See `PerfCallback`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.callbacks import DropConvBias
        >>> trainer = Trainer(callbacks=[DropConvBias()], accelerator="cpu", logger=False)
    """

    guide: ClassVar[str] = "T disable bias before batch norm"
    changes: ClassVar[frozenset[str]] = frozenset({"model"})
    exact: ClassVar[bool] = False
    moment: ClassVar[Moment] = "before_wrap"
    functions: ClassVar[frozenset[str]] = frozenset({"fit"})

    def __init__(self, *, strict: bool | None = None) -> None:
        super().__init__(strict=strict)
        self._flow: Flow | None = None

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason when no bias can go."""
        if trainer.strategy.restore_checkpoint_after_setup:
            return (
                f"{type(trainer.strategy).__name__} shards the parameters. Use bias=False in the "
                "model, or a strategy that keeps whole parameters, such as 'ddp'."
            )
        flow = needless_biases(module)
        self._flow = flow  # found in seconds, so not twice
        return None if flow.pairs else _no_bias(module, flow)

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Leave the biases out for the length of the run."""
        flow, self._flow = self._flow or needless_biases(module), None
        with dropped(module, flow) as biases, _known_to_optimizers(trainer, biases):
            text = f"{len(biases)} {'bias' if len(biases) == 1 else 'biases'}"
            yield f"{text}; kept: {list_kept(flow.kept)}" if flow.kept else text
        computed = [bias.name for bias in biases if bias.learned]
        if computed:
            self.say(
                f"{len(computed)} of {len(biases)} biases were used in training after all, because "
                "their convolution was called from elsewhere or its norm was in evaluation mode: "
                f"{', '.join(computed)}."
            )


@contextmanager
def without_conv_bias(model: nn.Module) -> Iterator[Flow]:
    """Compute convolutions without the biases that a norm subtracts, for the length of a block.

    Enter it before the model is wrapped for several processes, in training mode.

    Args:
        model: Any module.

    Yields:
        The pairs of convolution and norm, and why other convolutions keep their bias.

    Raises:
        ValueError: If no bias can go; the message says why.

    Example:
        >>> import torch
        >>> from lightning_perf.callbacks.drop_conv_bias import without_conv_bias
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> with without_conv_bias(net):
        ...     net(torch.randn(2, 3, 8, 8)).sum().backward()
        >>> net[0].bias.grad is None
        True
    """
    flow = needless_biases(model)
    if not flow.pairs:
        raise ValueError(_no_bias(model, flow))
    with dropped(model, flow):
        yield flow


def needless_biases(model: nn.Module) -> Flow:
    """Find the convolutions whose bias goes only to a norm that subtracts it.

    Args:
        model: Any module, in training mode. Nothing in it is changed.

    Returns:
        The pairs of convolution and norm, and why each other convolution with a bias needs it.
    """
    slots = Counter(p for module in model.modules() for p in module._parameters.values())
    layers, kept = {}, {}
    for name, module in model.named_modules():
        bias = module._parameters.get("bias")
        if not isinstance(module, CONVOLUTIONS) or bias is None:
            continue
        if is_lazy(bias):
            kept[name] = "its shape is not known before the first batch"
        elif type(module) not in CONVOLUTIONS:
            kept[name] = f"{type(module).__name__} is not a convolution of torch.nn"
        elif slots[bias] > 1:
            kept[name] = "its bias is shared"
        else:
            layers[name] = module
    flow = find_pairs(model, layers, tuple(CHANNELS), mismatch)
    return Flow(flow.pairs, kept | flow.kept)


def _no_bias(model: nn.Module, flow: Flow) -> str:
    name = type(model).__name__
    if not flow.kept:
        return f"{name} has no convolution with a bias. Remove DropConvBias for this model."
    return f"{name} has no bias that only a norm after it sees: {list_kept(flow.kept)}."


@contextmanager
def _known_to_optimizers(trainer: Trainer, biases: list[Bias]) -> Iterator[None]:
    """Keep the biases in optimizers and their checkpoints, which then load with and without."""
    strategy = trainer.strategy
    setup, save = strategy.setup_optimizers, strategy.optimizer_state

    def setup_optimizers(trainer: Trainer) -> None:
        # Many optimizers get only the parameters that require a gradient.
        require_grad(biases, True)
        try:
            setup(trainer)
        finally:
            require_grad(biases, False)

    def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
        saved: dict[str, Any] = save(optimizer)
        return saved and {**saved, "state": _completed(saved, optimizer, biases)}

    with (
        instance_attribute(strategy, "setup_optimizers", setup_optimizers),
        instance_attribute(strategy, "optimizer_state", optimizer_state),
    ):
        yield


def _completed(
    saved: dict[str, Any], optimizer: Optimizer, biases: list[Bias]
) -> dict[int, dict[str, Any]]:
    """Return the saved state with zero moments for the biases: fused SGD wants all or none."""
    state: dict[int, dict[str, Any]] = dict(saved.get("state", {}))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    like = {parameters[index].shape: entry for index, entry in state.items()}
    ours = {bias.layer.bias for bias in biases if bias.trainable}
    for index, parameter in enumerate(parameters):
        if parameter in ours and index not in state and parameter.shape in like:
            state[index] = {
                key: _zero(value, parameter) for key, value in like[parameter.shape].items()
            }
    return state


def _zero(value: Any, parameter: Tensor) -> Any:
    """Return a moment of zeros, or a copy of what is no moment, such as the step count."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros_like(value) if value.shape == parameter.shape else value.clone()
