"""One signature of a training step, recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_perf import _compat
from lightning_perf._attributes import instance_attribute
from lightning_perf.callbacks._graph.engine import Engine
from lightning_perf.callbacks._graph.probe import IneligibleError, LogRecorder
from lightning_perf.callbacks._graph.signature import filled, flatten
from lightning_perf.callbacks._graph.state import FrozenState
from lightning_perf.callbacks._graph.step_checks import Rehearsal, without_number


class StepGraph:
    """One signature of the training step, recorded.

    Args:
        trainer: The trainer of the run.
        module: Its LightningModule.
        engine: What records and repeats.
        kwargs: Arguments of the step, as the loop gives them.
        rehearsal: What a trial run of the step showed.
        gradients: Where gradients lie for all graphs; missing ones are added.

    Raises:
        IneligibleError: A replay would not do what the step does.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        engine: Engine,
        kwargs: Mapping[str, Any],
        rehearsal: Rehearsal,
        gradients: dict[nn.Parameter, Tensor],
    ) -> None:
        self._module = module
        self._engine = engine
        self._read = rehearsal.read
        self._frozen: FrozenState | None = None
        self.parameters = rehearsal.parameters
        for parameter in module.parameters():
            parameter.grad = None
        for parameter in self.parameters:
            if parameter not in gradients:
                gradients[parameter] = torch.zeros_like(parameter)
            parameter.grad = gradients[parameter]
        arguments = without_number(kwargs)

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            recorder = LogRecorder(module)
            with instance_attribute(module, "log", recorder):
                result = _compat.training_step(trainer, {**kwargs, **filled(arguments, values)})
            if recorder.found or result.closure_loss is None:
                raise IneligibleError("training_step does something else than it did a moment ago.")
            scaled = _scaled(trainer, result.closure_loss)
            module.backward(scaled)
            results = {
                "loss": result.loss,
                "scaled": scaled,
                "extra": result.extra,
                "logged": recorder.logged,
            }
            outputs = [tensor.detach() for tensor in flatten(results)[0]]
            self._template = filled(results, outputs)
            return tuple(outputs)

        self._graph = engine.capture(function, rehearsal.statics)

    def freeze(self) -> None:
        """Remember the state of the model that is in the graph, once the trial left no trace."""
        self._frozen = FrozenState(self._module, self._read)

    def changed(self) -> str | None:
        """Return what is not any more as it was recorded."""
        return self._frozen.changed() if self._frozen is not None else None

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Run the step on other tensors; the results hold until the next replay."""
        return filled(self._template, self._engine.replay(self._graph, tensors))


def _scaled(trainer: Trainer, loss: Tensor) -> Tensor:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return loss if scaler is None else scaler.scale(loss)
