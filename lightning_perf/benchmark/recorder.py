"""A short training run, recorded so that it can be compared with another one."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_perf import _compat
from lightning_perf.benchmark import first_update
from lightning_perf.benchmark.gate import without_interruptions
from lightning_perf.benchmark.variant import callback_list

Build = Callable[[], tuple[LightningModule, Any, dict[str, Any]]]

_SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


@dataclass
class LearningRecord:
    """What one short training run did."""

    losses: list[float]
    """Training loss of each batch, before the division by ``accumulate_grad_batches``."""
    initial_weights: str
    """Hash of the parameters and buffers before the first step."""
    batches: list[str]
    """Hash of each batch as the training step got it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of a validation after the last step, if it was asked for."""
    update: Path | None = None
    """File with the first optimizer step, tensor by tensor."""
    threads: int = 0
    """Intra-op threads during training."""
    device: str = "cpu"
    """Type of the device that was trained on."""
    error: str | None = None
    """Why the run cannot be compared with another."""


def record(
    build: Build,
    *,
    steps: int,
    seed: int,
    update: Path,
    perturb: float = 0.0,
    perturb_seed: int = 0,
    validate: bool = False,
) -> LearningRecord:
    """Train for some steps from a seed, and leave no trace but the file ``update``.

    Nothing is logged or checkpointed, and random generators are left as they were. An error in the
    user's code is not caught.

    Args:
        build: Returns a fresh module, its data and the Trainer's arguments.
        steps: Optimizer steps; a run whose own end comes sooner is shorter.
        seed: Seeds everything before ``build`` is called.
        update: Where to write the first optimizer step, tensor by tensor.
        perturb: Multiply every weight by 1 + u before the first step, u uniform in
            [-perturb, perturb].
        perturb_seed: Seed of u.
        validate: Whether to validate after the last step.
    """

    def run(loss_scale: float | None) -> tuple[_Recorder, dict[str, float]]:
        recorder = _Recorder(steps, update, perturb, perturb_seed, loss_scale)
        return recorder, _fit(build, recorder, seed, validate=validate)

    with _undisturbed():
        recorder, metrics = run(loss_scale=None)
        if recorder.skipped:
            # While float16's loss scale is too high, steps are skipped. Begin again with the scale
            # it came down to, or the updates would be those of other batches than the baseline's.
            recorder, metrics = run(loss_scale=recorder.loss_scale)
    return recorder.finish(metrics)


class _Recorder(Callback):
    """Keeps losses, batches and the first update, and ends the run after some steps."""

    loss_scale: float | None

    def __init__(
        self,
        steps: int,
        update: Path,
        perturb: float,
        perturb_seed: int,
        loss_scale: float | None,
    ) -> None:
        self.steps = steps
        self.update = update
        self.perturb = perturb
        self.perturb_seed = perturb_seed
        self.loss_scale = loss_scale
        self.skipped = False
        self.updated = False
        self.losses: list[tuple[Tensor, int]] = []
        self.batches: list[str] = []
        self.initial_weights = ""
        self.threads = 0
        self.device = ""

    @property
    def start(self) -> Path:
        """File with the model as it was before the first step."""
        return self.update.with_name(f"{self.update.name}.start")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The module's own `configure_callbacks` may have brought more of them.
        # A new list: Lightning is going through the old one.
        kept, _ = without_interruptions(_compat.callbacks(trainer))
        trainer.callbacks = kept  # type: ignore[attr-defined]  # public, but not declared

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.threads = torch.get_num_threads()
        self.device = pl_module.device.type
        # A plateau is judged by a validation, which is left out here.
        trainer.strategy.lr_scheduler_configs = [
            config
            for config in trainer.strategy.lr_scheduler_configs
            if not config.reduce_on_plateau
        ]
        self.initial_weights = _fingerprint(dict(first_update.model_tensors(pl_module)))
        self._perturb(pl_module)
        if _keeps_whole_tensors(trainer):
            first_update.save_start(self.start, pl_module)
        scaler = _scaler(trainer)
        if scaler is not None:
            if self.loss_scale is not None:
                scaler.load_state_dict({**scaler.state_dict(), "scale": self.loss_scale})
            self.loss_scale = scaler.get_scale()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(_fingerprint(batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Read at the end: reading it now would wait for the device. The copy is for modules
            # that optimize by hand and may go on to change it.
            divisor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.losses.append((loss.detach().clone(), divisor))
        taken = trainer.global_step > 0 and self._was_taken(trainer)
        if taken and not self.updated and self.start.exists():
            first_update.save_update(self.update, self.start, pl_module, trainer.optimizers)
        self.updated |= taken
        if trainer.global_step >= self.steps:
            # Not by `max_steps`, which learning-rate schedules may be computed from.
            trainer.should_stop = True

    def finish(self, metrics: dict[str, float]) -> LearningRecord:
        """Return the record, once the run is over."""
        error = None
        if not self.batches:
            error = "no batch was trained on. Is the training loader empty?"
        elif not self.losses:
            error = (
                "the training step returns no loss. Return it, also under manual optimization, "
                "and learning can be compared."
            )
        return LearningRecord(
            losses=[loss.item() * divisor for loss, divisor in self.losses],
            initial_weights=self.initial_weights,
            batches=self.batches,
            metrics=metrics,
            update=self.update if self.update.exists() else None,
            threads=self.threads,
            device=self.device,
            error=error,
        )

    def _perturb(self, module: LightningModule) -> None:
        if not self.perturb:
            return
        generator = torch.Generator().manual_seed(self.perturb_seed)
        with torch.no_grad():
            for parameter in filter(Tensor.is_floating_point, module.parameters()):
                noise = torch.empty(parameter.shape).uniform_(
                    1 - self.perturb, 1 + self.perturb, generator=generator
                )
                parameter.mul_(noise.to(parameter.device))

    def _was_taken(self, trainer: Trainer) -> bool:
        """Whether the optimizer stepped: it does not while the loss scale is too high."""
        scaler = _scaler(trainer)
        if scaler is None or self.loss_scale is None:
            return True
        scale = scaler.get_scale()
        taken = bool(scale >= self.loss_scale)
        self.skipped |= not taken
        self.loss_scale = min(scale, self.loss_scale)
        return taken


def _fit(build: Build, recorder: _Recorder, seed: int, *, validate: bool) -> dict[str, float]:
    """Train a fresh module under the recorder's eyes; return its validation metrics."""
    recorder.update.unlink(missing_ok=True)
    seed_everything(seed, workers=True, verbose=False)
    module, data, arguments = build()
    callbacks, _ = without_interruptions(callback_list(arguments))
    # Lightning's own default, which it warns about.
    limit = {} if {"max_epochs", "max_steps"} & arguments.keys() else {"max_epochs": 1000}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **{
                **limit,
                **arguments,
                "callbacks": [*callbacks, recorder],
                # Modules may log to `self.logger.experiment`, so there has to be one.
                "logger": DummyLogger(),
                "profiler": None,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "num_sanity_val_steps": 0,
                "limit_val_batches": 0,
                "min_steps": None,
                "min_epochs": None,
                "max_time": None,
                "default_root_dir": folder,
            }
        )
        try:
            trainer.fit(module, data)
        finally:
            recorder.start.unlink(missing_ok=True)
        if not (validate and _can_validate(module, data)):
            return {}
        trainer.limit_val_batches = arguments.get("limit_val_batches") or 1.0
        source = data if isinstance(data, LightningDataModule) else None
        trainer.validate(module, source, verbose=False)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _can_validate(module: LightningModule, data: Any) -> bool:
    owner = data if isinstance(data, LightningDataModule) else module
    return is_overridden("validation_step", module) and is_overridden("val_dataloader", owner)


def _scaler(trainer: Trainer) -> Any:
    """Return the scaler of float16's losses, if there is one in use."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def _keeps_whole_tensors(trainer: Trainer) -> bool:
    """Whether this process writes the update: not for shards, and once for replicas."""
    sharded = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)
    return trainer.is_global_zero and not isinstance(trainer.strategy, sharded)


def _fingerprint(tensors: Any) -> str:
    """Hash tensors in any structure by shape and values, whatever their strides and precision.

    Floating-point values are rounded to bfloat16, so that a variant that keeps weights or images
    in lower precision, or in channels-last order, is recognised as having the same.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(tensor: Tensor) -> None:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.is_floating_point():
            tensor = tensor.to(torch.bfloat16).view(torch.int16)
        else:
            tensor = tensor.long()
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())

    apply_to_collection(tensors, Tensor, add)
    return digest.hexdigest()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put random generators and seed variables back after the block, whatever happens in it."""
    variables = {name: os.environ.get(name) for name in _SEED_VARIABLES}
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for name, value in variables.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
