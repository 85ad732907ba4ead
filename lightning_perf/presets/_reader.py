"""Finds preset files, chooses among them, and turns one into arguments of a Trainer."""

import difflib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, TypeVar

import yaml

from lightning_perf import NoEffectWarning
from lightning_perf._hardware import Hardware, detect

NONE = "none"  # plain Lightning
T = TypeVar("T")


class Metadata(NamedTuple):
    """What the head of a preset file says about it."""

    description: str
    hardware: str
    aliases: tuple[str, ...]
    measured: str | None  # on what, and the result file; None: nobody has measured it


def names() -> list[str]:
    """Returns the names of all presets."""
    # A second dot marks a companion, such as `cpu.launch.yaml`.
    return sorted(f.stem for f in Path(__file__).parent.glob("*.yaml") if "." not in f.stem)


def path(name: str, hardware: Hardware | None = None) -> Path:
    """Returns the file of a preset; the arguments are those of `resolve`."""
    preset = resolve(name, hardware)
    if preset == NONE:
        raise ValueError(f"{name!r} stands for plain Lightning here; there is no file for that.")
    return _file(preset)


def metadata(name: str) -> Metadata:
    """Returns what the head of a preset's file says about it.

    Args:
        name: A preset or alias.
    """
    head: dict[str, str] = {}
    for line in path(name).read_text(encoding="utf-8").splitlines():
        key, colon, value = line.removeprefix("#").partition(":")
        if not (line.startswith("#") and colon):
            break
        head[key.strip()] = value.strip()
    return Metadata(
        description=head["description"],
        hardware=head["hardware"],
        aliases=tuple(alias.strip() for alias in head.get("aliases", "").split(",") if alias),
        measured=None if head["measured"] == "no" else head["measured"],
    )


def auto(hardware: Hardware | None = None) -> tuple[str, str]:
    """Chooses the preset for some hardware.

    Args:
        hardware: What to choose for; this machine if None.

    Returns:
        The name of a preset, or ``"none"`` where no preset helps, and the reason in a few words.
    """
    hardware = hardware or detect()
    if hardware.device == "mps":
        return "mps", hardware.device_name
    if hardware.device == "cuda":
        capability = hardware.capability or (0, 0)
        reason = f"{hardware.device_name}, compute capability {capability[0]}.{capability[1]}"
        if capability < (7, 0):
            return NONE, f"{reason}; the CUDA presets need 7.0, where tensor cores begin"
        if not hardware.native_bf16:
            return "cuda_fp16", reason
        if hardware.device_count > 1:
            return "cuda_ddp", f"{hardware.device_count} x {reason}"
        return "cuda_bf16", reason
    if hardware.cpu_bf16:
        return "cpu_bf16", f"{hardware.cpu_name} has bfloat16 instructions, and there is no GPU"
    return "cpu", f"{hardware.cpu_name} has no bfloat16 instructions, and there is no GPU"


def resolve(name: str, hardware: Hardware | None = None) -> str:
    """Returns the preset that a name stands for.

    Args:
        name: A preset, an alias such as ``"hopper"``, ``"auto"``, or ``"none"``.
        hardware: What ``"auto"`` chooses for; this machine if None.

    Returns:
        The name of a preset, or ``"none"`` for plain Lightning.

    Raises:
        ValueError: There is no preset of that name.
    """
    if name == "auto":
        return auto(hardware)[0]
    if name == NONE or name in names():
        return name
    aliases = {alias: preset for preset in names() for alias in metadata(preset).aliases}
    if name in aliases:
        return aliases[name]
    known = [*names(), "auto", NONE, *aliases]
    close = difflib.get_close_matches(str(name).lower(), known, n=1)
    raise ValueError(
        f"There is no preset {name!r}."
        + (f" Did you mean {close[0]!r}?" if close else "")
        + f" Presets: {', '.join(names())}, auto, none; aliases: {', '.join(aliases)}."
    )


