"""Convolutions without the bias that the norm after them subtracts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_perf._conv_norm import Flow, Pair
from lightning_perf._linked import Link, apply_layer, linked, own_forward, seen

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# Each norm with the name of its number of channels, and the rank of its input if that is fixed.
CHANNELS: dict[type[nn.Module], tuple[str, int | None]] = {
    nn.BatchNorm1d: ("num_features", 3),
    nn.BatchNorm2d: ("num_features", 4),
    nn.BatchNorm3d: ("num_features", 5),
    nn.SyncBatchNorm: ("num_features", None),
    nn.InstanceNorm1d: ("num_features", 3),
    nn.InstanceNorm2d: ("num_features", 4),
    nn.InstanceNorm3d: ("num_features", 5),
    nn.GroupNorm: ("num_channels", None),
}


def mismatch(layer: nn.Module, norm: nn.Module) -> str | None:
    """Return why a norm after a convolution does not subtract its bias, channel by channel."""
    channels, dimensions = CHANNELS[type(norm)]
    if dimensions not in (None, layer.get_parameter("weight").dim()):
        return f"{type(norm).__name__} is not for {type(layer).__name__}"
    if getattr(norm, channels) != layer.out_channels:
        return f"it normalizes {getattr(norm, channels)} channels"
    if isinstance(norm, nn.GroupNorm) and norm.num_groups != norm.num_channels:
        return "its groups have several channels each"
    if not _subtracts_input_mean(norm):
        return "it is in evaluation mode"
    return None


def _subtracts_input_mean(norm: Any) -> bool:
    """Return whether a norm computes the mean of each channel from its input, as it is now."""
    if isinstance(norm, _BATCH_NORMS):
        return norm.training or (norm.running_mean is None and norm.running_var is None)
    if isinstance(norm, _INSTANCE_NORMS):
        return norm.training or not norm.track_running_stats
    return isinstance(norm, nn.GroupNorm) and norm.num_groups == norm.num_channels


def _take_up(norm: Any, bias: Tensor) -> None:
    """Add to the running mean what it would have got from the bias in the call just made."""
    mean = getattr(norm, "running_mean", None)
    if mean is None:
        return
    if isinstance(norm, _INSTANCE_NORMS):
        share = bias.data * (norm.momentum or 0.0)
    elif not (norm.training and norm.track_running_stats):
        return
    elif norm.momentum is None:
        share = bias.data / norm.num_batches_tracked
    else:
        share = bias.data * norm.momentum
    # `.data`, because autograd has kept the buffer, although training never reads it.
    mean.data.add_(share)


def _updates(norm: Any) -> list[int]:
    """Return numbers that differ once the norm has updated its statistics."""
    if torch.compiler.is_compiling():
        return []
    # BatchNorm counts its batches; InstanceNorm copies into its running mean.
    tensors = (getattr(norm, name, None) for name in ("num_batches_tracked", "running_mean"))
    return [tensor._version for tensor in tensors if tensor is not None]


class Bias(Link):
    """The bias of one convolution, which takes part in a call unless the norm subtracts it.

    Args:
        name: The name of the convolution.
        layer: The convolution.
        place: The arguments of `Link`.
    """

    def __init__(self, name: str, layer: Any, *place: Any) -> None:
        super().__init__(*place)
        self.name = name
        self.layer = layer
        self.trainable: bool = layer.bias.requires_grad
        self.learned = False
        self._left_out = False
        self._updates: list[int] = []

    def require_grad(self, required: bool) -> None:
        """Set whether the bias gets a gradient, unless it never did."""
        if self.trainable:
            self.layer.bias.requires_grad_(required)

    def run_layer(self, layer: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Leave the bias out where the proof holds and the norm subtracts it."""
        norm: Any = self.norm
        batched = input.dim() == layer.weight.dim()
        self._left_out = (
            self.scope.running and batched and _subtracts_input_mean(norm) and not seen(layer, norm)
        )
        if self._left_out:
            self._updates = _updates(norm)
            return apply_layer(layer, input, layer.weight, None, *args, **kwargs)
        self._learn(layer)
        return own_forward(layer, input, *args, **kwargs)

    def leave(self, *, completed: bool) -> None:
        """Let the running mean take the bias up."""
        # A checkpointed scope that is recomputed raises once its last norm has run.
        if self._left_out and (completed or _updates(self.norm) != self._updates):
            _take_up(self.norm, self.layer.bias)
        self._left_out = False

    def _learn(self, layer: Any) -> None:
        """Let the bias learn from a call in which it does not cancel."""
        if self.learned or not (self.trainable and torch.is_grad_enabled()):
            return
        self.learned = True
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            rank_zero_warn(
                f"DropConvBias: the bias of {self.name!r} is used in training, because its "
                "convolution is called from elsewhere or its norm is in evaluation mode. It does "
                "not learn there, since DDP does not know of it. Remove DropConvBias if it shall."
            )
        else:
            layer.bias.requires_grad_(True)


@contextmanager
def dropped(model: nn.Module, flow: Flow) -> Iterator[list[Bias]]:
    """Leave out the biases of all pairs for the length of a block."""

    def make(pair: Pair, *place: Any) -> Bias:
        return Bias(pair.layer, model.get_submodule(pair.layer), *place)

    with linked(model, flow.pairs, make, norms=False) as biases:
        try:
            # DDP waits for the gradient of every parameter that requires one.
            require_grad(biases, False)
            yield biases
        finally:
            require_grad(biases, True)


def require_grad(biases: list[Bias], required: bool) -> None:
    """Set whether the biases that are trained get a gradient."""
    for bias in biases:
        bias.require_grad(required)
