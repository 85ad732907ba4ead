"""What both variants train: a function, or a LightningCLI file, loaded anew in each process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from lightning_perf.benchmark.variant import callback_list, instantiate

Make = Callable[[], tuple[Any, ...]]
Parts = tuple[Any, Any, dict[str, Any]]
"""LightningModule, its data, and arguments for the Trainer."""

_PARTS = ("model", "data", "optimizer", "lr_scheduler")


@dataclass(frozen=True)
class Task:
    """Where to find what is trained; names only, so that a child process can load it.

    Args:
        where: A module, a Python file, or a YAML file.
        function: The function in it that returns module and data; none in a YAML file.
    """

    where: str
    function: str | None = None

    def build(self) -> Parts:
        """Return a fresh LightningModule, its data and the Trainer arguments that go with them."""
        if self.function is None:
            return _from_config(Path(self.where))
        module = _import_file(Path(self.where)) if _is_file(self.where) else _import(self.where)
        make = getattr(module, self.function, None)
        if make is None:
            raise ValueError(f"There is no function {self.function!r} in {self.where}.")
        return _checked(make(), f"{self.where}:{self.function}")


def load_task(make: Make | str | Path) -> Task:
    """Return the task that a function, ``"module:function"``, ``"path.py:function"`` or file names.

    Raises:
        ValueError: A child process could not load it, or there is nothing of that name.
        FileNotFoundError: There is no such file.
    """
    if callable(make):
        return _task_of_function(make)
    text = str(make)
    if text.endswith((".yaml", ".yml")):
        _require_file(text)
        return Task(str(Path(text).resolve()))
    where, _, function = text.rpartition(":")
    if not where or not function.isidentifier():
        raise ValueError(
            f"Cannot train {text!r}: give a function, 'module:function', 'path.py:function', or "
            "a LightningCLI file ending in .yaml."
        )
    if _is_file(where):
        _require_file(where)
        return Task(str(Path(where).resolve()), function)
    return Task(where, function)


def _task_of_function(make: Make) -> Task:
    name = getattr(make, "__qualname__", repr(make))
    module = getattr(make, "__module__", None)
    if not name.isidentifier() or module is None:
        raise ValueError(
            f"Each variant runs in a process of its own, which must find {name} by its name. Make "
            "it a function at the top level of a file: no lambda, method, partial or function "
            "within a function."
        )
    if module != "__main__":
        return Task(str(module), name)
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return Task(spec.name, name)
    file = getattr(main, "__file__", None)
    if file is None:
        raise ValueError(
            f"{name} was defined interactively, where no other process can find it. Write it to "
            "a file and give 'file.py:" + name + "'."
        )
    return Task(str(Path(file).resolve()), name)


def _is_file(where: str) -> bool:
    return where.endswith(".py")


def _require_file(path: str) -> None:
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}.")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise ValueError(
                f"There is no module {name!r} to import. Give a file as 'path.py:function'."
            ) from error
        raise


def _import_file(path: Path) -> ModuleType:
    """Import a script under its stem, not as ``__main__``, so that it does not run as one.

    A name that can be imported lets loader workers that are spawned find what it defines.
    """
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
        return importlib.import_module(path.stem)
    name = f"lightning_perf_task_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{path} is not a Python file.")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _checked(parts: Any, source: str) -> Parts:
    from lightning.pytorch import LightningModule

    if isinstance(parts, tuple) and len(parts) in (2, 3) and isinstance(parts[0], LightningModule):
        module, data, *rest = parts
        return module, data, dict(rest[0]) if rest else {}
    raise ValueError(
        f"{source} must return a LightningModule of lightning.pytorch and its data (a "
        "LightningDataModule, or a DataLoader), and if need be a dict of Trainer arguments; it "
        f"returned {_kinds(parts)}."
    )


def _kinds(parts: Any) -> str:
    if isinstance(parts, tuple):
        return f"({', '.join(f'{type(p).__module__}.{type(p).__qualname__}' for p in parts)})"
    return f"{type(parts).__module__}.{type(parts).__qualname__}"


def _from_config(path: Path) -> Parts:
    from jsonargparse import ArgumentError
    from lightning.pytorch.cli import LightningCLI

    from lightning_perf.presets import Preset

    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and "fit" in content:
        content = content["fit"]
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, (dict, str)) or (
        isinstance(model, dict) and "class_path" not in model
    ):
        raise ValueError(
            f"{path} needs `model:` with a `class_path` (and `data:` likewise). If your own script "
            "fixes the classes, give a function that returns model and data instead."
        )
    sys.path.insert(0, str(Path.cwd()))

    class PartsOnly(LightningCLI):
        """Builds model and data, and no Trainer: that one depends on the variant."""

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            return None

    parts = {key: content[key] for key in _PARTS if content.get(key) is not None}
    try:
        cli = PartsOnly(
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=False,
            run=False,
            args=parts,
            parser_kwargs={"exit_on_error": False},
        )
    except ArgumentError as error:
        raise ValueError(f"{path}: {error}") from error
    trainer = instantiate(content.get("trainer") or {})
    for callback in callback_list(trainer):
        if isinstance(callback, Preset):
            raise ValueError(
                f"{path} holds preset {callback.name!r} written out, as a configuration that was "
                "saved with a run does, so both variants would have its items. Give the file that "
                "the run was started with, or take the callbacks of lightning_perf out of this one."
            )
    return cli.model, cli.datamodule, trainer
