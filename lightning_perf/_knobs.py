"""Every process-wide switch the package touches: how to read it, set it and put it back."""

from __future__ import annotations

import difflib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.profiler import emit_itt, emit_nvtx

from lightning_perf import _float32_precision
from lightning_perf.launch.kernel_files import format_cpu_list, parse_cpu_list


@dataclass(frozen=True)
class Knob:
    """One process-wide switch.

    Args:
        read: Returns the value, never warns or raises, and leaves everything as it was.
        write: Sets the value.
        doc: What the switch does and which values it takes.
        save: Returns the function that puts the present state back. Needed where the state is
            more than ``read`` says; by default ``write`` is called with what was read.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    doc: str
    save: Callable[[], Callable[[], None]] | None = None

    def saved(self) -> Callable[[], None]:
        """Return the function that puts the present state back."""
        return self.save() if self.save is not None else partial(self.write, self.read())


# --- Debugging aids -----------------------------------------------------------------------------


def _write_anomaly_mode(on: bool) -> None:
    torch.set_anomaly_enabled(on, torch.is_anomaly_check_nan_enabled())


def _write_anomaly_check_nan(on: bool) -> None:
    torch.set_anomaly_enabled(torch.is_anomaly_enabled(), on)


def _read_sync_debug_mode() -> int:
    # Asking would initialise CUDA, which must not happen before a fork; setting it initialises too,
    # so without CUDA it cannot be on.
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # no types in torch
    return torch.cuda.get_sync_debug_mode() if initialized else 0


def _write_sync_debug_mode(mode: int) -> None:
    if mode != _read_sync_debug_mode():
        torch.cuda.set_sync_debug_mode(mode)


def _profiler_type() -> str:
    name: str = torch._C._autograd._profiler_type().name.lower()
    return name


def _read_autograd_profiler() -> str:
    kind = _profiler_type()
    return "none" if kind in ("nvtx", "itt") else kind


def _write_autograd_profiler(kind: str) -> None:
    running = _read_autograd_profiler()
    if kind != running:
        raise RuntimeError(
            f"autograd_profiler={kind!r} was asked for, but {running!r} is what runs: a recording "
            "profiler can be neither started here nor continued once stopped. Start and stop it "
            "where it is used."
        )


def _write_ranges(emitter: type[emit_nvtx] | type[emit_itt], kind: str, on: bool) -> None:
    if on != (_profiler_type() == kind):
        ranges: Any = emitter()
        if on:
            ranges.__enter__()
        else:
            ranges.__exit__(None, None, None)


def _save_ranges(emitter: type[emit_nvtx] | type[emit_itt], kind: str) -> Callable[[], None]:
    if _profiler_type() != kind:
        return partial(_write_ranges, emitter, kind, False)
    # PyTorch does not tell whether shapes are recorded; the entered object, if it lives, does.
    shapes = any(o.record_shapes for o in gc.get_objects() if type(o) is emitter and o.entered)

    ranges: Any = emitter(record_shapes=shapes)

    def restore() -> None:
        if _profiler_type() != kind:
            ranges.__enter__()

    return restore


# --- The rest -----------------------------------------------------------------------------------


def _write_cudnn(name: str, value: bool) -> None:
    setattr(torch.backends.cudnn, name, value)


def _threads_of_process() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc/self/task")]
    return [0]


def _read_cpu_affinity() -> str | None:
    # Windows and macOS have no such call.
    return format_cpu_list(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _bind(cpus_of: dict[int, Iterable[int]], others: Iterable[int]) -> None:
    bound: set[int] = set()
    # Again, until there are no new ones: what an unbound thread starts meanwhile is unbound too.
    while threads := set(_threads_of_process()) - bound:
        for thread in threads:
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(thread, cpus_of.get(thread, others))
        bound |= threads


def _write_cpu_affinity(cpus: str) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise RuntimeError(f"cpu_affinity={cpus!r} was asked for; this system cannot bind threads.")
    _bind({}, parse_cpu_list(cpus))


def _save_cpu_affinity() -> Callable[[], None]:
    if not hasattr(os, "sched_getaffinity"):
        return lambda: None
    before: dict[int, Iterable[int]] = {}
    for thread in _threads_of_process():
        with suppress(ProcessLookupError):
            before[thread] = os.sched_getaffinity(thread)
    return partial(_bind, before, os.sched_getaffinity(0))


def _write_gc_enabled(on: bool) -> None:
    (gc.enable if on else gc.disable)()


def _write_gc_frozen(on: bool) -> None:
    if on != (gc.get_freeze_count() > 0):
        (gc.freeze if on else gc.unfreeze)()


def _write_gc_threshold(threshold: tuple[int, ...]) -> None:
    gc.set_threshold(*threshold)


def _read_dynamo(name: str) -> Any:
    import torch._dynamo.config as config  # slow to import, and only Dynamo's knobs need it

    return getattr(config, name)


def _write_dynamo(name: str, value: Any) -> None:
    import torch._dynamo.config as config

    setattr(config, name, value)


def _read_functorch(name: str) -> Any:
    import torch._functorch.config as config

    return getattr(config, name)


def _write_functorch(name: str, value: Any) -> None:
    import torch._functorch.config as config

    setattr(config, name, value)


def _read_default_dtype() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def _write_default_dtype(name: str) -> None:
    torch.set_default_dtype(getattr(torch, name))


KNOBS: dict[str, Knob] = {
    "cudnn_benchmark": Knob(
        lambda: torch.backends.cudnn.benchmark,
        partial(_write_cudnn, "benchmark"),
        "Whether cuDNN times its convolution algorithms for every new shape.",
    ),
    "cudnn_deterministic": Knob(
        lambda: torch.backends.cudnn.deterministic,
        partial(_write_cudnn, "deterministic"),
        "Whether cuDNN uses deterministic convolution algorithms only.",
    ),
    "deterministic_algorithms": Knob(
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        "Non-deterministic operations: 0 run, 1 warn, 2 raise.",
    ),
    "matmul_precision": Knob(
        _float32_precision.read_matmul_precision,
        _float32_precision.write_matmul_precision,
        "Precision of float32 matrix products: 'highest', 'high' or 'medium'.",
        _float32_precision.save_matmul_precision,
    ),
    "fp32_precision": Knob(
        _float32_precision.read_precision_tree,
        _float32_precision.write_precision_tree,
        "The newer settings (PyTorch 2.9) that decide about it, node by node; before it, none.",
    ),
    "anomaly_mode": Knob(
        torch.is_anomaly_enabled,
        _write_anomaly_mode,
        "Whether autograd records a traceback for every operation.",
    ),
    "anomaly_check_nan": Knob(
        torch.is_anomaly_check_nan_enabled,
        _write_anomaly_check_nan,
        "Whether anomaly mode, when on, looks for NaN in every gradient.",
    ),
    "sync_debug_mode": Knob(
        _read_sync_debug_mode,
        _write_sync_debug_mode,
        "CUDA calls that wait for the device: 0 run, 1 warn, 2 raise.",
    ),
    "autograd_profiler": Knob(
        _read_autograd_profiler,
        _write_autograd_profiler,
        "The recording profiler that runs: 'none', 'kineto', 'legacy' ...; cannot be changed here.",
    ),
    "emit_nvtx": Knob(
        lambda: _profiler_type() == "nvtx",
        partial(_write_ranges, emit_nvtx, "nvtx"),
        "Whether every operation emits an NVTX range.",
        partial(_save_ranges, emit_nvtx, "nvtx"),
    ),
    "emit_itt": Knob(
        lambda: _profiler_type() == "itt",
        partial(_write_ranges, emit_itt, "itt"),
        "Whether every operation emits an ITT range.",
        partial(_save_ranges, emit_itt, "itt"),
    ),
    "intra_op_threads": Knob(
        torch.get_num_threads,
        torch.set_num_threads,
        "Threads that one operation on the CPU may use.",
    ),
    "cpu_affinity": Knob(
        _read_cpu_affinity,
        _write_cpu_affinity,
        "Logical CPUs the threads of this process may run on, such as '0-3,8'; read of this one.",
        _save_cpu_affinity,
    ),
    "gc_enabled": Knob(
        gc.isenabled,
        _write_gc_enabled,
        "Whether Python's cyclic garbage collector runs by itself.",
    ),
    "gc_frozen": Knob(
        lambda: gc.get_freeze_count() > 0,
        _write_gc_frozen,
        "Whether the garbage collector passes over objects made before some moment.",
    ),
    "gc_threshold": Knob(
        gc.get_threshold,
        _write_gc_threshold,
        "Allocations after which each generation of Python objects is collected.",
    ),
    "dynamo_optimize_ddp": Knob(
        partial(_read_dynamo, "optimize_ddp"),
        partial(_write_dynamo, "optimize_ddp"),
        "Whether torch.compile splits its graphs at DDP's buckets.",
    ),
    "dynamo_recompile_limit": Knob(
        # PyTorch 2.7 renamed the setting and keeps this name.
        partial(_read_dynamo, "cache_size_limit"),
        partial(_write_dynamo, "cache_size_limit"),
        "Graphs of one function after which torch.compile runs it eagerly.",
    ),
    "activation_memory_budget": Knob(
        partial(_read_functorch, "activation_memory_budget"),
        partial(_write_functorch, "activation_memory_budget"),
        "Share of the activations that code of torch.compile keeps for backward: 0 to 1.",
    ),
    "default_dtype": Knob(
        _read_default_dtype,
        _write_default_dtype,
        "Type of new floating-point tensors: 'float32', 'bfloat16' ...",
    ),
}


def read_knobs() -> dict[str, Any]:
    """Return the present value of every knob; it never warns or raises."""
    return {name: knob.read() for name, knob in KNOBS.items()}


@contextmanager
def knobs(**values: Any) -> Iterator[None]:
    """Set process-wide switches for a block and put them back, last in first out.

    Args:
        **values: Name of a knob in `KNOBS` and the value it takes in the block.

    Raises:
        ValueError: There is no knob of that name, or it does not take the value.

    Example:
        >>> with knobs(cudnn_benchmark=True):
        ...     torch.backends.cudnn.benchmark
        True
    """
    for name in values:
        if name not in KNOBS:
            close = difflib.get_close_matches(name, KNOBS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"There is no knob {name!r}.{hint} The knobs are {sorted(KNOBS)}.")
    with ExitStack() as stack:
        for name, value in values.items():
            stack.callback(KNOBS[name].saved())
            KNOBS[name].write(value)
        yield
