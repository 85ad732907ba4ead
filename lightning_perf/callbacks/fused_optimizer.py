"""The fused (or foreach) implementation of torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_perf._item import Moment, PerfCallback
from lightning_perf.callbacks._optimizer_choice import (
    FLAGS,
    Choice,
    choose,
    describe,
    plan,
    sparse_weights,
)
from lightning_perf.callbacks.channels_last import match_optimizer_state, same_layout


class FusedOptimizer(PerfCallback):
    """Update all parameters in one fused kernel instead of several operations for each parameter.

    Sets ``fused=True`` in the param groups of torch's own optimizers (Adam, AdamW, SGD, Adagrad)
    where device, dtype and options allow it, in param groups restored from a checkpoint too. For
    optimizers without a fused implementation, it sets ``foreach=True`` on a CPU if the parameters
    are small; on a GPU torch does so itself. Checkpoints are written as without the item.

    Your own ``fused=`` or ``foreach=`` is respected. Do not use it to save memory: on a GPU, fused
    is lean already, and on a CPU foreach needs some more.

    Args:
        strict: See `PerfCallback`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.callbacks import FusedOptimizer
        >>> trainer = Trainer(callbacks=[FusedOptimizer()], accelerator="cpu", logger=False)
    """

    guide: ClassVar[str] = "T fuse pointwise operations: optimizers"
    changes: ClassVar[frozenset[str]] = frozenset({"optimizer"})
    exact: ClassVar[bool] = False
    moment: ClassVar[Moment] = "after_wrap"
    functions: ClassVar[frozenset[str]] = frozenset({"fit"})

    def __init__(self, *, strict: bool | None = None) -> None:
        super().__init__(strict=strict)

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason when no param group of any optimizer can be switched."""
        if trainer.strategy.restore_checkpoint_after_setup:
            return (
                f"{type(trainer.strategy).__name__} shards the optimizer. "
                "Pass fused=True to your optimizer where that strategy supports it."
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and trainer.gradient_clip_val:
            return (
                f"precision={trainer.precision!r} scales gradients and "
                f"gradient_clip_val={trainer.gradient_clip_val} clips them; PyTorch's fused "
                "optimizers and clipping do not go together under a loss scaler. Use "
                "precision='bf16-mixed' or remove gradient_clip_val."
            )
        if all(type(o).__module__.startswith("lightning.") for o in trainer.optimizers):
            # Lightning puts a mock where there is none.
            return f"{type(module).__name__}.configure_optimizers makes no optimizer."
        plans = [plan(optimizer, sparse_weights(module)) for optimizer in trainer.optimizers]
        if any(choice.flag for choices in plans for choice in choices):
            return None
        return describe(trainer.optimizers, plans)

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Switch the param groups of all optimizers for the length of the run."""
        sparse = sparse_weights(module)
        with ExitStack() as stack:
            switches = [
                stack.enter_context(_switched(optimizer, sparse, self.say))
                for optimizer in trainer.optimizers
            ]
            plans = [switch.choices for switch in switches]
            yield describe(trainer.optimizers, plans)


@contextmanager
def fused(optimizer: Optimizer) -> Iterator[None]:
    """Use an optimizer's fused (or foreach) implementation for the length of a block.

    State dicts taken inside the block are as without it, and ones loaded inside are switched too.

    Args:
        optimizer: One of torch's own, with its parameters on the device where they are trained;
            or the wrapper that Lightning Fabric has put around it.

    Raises:
        ValueError: If no param group can be switched; the message says why.

    Example:
        >>> import torch
        >>> from lightning_perf.callbacks.fused_optimizer import fused
        >>> optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
        >>> with fused(optimizer):
        ...     optimizer.param_groups[0]["fused"]
        True
        >>> optimizer.param_groups[0]["fused"] is None
        True
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # what Fabric's wrapper holds
    choices = plan(optimizer, frozenset())
    if not any(choice.flag for choice in choices):
        raise ValueError(
            f"No faster implementation to switch to: {describe([optimizer], [choices])}"
        )
    with _switched(optimizer, frozenset(), lambda message: None):
        yield


class _Switch:
    """One optimizer whose param groups run another implementation.

    ``choices`` and ``made`` have an entry for each param group: what was chosen, and the flags
    that the user, or the restored checkpoint, had given it.
    """

    def __init__(
        self, optimizer: Optimizer, sparse: frozenset[Tensor], say: Callable[[str], None]
    ) -> None:
        self.optimizer = optimizer
        self.sparse = sparse
        self.say = say
        self.choices: list[Choice] = []
        self.made: list[dict[str, Any]] = []
        self._waiting: list[tuple[int, Tensor]] = []

    def switch(self) -> None:
        """Choose for the param groups that have no choice yet, and set their flags."""
        known = len(self.choices)
        for index, group in enumerate(self.optimizer.param_groups[known:], start=known):
            choice = choose(self.optimizer, group, self.sparse)
            self.choices.append(choice)
            self.made.append({flag: group[flag] for flag in FLAGS if flag in group})
            if choice.flag is None:
                continue
            group[choice.flag] = True
            self._waiting += [(index, parameter) for parameter in group["params"]]
            if choice.flag == "fused":
                self._move_steps(group, host=False)
        match_optimizer_state(self.optimizer)

    def restore(self) -> None:
        """Give all param groups their own flags back."""
        groups = self.optimizer.param_groups
        for index in range(min(len(groups), len(self.choices))):
            self._put_back(index)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look at gradients that arrive for the first time, after the closure if there is one."""
        if len(optimizer.param_groups) > len(self.choices):
            self.switch()
        if not self._waiting:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._look_at_first_gradients()
            return None

        def closure_then_look() -> Any:
            loss = closure()
            self._look_at_first_gradients()
            return loss

        return args[:1], {**kwargs, "closure": closure_then_look}

    def after_load(self, optimizer: Optimizer) -> None:
        """Switch again: loading a state dict replaced the flags of the param groups."""
        before = describe([optimizer], [self.choices])
        self.choices, self.made, self._waiting = [], [], []
        self.switch()
        after = describe([optimizer], [self.choices])
        if after != before:
            self.say(f"after restoring its state, {after}")

    def as_made(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Make a state dict look as if nothing had been switched, so that it loads anywhere."""
        state = state_dict["state"]
        for packed, choice, made in zip(
            state_dict["param_groups"], self.choices, self.made, strict=False
        ):
            packed.update(made)
            for key in packed["params"] if choice.flag == "fused" else ():
                if "step" in state.get(key, {}):
                    state[key] = {**state[key], "step": _host_step(state[key]["step"])}
        return state_dict

    def _look_at_first_gradients(self) -> None:
        groups = self.optimizer.param_groups
        still_waiting = []
        for index, parameter in self._waiting:
            if parameter.grad is None:
                still_waiting.append((index, parameter))
            elif self.choices[index].flag is not None:
                problem = _gradient_problem(parameter)
                if problem is not None:
                    self._put_back(index)
                    self.choices[index] = Choice(None, problem)
                    text = describe([self.optimizer], [[self.choices[index]]])
                    self.say(f"param group {index} of {text}")
                elif groups[index].get("momentum") and self.choices[index].flag == "fused":
                    self._start_momentum(parameter)
        self._waiting = still_waiting

    def _start_momentum(self, parameter: Tensor) -> None:
        """Start from zero, which gives the same: fused SGD fails if only some have a momentum."""
        state = self.optimizer.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)

    def _put_back(self, index: int) -> None:
        group, made = self.optimizer.param_groups[index], self.made[index]
        group.update(made)
        if self.choices[index].flag == "fused":
            self._move_steps(group, host=True)

    def _move_steps(self, group: dict[str, Any], *, host: bool) -> None:
        """Put step counts where the implementation expects them: fused counts on the device."""
        for parameter in group["params"]:
            state = self.optimizer.state.get(parameter, {})
            if "step" in state:
                step = state["step"]
                state["step"] = (
                    _host_step(step) if host else step.to(parameter.device, torch.float32)
                )


@contextmanager
def _switched(
    optimizer: Optimizer, sparse: frozenset[Tensor], say: Callable[[str], None]
) -> Iterator[_Switch]:
    switch = _Switch(optimizer, sparse, say)
    switch.switch()
    hooks = [
        optimizer.register_step_pre_hook(switch.before_step),
        optimizer.register_state_dict_post_hook(switch.as_made),
        optimizer.register_load_state_dict_post_hook(switch.after_load),
    ]
    try:
        yield switch
    finally:
        for hook in hooks:
            hook.remove()
        switch.restore()


def _host_step(step: Tensor) -> Tensor:
    """Return a step count as torch makes it for the other implementations."""
    double = torch.get_default_dtype() == torch.float64
    return step.detach().to("cpu", torch.float64 if double else torch.float32)


def _gradient_problem(parameter: Tensor) -> str | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        return "it updates a parameter with sparse gradients"
    if not same_layout(gradient, parameter):
        # Fused CPU kernels ignore strides and would silently compute wrong updates.
        return "a gradient is laid out differently from its parameter"
    return None
