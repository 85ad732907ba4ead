"""Whether a training step may become a graph: what is known before, and a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_perf._attributes import instance_attribute
from lightning_perf._batches import batches_unseen
from lightning_perf.callbacks._graph.probe import (
    IneligibleError,
    LogRecorder,
    Watched,
    attribute_reads,
    observed,
    require_capturable,
    trainer_reads,
)
from lightning_perf.callbacks._graph.signature import filled, static_copy
from lightning_perf.callbacks._graph.state import FrozenState

# The graph holds the backward and finds gradients allocated: these would not run, or in another
# order.
_HOOKS = ("backward", "on_before_backward", "on_before_zero_grad", "optimizer_zero_grad")


def step_obstacle(module: LightningModule) -> str | None:
    """Return the reason why the steps of a module cannot be graphs, as far as its code says it."""
    name = type(module).__name__
    if not module.automatic_optimization:
        return (
            f"{name} uses manual optimization, whose steps do more than forward and backward. Use "
            "CUDAGraph(scope='network')."
        )
    for hook in _HOOKS:
        if is_overridden(hook, module):
            return (
                f"{name} overrides `{hook}`, which a graph would pass over. Use "
                "CUDAGraph(scope='network')."
            )
    return batches_unseen(module)


def ddp_obstacle(trainer: Trainer) -> str | None:
    """Return the reason why DDP's reduction of gradients cannot be in a graph."""
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return None
    if model.find_unused_parameters:
        return (
            "DDP looks for unused parameters (find_unused_parameters=True) on the host in every "
            "step. Use strategy='ddp' or CUDAGraph(scope='network')."
        )
    if model.gradient_as_bucket_view:
        return (
            "DDP moves gradients into its buckets (gradient_as_bucket_view=True), and a graph "
            "needs them in place. Leave the option out or use CUDAGraph(scope='network')."
        )
    return None


class Rehearsal(NamedTuple):
    """What a trial run of a step showed.

    Attributes:
        statics: Copies of the tensors in its arguments.
        parameters: Those that got a gradient.
        read: Attributes of the module that were read.
    """

    statics: tuple[Tensor, ...]
    parameters: list[nn.Parameter]
    read: set[str]


def without_number(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a step without the number of the batch."""
    return {name: value for name, value in kwargs.items() if name != "batch_idx"}


def rehearsed(
    trainer: Trainer,
    module: LightningModule,
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
) -> Rehearsal:
    """Run one step with its backward, without DDP, to see that a replay would do the same.

    Args:
        trainer: The trainer of the run.
        module: Its LightningModule, whose state the caller preserves.
        kwargs: Arguments of the step, as the loop gives them.
        tensors: The tensors in them.

    Raises:
        IneligibleError: It would not.
    """
    require_capturable(module, hooks_around=False)
    statics = tuple(static_copy(tensor) for tensor in tensors)
    kwargs = {**kwargs, **filled(without_number(kwargs), statics)}
    for parameter in module.parameters():
        parameter.grad = None
    state = FrozenState(module)
    versions = [tensor._version for tensor in statics]
    noticed: list[str] = []
    try:
        with observed() as found, attribute_reads(module) as read:
            loss = _rehearsed_step(trainer, module, kwargs, noticed)
            if loss is not None:
                module.backward(loss)
    except Exception as error:
        # What stands in for the number of the batch may be the cause.
        if noticed:
            raise IneligibleError(f"training_step {noticed[0]}.") from error
        raise
    found = [*noticed, *found]
    if [tensor._version for tensor in statics] != versions:
        found.append("changes its batch in place")
    if changed := state.changed():
        found.append(f"changes {changed}, and a replay would not")
    if loss is None:
        found.append("returned None")
    trained = [p for p in module.parameters() if p.grad is not None]
    if any(p.grad is not None and p.grad.layout is not torch.strided for p in trained):
        found.append("has sparse gradients")
    if found:
        raise IneligibleError(f"training_step {found[0]}.")
    return Rehearsal(statics, trained, read)


def _rehearsed_step(
    trainer: Trainer, module: LightningModule, kwargs: Mapping[str, Any], noticed: list[str]
) -> Tensor | None:
    def batch_idx_used() -> None:
        noticed.append("uses `batch_idx`, which a graph would freeze")

    if "batch_idx" in kwargs:
        kwargs = {**kwargs, "batch_idx": Watched(kwargs["batch_idx"], batch_idx_used)}
    recorder = LogRecorder(module)
    with (
        instance_attribute(module, "log", recorder),
        trainer_reads(trainer, noticed.append),
        trainer.precision_plugin.train_step_context(),
    ):
        output = module.training_step(*kwargs.values())
    noticed += recorder.found
    return ClosureResult.from_training_step_output(output).closure_loss
