"""The callback that carries the preset's name."""

from lightning.pytorch import Callback

from lightning_perf import _compat


@_compat.without_step_hooks
class Preset(Callback):
    """Names the preset that a Trainer was built from, for the status table and the logger.

    It does nothing else: it is the first callback of every preset file, so that the name survives
    in a saved configuration.

    Args:
        name: Name of the preset.

    Example:
        >>> Preset("cpu").name
        'cpu'
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Preset({self.name!r})"