def trainer_kwargs(name: str | None, /, **overrides: Any) -> dict[str, Any]:
    """Returns a preset as keyword arguments for a `Trainer`, the callbacks built.

    Args:
        name: A preset, an alias, ``"auto"``, or ``"none"`` (also None) for the overrides alone.
        **overrides: Your own arguments for the Trainer; they win over the preset's. Your
            ``callbacks`` are added to the preset's, one of the same class replaces the preset's,
            and ``callbacks=None`` drops the preset's.

    Raises:
        ValueError: There is no preset of that name, or a callback is a class.
        RuntimeError: The preset is for an accelerator that is not there.

    Example:
        >>> trainer_kwargs("cpu", max_epochs=3, callbacks=None)
        {'accelerator': 'cpu', 'callbacks': None, 'max_epochs': 3}
    """
    if name is None:
        return overrides
    hardware = detect()
    preset = resolve(name, hardware)
    if preset == NONE:
        if name == "auto":
            _warn(no_preset(hardware))
        return overrides
    settings = trainer_section(preset)
    asked = {key: value for key, value in settings.items() if key not in overrides}
    if drawback := check(preset, asked, hardware):
        _warn(drawback)
    callbacks = overrides.get("callbacks", [])
    if callbacks is not None:
        own = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        for cls in own:
            if isinstance(cls, type):
                raise ValueError(
                    f"callbacks holds the class {cls.__name__}; write {cls.__name__}() for a "
                    "callback of it."
                )
        items = [_build(entry) for entry in settings["callbacks"]]
        overrides["callbacks"] = [*kept(items, own, type), *own]
    if "strategy" in settings and "strategy" not in overrides:
        overrides["strategy"] = _build(settings["strategy"])
    return settings | overrides


def trainer_section(preset: str) -> dict[str, Any]:
    """Returns the arguments for a Trainer as the file of a preset holds them."""
    section: dict[str, Any] = yaml.safe_load(_file(preset).read_text(encoding="utf-8"))["trainer"]
    return section


def kept(items: Sequence[T], own: Sequence[T], kind: Callable[[T], Any]) -> list[T]:
    """Returns the items of a preset that none of the user's callbacks replaces.

    Args:
        items: What the preset has.
        own: What the user has; one of the same class replaces an item.
        kind: Returns the class of either.
    """
    kinds = [cls for cls in map(kind, own) if isinstance(cls, type)]
    return [item for item in items if not any(issubclass(cls, kind(item)) for cls in kinds)]


def no_preset(hardware: Hardware) -> str:
    """Returns what to say where ``auto`` stands for plain Lightning."""
    return f"No preset for this machine: {auto(hardware)[1]}. The Trainer stays as it is."


def check(preset: str, settings: dict[str, Any], hardware: Hardware) -> str | None:
    """Refuses what the hardware cannot do at all, and returns what it does badly.

    Args:
        preset: Name of a preset.
        settings: Its arguments for the Trainer, without those that the user has overridden.
        hardware: Where they are to run.

    Raises:
        RuntimeError: The preset is for an accelerator that is not there.
    """
    accelerator, precision = settings.get("accelerator", ""), settings.get("precision", "")
    if accelerator not in ("", "cpu", hardware.device):
        raise RuntimeError(
            f"Preset {preset!r} needs a device of kind {accelerator!r}; found {_found(hardware)}. "
            f"Use 'auto', which is {auto(hardware)[0]!r} here."
        )
    native = hardware.cpu_bf16 if accelerator == "cpu" else hardware.native_bf16
    if not accelerator or not precision.startswith("bf16") or native:
        return None
    found = hardware.cpu_name if accelerator == "cpu" else _found(hardware)
    return (
        f"Preset {preset!r} computes in bfloat16, which {found} has no instructions for: it will "
        f"be emulated and slower than float32. Use 'auto', which is {auto(hardware)[0]!r} here."
    )


def _file(preset: str) -> Path:
    return Path(__file__).with_name(f"{preset}.yaml")


def _build(entry: dict[str, Any]) -> Any:
    return resolve_name(entry["class_path"])(**entry.get("init_args", {}))


def _found(hardware: Hardware) -> str:
    version = ".".join(map(str, hardware.capability or ()))
    details = f" (compute capability {version})" if version else ""
    return f"{hardware.device} ({hardware.device_name}){details}"


def _warn(message: str) -> None:
    warnings.warn(message, NoEffectWarning, stacklevel=3)
