"""What all items share: a reversible change that holds for the length of a Trainer run."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_perf import NoEffectWarning, _compat
from lightning_perf._attributes import instance_attribute
from lightning_perf._knobs import KNOBS
from lightning_perf.data._followed_samplers import followed_samplers
from lightning_perf.presets import Preset

_log = logging.getLogger(__name__)

Moment = Literal["setup", "before_wrap", "after_wrap"]


@dataclass(frozen=True)
class Status:
    """What became of one item in a run: ``text`` is its detail if active, else the reason."""

    item: str
    active: bool
    text: str


@dataclass
class _Run:
    """The items of one Trainer run: one exit stack, closed by whichever hook ends the run first."""

    stack: ExitStack = field(default_factory=ExitStack)
    items: list[PerfCallback] = field(default_factory=list)
    statuses: list[Status] = field(default_factory=list)
    claims: dict[str, PerfCallback] = field(default_factory=dict)
    closed: bool = False

    def close(self) -> None:
        """Undo every item, last in, first out; an error in an undo is reported, never raised."""
        self.closed = True
        self.items.clear()
        self.claims.clear()
        try:
            self.stack.close()
        except Exception:
            # Raised from `on_exception`, it would hide the user's error and stop later callbacks.
            _log.exception("lightning_perf: an item could not be undone; the others were.")


# Kept here and not on the trainer or the callback, which spawn launchers pickle.
_runs: WeakKeyDictionary[Trainer, _Run] = WeakKeyDictionary()


@_compat.without_step_hooks
class PerfCallback(Callback, ABC):
    """Base of all items: `applied` is the change and its undo, `why_not` the reason not to act.

    A subclass writes its constructor, `why_not` and `applied`, and nothing else of the life cycle.

    Args:
        strict: What to do when the item has a reason not to act. ``None`` warns with
            `NoEffectWarning`, ``False`` only notes it in the status table, ``True`` raises.
    """

    guide: ClassVar[str]
    """Section of the tuning guides that the item implements."""
    changes: ClassVar[frozenset[str]]
    """What it touches: names of process-wide knobs, ``"model"``, ``"batches"``, ``"optimizer"``."""
    exact: ClassVar[bool]
    """Whether losses stay bit-identical on the same device."""
    moment: ClassVar[Moment] = "setup"
    """When it acts: in ``setup``, or just before or just after the strategy wraps the model."""
    functions: ClassVar[frozenset[str]] = frozenset({"fit", "validate", "test", "predict"})
    """Trainer functions it is made for; in others it is not involved."""

    def __init__(self, *, strict: bool | None = None) -> None:
        if strict not in (None, True, False):
            raise ValueError(
                f"strict={strict!r} was asked for; it is None to warn, True to raise, or False to "
                "keep quiet."
            )
        self.strict = strict

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason why the item cannot help here, the same on every rank, or ``None``."""
        return None

    @abstractmethod
    def applied(
        self, trainer: Trainer, module: LightningModule
    ) -> AbstractContextManager[str | None]:
        """Return a context that applies the change, yields a detail line, and undoes the change."""

    @final
    def has_no_effect(self, reason: str) -> None:
        """Tell of a reason not to act, as `strict` asks; for reasons that only the run shows.

        Raises:
            RuntimeError: The item is strict.
        """
        message = f"{type(self).__name__} has no effect here: {reason}"
        if self.strict:
            raise RuntimeError(
                f"{message} It was asked for with strict=True: remove it, or pass strict=False."
            )
        if self.strict is None:
            rank_zero_warn(message, category=NoEffectWarning)
        else:
            self.say(f"no effect: {reason}")

    def say(self, message: str) -> None:
        """Tell the user one line, on rank 0 only."""
        rank_zero_info(f"lightning_perf: {type(self).__name__}: {message}")

    def __repr__(self) -> str:
        arguments = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name)
            if value != parameter.default:
                keyword = f"{name}=" if parameter.kind is parameter.KEYWORD_ONLY else ""
                arguments.append(f"{keyword}{value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    @final
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Join the run; process switches act now, changes of the model around the wrap."""
        _require_lightning_trainer(self, trainer)
        run = _runs.get(trainer)
        if run is None or run.closed or self in run.items:
            if run is not None and not run.closed:
                # Another callback's `on_exception` raised, so Lightning never told us of the end.
                run.close()
            run = _runs[trainer] = _Run()
            run.stack.enter_context(_around_wrap(trainer, run))
            run.stack.enter_context(followed_samplers(trainer))
        if stage not in self.functions:
            return
        run.items.append(self)
        if self.moment == "setup":
            _enter(run, self, trainer, pl_module)

    @final
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo all items of the run."""
        _close(trainer)

    @final
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Undo all items of the run: after an error Lightning calls this and not `teardown`."""
        _close(trainer)


def statuses(trainer: Trainer) -> tuple[Status, ...]:
    """Return what became of each item in the current or latest run of ``trainer``."""
    run = _runs.get(trainer)
    return tuple(run.statuses) if run else ()


@contextmanager
def _around_wrap(trainer: Trainer, run: _Run) -> Iterator[None]:
    """Let items act right before and right after ``strategy.setup``.

    Only there do the layers made in `configure_model` and the restored weights exist while
    nothing is moved, wrapped or given to an optimizer yet.
    """
    wrap = trainer.strategy.setup

    def setup(trainer: Trainer) -> None:
        module = trainer.lightning_module
        for item in [item for item in run.items if item.moment == "before_wrap"]:
            _enter(run, item, trainer, module)
        wrap(trainer)
        for item in [item for item in run.items if item.moment == "after_wrap"]:
            _enter(run, item, trainer, module)
        _require_agreement(trainer, run)
        _announce(trainer, run)

    with instance_attribute(trainer.strategy, "setup", setup):
        yield


def _enter(run: _Run, item: PerfCallback, trainer: Trainer, module: LightningModule) -> None:
    name = type(item).__name__
    reason = item.why_not(trainer, module)
    if reason is not None:
        run.statuses.append(Status(name, active=False, text=reason))
        if item.strict is not False:
            item.has_no_effect(reason)
        return
    for switch in sorted(item.changes & KNOBS.keys()):
        other = run.claims.setdefault(switch, item)
        if other is not item:
            raise ValueError(
                f"{other!r} and {item!r} both set the process-wide switch `{switch}`. Keep one."
            )
    detail = run.stack.enter_context(item.applied(trainer, module))
    run.statuses.append(Status(name, active=True, text=detail or ""))


def _close(trainer: Trainer) -> None:
    run = _runs.get(trainer)
    if run is not None and not run.closed:
        run.close()


def _require_agreement(trainer: Trainer, run: _Run) -> None:
    """Refuse a run in which ranks differ in preset or items: it would hang or diverge later."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    mine = [(status.item, status.active) for status in run.statuses]
    if preset := _preset_name(trainer):
        mine.insert(0, (f"preset {preset}", True))  # "auto" may differ between machines
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if any(theirs != ranks[0] for theirs in ranks):
        raise RuntimeError(
            "The ranks disagree on which items act: "
            + "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(ranks))
            + ". Run all ranks on the same kind of machine, or remove the items that differ."
        )


def _announce(trainer: Trainer, run: _Run) -> None:
    """Print the status table once, on rank 0, and hand it to the loggers."""
    if not run.statuses:
        return
    preset = _preset_name(trainer)
    width = max(len(status.item) for status in run.statuses)
    lines = [f"lightning_perf{f' (preset {preset})' if preset else ''}:"]
    for status in run.statuses:
        state = "active " if status.active else "skipped"
        lines.append(f"  {state}  {status.item:<{width}}  {status.text}".rstrip())
    rank_zero_info("\n".join(lines))
    # Lightning 2.5.0 has no such argument.
    if trainer.state.fn == "fit" and getattr(trainer, "enable_autolog_hparams", True):
        _log_items(trainer, run, preset or "none")


def _log_items(trainer: Trainer, run: _Run, preset: str) -> None:
    """Hand the items to the loggers, together with the hyperparameters of the run.

    Lightning logs those by themselves a moment later, but TensorBoard shows one set, the first.
    """
    hyperparameters = _compat.hyperparameters(trainer) | {
        "lightning_perf/preset": preset,
        "lightning_perf/active": ", ".join(s.item for s in run.statuses if s.active),
        "lightning_perf/skipped": ", ".join(s.item for s in run.statuses if not s.active),
    }
    for logger in trainer.loggers:
        try:
            logger.log_hyperparams(hyperparameters)
        except Exception as error:
            # MLflow, for one, refuses another value for a name that a run has already.
            rank_zero_warn(
                f"lightning_perf: {type(logger).__name__} did not take the items as "
                f"hyperparameters, and the run goes on: {error}"
            )


def _preset_name(trainer: Trainer) -> str | None:
    names = [c.name for c in _compat.callbacks(trainer) if isinstance(c, Preset)]
    return names[-1] if names else None


def _require_lightning_trainer(item: PerfCallback, trainer: Any) -> None:
    if isinstance(trainer, Trainer):
        return
    kind = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    raise TypeError(
        f"{type(item).__name__} was given a {kind}; it works with lightning.pytorch.Trainer. "
        "Replace `import pytorch_lightning` by `import lightning.pytorch` in the whole project: "
        "the two packages do not mix."
    )
