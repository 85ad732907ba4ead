"""How micro-batches of one shape go through a network that is cut over processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_perf._batches import map_tensors
from lightning_perf.strategies._pipeline.exchange import Like, done_by
from lightning_perf.strategies._pipeline.stages import Part

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments with which a network is called."""
Context = Callable[[], AbstractContextManager[Any]]

LOSS = Like((1,), torch.float32)
"""What the last stage hands to torch, which hands nothing on."""
_KEPT = 8
"""Each holds the buffers of its micro-batches, and batches may have many shapes."""


class Run(nn.Module):
    """What torch takes for the module of a stage: calls ``body`` with the number of the chunk.

    It holds no parameters: torch would divide their gradients by the number of chunks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body: Callable[..., Any] = tuple
        self.chunk = 0

    def forward(self, *received: Tensor) -> Any:
        """Compute the next chunk: all schedules here take them in order."""
        self.chunk += 1
        return self.body(self.chunk - 1, *received)


@dataclass
class Plan:
    """The way of one shape of micro-batches; made once, as it takes a forward of each stage."""

    part: Part
    received: list[Like]
    handed: list[Like]
    result: list[Like]
    """What the network gives."""
    one_result: bool
    """Whether it gives a tensor, and not a tuple."""
    run: Run
    schedule: Any


class Plans:
    """Makes plans when they are first needed, in all processes at the same time.

    Args:
        network: What is cut.
        name: What errors call it.
        schedule: Order of forwards and backwards, ``"gpipe"`` or ``"1f1b"``.
        device: Of this process.
        make_part: Returns what this stage computes, given example arguments of the network.
    """

    def __init__(
        self,
        network: nn.Module,
        name: str,
        schedule: str,
        device: torch.device,
        make_part: Callable[[Call], Part],
    ) -> None:
        self._network, self._name, self._schedule = network, name, schedule
        self._device, self._make_part = device, make_part
        self._stage, self._stages = dist.get_rank(), dist.get_world_size()
        self._plans: OrderedDict[Any, Plan] = OrderedDict()

    def find(
        self, key: Any, chunks: int, example: Callable[[], Call], context: Context, *, train: bool
    ) -> Plan:
        """Return the plan for micro-batches of one shape.

        Args:
            key: Differs between micro-batches of different shapes.
            chunks: How many there are.
            example: Returns the arguments of the network for one of them; called in rank 0.
            context: Entered around forwards.
            train: Whether there will be a backward.

        Raises:
            Exception: A stage failed; in that process its own error, in others a `RuntimeError`.
        """
        modes = tuple(module.training for module in self._network.modules())
        key = (key, chunks, modes, train)
        if key not in self._plans:
            with torch.no_grad():
                self._plans[key] = self._make(chunks, example, context, train)
            if len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def _make(
        self, chunks: int, example: Callable[[], Call], context: Context, train: bool
    ) -> Plan:
        """Run the stages one after the other, so that all hear of an error before a step."""
        calls: list[Call] = []

        def inputs() -> Any:
            calls.append(example())
            return map_tensors(calls[0], lambda tensor: torch.empty_like(tensor, device="meta"))

        skeleton = done_by(0, inputs)
        if not calls:
            calls.append(map_tensors(skeleton, lambda t: Like.of(t).zeros(self._device)))
        args, kwargs = calls[0]
        part = self._make_part(calls[0])

        def run(stage: int, received: list[Like]) -> tuple[bool, list[Like]]:
            with context(), _buffers_kept(self._network):
                if stage == 0:
                    output = part(*args, **kwargs)
                else:
                    output = part(*(like.zeros(self._device) for like in received))
            return isinstance(output, Tensor), self._likes(stage, output)

        likes: list[list[Like]] = [[]]
        single = True
        for stage in range(self._stages):
            single, handed = done_by(stage, partial(run, stage, likes[-1]))
            likes.append(handed)
        received, handed = likes[self._stage], likes[self._stage + 1]
        if self._stage == self._stages - 1:
            handed = [LOSS]
        module = Run()
        schedule = self._make_schedule(module, received, handed, chunks, train)
        return Plan(part, received, handed, likes[-1], single, module, schedule)

    def _likes(self, stage: int, output: Any) -> list[Like]:
        values = as_tuple(output)
        if not all(isinstance(value, Tensor) for value in values):
            raise ValueError(
                f"Stage {stage} of {self._name} gives {type(output).__name__}, and it must give a "
                "tensor or a tuple of tensors."
            )
        return [Like.of(value) for value in values]

    def _make_schedule(
        self, module: Run, received: list[Like], handed: list[Like], chunks: int, train: bool
    ) -> Any:
        # Only here: on platforms without torch.distributed it cannot be imported.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        def meta(likes: list[Like]) -> tuple[Tensor, ...]:
            return tuple(like.on_wire().zeros("meta").requires_grad_(train) for like in likes)

        stage = PipelineStage(
            module,
            self._stage,
            self._stages,
            self._device,
            # With both, torch runs nothing to find out. The first stage gets the chunk's number.
            input_args=meta(received) if self._stage else (torch.zeros(1, dtype=torch.long),),
            output_args=meta(handed),
        )
        if not train:
            # Without a loss this goes forward only.
            return ScheduleGPipe(stage, chunks)
        schedule = Schedule1F1B if self._schedule == "1f1b" else ScheduleGPipe
        return schedule(stage, chunks, loss_fn=lambda output, _: output[0].sum())


def as_tuple(output: Any) -> tuple[Any, ...]:
    """Return the tensors that a stage gives."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


@contextmanager
def _buffers_kept(network: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in network.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
