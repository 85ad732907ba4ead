"""One side of a comparison: Trainer arguments and environment variables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_perf import presets
from lightning_perf._hardware import detect
from lightning_perf.presets._reader import kept

if TYPE_CHECKING:
    from lightning.pytorch import Callback

_KEYS = ("preset", "trainer", "env")


@dataclass(frozen=True)
class Variant:
    """What one side of a comparison adds to plain Lightning.

    Args:
        name: How the result calls it.
        preset: A preset it starts from.
        trainer: Arguments of the Trainer as a YAML file holds them, callbacks as ``class_path``
            and ``init_args``; they win over the preset's.
        env: Environment variables of its process.
    """

    name: str
    preset: str | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def trainer_kwargs(self) -> dict[str, Any]:
        """Return the arguments for a Trainer, the callbacks built."""
        try:
            own = instantiate(self.trainer)
        except (ValueError, TypeError) as error:
            raise ValueError(f"The trainer section of variant {self.name!r}: {error}") from error
        return presets.trainer_kwargs(self.preset, **own)


def load_variant(name: str | Path | Variant) -> Variant:
    """Return the variant that a name stands for.

    Args:
        name: ``"none"`` for plain Lightning, a preset, an alias, ``"auto"``, or a YAML file with
            any of the keys ``preset``, ``trainer`` and ``env``.

    Raises:
        ValueError: There is no such preset, or the file holds something else.
        FileNotFoundError: There is no such file.
    """
    if isinstance(name, Variant):
        return name
    if Path(name).suffix in (".yaml", ".yml"):
        return _read(Path(name))
    preset = _resolve(name)
    return Variant(preset, preset=None if preset == "none" else preset)


def _resolve(name: object) -> str:
    """Return the preset that a name stands for, on one of this machine's devices."""
    return presets.resolve(str(name), replace(detect(), device_count=1))


def _read(path: Path) -> Variant:
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping with any of {', '.join(_KEYS)}.")
    unknown = [key for key in content if key not in _KEYS]
    if unknown:
        raise ValueError(
            f"{path} holds {', '.join(map(repr, unknown))}; a variant has {', '.join(_KEYS)}. "
            "Model and data belong to what both variants train."
        )
    sections = {key: content.get(key) or {} for key in ("trainer", "env")}
    for key, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"`{key}` in {path} must be a mapping, not {section!r}.")
    preset = content.get("preset")
    return Variant(
        path.stem,
        preset=None if preset is None else _resolve(preset),
        trainer=sections["trainer"],
        env={name: str(value) for name, value in sections["env"].items()},
    )


def instantiate(section: dict[str, Any]) -> dict[str, Any]:
    """Build what a ``trainer`` section of a YAML file describes, as LightningCLI would."""
    from jsonargparse import ArgumentError, ArgumentParser
    from lightning.pytorch import Trainer

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "trainer", instantiate=False)
    # Named `instantiate_classes` before jsonargparse 4.49.
    build = getattr(parser, "instantiate", None) or parser.instantiate_classes
    try:
        built = build(parser.parse_object({"trainer": section}))
    except ArgumentError as error:
        raise ValueError(str(error)) from error
    return {name: built.trainer[name] for name in section}


def overlay(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Put Trainer arguments over others: callbacks add up, one of the same class is replaced."""
    callbacks = callback_list(top)
    return {**base, **top, "callbacks": [*kept(callback_list(base), callbacks, type), *callbacks]}


def callback_list(arguments: dict[str, Any]) -> list[Callback]:
    """Return the callbacks among Trainer arguments, which may be missing, one, or several."""
    callbacks = arguments.get("callbacks") or []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
