"""Several processes that all see the same batches."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import ParallelStrategy
from torch.utils.data import DataLoader

from lightning_perf import _compat
from lightning_perf._gloo_threads import settle_at_exit
from lightning_perf.strategies._pipeline.exchange import share

StartMethod = Literal["popen", "spawn"]


class SameBatchesStrategy(ParallelStrategy):
    """Starts processes and lets them talk; none has data of its own.

    Args:
        process_group_backend: Such as ``"gloo"`` or ``"nccl"``; ``None`` chooses by device.
        timeout: Seconds after which a process gives up to wait for another.
        start_method: How processes start, if nothing outside starts them.
    """

    def __init__(
        self, process_group_backend: str | None, timeout: float, start_method: StartMethod
    ) -> None:
        super().__init__()
        self.process_group_backend, self.timeout = process_group_backend, timeout
        self.start_method = start_method
        self.num_nodes = 1

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        if self.parallel_devices is None:
            raise RuntimeError("PipelineStrategy has devices only as part of a Trainer.")
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or [])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What a distributed sampler needs to know: all processes see the same batches."""
        return {"num_replicas": 1, "rank": 0}

    def _configure_launcher(self) -> None:
        self._launcher = _compat.process_launcher(self, self.start_method)

    def setup_environment(self) -> None:
        """Let the processes find each other."""
        super().setup_environment()
        environment = self.cluster_environment
        if environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            environment.set_global_rank(rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        timeout = timedelta(seconds=self.timeout)
        _compat.join_process_group(self, self.process_group_backend, timeout)
        settle_at_exit()

    def process_dataloader(self, dataloader: object) -> object:
        """Let loader workers draw the same random numbers in all processes."""
        if os.environ.get("PL_SEED_WORKERS") == "1" and isinstance(dataloader, DataLoader):
            dataloader.worker_init_fn = dataloader.worker_init_fn or partial(
                pl_worker_init_function, rank=0
            )
        return dataloader

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if dist.is_initialized():
            cuda = self.root_device.type == "cuda"
            dist.barrier(device_ids=[self.root_device.index] if cuda else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return in all processes the object of one."""
        return share(obj, src) if dist.is_initialized() else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the tensor: all processes have the same batches, and so the same values."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return in all processes whether all, or any, decide so."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else int(votes) > 0
