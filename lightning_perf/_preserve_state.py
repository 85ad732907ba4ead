"""A guard for warm-ups and probes: what runs inside leaves no trace."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from lightning_perf import _compat

Restore = Callable[[], None]

# Objects found on the way whose attributes are followed; all others are kept by reference.
_STATEFUL: tuple[type, ...] = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, Sampler)
_CONTAINERS = (dict, list, set, deque, tuple)
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
# Nothing to remember about these; named so that long lists of them are passed over quickly.
_ATOMS = (
    *(int, float, complex, str, bytes, type(None), type),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
)


@contextmanager
def preserve_state(
    trainer: Trainer, module: LightningModule, *, on_host: bool = False
) -> Iterator[None]:
    """Undo everything that the block does to a run: model, optimizers, trainer, random numbers.

    Whatever steps run inside, also when they raise: parameters and buffers (in place, in the same
    storage), gradients (``None`` stays ``None``), ``requires_grad`` and train/eval flags, metrics,
    plain attributes and containers of every submodule, optimizers with their parameter groups,
    schedulers, the gradient scaler, loop counters, logged values, the trainer's stage, the order
    of the data loaders, and all random number generators are afterwards as before. Attributes that
    the block sets on the model are undone as well: install results after it.

    The snapshot takes as much memory as all its tensors together: parameters, buffers, gradients
    and optimizer state once more.

    Not undone: what leaves the process (logger files, checkpoints), callbacks' own state, batches
    taken from the running training iterator (make a new one from the loader), and attributes of
    objects that are neither modules, optimizers nor schedulers.

    Args:
        trainer: The trainer of the run.
        module: Its LightningModule.
        on_host: Keep the snapshot in the memory of the host, for blocks that need what is free on
            the device. By default it lies where its tensors are, which is faster.

    Raises:
        RuntimeError: The model has layers whose shapes are not known before their first batch.
    """
    with ExitStack() as stack:
        for combined in _compat.combined_loaders(trainer):
            # A thread that fetches in advance would advance what is remembered here.
            stack.enter_context(getattr(combined, "paused", nullcontext)())
        snapshot = _Snapshot((*_STATEFUL, *_compat.RUN_STATE), on_host=on_host)
        for combined in _compat.combined_loaders(trainer):
            snapshot.remember_attributes(combined)
            for loader in combined.flattened:
                snapshot.remember_loader(loader)
        for loader in _compat.given_loaders(trainer):
            snapshot.remember_loader(loader)
        snapshot.remember_source(trainer.datamodule)  # type: ignore[attr-defined]  # not declared
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        wrapper = trainer.strategy.model  # DDP's, say, with marks of its own
        snapshot.follow(trainer, module, wrapper, *trainer.optimizers, *schedulers, scaler)
        stack.enter_context(preserve_rng())
        stack.enter_context(snapshot.undone())
        yield


@contextmanager
def preserve_model(
    model: nn.Module, optimizers: Iterable[Optimizer] = (), *, others: Iterable[Any] = ()
) -> Iterator[None]:
    """Undo everything that the block does to a model, its optimizers and random numbers.

    The same as `preserve_state`, without a trainer.

    Args:
        model: Any module.
        optimizers: Its optimizers.
        others: Learning rate schedulers, gradient scalers, samplers and the like.

    Raises:
        RuntimeError: The model has layers whose shapes are not known before their first batch.

    Example:
        >>> net = nn.BatchNorm1d(2)
        >>> with preserve_model(net):
        ...     _ = net(torch.randn(8, 2))
        >>> net.running_mean
        tensor([0., 0.])
    """
    snapshot = _Snapshot(_STATEFUL)
    snapshot.follow(model, *optimizers, *others)
    with preserve_rng(), snapshot.undone():
        yield


@contextmanager
def preserve_loader(loader: Any) -> Iterator[None]:
    """Undo what the block does to a loader's order, its dataset's attributes and random numbers.

    Args:
        loader: Any loader. Workers that are serving it are not disturbed.
    """
    snapshot = _Snapshot(_STATEFUL)
    snapshot.remember_loader(loader)
    with preserve_rng(), snapshot.undone():
        yield


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Undo what the block draws from the generators of Python, NumPy and torch on any device.

    CUDA is left alone where it is not initialised yet: asking would initialise it.
    """
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
            for generator in torch.cuda.default_generators:
                stack.callback(generator.set_state, generator.get_state())
        if torch.backends.mps.is_available():
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        yield


