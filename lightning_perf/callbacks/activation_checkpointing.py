"""Recompute chosen blocks in the backward pass, instead of keeping their activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_perf import _compat
from lightning_perf._item import Moment, PerfCallback
from lightning_perf._knobs import knobs
from lightning_perf.callbacks._checkpoint.blocks import (
    all_recomputing,
    chosen_blocks,
    kept_share,
    none_found,
    require_policy,
    required_blocks,
)
from lightning_perf.callbacks._checkpoint.comparison import (
    CheckpointingCost,
    StepCost,
    checkpointing_cost,
)
from lightning_perf.callbacks._checkpoint.forward import Stopwatch, recomputed_blocks
from lightning_perf.callbacks._checkpoint.report import FirstSteps
from lightning_perf.callbacks.compile import Compile

__all__ = [
    "ActivationCheckpointing",
    "CheckpointingCost",
    "StepCost",
    "checkpointed",
    "checkpointing_cost",
    "recomputed_blocks",
]


class ActivationCheckpointing(PerfCallback):
    """Recompute chosen blocks in the backward pass, instead of keeping their activations.

    A block keeps its inputs only, and runs its forward pass again when the backward pass needs
    what it computed: much less memory for at most one forward pass more. The results are the
    same: random numbers, autocast, buffers and attributes are, in the second pass, as they were in
    the first, and running statistics move once. Checkpoints and module names do not change.
    Without gradients, as in validation, blocks run as they are.

    Do not use it where memory is no limit: it takes time.

    Args:
        blocks: ``"auto"`` takes the repeated blocks: members, all of one class, of a ModuleList or
            a Sequential. A list holds names of modules, or of classes for all modules of them.
        policy: ``"full"`` keeps only the inputs of a block. A number from 0 to 1 is the share of
            its activations that a block may keep: its inputs, and the results of matrix products,
            convolutions and attention that took most FLOPs per byte. ``"selective"`` is 0.6. Where
            `Compile` acts, the share is torch.compile's own memory budget for all that it compiles,
            and ``blocks`` and ``every_n`` do not matter.
        every_n: Recompute only the first of each n blocks.
        report: Say what the first steps showed: bytes, FLOPs and time.
        strict: See `PerfCallback`.

    Raises:
        ValueError: Unknown policy, ``every_n`` below 1, or, at the start of a run, no module of a
            name.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.callbacks import ActivationCheckpointing
        >>> item = ActivationCheckpointing(["TransformerEncoderLayer"], policy="selective")
        >>> trainer = Trainer(callbacks=[item], accelerator="cpu", logger=False)

    Source: PyTorch tuning guide, "Checkpoint intermediate buffers"; Chen et al. 2016,
    arXiv:1604.06174.
    """

    guide: ClassVar[str] = "T checkpoint intermediate buffers; K 5.1; L 3"
    changes: ClassVar[frozenset[str]] = frozenset({"model", "activation_memory_budget"})
    exact: ClassVar[bool] = True
    moment: ClassVar[Moment] = "before_wrap"
    functions: ClassVar[frozenset[str]] = frozenset({"fit"})

    def __init__(
        self,
        blocks: str | list[str] = "auto",
        *,
        policy: float | str = "full",
        every_n: int = 1,
        report: bool = True,
        strict: bool | None = None,
    ) -> None:
        super().__init__(strict=strict)
        require_policy(policy, every_n)
        self.blocks = blocks
        self.policy = policy
        self.every_n = every_n
        self.report = report

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason not to recompute: the strategy, the model, or no compiler."""
        if trainer.strategy.restore_checkpoint_after_setup:
            return (
                f"{type(trainer.strategy).__name__} wraps layers itself. Use what it has for this, "
                "such as `activation_checkpointing_policy` of FSDPStrategy."
            )
        if self._is_for_the_compiler(trainer, module):
            return None
        chosen, left = chosen_blocks(module, self.blocks, self.every_n)
        return None if chosen else none_found(module, left)

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Recompute the blocks for the length of the run, and say what it brought."""
        if self._is_for_the_compiler(trainer, module):
            share = kept_share(self.policy)
            with _memory_budget(share):
                yield f"memory budget {share:g} for torch.compile"
            return
        chosen, left = chosen_blocks(module, self.blocks, self.every_n)
        with all_recomputing(chosen, self.policy) as blocks:
            steps = FirstSteps(blocks, Stopwatch(trainer.strategy.root_device), self.say)
            with steps.watching(trainer) if self.report else nullcontext():
                yield _detail(list(chosen), left, self.policy)

    def _is_for_the_compiler(self, trainer: Trainer, module: LightningModule) -> bool:
        """Say whether code is compiled that a memory budget acts on."""
        return kept_share(self.policy) > 0 and any(
            item.backend != "eager" and item.why_not(trainer, module) is None
            for item in _compat.callbacks(trainer)
            if isinstance(item, Compile)
        )


@contextmanager
def checkpointed(
    model: nn.Module,
    blocks: str | Sequence[str] = "auto",
    *,
    policy: float | str = "full",
    every_n: int = 1,
) -> Iterator[tuple[str, ...]]:
    """Recompute blocks of a model in each backward pass, for the length of a block of code.

    Args:
        model: Any module.
        blocks: As for `ActivationCheckpointing`.
        policy: As for `ActivationCheckpointing`, without a compiler.
        every_n: Recompute only the first of each n blocks.

    Yields:
        The names of the blocks.

    Raises:
        ValueError: No block is found, a name or the policy is unknown, or ``every_n`` is below 1.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> with checkpointed(model) as names:
        ...     model(torch.randn(5, 3, 8)).sum().backward()
        >>> names
        ('layers.0', 'layers.1')
    """
    chosen = required_blocks(model, blocks, policy, every_n)
    with all_recomputing(chosen, policy):
        yield tuple(chosen)


@contextmanager
def _memory_budget(share: float) -> Iterator[None]:
    """Let torch.compile keep that share of the activations, in code that it compiles inside."""
    # What is compiled already was so under another budget, and Dynamo would take it as it is.
    with knobs(activation_memory_budget=share):
        torch.compiler.reset()
        try:
            yield
        finally:
            torch.compiler.reset()


def _detail(names: list[str], left: dict[str, str], policy: float | str) -> str:
    shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
    count = "1 block" if len(names) == 1 else f"{len(names)} blocks"
    kept = policy if isinstance(policy, str) else f"at most {policy:.0%} kept"
    rest = "".join(f"; {name}: {reason}" for name, reason in left.items())
    return f"{count} ({shown}), {kept}{rest}"
