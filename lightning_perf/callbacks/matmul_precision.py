"""Faster float32 matrix products: TF32 on tensor cores, bfloat16 on CPUs with AMX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_perf._float32_precision import MATMUL_PRECISIONS
from lightning_perf._hardware import Hardware, detect
from lightning_perf._item import PerfCallback
from lightning_perf._knobs import KNOBS, knobs

# What the CPU must have for PyTorch's oneDNN path to leave float32. On x86 AMX is needed: with
# AVX-512 alone oneDNN keeps computing in float32, whatever it is allowed to do.
_CPU_FEATURES = {
    "high": frozenset({"amx_fp16"}),
    "medium": frozenset({"amx_bf16", "bf16"}),  # "bf16" is how Linux names it on Arm
}


class MatmulPrecision(PerfCallback):
    """Let float32 matrix products run at reduced internal precision.

    ``"high"`` uses TensorFloat-32 on NVIDIA GPUs from compute capability 8.0 on: inputs rounded to
    10 bits of mantissa, sums in float32. ``"medium"`` does the same there, and bfloat16 on CPUs
    with AMX. Convolutions are not touched: cuDNN uses TF32 for them by default.

    PyTorch has two families of switches for this, and raises when they contradict each other.
    Whichever the process uses is set, and put back exactly.

    Not useful under ``precision="bf16-true"`` and the like, where nothing is multiplied in float32.

    Args:
        precision: ``"highest"``, ``"high"`` or ``"medium"``.
        strict: What to do when it cannot help: warn, raise (True) or keep quiet (False).

    Raises:
        ValueError: ``precision`` is none of the three.

    Example:
        >>> MatmulPrecision("high")
        MatmulPrecision()

    Source: PyTorch Performance Tuning Guide, "Use Tensor Cores", and
    `torch.set_float32_matmul_precision`.
    """

    guide: ClassVar[str] = "T tensor cores"
    changes: ClassVar[frozenset[str]] = frozenset({"matmul_precision", "fp32_precision"})
    exact: ClassVar[bool] = False

    def __init__(self, precision: str = "high", *, strict: bool | None = None) -> None:
        if precision not in MATMUL_PRECISIONS:
            raise ValueError(
                f"MatmulPrecision(precision={precision!r}) was asked for; it must be one of "
                f"{', '.join(map(repr, MATMUL_PRECISIONS))}."
            )
        super().__init__(strict=strict)
        self.precision = precision

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return why the setting cannot matter to this run, or ``None``."""
        if str(trainer.precision).endswith("-true") and trainer.precision != "32-true":
            return f"with precision={trainer.precision!r} nothing is multiplied in float32."
        return matmul_precision_useless(
            self.precision,
            current=KNOBS["matmul_precision"].read(),
            device=trainer.strategy.root_device,
            hardware=detect(),
        )

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str | None]:
        """Set the precision for the run."""
        before = KNOBS["matmul_precision"].read()
        with matmul_precision(self.precision):
            yield f"{self.precision!r} instead of {before!r}"


def matmul_precision(precision: str) -> AbstractContextManager[None]:
    """Set the precision of float32 matrix products for a block.

    Args:
        precision: ``"highest"``, ``"high"`` or ``"medium"``.

    Raises:
        ValueError: ``precision`` is none of the three.
    """
    return knobs(matmul_precision=precision)


def matmul_precision_useless(
    precision: str, *, current: str, device: torch.device, hardware: Hardware
) -> str | None:
    """Return why ``precision`` changes nothing for the better, or ``None``.

    Args:
        precision: The one asked for.
        current: The one in force.
        device: The device of the run.
        hardware: The machine.
    """
    if current == precision:
        return f"the process already uses {current!r}."
    if precision == "high" and current == "medium":
        return "the process already uses 'medium', which is faster still; it is left alone."
    if precision == "highest":
        return None
    if device.type == "cuda":
        if hardware.capability is not None and hardware.capability < (8, 0):
            major, minor = hardware.capability
            return f"compute capability {major}.{minor} has no TF32; 8.0 and newer have."
        return None
    if device.type == "cpu":
        needed = _CPU_FEATURES[precision]
        if hardware.isa.isdisjoint(needed):
            return (
                f"on a CPU {precision!r} needs {' or '.join(sorted(needed))}, "
                "which this one lacks: products stay in float32."
            )
        return None
    return f"PyTorch has no reduced float32 precision on {device.type!r} devices."
