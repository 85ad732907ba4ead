"""Chosen modules in float32 inside autocast."""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_perf._attributes import instance_attribute
from lightning_perf._batches import map_tensors
from lightning_perf._item import Moment, PerfCallback
from lightning_perf.callbacks._blocks import has_forward

_HALF = (torch.float16, torch.bfloat16)
_FEW = 8  # names that fit into a line


class KeepInFP32(PerfCallback):
    """Run chosen modules (softmax, norms, losses) in float32 under mixed precision.

    Inside autocast, their half-precision inputs are cast to float32 and autocast is off, for
    everything in them. Their outputs stay in float32, as those of operations for which autocast
    itself prefers float32; the next layer casts them down if it wants to. Use it for layers that
    overflow or lose digits in half precision. Autocast keeps many operations in float32 already,
    on a CPU fewer than on a GPU; naming those again changes nothing.

    Args:
        modules: Names of modules, such as ``"net.head"``, or of their classes, such as
            ``"LayerNorm"``, which stands for its subclasses too.
        strict: See `PerfCallback`.

    Raises:
        ValueError: There is no name; or, at the start of a run, one names no module, or one that
            computes nothing itself.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.callbacks import KeepInFP32
        >>> trainer = Trainer(
        ...     callbacks=[KeepInFP32(["LayerNorm", "Softmax"])],
        ...     precision="bf16-mixed",
        ...     accelerator="cpu",
        ...     logger=False,
        ... )

    Source: PyTorch's documentation of autocast, "Autocast Op Reference".
    """

    guide: ClassVar[str] = "K 3.1"
    changes: ClassVar[frozenset[str]] = frozenset({"model"})
    exact: ClassVar[bool] = False
    moment: ClassVar[Moment] = "before_wrap"

    def __init__(self, modules: list[str] | str, *, strict: bool | None = None) -> None:
        _require_names(modules)
        super().__init__(strict=strict)
        self.modules = modules

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason when there is no autocast, or no module that can run in float32."""
        chosen = find_modules(module, self.modules)
        precision = trainer.precision_plugin
        if not isinstance(precision, MixedPrecision):
            return (
                f"precision={trainer.precision!r} is the work of {type(precision).__name__}, and "
                "KeepInFP32 acts in the autocast of MixedPrecision: 'bf16-mixed' or '16-mixed', on "
                "a single device or under DDP."
            )
        if all(_half_weights(target) for target in chosen.values()):
            return (
                f"the weights of {_listed(chosen)} are in half precision already. "
                "Mixed precision wants them in float32: remove the call of half() or bfloat16()."
            )
        return None

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Keep the modules in float32 for the length of the run."""
        _warn_of_half_weights(module)
        chosen = find_modules(module, self.modules)
        with keep_in_fp32(module, self.modules) as kept:
            left = {name: target for name, target in chosen.items() if name not in kept}
            kinds = _listed({name: chosen[name] for name in kept})
            half = f"; left alone, as their weights are in half precision: {_listed(left)}"
            yield kinds + (half if left else "")
        idle = {name: chosen[name] for name, forward in kept.items() if not forward.ran}
        advice = (
            f" Never called inside autocast: {_listed(idle)}. Name the module around them that "
            "is called."
        )
        ran = f"modules that ran in float32: {len(kept) - len(idle)} of {len(kept)}."
        self.say(ran + (advice if idle else ""))


@contextmanager
def keep_in_fp32(
    model: nn.Module, modules: Sequence[str] | str
) -> Iterator[dict[str, Float32Forward]]:
    """Run chosen modules in float32 inside autocast, for the length of a block.

    Outside autocast they run as ever. Modules with half-precision weights are left alone.

    Args:
        model: Any module.
        modules: As for `KeepInFP32`.

    Yields:
        The new forward of each module, by the module's name.

    Raises:
        ValueError: There is no name; or one names no module, or one that computes nothing itself.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=-1))
        >>> with keep_in_fp32(net, ["Softmax"]), torch.autocast("cpu", torch.bfloat16):
        ...     net(torch.ones(1, 2)).dtype
        torch.float32
    """
    kept: dict[str, Float32Forward] = {}
    with ExitStack() as stack:
        for name, module in find_modules(model, modules).items():
            if not _half_weights(module):
                kept[name] = Float32Forward(module)
                stack.enter_context(instance_attribute(module, "forward", kept[name]))
        yield kept


