"""Presets: speed-ups for one kind of hardware, as files in LightningCLI's own syntax.

Example:
    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(**trainer_kwargs("auto", max_epochs=3))
"""

from typing import TYPE_CHECKING, Any

from lightning_perf.presets._reader import (
    Metadata,
    auto,
    metadata,
    names,
    path,
    resolve,
    trainer_kwargs,
)

if TYPE_CHECKING:
    from lightning_perf.presets._preset import Preset

__all__ = ["Metadata", "Preset", "auto", "metadata", "names", "path", "resolve", "trainer_kwargs"]


def __getattr__(name: str) -> Any:
    # The class needs Lightning, whose import takes seconds; names and files do not.
    if name == "Preset":
        from lightning_perf.presets._preset import Preset

        return Preset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
