"""Whether ``static_graph=True`` averages gradients as it should: PyTorch sometimes does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

_WINDOWS = 3

# First steps in which the gradients of all ranks are compared: PyTorch was seen to stop averaging
# in the second window.
_PROOFS = 3


def static_graph_fails(batches: int, device: torch.device) -> str | None:
    """Return what goes wrong under ``static_graph`` and accumulation here, or ``None``.

    Trains two layers, one of them recomputed in the backward pass, for three windows, and compares
    with the mean of the ranks' own gradients. Every rank must call it; random numbers are left
    alone.

    Args:
        batches: Length of a window, in micro-batches.
        device: The rank's device.
    """
    net = _Net().to(device)
    ids = [device.index] if device.type == "cuda" else None
    ddp = DistributedDataParallel(net, device_ids=ids, static_graph=True)
    for window in range(_WINDOWS):
        inputs = [_input(window, index, device) for index in range(batches)]
        net.zero_grad()
        alone = [torch.zeros_like(parameter) for parameter in net.parameters()]
        for x in inputs:
            gradients = torch.autograd.grad(net(x).sum(), list(net.parameters()))
            alone = [sum_ + gradient for sum_, gradient in zip(alone, gradients, strict=True)]
        for mean in alone:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        try:
            for index, x in enumerate(inputs):
                with nullcontext() if index == batches - 1 else ddp.no_sync():
                    ddp(x).sum().backward()
        except RuntimeError:
            return f"PyTorch fails in the backward pass of window {window + 1}"
        for parameter, mean in zip(net.parameters(), alone, strict=True):
            if parameter.grad is None or not torch.allclose(parameter.grad, mean, rtol=1e-4):
                return f"gradients are not averaged over the ranks in window {window + 1}"
    return None


class Proof:
    """Compares the gradients of the ranks in the first steps of a run."""

    def __init__(self) -> None:
        self._left = _PROOFS

    def around(self, closure: Callable[[], Any], module: LightningModule) -> Callable[[], Any]:
        """Return a closure that raises where gradients differ; every rank must call both.

        Args:
            closure: Forward and backward pass before a step of the optimizer.
            module: The module whose gradients it computes.
        """
        if self._left <= 0:
            return closure
        self._left -= 1

        def proven() -> Any:
            output = closure()
            differ = unequal_gradients(module)
            if differ:
                raise RuntimeError(
                    "static_graph=True was asked for, and the gradients of the ranks differ: "
                    f"{', '.join(differ[:5])}. Pass static_graph=False."
                )
            return output

        return proven


def unequal_gradients(module: nn.Module) -> list[str]:
    """Return the names of parameters whose gradients differ between ranks; all must call it."""
    named = [(n, p.grad) for n, p in module.named_parameters() if p.requires_grad]
    sums = [torch.zeros(()) if g is None else g.detach().double().sum() for _, g in named]
    mine = torch.stack([value.cpu() for value in sums]).tolist() if sums else []
    everyones: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return [
        name
        for (name, _), values in zip(named, zip(*everyones, strict=True), strict=True)
        if any(value != values[0] and value == value for value in values)
    ]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
        self.second = nn.Parameter(torch.tensor([[0.5, 0.6]]))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self._hidden, x, use_reentrant=False)
        return nn.functional.linear(hidden, self.second)

    def _hidden(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.first).tanh()


def _input(window: int, index: int, device: torch.device) -> Tensor:
    return torch.full((1, 2), 0.1 * (1 + window + index + dist.get_rank()), device=device)
