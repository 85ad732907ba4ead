"""Pipeline parallelism: the layers of one network in several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_perf._attributes import instance_attribute
from lightning_perf._batches import batches_unseen
from lightning_perf.strategies._pipeline.exchange import likes, random_numbers, same_random_numbers
from lightning_perf.strategies._pipeline.micro_batches import Recorder, micro_batches
from lightning_perf.strategies._pipeline.pipe import Pipe
from lightning_perf.strategies._pipeline.plan import Call
from lightning_perf.strategies._pipeline.same_batches import SameBatchesStrategy, StartMethod
from lightning_perf.strategies._pipeline.stages import (
    Part,
    find_network,
    find_points,
    is_sequential,
    module_owners,
    sequential_part,
    traced_part,
)
from lightning_perf.strategies._pipeline.weights import StageWeights

Schedule = Literal["gpipe", "1f1b"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class PipelineStrategy(SameBatchesStrategy):
    """Train a network that is cut into as many stages as there are processes.

    Each process keeps the weights, gradients and optimizer state of its own stage only. A batch
    goes through as micro-batches, so that stages work at the same time. `training_step`,
    `validation_step` and the rest stay as they are: where they call the network, all stages do.
    Losses and gradients are those of one process that accumulates the same micro-batches, and
    checkpoints are those of the network as it was.

    All processes load all batches; use no distributed sampler. Do not use it for a network that
    fits one device: data parallelism has no bubble, and needs no equal stages.

    Args:
        network: Dotted name of the module to cut. ``None`` takes the only child that is an
            ``nn.Sequential`` with parameters.
        split_points: Names inside the network before which a stage begins, one fewer than
            processes. ``None`` cuts a Sequential into stages of about equal parameter counts. A
            network that is no Sequential is traced, so it must have no control flow that depends
            on values.
        schedule: ``"1f1b"`` lets each stage hold no more micro-batches than there are stages,
            ``"gpipe"`` all of them.
        chunks: Micro-batches in a batch; a batch must be divisible by it.
        process_group_backend: Such as ``"gloo"`` or ``"nccl"``; ``None`` chooses by device.
        timeout: Seconds after which a process gives up to wait for another.
        start_method: How processes start, if nothing outside starts them.

    Raises:
        ValueError: An argument has a wrong value.

    Example:
        >>> from lightning_perf.strategies import PipelineStrategy
        >>> strategy = PipelineStrategy("net", schedule="gpipe", chunks=8)

    Source: K 6.2; GPipe (Huang et al. 2019), PipeDream-Flush (Narayanan et al. 2021).
    """

    guide: ClassVar[str] = "K 6.2"
    """Section of the tuning guides that the strategy implements."""

    def __init__(
        self,
        network: str | None = None,
        *,
        split_points: list[str] | None = None,
        schedule: Schedule = "1f1b",
        chunks: int = 4,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
        start_method: StartMethod = "popen",
    ) -> None:
        super().__init__(process_group_backend, timeout, start_method)
        _one_of("schedule", schedule, get_args(Schedule))
        _one_of("start_method", start_method, get_args(StartMethod))
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise ValueError(f"chunks={chunks!r} was asked for; it is a whole number from 1 on.")
        if not timeout > 0:
            raise ValueError(
                f"timeout={timeout!r} was asked for; it is a number of seconds above 0."
            )
        if isinstance(split_points, str) or not all(isinstance(p, str) for p in split_points or []):
            raise ValueError(
                f"split_points={split_points!r} was asked for; it is a list of names, or None."
            )
        self.network, self.split_points = network, split_points
        self.schedule, self.chunks = schedule, chunks
        self._pipe: Pipe | None = None
        self._weights: StageWeights | None = None
        self._undo = ExitStack()
        self._failed = False

    def setup_environment(self) -> None:
        """Let the processes find each other.

        Raises:
            ValueError: There is only one.
        """
        if self.num_nodes * self.num_processes < 2:
            raise ValueError(
                "PipelineStrategy was asked for with one process, and each stage needs one. Pass "
                "Trainer(devices=2) or more, or another strategy."
            )
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Cut the network, keep the stage of this process, and build the optimizers.

        Raises:
            ValueError: The module, or the way it is run, cannot be a pipeline.
        """
        module = self._module
        fitting = trainer.state.fn == TrainerFn.FITTING
        reason = self._why_not(module, fitting=fitting)
        if reason:
            raise ValueError(f"PipelineStrategy cannot run {type(module).__name__}: {reason}")
        self._failed = False
        super().setup(trainer)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise ValueError("PipelineStrategy cannot run LBFGS, which needs all parameters.")
        name, network = find_network(module, self.network)
        clip = partial(_clip_by_norm, self)
        self._undo.enter_context(instance_attribute(network, "forward", self._pipe))
        self._undo.enter_context(
            instance_attribute(self.precision_plugin, "clip_grad_by_norm", clip)
        )
        same_random_numbers(self.root_device)
        if fitting and any(isinstance(layer, _BATCH_NORMS) for layer in network.modules()):
            rank_zero_info(
                f"lightning_perf: PipelineStrategy: BatchNorm in {name!r} sees micro-batches: its "
                f"statistics are those of 1/{self.chunks} of a batch, not of a batch."
            )

    def _why_not(self, module: LightningModule, *, fitting: bool) -> str | None:
        if not fitting:
            return None
        if not module.automatic_optimization:
            return "it optimizes manually, and steps run up to the network only in some processes."
        if getattr(self.precision_plugin, "scaler", None) is not None:
            return "precision='16-mixed' scales losses. Use 'bf16-mixed' or '32-true'."
        if self.schedule == "1f1b" and self.chunks < self.world_size:
            return (
                f"schedule='1f1b' needs as many chunks as stages, and there are {self.chunks} and "
                f"{self.world_size}. Pass chunks={self.world_size} or more, or schedule='gpipe'."
            )
        return batches_unseen(module)

    def model_to_device(self) -> None:
        """Give all processes the weights of rank 0, of which each keeps those of its stage."""
        module, device = self._module, self.root_device
        name, network = find_network(module, self.network)
        points = find_points(network, self.split_points, self.world_size)

        def make_part(call: Call) -> Part:
            if is_sequential(network):
                return sequential_part(network, points, self.global_rank)
            return traced_part(network, points, self.global_rank, *call)

        self._weights = StageWeights(module, module_owners(module, name, points), device)
        self._weights.keep_own()
        module.to(device)
        shown = f"{type(module).__name__}.{name}"
        self._pipe = Pipe(network, shown, self.schedule, self.chunks, device, make_part)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the user's step for each micro-batch, and return their mean loss in all processes.

        Gradients are computed here, where the schedule needs it, and given to the parameters in
        the backward of the loss: in between Lightning clears them.
        """
        module, pipe, weights, device = self._module, *self._split, self.root_device
        pipe.agree(batch)
        parts, rows = micro_batches(batch, self.chunks)
        recorder, losses = Recorder(rows), []
        # The same in all processes: steps draw alike, and stages each their own numbers.
        seed = int(torch.randint(2**31, ()))

        def step(index: int) -> Tensor:
            with random_numbers(seed + index, device):
                output = module.training_step(parts[index], *args, **kwargs)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor):
                raise ValueError(f"training_step must return a loss, and gave {output!r}.")
            losses.append(loss.detach().reshape(()))
            return loss

        def report() -> Any:
            return torch.stack(losses).mean().cpu(), recorder.summary()

        with (
            weights.gradients_aside() as gradients,
            instance_attribute(module, "log", recorder.log),
            random_numbers(seed + self.chunks + self.global_rank, device),
        ):
            context = self.precision_plugin.train_step_context
            mean, logged = pipe.train(likes(parts[0]), step, context, report)
        weights.share_outside_buffers()
        for name, value, flags, options in logged:
            module.log(name, value.to(device), *flags, **options)
        loss: Tensor = mean.to(device).requires_grad_()
        loss.register_hook(  # type: ignore[no-untyped-call]  # torch has no types here
            lambda factor: weights.add_gradients(gradients, factor)
        )
        return loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step in all processes."""
        with self._split[0].answering():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step in all processes."""
        with self._split[0].answering():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step in all processes."""
        with self._split[0].answering():
            return super().predict_step(*args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Add up gradients of parameters that all processes have, and step."""

        def closure_and_sum() -> Any:
            result = closure()
            self._split[1].add_up_outside()
            return result

        return super().optimizer_step(optimizer, closure_and_sum, model, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state in rank 0, and nothing in other processes."""
        if self._weights is None:
            return super().lightning_module_state_dict()
        return self._weights.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state in rank 0, and nothing in other processes."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return state if self._weights is None else self._weights.optimizer_state(optimizer, state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what belongs to this process."""
        weights = self._split[1]
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        states = [weights.own_optimizer_state(optimizer, state) for optimizer, state in pairs]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    def on_exception(self, exception: BaseException) -> None:
        """Note that other processes may be gone."""
        self._failed = True

    def teardown(self) -> None:
        """Give all processes all weights, and the network its forward.

        After an error others may be gone: the weights of their stages are NaN then.
        """
        self._undo.close()
        self._pipe = None
        if self._weights is not None:
            self._weights.put_back(failed=self._failed)
        super().teardown()

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("PipelineStrategy has a module only as part of a Trainer.")
        return self.lightning_module

    @property
    def _split(self) -> tuple[Pipe, StageWeights]:
        if self._pipe is None or self._weights is None:
            raise RuntimeError("PipelineStrategy has stages only during a run.")
        return self._pipe, self._weights


def _clip_by_norm(strategy: PipelineStrategy, optimizer: Optimizer, clip_val: float) -> None:
    """Stand in for the method of the precision plugin, which knows this process only."""
    parameters = list(strategy.precision_plugin.main_params(optimizer))
    strategy._split[1].clip_by_norm(parameters, float(clip_val))


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{name}={value!r} was asked for; it is one of {', '.join(map(repr, choices))}."
        )