class _Snapshot:
    """Remembers objects, everything below them included, and puts them back.

    Args:
        stateful: Types whose attributes are followed.
        on_host: Where to keep the values of tensors: on the host, or on their own devices.
    """

    def __init__(self, stateful: tuple[type, ...], *, on_host: bool = False) -> None:
        self._stateful = stateful
        self._on_host = on_host
        # Held, not only their ids: the id of a dead object may come back.
        self._seen: dict[int, Any] = {}
        self._structure: list[Restore] = []
        self._values: list[Restore] = []
        self._loaders: list[DataLoader[Any]] = []

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put everything back after the block; an error in one step does not stop the others."""
        with ExitStack() as stack:
            # Run in reverse: first the objects return to their places, then values to the objects.
            for restore in [*self._values, *self._structure]:
                stack.callback(restore)
            # Casts of weights that the block changed may be cached by an autocast around it.
            stack.callback(torch.clear_autocast_cache)
            for loader in self._loaders:
                # Persistent workers serve one iteration at a time: a second one inside the block
                # would take over, and end, the one that is under way.
                loader._iterator = None
            yield

    def follow(self, *roots: Any) -> None:
        """Remember the attributes of each root and all that is reached through them."""
        todo: list[Any] = []
        for root in roots:
            todo.extend((root, vars(root)) if hasattr(root, "__dict__") else (root,))
        while todo:
            thing = todo.pop()
            if isinstance(thing, _ATOMS) or id(thing) in self._seen:
                continue
            self._seen[id(thing)] = thing
            if isinstance(thing, Tensor):
                todo.append(self._remember_tensor(thing))
            elif isinstance(thing, np.ndarray):
                if thing.flags.writeable:
                    self._values.append(partial(np.copyto, thing, thing.copy()))
            elif isinstance(thing, _GENERATORS):
                self._values.append(_generator_restore(thing))
            else:
                if isinstance(thing, self._stateful):
                    todo.append(vars(thing))
                if isinstance(thing, _CONTAINERS):
                    if not isinstance(thing, tuple):
                        self._structure.append(_container_restore(thing))
                    todo.extend(thing.values() if isinstance(thing, dict) else thing)

    def remember_attributes(self, thing: Any) -> None:
        """Remember which objects the attributes of ``thing`` are, not what is in them."""
        attributes = getattr(thing, "__dict__", None)
        if attributes is not None:
            self._structure.append(_container_restore(attributes))

    def remember_source(self, source: Any) -> None:
        """Remember how far a dataset or data module is, without copying what it holds."""
        self.remember_attributes(source)
        for value in getattr(source, "__dict__", {}).values():
            if isinstance(value, _GENERATORS):
                self.follow(value)
            elif isinstance(value, DataLoader):
                self.remember_loader(value)

    def remember_loader(self, loader: Any) -> None:
        """Remember in what order a loader gives its data."""
        self.remember_attributes(loader)
        dataset = getattr(loader, "dataset", None)
        self.remember_source(dataset)
        self._seen[id(dataset)] = dataset  # samplers refer to it, and it may be a plain list
        for name in ("generator", "sampler", "batch_sampler"):
            self.follow(getattr(loader, name, None))
        if isinstance(loader, DataLoader):
            self._loaders.append(loader)

    def _remember_tensor(self, tensor: Tensor) -> Tensor | None:
        """Remember one tensor; return its gradient, to be remembered as well."""
        if is_lazy(tensor):
            raise RuntimeError(
                "The state of the model was to be preserved, but it has a lazy layer whose shape "
                "is not known yet. Pass one batch through the model first."
            )
        if tensor.requires_grad and not tensor.is_leaf:
            # The graph behind it needs its values; they are results, and nobody writes to results.
            return None
        self._values.append(_tensor_restore(tensor, on_host=self._on_host))
        return tensor.grad


def _generator_restore(generator: Any) -> Restore:
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    state = generator.get_state()

    def restore() -> None:
        generator.set_state(state)

    return restore


def _container_restore(container: Any) -> Restore:
    """Return what puts the same objects back into a container, in the same order."""
    is_dict = isinstance(container, dict)
    before = _flat(container)

    def restore() -> None:
        if len(now := _flat(container)) == len(before) and all(map(is_, now, before)):
            return
        container.clear()
        if is_dict:
            # Not `update`: a Counter would count.
            for key, value in zip(before[::2], before[1::2], strict=True):
                container[key] = value
        else:
            (container.update if isinstance(container, set) else container.extend)(before)

    return restore


def _flat(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return list(chain.from_iterable(container.items()))
    return list(container)


def _tensor_restore(tensor: Tensor, *, on_host: bool) -> Restore:
    """Return what puts values, storage, version, gradient and flag of one tensor back.

    Autograd compares versions, not values: to graphs that wait for their backward, the same values
    put back would look like others.
    """
    version = nullcontext() if tensor.is_inference() else _unsafe_preserve_version_counter(tensor)
    alias = tensor.detach()
    values = _distinct(alias)
    values = values.to("cpu", copy=True) if on_host else values.clone()
    requires_grad, gradient = tensor.requires_grad, tensor.grad

    def restore() -> None:
        # Tensors made in inference mode can be written to only there; for others it would hide the
        # change from autograd.
        with version, torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            if not tensor.is_leaf:
                tensor.detach_()  # the block computed into it
            if not _same_place(tensor, alias):
                tensor.data = alias
            _distinct(tensor).copy_(values)
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not gradient:
            tensor.grad = gradient

    return restore


def _same_place(tensor: Tensor, alias: Tensor) -> bool:
    if tensor.layout != torch.strided or alias.layout != torch.strided:
        return tensor.layout == alias.layout
    return (
        tensor.device == alias.device
        and tensor.dtype == alias.dtype
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.data_ptr() == alias.data_ptr()
    )


def _distinct(tensor: Tensor) -> Tensor:
    """View of each element once: an expanded tensor cannot be written to."""
    if tensor.layout == torch.strided:
        for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor
