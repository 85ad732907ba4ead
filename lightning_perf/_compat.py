"""The only file that touches private attributes of Lightning.

Each use says why no public way will do, and with which versions it was checked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import TrainerState
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CallbackT = TypeVar("CallbackT", bound=Callback)

RUN_STATE: tuple[type, ...] = (
    _Loop,
    _BaseProgress,
    _LoggerConnector,
    _ResultCollection,
    TrainerState,
)
"""Types of the objects below a trainer whose attributes change as a run advances: loops and their
progress, logged values, the stage. Loops have a public ``state_dict``, but it leaves out what was
logged and what a running epoch has in hand (2.5.0 - 2.6.6)."""


def without_step_hooks(cls: type[CallbackT]) -> type[CallbackT]:
    """Let Lightning pass over a class of callbacks in every step.

    It calls each hook of each callback, with a profiler span around it, also where the hook does
    nothing; only a hook that is not callable is left out (2.5.0 - 2.6.6).

    Example:
        >>> @without_step_hooks
        ... class Idle(Callback):
        ...     pass
        >>> callable(Idle().on_train_batch_start), callable(Idle().on_train_start)
        (False, True)
    """
    for name in vars(Callback):
        if "_batch_" in name or name.startswith(("on_before_", "on_after_")):
            setattr(cls, name, vars(cls).get(name))
    return cls


def callbacks(trainer: Trainer) -> list[Callback]:
    """Return the trainer's list of callbacks: public, but set by a connector and not declared."""
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared
    return found


def detects_anomalies(trainer: Trainer) -> bool:
    """Return whether ``Trainer(detect_anomaly=True)`` was asked for.

    The argument is kept in ``_detect_anomaly`` only (2.5.0 - 2.6.6).
    """
    return bool(trainer._detect_anomaly)


def hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """Return the hyperparameters that Lightning will hand to the loggers.

    Whether they were saved with ``logger=True`` is kept in ``_log_hyperparams`` only, and how those
    of module and data module are put together in a private function (2.5.0 - 2.6.6).
    """
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # public, but not declared
    sources = (trainer.lightning_module, datamodule)
    return {
        name: value
        for source in sources
        if source is not None and source._log_hyperparams
        for name, value in source.hparams_initial.items()
        if name != "_class_path"  # LightningCLI's own
    }


def training_results(trainer: Trainer) -> _ResultCollection:
    """Return where the values that training logs are kept, one object for all runs of a trainer.

    ``self.log`` hands them to its ``log``, which alone is told by what an epoch's mean is weighed;
    the training loop holds it in ``_results`` only (2.5.0 - 2.6.6).
    """
    return trainer.fit_loop.epoch_loop._results


def combined_loaders(trainer: Trainer) -> list[CombinedLoader]:
    """Return the `CombinedLoader` of every loop that has one already.

    Their iteration state lies in the object itself; the public ``trainer.train_dataloader`` and the
    like give the user's loaders without it (2.5.0 - 2.6.6).
    """
    loaders = (loop._combined_loader for loop in _data_loops(trainer))
    return [loader for loader in loaders if loader is not None]


