"""Forward, loss and backward of a training step as one graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_perf import _compat
from lightning_perf._attributes import instance_attribute
from lightning_perf._batches import map_tensors
from lightning_perf._preserve_state import preserve_model
from lightning_perf.callbacks._graph.engine import Engine
from lightning_perf.callbacks._graph.probe import IneligibleError, first_cause
from lightning_perf.callbacks._graph.ranks import Ranks, ddp_on_stream, ranks_together
from lightning_perf.callbacks._graph.signature import constants, flatten
from lightning_perf.callbacks._graph.step_checks import (
    Rehearsal,
    ddp_obstacle,
    rehearsed,
    without_number,
)
from lightning_perf.callbacks._graph.step_record import StepGraph
from lightning_perf.callbacks._graph.table import GraphTable

Report = Callable[[str], None]
T = TypeVar("T")

DDP_WARM_UP = 11
"""Eager steps that DDP needs before a capture: it times its first ten."""


class _Way(IntEnum):
    """What becomes of one step; ranks take the least of theirs."""

    EAGER_FOR_GOOD = 0
    EAGER = 1
    CAPTURE = 2
    REPLAY = 3


@contextmanager
def step_graphs(
    trainer: Trainer, module: LightningModule, engine: Engine, report: Report
) -> Iterator[GraphTable[StepGraph]]:
    """Run training steps in automatic optimization as graphs, for a block.

    Args:
        trainer: The trainer of the run; its strategy has not wrapped the module yet.
        module: Its LightningModule.
        engine: What records and repeats.
        report: Called with the reason when steps stay eager for good.

    Yields:
        The counts.
    """
    loop, make_closure = _compat.closure_maker(trainer)
    make = getattr(loop, make_closure)

    with ranks_together() as ranks, ddp_on_stream(trainer.strategy, engine):
        steps = _GraphedSteps(trainer, module, engine, ranks, report)

        def replaced(kwargs: Any, optimizer: Any, batch_idx: int) -> _Closure:
            return _Closure(steps, make(kwargs, optimizer, batch_idx), kwargs)

        with instance_attribute(loop, make_closure, replaced):
            yield steps.table
        steps.table.graphs.clear()


class _Closure:
    """Takes the place of Lightning's closure, which runs a step and its backward."""

    def __init__(self, steps: _GraphedSteps, stock: Any, kwargs: Mapping[str, Any]) -> None:
        self._steps = steps
        self._stock = stock
        self._kwargs = kwargs
        self._result: ClosureResult | None = None

    @torch.enable_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._result = self._steps.run(self._stock, self._kwargs)
        return self._result.loss

    def consume_result(self) -> ClosureResult:
        """Return what the step gave, once; Lightning's own says it if there was no call."""
        result, self._result = self._result, None
        return self._stock.consume_result() if result is None else result


