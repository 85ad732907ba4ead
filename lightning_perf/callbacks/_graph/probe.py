"""A trial run that notes everything a replay would not do again."""

from __future__ import annotations

import io
import linecache
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_perf._attributes import instance_attribute

Note = Callable[[str], None]

_AWAITED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_LIBRARIES = tuple(
    str(Path(str(module.__file__)).parent)
    for module in (torch, lightning.pytorch, sys.modules["lightning_perf"])
)
_VARYING = ("global_step", "current_epoch", "is_last_batch", "callback_metrics", "logged_metrics")
_OUTSIDE = ("logger", "loggers")


class IneligibleError(Exception):
    """The reason why something cannot become a graph, for the user to read."""


def require_capturable(model: nn.Module, *, hooks_around: bool = True) -> None:
    """Raise `IneligibleError` for layers whose Python must run in every step.

    Args:
        model: A network or a LightningModule.
        hooks_around: Hooks of ``model`` itself run outside of the graph.
    """
    for name, layer in model.named_modules():
        it = f"its layer {name}" if name else "it"
        if layer._compiled_call_impl is not None:
            raise IneligibleError(
                f"{it} is compiled. For compiled networks use Compile(mode='reduce-overhead'), "
                "which makes CUDA graphs itself."
            )
        if isinstance(layer, nn.SyncBatchNorm) and dist.is_initialized():
            raise IneligibleError(f"{it} communicates with other processes (SyncBatchNorm).")
        hooks = (
            *(layer._forward_hooks, layer._forward_pre_hooks),
            *(layer._backward_hooks, layer._backward_pre_hooks),
        )
        if any(hooks) and (name or not hooks_around):
            raise IneligibleError(f"{it} has hooks, which a replay would not call.")


def first_cause(error: BaseException) -> str:
    """Return the message of what went wrong first: ending a broken capture fails once more."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def observed() -> Iterator[list[str]]:
    """Note, in words, what happens in the block and would not happen in a replay."""
    found: list[str] = []
    python, numpy = random.getstate(), _numpy_state()
    printed = io.StringIO()

    def get_rng_state() -> Tensor:
        found.append(
            "saves the state of random numbers, as activation checkpointing does by default, and "
            "a graph does not allow it; pass preserve_rng_state=False if nothing there is random"
        )
        return rng_state()

    rng_state = torch.get_rng_state
    with (
        redirect_stdout(printed),
        instance_attribute(torch, "get_rng_state", get_rng_state),
        HostWork(found.append),
    ):
        yield found
    if printed.getvalue():
        found.append("prints, and a replay would not")
    if random.getstate() != python or _numpy_state() != numpy:
        found.append(
            "draws random numbers from Python or NumPy, and a replay would repeat the first ones; "
            "draw them with torch on the device"
        )


def _numpy_state() -> tuple[Any, ...]:
    state: tuple[Any, ...] = np.random.get_state(legacy=True)  # type: ignore[assignment]  # legacy
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)


class HostWork(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes operations that the host must wait for, and ones that reach other devices.

    Args:
        note: Called with a description of each.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at it."""
        result = func(*args, **(kwargs or {}))
        if (what := _host_work(func, args, result)) is not None:
            self._note(f"{what}{_where()}")
        return result


def _host_work(func: Any, args: Any, result: Any) -> str | None:
    name = func.overloadpacket.__name__
    if func.namespace in ("c10d", "_c10d_functional"):
        return f"communicates with other processes (`{name}`)"
    if func is torch.ops.aten._local_scalar_dense.default:
        return "reads a value on the host, as .item(), float() and `if tensor` do"
    if func is torch.ops.aten.index.Tensor or name in ("index_put", "index_put_"):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        filled = name != "index" and args[2].numel() == 1  # becomes a masked_fill
        return f"selects with a mask (`{name}`)" if masks and not filled else None
    if _AWAITED & set(func.tags):
        return f"has a result whose size depends on values (`{name}`)"
    if name in ("copy_", "_to_copy"):
        devices = {t.device.type for t in tree_leaves((args[:2], result)) if isinstance(t, Tensor)}
        if len(devices) > 1:
            return f"copies between {' and '.join(sorted(devices))}"
    return None


def _where() -> str:
    """Return file, line and code of the innermost frame that belongs to no library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    if frame is None:
        return ""
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f" in {Path(path).name}:{line}, `{linecache.getline(path, line).strip()}`"


@contextmanager
def trainer_reads(trainer: Trainer, note: Note) -> Iterator[None]:
    """Note reads of what the trainer says and what is another thing in the next step."""
    cls = type(trainer)

    def noting(name: str, why: str) -> property:
        declared = getattr(cls, name)

        def read(self: Trainer) -> Any:
            note(f"reads `trainer.{name}`, {why}")
            return declared.fget(self)

        return property(read, declared.fset)

    frozen = {name: noting(name, "which a graph would freeze") for name in _VARYING}
    outside = {name: noting(name, "and a replay would not") for name in _OUTSIDE}
    # Properties cannot be replaced on an instance. A class of the same name, for one trial run.
    trainer.__class__ = type(cls.__name__, (cls,), {**frozen, **outside})
    try:
        yield
    finally:
        trainer.__class__ = cls


@contextmanager
def attribute_reads(module: nn.Module) -> Iterator[set[str]]:
    """Yield the names of a module's own attributes that are read in the block."""
    cls, names = type(module), set[str]()

    def read(self: nn.Module, name: str) -> Any:
        names.add(name)
        return cls.__getattribute__(self, name)

    module.__class__ = type(cls.__name__, (cls,), {"__getattribute__": read})
    try:
        yield names
    finally:
        module.__class__ = cls


class LogRecorder:
    """Takes the place of ``module.log``: keeps what was logged, to log it after each replay.

    Args:
        module: The LightningModule, to name it.
    """

    def __init__(self, module: LightningModule) -> None:
        self.logged: list[tuple[str, Tensor, dict[str, Any]]] = []
        self.found: list[str] = []
        self._device = module.device

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note one value, as it was logged."""
        arguments = dict(zip(_LOG_ARGUMENTS, args, strict=False)) | kwargs
        if isinstance(value, Metric):
            self.found.append(f"logs the torchmetrics object {name!r}; log it in a callback")
        elif not isinstance(value, Tensor):
            self.found.append(
                f"logs the Python value {name!r}, which a graph would freeze; log a tensor"
            )
        elif value.device.type != self._device.type:
            self.found.append(f"logs {name!r} from the {value.device.type}")
        elif arguments.get("enable_graph"):
            self.found.append(f"logs {name!r} with enable_graph=True")
        else:
            self.logged.append((name, value.detach(), arguments))


_LOG_ARGUMENTS = (
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist"),
    *("sync_dist_group", "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only"),
)


class Watched:
    """Stands in for an integer and notes every use of it.

    It is no ``int``: code in C would read that without asking.

    Args:
        value: The number.
        note: Called with no argument at each use.
    """

    def __init__(self, value: int, note: Callable[[], None]) -> None:
        self._value = value
        self._note = note

    def __hash__(self) -> int:
        self._note()
        return hash(self._value)


def _used(method: str) -> Callable[..., Any]:
    def use(self: Watched, *args: Any) -> Any:
        self._note()
        return getattr(int, method)(self._value, *args)

    return use


for _method in dir(int):
    if _method.startswith("__") and _method not in dir(object) and _method != "__getnewargs__":
        setattr(Watched, _method, _used(_method))
for _method in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__str__"):
    setattr(Watched, _method, _used(_method))
Watched.__format__ = _used("__format__")  # type: ignore[method-assign]  # like the ones above