class Float32Forward:
    """The forward of a module, in float32 where autocast is on.

    An object and not a nested function, so that a copy of the module runs the copy's own weights,
    and a module can be pickled.

    Args:
        module: Whose forward it stands for.
    """

    ran = False
    """Whether it was called inside autocast."""

    def __init__(self, module: nn.Module) -> None:
        # Also where `inspect.signature` looks, by which some libraries choose arguments.
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, in float32 if autocast is on where its inputs are."""
        forward = self.__wrapped__  # type: ignore[attr-defined]  # set by update_wrapper
        device = _autocast_device(args, kwargs)
        if device is None:
            return forward(*args, **kwargs)
        self.ran = True
        args = tuple(_float32(value) for value in args)
        kwargs = {name: _float32(value) for name, value in kwargs.items()}
        with torch.autocast(device, enabled=False):
            return forward(*args, **kwargs)


def find_modules(model: nn.Module, modules: Sequence[str] | str) -> dict[str, nn.Module]:
    """Return the modules that names of modules or of classes stand for, by their names.

    Raises:
        ValueError: A name stands for no module, or for one that computes nothing itself.
    """
    everything = dict(model.named_modules(remove_duplicate=False))
    del everything[""]
    found: dict[str, nn.Module] = {}
    for wanted in _require_names(modules):
        matches = {
            name: module
            for name, module in everything.items()
            if name == wanted or (wanted in _class_names(module) and wanted not in everything)
        }
        if not matches:
            raise ValueError(_no_match(wanted, model, everything))
        for name, module in matches.items():
            if not has_forward(module):
                raise ValueError(
                    f"KeepInFP32 was to keep {name!r} in float32, but a {type(module).__name__} is "
                    "never called itself. Name the modules in it."
                )
            if module not in found.values():
                found[name] = module
    return found


def _require_names(modules: Sequence[str] | str) -> list[str]:
    names = [modules] if isinstance(modules, str) else list(modules)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"KeepInFP32(modules={modules!r}) was asked for; give names of modules or of their "
            "classes, such as ['LayerNorm', 'net.head']."
        )
    return names


def _class_names(module: nn.Module) -> set[str]:
    """Names of a module's class and of those it derives from, below `nn.Module`."""
    return {cls.__name__ for cls in type(module).__mro__ if cls not in nn.Module.__mro__}


def _no_match(wanted: str, model: nn.Module, everything: dict[str, nn.Module]) -> str:
    names = {*everything, *(type(module).__name__ for module in everything.values())}
    close = difflib.get_close_matches(wanted, sorted(names), n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"KeepInFP32 was to keep {wanted!r} in float32, but no module of {type(model).__name__} "
        f"has that name, and none that class.{hint} Functions, such as those of "
        "torch.nn.functional, cannot be named: put them into a module."
    )


def _listed(modules: dict[str, nn.Module]) -> str:
    """Return the names of a few modules, or how many there are of each class."""
    if len(modules) <= _FEW:
        return ", ".join(modules)
    classes = Counter(type(module).__name__ for module in modules.values())
    return ", ".join(f"{count} {name}" for name, count in classes.items())


def _half_weights(module: nn.Module) -> bool:
    weights = (*module.parameters(), *module.buffers())
    return any(weight.dtype in _HALF for weight in weights)


def _warn_of_half_weights(module: nn.Module) -> None:
    half = [name for name, weight in module.named_parameters() if weight.dtype in _HALF]
    if half:
        rank_zero_warn(
            f"KeepInFP32: {len(half)} parameters are in half precision under mixed precision, "
            f"such as {half[0]!r}. Updates below their last digit are lost, whatever runs in "
            "float32: keep weights in float32 and let autocast cast them."
        )


def _autocast_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the kind of device of the arguments for which autocast is on, if there is one."""
    devices: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        devices.append(tensor.device.type)
        return tensor

    for value in (*args, *kwargs.values()):
        map_tensors(value, note)
    for device in devices:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return device
    return None


def _float32(value: Any) -> Any:
    # Tensors and plain containers here, as Dynamo cannot trace the general way of copying.
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if type(value) in (list, tuple):
        return type(value)([_float32(part) for part in value])
    if type(value) is dict:
        return {key: _float32(part) for key, part in value.items()}
    return map_tensors(value, _float32)
