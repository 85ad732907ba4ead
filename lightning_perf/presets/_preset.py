"""The callback that carries the preset's name."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_perf import _compat
from lightning_perf.launch.verify import promised, remark_on_this_process

_told = False  # whether this process has been told about its launch half


@_compat.without_step_hooks
class Preset(Callback):
    """Names the preset that a Trainer was built from, for the status table and the logger.

    It is the first callback of every preset file, so that the name survives in a saved
    configuration. Once per process it says if the preset's launch half, or what ``lightning-perf
    launch`` has promised, is not in effect; and it sets the inter-op threads that the launcher was
    asked for, which no environment variable can.

    Args:
        name: Name of the preset.

    Example:
        >>> Preset("cpu").name
        'cpu'
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say once what of the launch half is not in effect."""
        global _told
        if _told:
            return
        _told = True
        for remark in (_set_interop_threads(), remark_on_this_process(self.name)):
            if remark is not None:
                rank_zero_info(f"lightning_perf: {remark}")

    def __repr__(self) -> str:
        return f"Preset({self.name!r})"


def _set_interop_threads() -> str | None:
    """Set the inter-op threads that the launcher was asked for, for the life of the process."""
    threads = (promised() or {}).get("interop_threads")
    if threads is None or threads == torch.get_num_interop_threads():
        return None
    try:
        torch.set_num_interop_threads(threads)
    except RuntimeError:
        return (
            f"{threads} inter-op threads were asked for, but PyTorch has started "
            f"{torch.get_num_interop_threads()} already."
        )
    return None
