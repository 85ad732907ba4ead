"""The weights of a module, of which each process keeps those of one stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_perf.strategies._pipeline.exchange import broadcast, to_rank_zero

Gradients = dict[nn.Parameter, Tensor]


class StageWeights:
    """Drops the weights of other stages, and puts all together again.

    Parameters outside of the network stay in all processes, which update them alike. Parameter
    objects stay the same throughout.

    Args:
        module: What holds the network.
        owners: The stage of each parameter and buffer of the network, by their names in the module.
        device: Of this process.
    """

    def __init__(self, module: nn.Module, owners: Mapping[str, int], device: torch.device) -> None:
        self._module, self._owners, self._device = module, owners, device
        self._rank, self._last = dist.get_rank(), dist.get_world_size() - 1
        self.whole = True
        """Whether this process has all weights."""

    def keep_own(self) -> None:
        """Take the weights of rank 0, tensor by tensor, and keep those that belong here."""
        for name, tensor in self._tensors().items():
            data = tensor.detach().to(self._device)
            broadcast(data, 0)
            if isinstance(tensor, nn.Parameter) and not self._is_here(name):
                # No memory, and yet the shape by which optimizers may group parameters.
                data = data.new_zeros(()).expand(data.shape)
            tensor.data = data
        self.whole = False

    def put_back(self, *, failed: bool) -> None:
        """Give all processes all weights, on the CPU.

        Args:
            failed: The others may be gone. What they had becomes NaN, so that nobody uses it.
        """
        if self.whole:
            return
        for name, tensor in self._tensors().items():
            if name not in self._owners:
                continue
            here = self._is_here(name)
            data = tensor.detach() if here else torch.empty_like(tensor, **_DENSE)
            if not failed:
                broadcast(data, self._owners[name])
            elif not here and isinstance(tensor, nn.Parameter):
                data.fill_(torch.nan)
            elif not here:
                data.copy_(tensor)
            tensor.data = data.cpu()
        self.whole = True

    def state_dict(self) -> dict[str, Any]:
        """Return in rank 0 the state of the whole module, and nothing in others."""
        state: dict[str, Any] = self._module.state_dict()
        if self.whole:
            return state
        for stage in range(1, self._last + 1):
            names = [name for name in state if self._owners.get(name) == stage]
            found = to_rank_zero({name: state[name] for name in names}, stage, self._device)
            state.update(found or {})
        return state if self._rank == 0 else {}

    def optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return in rank 0 the optimizer's state of all parameters, and nothing in others."""
        whole = dict(state["state"])
        for stage in range(1, self._last + 1):
            own = self._own(optimizer, whole, stage) if stage == self._rank else None
            found = to_rank_zero(own, stage, self._device)
            whole.update(found or {})
        return {**state, "state": whole} if self._rank == 0 else {}

    def own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return of such a state what belongs here."""
        own = self._own(optimizer, state["state"], self._rank)
        return {**state, "state": {**own, **self._own(optimizer, state["state"], None)}}

    @contextmanager
    def gradients_aside(self) -> Iterator[Gradients]:
        """Let a block compute gradients, and fill them into a dictionary instead of parameters."""
        kept = {p: p.grad for p in self._module.parameters() if p.requires_grad}
        found: Gradients = {}
        for parameter in kept:
            parameter.grad = None
        try:
            yield found
        finally:
            found.update({p: p.grad for p in kept if p.grad is not None})
            for parameter, gradient in kept.items():
                parameter.grad = gradient

    def add_gradients(self, gradients: Gradients, factor: Tensor) -> None:
        """Add gradients, times a factor, to those of the parameters, and empty the dictionary."""
        with torch.no_grad():
            for parameter, gradient in gradients.items():
                gradient.mul_(factor.to(gradient.dtype))
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
        gradients.clear()

    def add_up_outside(self) -> None:
        """Add up over stages the gradients of parameters outside of the network.

        The first stage has those of what comes before the network, the last of what comes after.
        """
        outside = self._outside()
        used = torch.tensor(
            [p.grad is not None for p in outside], dtype=torch.int, device=self._device
        )
        if outside:
            dist.all_reduce(used, dist.ReduceOp.MAX)
        for parameter, any_gradient in zip(outside, used.tolist(), strict=True):
            if any_gradient:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def share_outside_buffers(self) -> None:
        """Take buffers outside of the network from the last stage, which runs whole steps."""
        for name, buffer in self._module.named_buffers():
            if name not in self._owners:
                broadcast(buffer, self._last)

    def clip_by_norm(self, parameters: list[nn.Parameter], limit: float) -> None:
        """Clip gradients by their norm over all stages, as ``clip_grad_norm_`` does over one."""
        outside = set(self._outside())
        square = torch.zeros((), device=self._device, dtype=torch.float64)
        if self._device.type == "mps":
            square = square.float()
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, gradient in gradients:
            # Those outside are the same in all processes, and count once.
            if self._rank == 0 or parameter not in outside:
                square += torch.linalg.vector_norm(gradient).to(square.dtype) ** 2
        dist.all_reduce(square)
        factor = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for _, gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))

    def _is_here(self, name: str) -> bool:
        return self._owners.get(name, self._rank) == self._rank

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def _outside(self) -> list[nn.Parameter]:
        parameters = self._module.named_parameters()
        return [p for name, p in parameters if name not in self._owners]

    def _own(
        self, optimizer: Optimizer, state: Mapping[int, Any], stage: int | None
    ) -> dict[int, Any]:
        """Return the entries of parameters of one stage, or with ``None`` of those outside."""
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owners = [self._owners.get(names.get(p, "")) for p in parameters]
        return {
            index: state[index]
            for index, owner in enumerate(owners)
            if owner == stage and index in state
        }


_DENSE: dict[str, Any] = {"memory_format": torch.contiguous_format}