class _GraphedSteps:
    """Decides for each step: eager, recorded, or replayed."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        engine: Engine,
        ranks: Ranks,
        report: Report,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._engine = engine
        self._ranks = ranks
        self._report = report
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._over = False
        warm_up = DDP_WARM_UP if isinstance(trainer.strategy, DDPStrategy) else 0
        self.table: GraphTable[StepGraph] = GraphTable(warm_up)

    def run(self, stock: Any, kwargs: Mapping[str, Any]) -> ClosureResult:
        """Run one step with its backward; return what Lightning's closure would."""
        backward, zero_grad = _compat.closure_parts(stock)
        if self._over or backward is None:
            self.table.eager += 1
            return _eager(stock)
        arguments = without_number(kwargs)
        tensors, signature = flatten(arguments)
        key = (signature, self._trainer.accumulate_grad_batches, _ddp_state(self._trainer))
        way = self._ranks.least(self._way(key, arguments, tensors))
        if way == _Way.CAPTURE:
            way = self._captured(key, kwargs, tensors)
        if way == _Way.REPLAY:
            return self._replayed(self.table.graphs[key], tensors, zero_grad)
        if way == _Way.EAGER_FOR_GOOD:
            self._stop()
        self.table.count_eager(key)
        with self._engine.warm_up():
            return _eager(stock)

    def _way(self, key: Hashable, arguments: Any, tensors: Sequence[Tensor]) -> _Way:
        if self.table.reason is None:
            self.table.reason = self._obstacle(arguments, tensors)
        graph = self.table.graphs.get(key)
        if graph is not None and (changed := graph.changed()):
            self.table.drop(key, changed)
            graph = None
        if self.table.reason is not None:
            return _Way.EAGER_FOR_GOOD
        if graph is not None:
            return _Way.REPLAY
        return _Way.CAPTURE if self.table.is_due(key) else _Way.EAGER

    def _obstacle(self, arguments: Any, tensors: Sequence[Tensor]) -> str | None:
        place, value = next(constants(arguments["batch"]), (None, None))
        if place is not None:
            return (
                f"{place} is the Python value {value!r}, which a graph would freeze. Make it a "
                "tensor in the collate function, or leave it out."
            )
        device = self._trainer.strategy.root_device
        if any(tensor.device != device for tensor in tensors):
            return f"the batch has tensors that are not on {device}. Move them there."
        return ddp_obstacle(self._trainer)

    def _stop(self) -> None:
        self._over = True
        self.table.graphs.clear()
        self.table.reason = self._ranks.first(self.table.reason)
        self._report(self.table.reason)

    def _captured(self, key: Hashable, kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> int:
        """Rehearse and record on all ranks; a rank alone would wait for the others for ever."""
        trainer, module, engine = self._trainer, self._module, self._engine

        def rehearse() -> Rehearsal:
            with engine.warm_up():
                return rehearsed(trainer, module, kwargs, tensors)

        rehearsal = self._tried(rehearse)
        way = self._ranks.least(_Way.CAPTURE if rehearsal else _Way.EAGER_FOR_GOOD)
        if way != _Way.CAPTURE or rehearsal is None:
            return way
        record = partial(StepGraph, trainer, module, engine, kwargs, rehearsal, self._gradients)
        graph = self._tried(record)
        if graph is None:
            _forget_reduction(trainer)
            return self._ranks.least(_Way.EAGER_FOR_GOOD)
        graph.freeze()
        self.table.add(key, graph)
        return self._ranks.least(_Way.REPLAY)

    def _tried(self, run: Callable[[], T]) -> T | None:
        """Return what a trial run gives, without a trace; ``None`` and the reason if it fails."""
        try:
            with preserve_model(self._module):
                return run()
        except IneligibleError as reason:
            self.table.reason = str(reason)
        except Exception as error:
            self.table.reason = f"the capture failed: {first_cause(error)}"
        return None

    def _replayed(
        self, graph: StepGraph, tensors: Sequence[Tensor], zero_grad: Callable[[], None] | None
    ) -> ClosureResult:
        self.table.replayed += 1
        if zero_grad is not None:
            zero_grad()
        self._attach_gradients(graph.parameters)
        results = graph.replay(tensors)
        _note_in_ddp(self._trainer)
        with _compat.inside_hook(self._module, "training_step"):
            for name, value, arguments in results["logged"]:
                self._module.log(name, value, **arguments)
        plugin = self._trainer.precision_plugin
        # The plugin's own would scale the loss: the graph has done that.
        Precision.pre_backward(plugin, results["scaled"], self._module)
        plugin.post_backward(results["scaled"], self._module)
        # The next replay overwrites what this one returned.
        extra = map_tensors(results["extra"], torch.clone)
        return ClosureResult(results["loss"], extra=extra)

    def _attach_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put the gradients into the memory where the graph adds to them.

        An optimizer that sets them to None, or the end of a validation in the epoch, took them
        away; an eager step made new ones.
        """
        empty = []
        for parameter in parameters:
            own, gradient = self._gradients[parameter], parameter.grad
            if gradient is own:
                continue
            if gradient is None:
                empty.append(own)
            else:
                own.copy_(gradient)
            parameter.grad = own
        if empty:
            torch._foreach_zero_(empty)


def _eager(stock: Any) -> ClosureResult:
    stock()
    result: ClosureResult = stock.consume_result()
    return result


def _ddp_state(trainer: Trainer) -> tuple[bool, ...]:
    """Return what DDP does in this step: broadcast buffers, reduce gradients."""
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return ()
    return model.require_forward_param_sync, model.require_backward_grad_sync


def _note_in_ddp(trainer: Trainer) -> None:
    """Do what DDP does in Python after a forward: buffers differ once a step was not eager too."""
    model = trainer.strategy.model
    if isinstance(model, DistributedDataParallel):
        model.require_forward_param_sync = model.require_backward_grad_sync


def _forget_reduction(trainer: Trainer) -> None:
    """Let DDP start anew after a step that broke off: it would wait for its other gradients."""
    model = trainer.strategy.model
    if isinstance(model, DistributedDataParallel):
        model.reducer._reset_state()