def given_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders handed to ``fit`` and the like, for loops that have not set them up yet.

    Until then they are kept in ``_data_source`` only (2.5.0 - 2.6.6).
    """
    sources = (loop._data_source.instance for loop in _data_loops(trainer))
    given = [source for source in sources if not isinstance(source, (DataHooks, type(None)))]
    return [loader for source in given for loader in CombinedLoader(source).flattened]


def loader_sources(trainer: Trainer) -> list[tuple[Any, str]]:
    """Return what asks for the loaders of each loop, and the mode in which it combines them.

    Loops make the `CombinedLoader` that they iterate from what ``_data_source.dataloader()``
    returns, and take one that is returned as it is. Nothing public lies between (2.5.0 - 2.6.6).
    """
    return [
        (loop._data_source, "max_size_cycle" if loop is trainer.fit_loop else "sequential")
        for loop in _data_loops(trainer)
    ]


def mode_of(combined: CombinedLoader) -> str:
    """Return how a `CombinedLoader` combines, kept in ``_mode`` only (2.5.0 - 2.6.6)."""
    return combined._mode


def before_transfer(module: LightningModule, batch: Any) -> Any:
    """Call ``on_before_batch_transfer`` of module or data module, whichever overrides it.

    Which one is decided in a private method only (2.5.0 - 2.6.6).
    """
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


@contextmanager
def inside_hook(module: LightningModule, name: str) -> Iterator[None]:
    """Let ``module.log`` find itself in the hook of that name.

    It looks at ``_current_fx_name``, which private functions of the trainer set (2.5.0 - 2.6.6).
    """
    outer = module._current_fx_name
    module._current_fx_name = name
    try:
        yield
    finally:
        module._current_fx_name = outer


def closure_maker(trainer: Trainer) -> tuple[Any, str]:
    """Return the object and the name of its method that makes the closure of a training step.

    A closure runs step, ``zero_grad`` and backward. No hook is around all of it when gradients are
    accumulated; ``_make_closure`` is (2.5.0 - 2.6.6).
    """
    return trainer.fit_loop.epoch_loop.automatic_optimization, "_make_closure"


def closure_parts(closure: Any) -> tuple[Callable[..., None] | None, Callable[[], None] | None]:
    """Return backward and ``zero_grad`` of such a closure; ``None`` for what it does not run.

    They are kept in ``_backward_fn`` and ``_zero_grad_fn`` only (2.5.0 - 2.6.6).
    """
    return closure._backward_fn, closure._zero_grad_fn


def training_step(trainer: Trainer, kwargs: Mapping[str, Any]) -> Any:
    """Run the training step through the strategy, as a closure does; return its `ClosureResult`.

    It divides the loss for accumulation; a private method of the loop does both (2.5.0 - 2.6.6).
    """
    return trainer.fit_loop.epoch_loop.automatic_optimization._training_step(OrderedDict(kwargs))


def ddp_comm_hook(strategy: DDPStrategy) -> Any:
    """Return DDP's communication hook, kept in ``_ddp_comm_hook`` (2.5.0 - 2.6.6).

    `PerfDDPStrategy` keeps it, or its name, under the name of the argument.
    """
    return getattr(strategy, "ddp_comm_hook", strategy._ddp_comm_hook)


def builds_plain_ddp(strategy: Any) -> bool:
    """Return whether `build_ddp` does what the strategy would: no subclass has its own way.

    ``_setup_model`` chooses the stream on which DDP is built: another than the current one in
    2.5.0 - 2.6.6, the current one in the development line of 2026-07.
    """
    own: Any = getattr(type(strategy), "_setup_model", None)
    return own is DDPStrategy._setup_model


def build_ddp(strategy: DDPStrategy, module: nn.Module) -> DistributedDataParallel:
    """Wrap a module as the strategy would, on the current stream.

    The arguments for DDP are kept in ``_ddp_kwargs`` only (2.5.0 - 2.6.6).
    """
    devices = strategy.determine_ddp_device_ids()
    return DistributedDataParallel(module, device_ids=devices, **strategy._ddp_kwargs)


def process_launcher(strategy: ParallelStrategy, start_method: str) -> Any:
    """Return what starts the processes of a strategy, as `DDPStrategy` does.

    The launchers are private classes, although each strategy must choose one (2.5.0 - 2.6.6).
    """
    if start_method != "popen":
        return _MultiProcessingLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]  # any of str
    environment = strategy.cluster_environment
    devices, nodes = len(strategy.parallel_devices or []), getattr(strategy, "num_nodes", 1)
    return _SubprocessScriptLauncher(environment, devices, nodes)  # type: ignore[arg-type]  # set by then


def join_process_group(strategy: ParallelStrategy, backend: str | None, timeout: timedelta) -> None:
    """Let a process join the others, as `DDPStrategy` does.

    The function that takes address and port from the cluster environment, and leaves NCCL at exit,
    is private, as is the one that chooses the backend. The rank by which `rank_zero_info` and its
    like decide is an attribute that is not declared (2.5.0 - 2.6.6).
    """
    rank_zero_only.rank = strategy.global_rank  # type: ignore[attr-defined]  # not declared
    device, environment = strategy.root_device, strategy.cluster_environment
    chosen = backend or _get_default_process_group_backend_for_device(device)
    device_id = device if device.type != "cpu" else None
    kwargs: dict[str, Any] = {"timeout": timeout, "device_id": device_id}
    _init_dist_connection(environment, chosen, **kwargs)  # type: ignore[arg-type]  # set by then


def let_lightning_rebuild(sampler: type[Any]) -> None:
    """Let Lightning build objects of a class anew with all their arguments.

    It does so with every batch sampler under DDP and in prediction, to hand in another ``sampler``.
    Of a class that is no `BatchSampler` it knows the arguments only if they are in four attributes
    of these names, which it sets itself for loaders that are made in a hook (2.5.0 - 2.6.6).

    Args:
        sampler: A class whose ``constructor_arguments()`` returns them.
    """
    arguments = property(lambda self: self.constructor_arguments())
    # By `setattr`, as names with two underscores are mangled; a property, as Lightning writes into
    # the dictionary that it gets.
    for name, value in (
        ("args", ()),
        ("kwargs", arguments),
        ("arg_names", ()),
        ("default_kwargs", {}),
    ):
        setattr(sampler, f"__pl_saved_{name}", value)


def is_unrepeated(sampler: object) -> bool:
    """Return whether Lightning handed in the sampler by which it predicts on several ranks.

    Its class is public, but not documented: ranks then need not have the same number of batches,
    and no item may come twice (2.5.0 - 2.6.6).
    """
    return isinstance(sampler, UnrepeatedDistributedSampler)


def without_index_wrapper(batch_sampler: Any) -> Any:
    """Return a batch sampler without what Lightning puts around it in prediction.

    The wrapper keeps it in ``_batch_sampler`` only (2.5.0 - 2.6.6).
    """
    return getattr(batch_sampler, "_batch_sampler", batch_sampler)


def _data_loops(trainer: Trainer) -> tuple[Any, ...]:
    return (
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    )
