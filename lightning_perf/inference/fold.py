"""Batch normalization folded into the layer before it, for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from lightning_perf._conv_norm import CONVOLUTIONS, Flow, Pair, find_pairs, list_kept
from lightning_perf._linked import Link, apply_layer, linked, own_forward, seen

# Each norm with the rank of the weights before it, if that is fixed.
_WEIGHT_RANKS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
    nn.SyncBatchNorm: (2, 3, 4, 5),
}
# Largest difference to the separate layers, relative to the largest value. A wrong fold is off by
# about one; float32 convolutions may run in TF32 on a GPU.
_TOLERANCES = {
    torch.float64: 1e-8,
    torch.float32: 5e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 1e-1,
}


class Folding:
    """What `folded` does to a model.

    Args:
        flow: The pairs that fold.
        folds: What runs them.
    """

    def __init__(self, flow: Flow, folds: list[Fold]) -> None:
        self._flow = flow
        self._folds = folds

    @property
    def folded(self) -> dict[str, str]:
        """The layers that are computed together with their norm, with its name."""
        return {fold.pair.layer: fold.pair.norm for fold in self._folds if not fold.problem}

    @property
    def verified(self) -> list[str]:
        """The layers among them whose output was compared already."""
        return [fold.pair.layer for fold in self._folds if fold.verified]

    @property
    def kept(self) -> dict[str, str]:
        """The layers that are computed as ever, each with its reason."""
        problems = {fold.pair.layer: fold.problem for fold in self._folds if fold.problem}
        return self._flow.kept | problems


@contextmanager
def folded(model: nn.Module) -> Iterator[Folding]:
    """Compute batch normalization together with the layer before it, for the length of a block.

    A convolution or linear layer whose output goes only to one BatchNorm is computed with weights
    that do the work of both, wherever the norm is in evaluation mode and gradients are off. In all
    other calls both run as ever. The first such call of each pair, which must not be inside
    compiled code, compares the folded with the separate output; a pair that differs is not folded.

    Parameters, buffers and state dicts stay as they are: folded weights are kept beside them, and
    take as much memory again. They follow when weights change, also by `load_state_dict`, but not
    when somebody writes through ``parameter.data``.

    Args:
        model: Any module.

    Yields:
        What is folded, and why other layers are not.

    Raises:
        ValueError: If nothing can be folded; the message says why.

    Example:
        >>> import torch
        >>> from lightning_perf.inference.fold import folded
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
        >>> with folded(net) as folding, torch.inference_mode():
        ...     out = net(torch.randn(1, 3, 8, 8))
        >>> folding.folded
        {'0': '1'}
    """
    flow = foldable(model)
    if not flow.pairs:
        raise ValueError(f"Nothing to fold: {describe(model, flow)}")
    with folded_pairs(model, flow) as folding:
        yield folding


def foldable(model: nn.Module) -> Flow:
    """Find the convolutions and linear layers whose output goes only to one BatchNorm.

    Args:
        model: Any module. Nothing in it is changed.

    Returns:
        The pairs, and why each other convolution or linear layer is in none.
    """
    kinds = (*CONVOLUTIONS, nn.Linear)
    layers = {name: module for name, module in model.named_modules() if type(module) in kinds}
    return find_pairs(model, layers, tuple(_WEIGHT_RANKS), _mismatch)


def describe(model: nn.Module, flow: Flow) -> str:
    """Return in one line how many norms of a model fold, and what keeps the others."""
    norms = sum(type(module) in _WEIGHT_RANKS for module in model.modules())
    if not norms:
        return f"{type(model).__name__} has no BatchNorm."
    text = f"{len(flow.pairs)} of {norms} BatchNorm folded"
    return text if norms == len(flow.pairs) else f"{text}; kept: {list_kept(flow.kept)}"


@contextmanager
def folded_pairs(model: nn.Module, flow: Flow) -> Iterator[Folding]:
    """Fold pairs that `foldable` has found; see `folded`."""

    def make(pair: Pair, *place: Any) -> Fold:
        return Fold(pair, *place)

    with linked(model, flow.pairs, make, norms=True) as folds:
        yield Folding(flow, folds)


def _mismatch(layer: Any, norm: Any) -> str | None:
    """Return why a norm does not fold into the layer before it."""
    if layer.weight.dim() not in _WEIGHT_RANKS[type(norm)]:
        return f"{type(norm).__name__} is not for {type(layer).__name__}"
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    if norm.num_features != channels:
        return f"it normalizes {norm.num_features} channels"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics"
    if getattr(layer, "transposed", False) and layer.groups != 1:
        return "the transposed convolution before it has groups"
    return None


class Fold(Link):
    """One pair, with the weights that do the work of both.

    Args:
        pair: Their names.
        place: The arguments of `Link`.
    """

    def __init__(self, pair: Pair, *place: Any) -> None:
        super().__init__(*place)
        self.pair = pair
        self.verified = False
        self.problem = ""
        self._source: list[tuple[Tensor | None, int]] | None = None
        self._weight = self._bias = torch.empty(0)
        self._done = False

    def run_layer(self, layer: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run layer and norm at once if both may be."""
        self._done = self._allowed(layer, input) and self._right(layer, input, *args, **kwargs)
        if not self._done:
            return own_forward(layer, input, *args, **kwargs)
        return apply_layer(layer, input, self._weight, self._bias, *args, **kwargs)

    def run_norm(self, norm: Any, input: Tensor) -> Any:
        """Pass on what is normalized already."""
        return input if self._done else own_forward(norm, input)

    def leave(self, *, completed: bool) -> None:
        """Forget the call."""
        self._done = False

    def _allowed(self, layer: Any, input: Tensor) -> bool:
        norm = self.norm
        return (
            self.scope.running
            and not (self.problem or norm.training or torch.is_grad_enabled())
            and input.dim() == layer.weight.dim()
            and not seen(layer, norm)
        )

    def _right(self, layer: Any, input: Tensor, *args: Any, **kwargs: Any) -> bool:
        """Return whether the folded weights are up to date and known to be right."""
        if torch.compiler.is_compiling():
            return self.verified
        if self._changed(layer):
            self._fold(layer)
        if not self.verified and input.numel():
            self._verify(layer, input, *args, **kwargs)
        return self.verified

    def _changed(self, layer: Any) -> bool:
        if self._source is None:
            return True
        moved = self._weight.device != layer.weight.device
        cast = self._weight.dtype != layer.weight.dtype
        return (
            moved
            or cast
            or any(
                tensor is not source or _version(tensor) != version
                for tensor, (source, version) in zip(
                    self._tensors(layer), self._source, strict=True
                )
            )
        )

    def _fold(self, layer: Any) -> None:
        tensors, norm = self._tensors(layer), self.norm
        self._source = [(tensor, _version(tensor)) for tensor in tensors]
        # Half precision is too coarse for the square root and the products.
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        arguments: list[Any] = [t if t is None else t.detach().to(dtype) for t in tensors]
        arguments.insert(4, norm.eps)
        fuse: Callable[..., tuple[Tensor, Tensor]] = fuse_linear_bn_weights
        if not isinstance(layer, nn.Linear):
            fuse = partial(fuse_conv_bn_weights, transpose=layer.transposed)
        with torch.no_grad():
            both = fuse(*arguments)
        self._weight, self._bias = (t.detach().to(layer.weight.dtype) for t in both)
        self.verified = False

    def _tensors(self, layer: Any) -> tuple[Tensor | None, ...]:
        """Return what the folded weights are made of, in the order that torch expects."""
        norm = self.norm
        return (
            layer.weight,
            layer.bias,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            norm.bias,
        )

    def _verify(self, layer: Any, input: Tensor, *args: Any, **kwargs: Any) -> None:
        expected = own_forward(self.norm, own_forward(layer, input, *args, **kwargs))
        output = apply_layer(layer, input, self._weight, self._bias, *args, **kwargs)
        difference = (output - expected).abs().max()
        largest = torch.maximum(expected.abs().max(), self._bias.abs().max())
        relative = float(difference / largest.clamp(min=torch.finfo(expected.dtype).tiny))
        if not relative <= _TOLERANCES[expected.dtype]:
            self.problem = f"the folded output differs by {relative:.1e} of its largest value"
        self.verified = not self.problem
        if self.problem:
            rank_zero_warn(
                f"lightning_perf: {self.pair.norm!r} is not folded into {self.pair.layer!r}: "
                f"{self.problem}. Both are computed as ever."
            )


def _version(tensor: Tensor | None) -> int:
    """Return how often a tensor was written to; tensors of inference mode do not tell."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
