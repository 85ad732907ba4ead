"""Running one network whose stages lie in several processes, a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_perf.strategies._pipeline.exchange import (
    Failure,
    Like,
    broadcast,
    fingerprint,
    gather,
    likes,
)
from lightning_perf.strategies._pipeline.plan import LOSS, Call, Context, Plan, Plans, as_tuple
from lightning_perf.strategies._pipeline.stages import Part


class _Reached(BaseException):
    """Ends a step where it calls the network. No `Exception`, which the user may catch."""

    def __init__(self, call: Call) -> None:
        self.call = call


class Pipe:
    """A network cut over all processes, each of which makes the same calls.

    Args:
        network: What is cut.
        name: What errors call it.
        schedule: Order of forwards and backwards, ``"gpipe"`` or ``"1f1b"``.
        chunks: Micro-batches in a batch.
        device: Of this process.
        make_part: Returns what this stage computes, given example arguments of the network.
    """

    def __init__(
        self,
        network: nn.Module,
        name: str,
        schedule: str,
        chunks: int,
        device: torch.device,
        make_part: Callable[[Call], Part],
    ) -> None:
        self.name, self.chunks, self._device = name, chunks, device
        self._plans = Plans(network, name, schedule, device, make_part)
        self._stage, self._stages = dist.get_rank(), dist.get_world_size()
        self._first, self._last = self._stage == 0, self._stage == self._stages - 1
        self._answer: Callable[[Call], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the forward of the network.

        Raises:
            RuntimeError: It is called outside of a step, where the other processes take no part.
        """
        if self._answer is None:
            raise RuntimeError(
                f"{self.name} was called outside of a training, validation, test or predict step, "
                "but its layers lie in several processes, which meet in steps only. Call it there. "
                "For the model summary Lightning calls it if there is an example_input_array: pass "
                "Trainer(enable_model_summary=False)."
            )
        return self._answer((args, kwargs))

    @contextmanager
    def answering(self, answer: Callable[[Call], Any] | None = None) -> Iterator[None]:
        """Let the network be called: evaluated by all processes, if not told otherwise."""
        outer, self._answer = self._answer, answer or self._evaluate
        try:
            yield
        finally:
            self._answer = outer

    def agree(self, batch: Any) -> None:
        """Make sure that all processes have the same batch.

        Raises:
            RuntimeError: They have not, and would mix inputs of one with targets of another.
        """
        mark = torch.tensor([fingerprint(batch)], device=self._device)
        marks = [torch.zeros_like(mark) for _ in range(self._stages)]
        dist.all_gather(marks, mark)
        if len({int(mark) for mark in marks}) > 1:
            raise RuntimeError(
                "The processes of PipelineStrategy have different batches, and each must have the "
                "same: one takes the inputs, another the targets. Call seed_everything at the "
                "start, use no DistributedSampler, and draw random numbers alike on all ranks."
            )

    def train(
        self, key: Any, step: Callable[[int], Tensor], context: Context, report: Callable[[], Any]
    ) -> Any:
        """Run forward and backward of all micro-batches, for gradients of their mean loss.

        Args:
            key: Differs between batches of different shapes.
            step: Runs the user's step for the micro-batch of that number; returns the loss.
            context: Entered around forwards, for autocast.
            report: Called after the last micro-batch.

        Returns:
            What the report gives in the last stage, the only one that runs whole steps.

        Raises:
            Exception: A stage failed; in that process its own error, in others a `RuntimeError`.
        """

        def example() -> Call:
            with context():
                return self._inputs(step, 0)

        plan = self._plans.find(key, self.chunks, example, context, train=True)

        def body(index: int, *received: Tensor) -> Any:
            with context():
                if self._first:
                    args, kwargs = self._inputs(step, index)
                    return plan.part(*args, **kwargs)
                output = plan.part(*received)
                if not self._last:
                    return output
                loss = self._finish(step, index, output)
            # Not a view: torch detaches it in place.
            return torch.stack([(loss / self.chunks).reshape(())]).float()

        return self._go(plan, body, self.chunks, train=True, report=report)

    def _inputs(self, step: Callable[[int], Tensor], index: int) -> Call:
        """Run the user's step up to where it calls the network."""

        def stop(call: Call) -> Any:
            raise _Reached(call)

        try:
            with self.answering(stop):
                step(index)
        except _Reached as reached:
            return reached.call
        raise RuntimeError(f"training_step did not call {self.name}, which is to be trained.")

    def _finish(self, step: Callable[[int], Tensor], index: int, output: Any) -> Tensor:
        """Run the user's step with what the network gives."""
        outputs = [output]

        def give(call: Call) -> Any:
            if not outputs:
                raise RuntimeError(
                    f"training_step called {self.name} twice, and a pipeline runs it once in a "
                    "step. Put both inputs into one batch."
                )
            return outputs.pop()

        with self.answering(give):
            return step(index)

    def _evaluate(self, call: Call) -> Any:
        """Run the forward in all processes; each has the arguments, and each gets the result."""
        self.agree(call)
        args, kwargs = call
        pieces = [call]
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dim():
            rows = args[0].shape[0] // self.chunks
            if rows and args[0].shape[0] % self.chunks == 0:
                pieces = [((piece,), {}) for piece in args[0].chunk(self.chunks)]
        with torch.no_grad():
            plan = self._evaluation_plan(pieces)
            if any(like.shape[:1] != (rows,) for like in plan.result if len(pieces) > 1):
                # The result is not one of rows, so it cannot be put together.
                pieces = [call]
                plan = self._evaluation_plan(pieces)
            return self._run_pieces(plan, pieces)

    def _evaluation_plan(self, pieces: list[Call]) -> Plan:
        # Buffers made in inference mode cannot be written outside of it.
        key = (likes(pieces[0]), torch.is_inference_mode_enabled())
        return self._plans.find(key, len(pieces), lambda: pieces[0], nullcontext, train=False)

    def _run_pieces(self, plan: Plan, pieces: list[Call]) -> Any:
        done: list[tuple[Tensor, ...]] = []

        def body(index: int, *received: Tensor) -> Any:
            args, kwargs = pieces[index] if self._first else (received, {})
            output = plan.part(*args, **kwargs)
            if not self._last:
                return output
            done.append(as_tuple(output))
            return LOSS.zeros(self._device)

        self._go(plan, body, len(pieces), train=False)
        outputs = []
        for number, like in enumerate(plan.result):
            if self._last:
                parts = [piece[number] for piece in done]
                output = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
            else:
                output = like.zeros(self._device)
                if len(pieces) > 1:
                    output = output.repeat(len(pieces), *[1] * (output.dim() - 1))
            broadcast(output, self._stages - 1)
            outputs.append(output)
        return outputs[0] if plan.one_result else tuple(outputs)

    def _go(
        self,
        plan: Plan,
        body: Callable[..., Any],
        chunks: int,
        *,
        train: bool,
        report: Callable[[], Any] = bool,
    ) -> Any:
        """Run all chunks. After an error go on with zeros, so that no other process waits."""
        failure: Exception | None = None

        def guarded(index: int, *wires: Tensor) -> Any:
            nonlocal failure
            pairs = [] if self._first else list(zip(plan.received, wires, strict=True))
            # Torch sends a gradient back for all that was received.
            ties = [wire for like, wire in pairs if not like.dtype.is_floating_point]
            if failure is None:
                try:
                    values = body(index, *(like.off_wire(wire) for like, wire in pairs))
                    return _on_wires(self._checked(plan, values), ties, train=train)
                except Exception as error:
                    failure = error
            zeros = tuple(like.zeros(self._device) for like in plan.handed)
            return _on_wires(zeros, [wire for _, wire in pairs], train=train)

        plan.run.body, plan.run.chunk = guarded, 0
        numbers = torch.arange(chunks)
        args = (numbers,) if self._first else ()
        kwargs = {"target": numbers} if self._last and train else {}
        try:
            plan.schedule.step(*args, **kwargs)
        finally:
            plan.run.body = tuple
        reports = gather(Failure.of(failure) if failure else self._last and report())
        if failure is not None:
            raise failure
        for found in reports:
            if isinstance(found, Failure):
                raise found.exception()
        return reports[-1]

    def _checked(self, plan: Plan, output: Any) -> tuple[Tensor, ...]:
        values = as_tuple(output)
        found = [Like.of(value) for value in values]
        if found != plan.handed:
            raise RuntimeError(
                f"Stage {self._stage} of {self.name} gave {found}, and {plan.handed} for an input "
                "of the same shape before. Shapes must follow from the shapes of the input."
            )
        return values


def _on_wires(values: tuple[Tensor, ...], ties: list[Tensor], *, train: bool) -> tuple[Tensor, ...]:
    """Return tensors as torch can send them; each requires a gradient, and depends on the ties."""
    wires = [(v if v.is_floating_point() else v.double()).contiguous() for v in values]
    if train:
        for tie in ties:
            wires[0] = wires[0] + 0 * tie.sum().to(wires[0].dtype)
        wires = [wire if wire.requires_grad else wire.detach().requires_grad_() for wire in wires]
    return tuple(wires)
