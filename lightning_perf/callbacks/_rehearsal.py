"""One forward and backward of a run that leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_perf import _compat
from lightning_perf._attributes import instance_attribute
from lightning_perf._batches import map_tensors
from lightning_perf._preserve_state import preserve_state
from lightning_perf.callbacks._largest_input import Input, shapes
from lightning_perf.callbacks._out_of_memory import (
    is_out_of_memory,
    memory_in_use,
    release_memory,
)

# Wrapped by items that count steps, and this is none.
_STEP = ("training_step", "backward", "optimizer_step")


@contextmanager
def rehearsal(trainer: Trainer, module: LightningModule) -> Iterator[Callable[[Any], bool]]:
    """Let training steps run that nobody sees and that change nothing.

    They run as in training, on the wrapped model, in the precision of the run, but without updates:
    optimizers and schedulers that a step of manual optimization calls do nothing. Callbacks,
    loggers and the profiler are not told. Gradients of ranks are not reduced, since that would
    change the state of DDP's reducer.

    Args:
        trainer: In a ``fit``, between two steps.
        module: Its LightningModule.

    Yields:
        A function that takes a batch on the device and runs one forward and backward. It returns
        false where `training_step` returned no loss.
    """
    strategy = trainer.strategy
    with ExitStack() as stack:
        # On the host: the step shall find as much free memory as in training.
        stack.enter_context(preserve_state(trainer, module, on_host=True))
        stack.enter_context(_unwrapped(strategy))
        stack.enter_context(_no_updates(trainer))
        stack.enter_context(_unseen(trainer))
        stack.enter_context(_unreduced(strategy))

        def step(batch: Any) -> bool:
            return _step(trainer, module, batch)

        yield step


@dataclass
class Run:
    """How it went on this rank, and on all: whether all had enough memory, and a loss."""

    shapes: list[str] = field(default_factory=list)
    error: Exception | None = None
    memory: str = ""
    fits: bool = True
    without_loss: bool = False


def run_inputs(
    trainer: Trainer, step: Callable[[Any], bool], inputs: list[Input], size: int | None = None
) -> Run:
    """Run a step for each input, all ranks together, until one is too large for some rank.

    Args:
        trainer: The trainer of the run.
        step: What `rehearsal` yields.
        inputs: What to run, as many on each rank.
        size: How much of each, at most, if only a part shall be tried.
    """
    run = Run()
    for each in inputs:
        try:
            # Copies: a step may write to its batch, and that may share memory with the dataset.
            batch = map_tensors(each.make(min(size or each.size, each.size)), Tensor.clone)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            run.shapes.append(shapes(batch))
            run.without_loss |= not step(batch)
        except Exception as error:
            # What is smaller than any real input may fail otherwise, and does not fit then either.
            if size is None and not is_out_of_memory(error):
                raise
            run.error, run.memory = error, memory_in_use(trainer.strategy.root_device)
        batch = None
        if run.error is not None:
            release_memory(run.error)  # ranks need some to tell each other
        ranks = everyone((run.error is None, run.without_loss))
        run.fits = all(fits for fits, _ in ranks)
        run.without_loss = any(without for _, without in ranks)
        if not run.fits:
            break
    return run


def everyone(mine: Any) -> list[Any]:
    """Return what each rank says."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [mine]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def _step(trainer: Trainer, module: LightningModule, batch: Any) -> bool:
    arguments = [batch]
    if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
        arguments.append(trainer.fit_loop.epoch_loop.batch_idx + 1)
    with _compat.inside_hook(module, "on_train_batch_start"):
        module.on_train_batch_start(batch, trainer.fit_loop.epoch_loop.batch_idx + 1)
    with _compat.inside_hook(module, "training_step"):
        output = trainer.strategy.training_step(*arguments)
    if not module.automatic_optimization:
        return True
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        return False
    with _compat.inside_hook(module, "backward"):
        trainer.strategy.backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])
    return True


@contextmanager
def _unwrapped(strategy: Strategy) -> Iterator[None]:
    attributes = vars(strategy)
    wrappers = {name: attributes.pop(name) for name in _STEP if name in attributes}
    try:
        yield
    finally:
        attributes.update(wrappers)


@contextmanager
def _no_updates(trainer: Trainer) -> Iterator[None]:
    def only_compute(optimizer: Any, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        return closure()

    def only_call(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return None if closure is None else closure()

    def nothing(*_: Any, **__: Any) -> None:
        return None

    with ExitStack() as stack:
        stack.enter_context(instance_attribute(trainer.strategy, "optimizer_step", only_compute))
        for optimizer in trainer.optimizers:
            stack.enter_context(instance_attribute(optimizer, "step", only_call))
        for config in trainer.lr_scheduler_configs:
            stack.enter_context(instance_attribute(config.scheduler, "step", nothing))
        yield


@contextmanager
def _unseen(trainer: Trainer) -> Iterator[None]:
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with (
            instance_attribute(trainer, "callbacks", []),
            instance_attribute(trainer, "profiler", PassThroughProfiler()),
        ):
            yield
    finally:
        trainer.loggers = loggers


@contextmanager
def _unreduced(strategy: Strategy) -> Iterator[None]:
    model = strategy.model
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    try:
        with model.no_sync():
            yield
    finally:
        if model.find_unused_parameters:
            # Even in `no_sync` the reducer notes which parameters got a gradient, and would miss
            # those that the first step does not use.
            model.reducer._reset_state()
