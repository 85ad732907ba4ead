"""The process of one variant: ``python -m lightning_perf.benchmark.worker``.

It reads commands from standard input and writes reports to standard output, one JSON line each.
Whatever the user's code prints goes to standard error.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import os
import platform
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_perf.benchmark.task import Parts, Task
    from lightning_perf.benchmark.variant import Variant

Message = dict[str, Any]

# Variables that change speed or numbers; others may hold secrets and are not recorded.
_VARIABLES = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_", "LD_PRELOAD", "GLIBC_",
    "TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVIDIA_TF32", "ONEDNN_", "DNNL_",
    "PYTHONHASHSEED", "PYTHONMALLOC", "TRITON_", "INDUCTOR_",
)  # fmt: skip
# The coordinator ends a timed run, and no validation interrupts it. The number of steps is finite
# because learning-rate schedules are computed from it.
_TIMED = {
    "max_epochs": -1,
    "max_steps": 10**7,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}


class Channel:
    """The worker's end of the two pipes; keeps the user's prints and children out of them."""

    def __init__(self) -> None:
        self._commands = os.fdopen(os.dup(0), encoding="utf-8")
        self._reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)

    def send(self, report: Message) -> None:
        """Report to the coordinator."""
        self._reports.write(json.dumps(report) + "\n")
        self._reports.flush()

    def receive(self) -> Message:
        """Wait for the next command; end the process if there will be none."""
        line = self._commands.readline()
        command: Message = json.loads(line) if line else {"do": "stop"}
        if command["do"] == "stop":
            os._exit(0)
        return command

    def exchange(self, report: Message) -> Message:
        """Report, and wait for the next command."""
        self.send(report)
        return self.receive()


def main() -> NoReturn:
    """Serve the coordinator until it says stop."""
    channel = Channel()
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    with suppress(OSError):
        # If memory runs out, the kernel shall take this process and not the user's shell.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        _serve(channel)
    except BaseException as error:
        channel.send(_failure(error))
        os._exit(1)


def _serve(channel: Channel) -> NoReturn:
    job = channel.receive()
    sys.path[:] = job["sys_path"]
    import lightning.pytorch  # noqa: F401  (so that start-up time has imports in one place)

    from lightning_perf.benchmark.task import Task
    from lightning_perf.benchmark.variant import Variant

    builder = Builder(Task(**job["task"]), Variant(**job["variant"]), Path(job["folder"]))
    channel.send({"event": "imported"})
    while True:
        command = channel.receive()
        if command["do"] == "fit":
            _fit(builder, channel, command["seed"])
        elif command["do"] == "learn":
            channel.send({"event": "learned", "record": _learn(builder, command)})


class Builder:
    """Builds model, data and Trainer arguments of a variant, as often as asked."""

    def __init__(self, task: Task, variant: Variant, folder: Path) -> None:
        self.task, self.variant, self.folder = task, variant, folder
        self.left_out: list[str] = []

    def __call__(self) -> Parts:
        """Return fresh parts, without what would end the run, or write files into the project."""
        from lightning_perf.benchmark.gate import without_interruptions
        from lightning_perf.benchmark.variant import callback_list, overlay

        module, data, own = self.task.build()
        own.pop("logger", None)  # the user's may write to a server
        arguments = overlay(own, self.variant.trainer_kwargs())
        arguments.pop("fast_dev_run", None)
        callbacks, self.left_out = without_interruptions(callback_list(arguments))
        quiet = ("enable_checkpointing", "enable_model_summary", "enable_progress_bar")
        return (
            module,
            data,
            {
                **arguments,
                **dict.fromkeys(quiet, False),
                "callbacks": callbacks,
                "default_root_dir": str(self.folder),
            },
        )


def _fit(builder: Builder, channel: Channel, seed: int) -> None:
    from lightning.pytorch import Trainer, seed_everything

    from lightning_perf.benchmark.gate import Gate

    seed_everything(seed, workers=True, verbose=False)
    module, data, arguments = builder()
    gate = Gate(channel.exchange, lambda command, trainer: _describe(builder, trainer))
    trainer = Trainer(**{**arguments, **_TIMED, "callbacks": [*arguments["callbacks"], gate]})
    if trainer.world_size > 1:
        raise ValueError(
            f"the benchmark compares runs on one device, and this one has {trainer.world_size} "
            "processes. Set `devices: 1`."
        )
    trainer.fit(module, data)
    if not gate.reached:
        raise ValueError(
            "the training loader gave no batch. Check the length of the data set, and `drop_last` "
            "and the batch size of the loader."
        )
    if not gate.finished:
        raise RuntimeError(
            f"the training ended by itself after {trainer.global_step} optimizer steps, although "
            "it was to go on. Something in the model or its callbacks stops the Trainer."
        )
    channel.send({"event": "finished"})


def _learn(builder: Builder, command: Message) -> Message:
    from lightning_perf.benchmark.learning import record

    learned = record(
        builder,
        steps=command["steps"],
        seed=command["seed"],
        update=Path(command["update"]),
        perturb=command["perturb"],
        perturb_seed=command["perturb_seed"],
        validate=command["validate"],
    )
    return asdict(learned) | {"update": None if learned.update is None else str(learned.update)}


def _describe(builder: Builder, trainer: Trainer) -> Message:
    import torch

    from lightning_perf import _compat
    from lightning_perf._hardware import detect
    from lightning_perf._item import PerfCallback, statuses
    from lightning_perf._knobs import read_knobs
    from lightning_perf.benchmark.gate import Gate
    from lightning_perf.presets import Preset

    states = statuses(trainer)
    callbacks = _compat.callbacks(trainer)
    items = [callback for callback in callbacks if isinstance(callback, PerfCallback)]
    inexact = {type(item).__name__ for item in items if not item.exact}
    ours = (PerfCallback, Preset, Gate)
    device = trainer.strategy.root_device
    hardware = asdict(detect())
    return {
        "event": "description",
        "statuses": [asdict(state) for state in states],
        "inexact": [state.item for state in states if state.active and state.item in inexact],
        "callbacks": [type(c).__name__ for c in callbacks if not isinstance(c, ours)],
        "left_out": builder.left_out,
        "accumulate": trainer.accumulate_grad_batches,
        "loader_workers": _loader_workers(trainer.train_dataloader),
        "prefetched": _prefetched(trainer.train_dataloader),
        "epoch_batches": _finite(trainer.num_training_batches),
        "peak_memory": peak_memory(),
        "peak_device_memory": (
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        ),
        "environment": {
            "versions": _versions(),
            "system": platform.platform(),
            "hardware": hardware | {"isa": sorted(hardware["isa"])},
            "device": str(device),
            "precision": str(trainer.precision),
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "knobs": {name: _plain(value) for name, value in read_knobs().items()},
            "variables": _variables(builder.variant),
        },
    }


def _loaders(loaders: Any) -> list[Any]:
    from torch.utils.data import DataLoader

    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return [inner for loader in loaders for inner in _loaders(loader)]
    return [loaders] if isinstance(loaders, DataLoader) else []


def _loader_workers(loaders: Any) -> int:
    return sum(loader.num_workers for loader in _loaders(loaders))


def _prefetched(loaders: Any) -> int:
    """Return how many batches may lie ready when a turn begins."""
    return sum(loader.num_workers * (loader.prefetch_factor or 0) for loader in _loaders(loaders))


def _finite(number: int | float) -> int | None:
    return None if number == float("inf") else int(number)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("torch", "lightning", "lightning-perf", "torchvision", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _variables(variant: Variant) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) or name in variant.env
    }


def peak_memory() -> int | None:
    """Return the peak of this process's resident memory in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not `ru_maxrss`, which a child takes over from its parent.
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        sizes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
        return sizes[0] * 1024 if sizes else None
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _failure(error: BaseException) -> Message:
    reason = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OutOfMemoryError":
        reason = f"out of memory. {reason}"
    return {"event": "failed", "reason": reason, "traceback": traceback.format_exc()}


if __name__ == "__main__":
    main()
