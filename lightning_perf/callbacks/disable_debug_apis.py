"""Debugging aids that were left on, off for the length of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, PyTorchProfiler

from lightning_perf import _compat
from lightning_perf._item import PerfCallback
from lightning_perf._knobs import KNOBS, knobs

# Knob, its value when off, and its name for the user.
_AIDS = (
    ("anomaly_mode", False, "anomaly mode"),
    ("sync_debug_mode", 0, "CUDA sync debug mode"),
    ("emit_nvtx", False, "NVTX ranges"),
    ("emit_itt", False, "ITT ranges"),
)

# Variables that slow a process down and are read when it starts or when torch is imported; the
# values at which they are harmless.
_VARIABLES: dict[str, frozenset[str]] = {
    "CUDA_LAUNCH_BLOCKING": frozenset({"0"}),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": frozenset(),  # on when set at all
    "TORCH_USE_CUDA_DSA": frozenset({"0"}),
    "TORCH_SHOW_CPP_STACKTRACES": frozenset({"0"}),
    "TORCH_DISTRIBUTED_DEBUG": frozenset({"OFF"}),
    "TORCH_CPP_LOG_LEVEL": frozenset({"WARNING", "ERROR", "FATAL", "1", "2", "3"}),
    "TORCH_LOGS": frozenset(),
    "TORCH_COMPILE_DEBUG": frozenset({"0"}),
    "NCCL_DEBUG": frozenset({"VERSION", "WARN"}),
    "ONEDNN_VERBOSE": frozenset({"0", "none"}),
    "DNNL_VERBOSE": frozenset({"0", "none"}),
    "MKL_VERBOSE": frozenset({"0"}),
    "PYTHONDEVMODE": frozenset(),
    "PYTHONTRACEMALLOC": frozenset({"0"}),
}


class DisableDebugAPIs(PerfCallback):
    """Switch off debugging aids that were left on, and put them back after the run.

    Autograd's anomaly mode, CUDA's sync debug mode and the ranges of `emit_nvtx` and `emit_itt` are
    switched off. What was asked for through the Trainer (``detect_anomaly``, ``profiler``,
    ``deterministic``), a profiler that is recording, whose record could not be continued, and
    environment variables that act from the start of the process are named in the status table and
    left alone.

    Not for debugging runs, of course.

    Args:
        strict: What to do when nothing is left on: warn, raise (True) or keep quiet (False).

    Example:
        >>> DisableDebugAPIs()
        DisableDebugAPIs()

    Source: PyTorch Performance Tuning Guide, "Disable debugging APIs".
    """

    guide: ClassVar[str] = "T debugging APIs"
    changes: ClassVar[frozenset[str]] = frozenset(name for name, _, _ in _AIDS)
    exact: ClassVar[bool] = True

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return that nothing is left on, with what slows the run all the same, or ``None``."""
        left_on = bool(debug_aids_on(keep=_asked_knobs(trainer)))
        # Rank 0 alone is often the one that is debugged; an item acts on all ranks or on none.
        if trainer.strategy.reduce_boolean_decision(left_on, all=False):
            return None
        return "; ".join(["nothing is left on", *_remarks(trainer)]) + "."

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str | None]:
        """Switch them off for the run."""
        with debug_aids_off(keep=_asked_knobs(trainer)) as names:
            yield "; ".join([f"off: {', '.join(names) or 'nothing here'}", *_remarks(trainer)])


def debug_aids_on(*, keep: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return the debugging aids that are on and can be switched off: knob and readable name.

    Args:
        keep: Knobs to leave out.
    """
    return {
        knob: label for knob, off, label in _AIDS if knob not in keep and KNOBS[knob].read() != off
    }


@contextmanager
def debug_aids_off(*, keep: frozenset[str] = frozenset()) -> Iterator[list[str]]:
    """Switch off, for a block, the debugging aids that are on; yield their names.

    Args:
        keep: Knobs to leave alone.
    """
    aids = debug_aids_on(keep=keep)
    with knobs(**{knob: off for knob, off, _ in _AIDS if knob in aids}):
        yield list(aids.values())


def slow_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables, with values, that slow the process down and cannot be undone now.

    Args:
        environ: The environment of the process.
    """
    return [
        f"{name}={environ[name]}"
        for name, harmless in _VARIABLES.items()
        if environ.get(name) and environ[name] not in harmless
    ]


def _profiler(trainer: Trainer) -> Profiler:
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]  # public, but not declared
    return profiler


def _asked_knobs(trainer: Trainer) -> frozenset[str]:
    """Knobs that are on because the user asked the Trainer for it."""
    asked = set()
    if _compat.detects_anomalies(trainer):
        asked.add("anomaly_mode")
    if isinstance(_profiler(trainer), PyTorchProfiler):
        asked |= {"emit_nvtx", "emit_itt"}
    return frozenset(asked)


def _remarks(trainer: Trainer) -> list[str]:
    """What slows the run and is left alone, with the reason."""
    asked = []
    if _compat.detects_anomalies(trainer):
        asked.append("Trainer(detect_anomaly=True)")
    if not isinstance(_profiler(trainer), PassThroughProfiler):
        asked.append(f"Trainer(profiler={type(_profiler(trainer)).__name__})")
    if torch.are_deterministic_algorithms_enabled():
        asked.append("deterministic algorithms")
    remarks = [f"left as asked for: {', '.join(asked)}"] if asked else []
    recording = KNOBS["autograd_profiler"].read() != "none"
    if recording and not isinstance(_profiler(trainer), PyTorchProfiler):
        remarks.append("left on: a profiler that is recording, stop it where it was started")
    variables = slow_variables(os.environ)
    if variables:
        remarks.append(f"must be unset before the process starts: {', '.join(variables)}")
    return remarks
