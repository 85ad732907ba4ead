"""Training as CUDA graphs: many kernels launched by one call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from lightning_perf import _compat
from lightning_perf._item import Moment, PerfCallback
from lightning_perf.callbacks._graph.engine import ENGINES, Scope
from lightning_perf.callbacks._graph.network import graphed_network
from lightning_perf.callbacks._graph.step import step_graphs
from lightning_perf.callbacks._graph.step_checks import step_obstacle

_SCOPES = ("network", "step")
_PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
_LEAST_LAYERS = 3


class CUDAGraph(PerfCallback):
    """Replay training from CUDA graphs, so that the CPU launches one graph instead of each kernel.

    It helps where the GPU waits for the CPU: small networks, small batches, many small layers.
    The first calls with each shape run eagerly, one is recorded, and later ones with the same
    shapes are replayed. All others run eagerly, are counted, and the run says so at its end.
    Whatever cannot be recorded runs eagerly for good after one warning with the reason.

    Do not use it where every batch has another shape, where memory is short (graphs keep their
    activations), or together with a compiled network: `Compile` has ``mode="reduce-overhead"``.

    Args:
        scope: ``"network"`` records forward and backward of the networks that the LightningModule
            has as attributes; its steps with their logging and Python values stay as they are.
            ``"step"`` records forward, loss and backward of the whole training step.
        strict: See `PerfCallback`; it also holds for reasons found while training.

    Raises:
        ValueError: There is no such scope.

    Example:
        >>> from lightning_perf.callbacks import CUDAGraph
        >>> CUDAGraph(scope="step")
        CUDAGraph(scope='step')
    """

    guide: ClassVar[str] = "T CUDA graphs"
    changes: ClassVar[frozenset[str]] = frozenset({"model"})
    exact: ClassVar[bool] = False
    moment: ClassVar[Moment] = "before_wrap"
    functions: ClassVar[frozenset[str]] = frozenset({"fit"})

    def __init__(self, scope: str = "network", *, strict: bool | None = None) -> None:
        if scope not in _SCOPES:
            raise ValueError(
                f"CUDAGraph(scope={scope!r}) was asked for; it is 'network' for the forward and "
                "backward of networks, or 'step' for the whole training step."
            )
        super().__init__(strict=strict)
        self.scope: Scope = "step" if scope == "step" else "network"

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason why nothing of this run can be recorded, or ``None``."""
        return (
            _unsupported(trainer)
            or self._second(trainer)
            or (
                _no_network(module)
                if self.scope == "network"
                else step_obstacle(module) or _unsupported_for_steps(trainer)
            )
        )

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Record and replay for the length of the run."""
        engine = ENGINES[trainer.strategy.root_device.type][self.scope]
        if self.scope == "step":
            report = partial(self._eager, "the training step")
            with step_graphs(trainer, module, engine(), report) as table:
                yield "forward, loss and backward of the training step"
                self.say(table.summary())
            return
        networks = trainable_networks(module)
        with ExitStack() as stack:
            tables = {}
            for name, network in networks.items():
                report = partial(self._eager, name)
                tables[name] = stack.enter_context(graphed_network(network, engine(), report))
            yield f"forward and backward of {', '.join(networks)}"
            for name, counts in tables.items():
                self.say(f"{name}: {counts.summary()}")

    def _second(self, trainer: Trainer) -> str | None:
        items = (item for item in _compat.callbacks(trainer) if isinstance(item, CUDAGraph))
        first = next(items, self)
        return None if first is self else f"{first!r} acts already. Keep one of the two."

    def _eager(self, what: str, reason: str) -> None:
        self.has_no_effect(f"{what} is eager: {reason}")


@contextmanager
def cuda_graphed(network: nn.Module, *, strict: bool | None = None) -> Iterator[nn.Module]:
    """Run forward and backward of a network from CUDA graphs, for the length of a block.

    Calls in train mode with gradients are recorded once for each signature and replayed; all
    others run as ever. Move the network to its device and convert it before the block.

    Args:
        network: Any module with parameters on a CUDA device.
        strict: What to do when its calls cannot be recorded: ``None`` warns, ``True`` raises,
            ``False`` keeps quiet.

    Yields:
        The network.

    Raises:
        RuntimeError: The network is on a device without CUDA graphs.

    Example:
        >>> import torch
        >>> from lightning_perf.callbacks.cuda_graph import cuda_graphed
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> if torch.cuda.is_available():
        ...     with cuda_graphed(net.cuda()):
        ...         net(torch.randn(4, 8, device="cuda")).sum().backward()
    """
    device = next((p.device.type for p in network.parameters()), "none")
    if device not in ENGINES:
        raise RuntimeError(
            f"CUDA graphs of a {type(network).__name__} were asked for, but its parameters are on "
            f"{device}. Move it to a CUDA device first."
        )
    report = partial(CUDAGraph(strict=strict)._eager, type(network).__name__)
    with graphed_network(network, ENGINES[device]["network"](), report):
        yield network


def trainable_networks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the networks that a LightningModule has as attributes, or in lists, by name.

    Single layers are no networks: a graph for each would cost more than it saves. A part of
    another network is recorded with it.
    """
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found |= {f"{name}.{part}": net for part, net in trainable_networks(child).items()}
        elif any(p.requires_grad for p in child.parameters()) and _layers(child) >= _LEAST_LAYERS:
            found[name] = child
    inner = {part for net in found.values() for part in net.modules() if part is not net}
    return {name: net for name, net in found.items() if net not in inner}


def _layers(network: nn.Module) -> int:
    return sum(1 for layer in network.modules() if not any(True for _ in layer.children()))


def _no_network(module: LightningModule) -> str | None:
    if trainable_networks(module):
        return None
    return (
        f"{type(module).__name__} has no attribute that is a network of several layers. Put its "
        "layers into one module, or use CUDAGraph(scope='step')."
    )


def _unsupported(trainer: Trainer) -> str | None:
    strategy, device = trainer.strategy, trainer.strategy.root_device.type
    if device not in ENGINES:
        return f"CUDA graphs need a CUDA device, and this run is on {device}."
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        return (
            f"{type(strategy).__name__} gathers and moves weights while a step runs. Use one "
            "device or strategy='ddp'."
        )
    if type(trainer.precision_plugin) not in _PRECISIONS:
        return (
            f"{type(trainer.precision_plugin).__name__} is not known to work in a graph. Use "
            "precision='bf16-mixed', '16-mixed' or '32-true'."
        )
    if _compat.detects_anomalies(trainer) or torch.is_anomaly_enabled():
        return "detect_anomaly=True reads every gradient on the host. Turn it off."
    return None


def _unsupported_for_steps(trainer: Trainer) -> str | None:
    if not isinstance(trainer.strategy, DDPStrategy):
        return None
    if _compat.ddp_comm_hook(trainer.strategy) is not None:
        return (
            "a DDP communication hook runs Python in every step. Remove it or use "
            "CUDAGraph(scope='network')."
        )
    # NCCL registers the buffers of captured collectives, and expandable segments move under it.
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    expandable = "expandable_segments:true" in settings.replace(" ", "").lower()
    if expandable and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        return (
            "the allocator uses expandable_segments, which NCCL in a graph does not stand. Set "
            "NCCL_GRAPH_REGISTER=0 before the start, or leave expandable_segments out."
        )
    return None
