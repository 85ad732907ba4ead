"""Distributed data parallel over the sockets and NUMA nodes of CPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_perf._hardware import detect
from lightning_perf._knobs import knobs
from lightning_perf.callbacks.threads import bound_by, users_choice
from lightning_perf.launch.kernel_files import format_cpu_list
from lightning_perf.launch.topology import By, placements, this_machine
from lightning_perf.strategies import oneccl
from lightning_perf.strategies._cpu.memory_policy import memory_on, preferred_node
from lightning_perf.strategies._cpu.places import Place, limited, place
from lightning_perf.strategies._cpu.workers import bound_workers
from lightning_perf.strategies.perf_ddp import PerfDDPStrategy

T = TypeVar("T")


class CPUDDPStrategy(PerfDDPStrategy):
    """Distributed data parallel on CPUs: a rank for each NUMA node, on cores of its own.

    Each rank keeps its threads, its memory and its loader workers on its own cores for the length
    of a run, whatever ``OMP_NUM_THREADS`` it inherits, and its gradients travel over oneCCL where
    that is installed. Cores that affinity or the control group forbid are never used.

    It is for machines with several NUMA nodes, and within one for many small operations on few
    weights; elsewhere no gain over one process with all threads was found. Each rank takes a batch
    of its own, so the batch that a step sees grows with their number.

    Args:
        process_group_backend: ``"ccl"``, ``"gloo"``, or ``None`` for ``"ccl"`` on a single machine
            that has it, else ``"gloo"``.
        ranks: Ranks on this machine. ``"auto"``: as many as the Trainer has devices or the
            launcher started; where the Trainer has one device, its default, one for each domain.
        by: The domains, whose borders no rank crosses where it can be avoided: ``"auto"`` and
            ``"numa"`` NUMA nodes, ``"socket"`` sockets, ``"l3"`` caches, ``"core"`` cores,
            ``"machine"`` none; ``None`` binds nothing.
        loader_cores: Cores of each rank that are left to its loader workers. Without, workers share
            those of the rank, hardware threads that compute leaves idle included.
        **kwargs: See `PerfDDPStrategy`.

    Raises:
        ValueError: An unknown name, or numbers that do not fit.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.strategies import CPUDDPStrategy
        >>> strategy = CPUDDPStrategy("gloo", ranks=2)
        >>> trainer = Trainer(accelerator="cpu", strategy=strategy, logger=False)
        >>> trainer.world_size
        2

    Source: PyTorch tuning guide, "Train a model on CPU with PyTorch DistributedDataParallel",
    "Utilize NUMA controls", "Utilize OpenMP".
    """

    guide: ClassVar[str] = "T CPU DDP with oneCCL, NUMA, OpenMP"

    def __init__(
        self,
        process_group_backend: Literal["ccl", "gloo"] | None = None,
        *,
        ranks: int | Literal["auto"] = "auto",
        by: By | None = "auto",
        loader_cores: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, **kwargs)
        if process_group_backend not in (None, "ccl", "gloo"):
            raise ValueError(
                f"process_group_backend={process_group_backend!r} was asked for; it is 'ccl', "
                "'gloo', or None to choose."
            )
        if ranks != "auto" and not (isinstance(ranks, int) and ranks >= 1):
            raise ValueError(f"ranks={ranks!r} was asked for; it is 'auto' or 1 and more.")
        if by not in (None, *get_args(By)):
            raise ValueError(
                f"by={by!r} was asked for; it is one of {', '.join(get_args(By))}, or None."
            )
        if loader_cores < 0:
            raise ValueError(f"loader_cores={loader_cores} was asked for; it is 0 or more.")
        self.ranks = ranks
        self.by = by
        self.loader_cores = loader_cores
        self.place: Place | None = None
        """Where this rank computes in the current run; ``None`` where nothing was bound."""
        self._bound = ExitStack()

    def set_world_ranks(self) -> None:
        """Decide how many ranks this machine has, before any of them is started."""
        devices = self.parallel_devices or []
        if any(device.type != "cpu" for device in devices):
            raise ValueError(
                f"CPUDDPStrategy was given a {devices[0].type} device; it is for "
                "Trainer(accelerator='cpu'). Use PerfDDPStrategy for others."
            )
        if devices:
            self.parallel_devices = [devices[0]] * self._ranks_here(len(devices))
        super().set_world_ranks()

    def _ranks_here(self, devices: int) -> int:
        started = self._started_ranks()
        asked = devices if self.ranks == "auto" else self.ranks
        if started is not None:
            if devices == 1 and self.ranks == "auto":
                return started
            return asked  # a launcher that started another number is told so by Lightning
        if devices not in (1, asked):
            raise ValueError(
                f"CPUDDPStrategy(ranks={asked}) was given with Trainer(devices={devices}). Leave "
                "one of them out."
            )
        if devices > 1 or self.ranks != "auto" or self.by is None or not _affinity():
            return asked
        return len(placements(this_machine(), by=self.by))

    def _started_ranks(self) -> int | None:
        """Return how many ranks were started here already, ``None`` if this is the only one."""
        environment = self.cluster_environment
        if environment is None or not environment.creates_processes_externally:
            return None
        if isinstance(environment, LightningEnvironment):  # it does not know before it is told
            return int(os.environ.get("WORLD_SIZE", self.num_nodes)) // self.num_nodes
        return environment.world_size() // self.num_nodes

    def setup_environment(self) -> None:
        """Join the group of ranks, then move to cores of its own."""
        super().setup_environment()
        self._bound.close()
        self._bind()

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is not None:
            return self._process_group_backend
        reason = self._why_not_oneccl()
        if reason is None:
            return "ccl"
        if self.world_size > 1:
            self._say(f"gradients travel over gloo, not oneCCL: {reason}")
        return "gloo"

    def _why_not_oneccl(self) -> str | None:
        if self.num_nodes > 1:
            return "the ranks are on several machines"
        module = self.lightning_module
        names = (
            [n for n, m in module.named_modules() if getattr(m, "sparse", False)] if module else []
        )
        if names:
            return f"it takes no sparse gradients, which {names[0]} has"
        return oneccl.why_not()

    def _bind(self) -> None:
        self.place = None
        if self.by is not None and _affinity():
            cores = own_cores(self.by, loader_cores=self.loader_cores)
            self.place = self._bound.enter_context(cores)
        self._tell(self.place.note if self.place else "not bound")

    def _tell(self, note: str) -> None:
        """Show what is in effect on each rank, in one table on rank 0."""
        node = preferred_node()
        memory = "" if node is None else f"memory of node {node}"
        cpus = f"CPUs {format_cpu_list(_affinity()) or 'unknown'}"
        threads = torch.get_num_threads()
        mine = cpus, f"{threads} thread{'s' * (threads > 1)}", memory, note
        rows = _gathered(mine)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        lines = [f"{ranks} over {dist.get_backend()}"]
        for rank, row in enumerate(rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
            lines.append(f"  rank {rank}  {'  '.join(cells)}".rstrip())
        self._say("\n".join(lines))

    def process_dataloader(self, dataloader: Any) -> Any:
        """Give loader workers their cores, too."""
        if isinstance(dataloader, DataLoader) and dataloader.num_workers and self.place:
            self._bound.enter_context(bound_workers(dataloader, self.place.workers))
        return super().process_dataloader(dataloader)

    def teardown(self) -> None:
        """End the run, and put threads, cores and memory policy back."""
        try:
            super().teardown()
        finally:
            self._bound.close()


@contextmanager
def own_cores(by: By = "auto", *, loader_cores: int = 0) -> Iterator[Place]:
    """Keep this rank on cores of its own for a block; every rank of the process group enters it.

    All threads of the process are bound, the intra-op threads are as many as cores, and where the
    machine has several NUMA nodes new memory is the own node's.

    Args:
        by: The borders that no rank crosses where it can be avoided, see `CPUDDPStrategy`.
        loader_cores: Cores of each rank that are left to its loader workers.

    Yields:
        The place of this rank; its ``workers`` are for loader workers.

    Raises:
        ValueError: No core would be left to compute.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with own_cores() as place:
        ...     torch.get_num_threads() == place.threads
        True
        >>> dist.destroy_process_group()
    """
    mine = socket.gethostname(), _affinity()
    everyones = _gathered(mine)
    here = [rank for rank, (host, _) in enumerate(everyones) if host == mine[0]]
    affinities = [everyones[rank][1] for rank in here]
    chosen = users_choice(os.environ, detect(), len(here))
    index = here.index(dist.get_rank())
    there = place(this_machine(), affinities, index, by=by, loader_cores=loader_cores)
    there = limited(there, chosen)
    binding = bound_by(os.environ)
    if binding and len(set(affinities)) < len(affinities):
        rank_zero_warn(
            f"{binding} has bound the OpenMP threads of all ranks to the same cores before each "
            "rank could get its own. Unset it, or start the script by `lightning-perf launch`."
        )
    with ExitStack() as stack:
        values: dict[str, Any] = {"intra_op_threads": there.threads}
        if there.compute is not None:
            values["cpu_affinity"] = there.cpus
        stack.enter_context(knobs(**values))
        if there.node is not None:
            try:
                stack.enter_context(memory_on(there.node))
            except OSError as error:
                there = there.noted(f"memory policy refused: {error.strerror}")
        yield there


def _affinity() -> frozenset[int]:
    """Return the CPUs of this thread, none where the system does not tell."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


def _gathered(mine: T) -> list[T]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones
