"""What ranks do once a run broke off: end, each by itself, and say why."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerState, TrainerStatus
from torch.nn.parallel import DistributedDataParallel

from lightning_perf._gloo_threads import settle_at_exit
from lightning_perf.strategies._ddp.unused import name_indices

T = TypeVar("T")

_PEER_LEFT = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Read timeout|Timed out waiting"
    r"|remote process exited|Socket closed"
)


class EndsAlone(DDPStrategy):
    """Distributed data parallel whose ranks wait for no other once the run broke off.

    After an exception Lightning still saves checkpoints and asks loggers and callbacks, of which
    some talk to all ranks. The others may never come: they wait in the backward pass.
    """

    _state: TrainerState | None = None

    def setup_environment(self) -> None:
        """Join the other ranks, and end without an abort when the time comes."""
        super().setup_environment()
        settle_at_exit()

    def setup(self, trainer: Trainer) -> None:
        """Remember where to look whether the run broke off."""
        self._state = trainer.state
        super().setup(trainer)

    def is_alone(self) -> bool:
        """Return whether this rank's run broke off."""
        return self._state is not None and self._state.status == TrainerStatus.INTERRUPTED

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the other ranks, unless the run broke off."""
        if not self.is_alone():
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src``, or this rank's own if the run broke off."""
        return obj if self.is_alone() else super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the reduction over the ranks, or this rank's own value if the run broke off."""
        return tensor if self.is_alone() else super().reduce(tensor, group, reduce_op)

    def on_exception(self, exception: BaseException) -> None:
        """Say in the error what torch leaves out: names, and where to look for the cause."""
        message = str(exception)  # Lightning replaces it by one without indices
        super().on_exception(exception)
        names = None
        if isinstance(self.model, DistributedDataParallel):
            names = name_indices(message, self.model)
        if names is not None:
            _add(exception, f"Without a gradient on rank {self.global_rank}: {names}.")
        elif _PEER_LEFT.search(message) and isinstance(exception, RuntimeError):
            _add(
                exception,
                f"Rank {self.global_rank} ends because another rank left the run: the output of "
                "that rank tells why. Nothing at all tells it where a process was killed, as by "
                "the kernel for lack of memory.",
            )


def _add(exception: BaseException, text: str) -> None:
    exception.args = (f"{exception}\n{text}", *exception.args[1:])
