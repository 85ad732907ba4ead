"""Give each process the intra-op threads that its share of the machine can run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_perf._hardware import Hardware, detect
from lightning_perf._item import Moment, PerfCallback
from lightning_perf._knobs import knobs
from lightning_perf.callbacks._loaders import every_loader
from lightning_perf.launch.verify import promised

T = TypeVar("T")

_BINDING_VARIABLES = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND")
_UNBOUND = ("", "false", "none", "disabled")


def intra_op_threads(
    hardware: Hardware,
    local_ranks: int = 1,
    loader_workers: int = 0,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Return how many intra-op threads a process should use, at least 1.

    That is the usable cores (affinity and control group respected, hardware threads of one core
    counted once) divided among the ranks that share them. Loader workers run one thread each: they
    first take the hardware threads that compute leaves idle; each one beyond takes a core, because
    a compute thread that has to share its core holds up all others. Never more than a quarter of
    the cores is given up for them, since nobody knows beforehand how busy they will be.

    Args:
        hardware: The machine as this process sees it.
        local_ranks: Ranks that share the CPUs of this process, itself included.
        loader_workers: Loader workers of this process that compete with it for the CPU.
        environ: Environment variables; an ``OMP_NUM_THREADS`` that the user set wins.
    """
    chosen = users_choice(environ or {}, hardware, local_ranks)
    if chosen is not None:
        return chosen
    cpus = hardware.logical_cpus
    if hardware.quota is not None:
        cpus = min(cpus, int(hardware.quota))
    idle = max(0, cpus - hardware.usable_cores) // local_ranks
    share = max(1, hardware.usable_cores // local_ranks)
    return share - min(max(0, loader_workers - idle), share // 4)


def users_choice(environ: Mapping[str, str], hardware: Hardware, local_ranks: int) -> int | None:
    """Return ``OMP_NUM_THREADS`` if it is the user's, ``None`` if it is a launcher's default.

    torchrun sets 1 for several ranks, and Lightning's launchers the logical CPUs per rank, where
    the variable is not set. A user who sets just these values is not told from them. Our own
    launcher counts for the ranks it knows of, which those of Lightning's launchers are not.
    """
    value = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not (value.isdecimal() and int(value)):
        return None
    of_torchrun = "TORCHELASTIC_RUN_ID" in environ and value == "1"
    lightnings = max(1, hardware.logical_cpus // local_ranks)
    of_lightning = local_ranks > 1 and int(value) == lightnings
    promise = promised(environ) or {}
    of_launch = promise.get("threads") == int(value) and promise.get("ranks", 1) != local_ranks
    return None if of_torchrun or of_lightning or of_launch else int(value)


def bound_by(environ: Mapping[str, str]) -> str | None:
    """Return the setting by which a launcher has bound the threads of this process to cores."""
    for name in _BINDING_VARIABLES:
        value = environ.get(name, "")
        if value.lower() not in _UNBOUND:
            return f"{name}={value}"
    return None


def decided_elsewhere(
    environ: Mapping[str, str], hardware: Hardware, local_ranks: int
) -> str | None:
    """Return the reason to leave the threads alone that the environment gives."""
    bound = bound_by(environ)
    if bound is not None:
        return f"{bound} has bound the threads of this process to cores."
    chosen = users_choice(environ, hardware, local_ranks)
    if chosen is not None and (promised(environ) or {}).get("threads") == chosen:
        return f"lightning-perf launch has given the process {_threads(chosen)}."
    if chosen is not None:
        return (
            f"OMP_NUM_THREADS={chosen} in the environment wins. Unset it, or give Threads a number."
        )
    return None


@contextmanager
def threads(intra_op: int | str = "auto", *, loader_workers: int = 0) -> Iterator[int]:
    """Set the intra-op threads of this process for a block, and yield their number.

    Where processes belong to a group, enter it on all ranks: they ask each other who shares cores.

    Args:
        intra_op: ``"auto"`` for this process's share of the cores, unless the user or a launcher
            has decided; or the number of threads.
        loader_workers: Loader workers of this process that compete with it for the CPU.

    Raises:
        ValueError: ``intra_op`` is neither ``"auto"`` nor a positive integer.

    Example:
        >>> with threads(1):
        ...     torch.get_num_threads()
        1
    """
    _require_valid(intra_op)
    number = intra_op if isinstance(intra_op, int) else _fitting(loader_workers)
    with knobs(intra_op_threads=number):
        yield number


class Threads(PerfCallback):
    """Set the intra-op threads of each process to its share of the cores it may use.

    Without it PyTorch starts a thread for each core of the machine in processes that may use only a
    part of it (a container's CPU quota, ranks started by hand), and only one under torchrun. It
    leaves alone what the user decided: ``OMP_NUM_THREADS``, or threads bound to cores.
    Inter-op threads are never touched: they cannot be put back.

    Do not use it where another library of the process must keep its own number of OpenMP threads.

    Args:
        intra_op: ``"auto"``, or the threads per process, applied whatever the environment says.
        strict: See `PerfCallback`.

    Raises:
        ValueError: ``intra_op`` is neither ``"auto"`` nor a positive integer.

    Example:
        >>> Trainer(accelerator="cpu", callbacks=[Threads()])

    Source: PyTorch tuning guide, "Utilize OpenMP".
    """

    guide: ClassVar[str] = "T utilize OpenMP"
    changes: ClassVar[frozenset[str]] = frozenset({"intra_op_threads"})
    exact: ClassVar[bool] = False
    # It looks at the workers of loaders, which `LoaderSettings` may change.
    moment: ClassVar[Moment] = "before_wrap"

    def __init__(self, intra_op: int | str = "auto", *, strict: bool | None = None) -> None:
        _require_valid(intra_op)
        super().__init__(strict=strict)
        self.intra_op = intra_op

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason: the user or a launcher has decided, or the number is right already."""
        hardware, ranks = detect(), 1
        if self.intra_op == "auto":
            if getattr(trainer.strategy, "place", None) is not None:
                return "CPUDDPStrategy has given each rank threads and cores of its own."
            mine = decided_elsewhere(os.environ, hardware, trainer.num_devices)
            for reason in _on_all_ranks(mine):
                if reason is not None:
                    return reason
            ranks = sharing_ranks()
        threads, fewest = self._range(trainer, hardware, ranks)
        if all(_on_all_ranks(torch.get_num_threads() == threads == fewest)):
            return f"{_threads(threads)} per process is what PyTorch uses already."
        return None

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Set the threads, lower them for loader workers, and put them back."""
        hardware = detect()
        ranks = sharing_ranks() if self.intra_op == "auto" else 1
        threads, fewest = self._range(trainer, hardware, ranks)
        before = torch.get_num_threads()
        if threads > hardware.usable_cores:
            rank_zero_warn(
                f"Threads({threads}) was asked for, but this process may use "
                f"{hardware.usable_cores} cores: more threads than cores wait for each other."
            )

        def make_room(loader: DataLoader[Any]) -> None:
            fewer = intra_op_threads(hardware, ranks, loader.num_workers)
            if fewer < torch.get_num_threads():
                torch.set_num_threads(fewer)
                workers = "worker" if loader.num_workers == 1 else "workers"
                self.say(f"{_threads(fewer)}, because of {loader.num_workers} loader {workers}.")

        with ExitStack() as stack:
            stack.enter_context(knobs(intra_op_threads=threads))
            if fewest < threads:
                stack.enter_context(every_loader(trainer, make_room))
            yield f"{_threads(threads)} per process, {before} before"

    def _range(self, trainer: Trainer, hardware: Hardware, ranks: int) -> tuple[int, int]:
        """Return the threads without loader workers, and with as many as there can be."""
        if isinstance(self.intra_op, int):
            return self.intra_op, self.intra_op
        threads = intra_op_threads(hardware, ranks)
        if trainer.strategy.root_device.type != "cpu":
            # Workers then compete with a process that mostly waits for its device.
            return threads, threads
        return threads, intra_op_threads(hardware, ranks, loader_workers=hardware.logical_cpus)


def _require_valid(intra_op: int | str) -> None:
    is_number = isinstance(intra_op, int) and not isinstance(intra_op, bool)
    if intra_op != "auto" and not (is_number and int(intra_op) >= 1):
        raise ValueError(
            f"intra_op={intra_op!r} was asked for; it is 'auto' or the number of threads."
        )


def _fitting(loader_workers: int) -> int:
    """Return the threads that ``"auto"`` stands for outside a Trainer."""
    hardware, ranks = detect(), sharing_ranks()
    if decided_elsewhere(os.environ, hardware, ranks):
        return torch.get_num_threads()
    return intra_op_threads(hardware, ranks, loader_workers)


def sharing_ranks() -> int:
    """Count the ranks that may run on the CPUs of this one; bound ranks share with nobody."""
    machine = socket.gethostname()
    cpus = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else (0,))
    places = _on_all_ranks((machine, cpus))
    return sum(there == machine and not cpus.isdisjoint(others) for there, others in places)


def _on_all_ranks(value: T) -> list[T]:
    """Gather, so that every rank decides alike even if nodes differ."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _threads(number: int) -> str:
    return "1 intra-op thread" if number == 1 else f"{number} intra-op threads"
