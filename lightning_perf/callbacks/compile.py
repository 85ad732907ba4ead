"""Compile networks in place, for the length of a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_perf._attributes import instance_attribute
from lightning_perf._batches import batches_unseen, every_batch
from lightning_perf._item import PerfCallback
from lightning_perf._knobs import KNOBS, knobs
from lightning_perf.callbacks._batch_shapes import (
    FEW_SHAPES,
    short_batches_uncompiled,
    when_shapes_are_many,
)
from lightning_perf.callbacks._compile_report import compile_report
from lightning_perf.callbacks._regions import (
    Regions,
    compilable_regions,
    convolution_share,
    is_compiled,
    kinds,
    staged,
)
from lightning_perf.callbacks._toolchain import what_inductor_lacks

_COMMON_BACKENDS = ("inductor", "eager", "aot_eager")
# Modes that record a CUDA graph for each shape, with the mode that does the rest of it.
_CAPTURING = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
# `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`, absent in builds without distributed.
_FIRST_BUCKET_BYTES = 1024 * 1024


@contextmanager
def compiled(
    model: nn.Module, regions: str | Sequence[str] = "auto", **options: Any
) -> Iterator[tuple[str, ...]]:
    """Compile parts of a model in place for a block; names of weights and hooks stay as they are.

    Args:
        model: Any module. Of a LightningModule the networks are compiled, never its steps.
        regions: As for `Compile`.
        **options: Passed to `torch.nn.Module.compile`.

    Yields:
        The names of the compiled modules; that of ``model`` itself is ``""``.

    Raises:
        ValueError: ``regions`` names a module that is not there.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> with compiled(model, backend="eager"):
        ...     model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """
    targets, _ = compilable_regions(model, regions)
    with _compiled(targets, options):
        yield tuple(targets)


class Compile(PerfCallback):
    """Compile the network in place once the strategy has wrapped it, and undo it after the run.

    Repeated blocks are compiled one by one and share their code, which takes less time than
    compiling the whole network. The steps of the LightningModule are never compiled: they log
    and read the trainer. Keys of checkpoints do not change.

    A last batch that is shorter than the others runs uncompiled, unless ``dynamic=True``.

    Do not use it for a model whose steps see new shapes all the time, or for runs shorter than
    the compilation. On a CPU, networks made of convolutions are skipped unless named: oneDNN's
    convolutions, which compiling leaves as they are, take nearly all their time.

    Args:
        regions: ``"auto"`` compiles repeated blocks (members, all of one class, of a ModuleList or
            a Sequential), or the whole of a network that does not consist of them; ``"whole"``
            compiles each network of the LightningModule; a list the modules of these names.
        mode: ``None``, ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``, or
            ``"max-autotune-no-cudagraphs"``, as for `torch.compile`.
        dynamic: Whether code is made for all sizes at once; ``None`` lets the second size decide,
            and in stages of blocks that differ in size the ninth shape of a batch.
        backend: Name of a backend, such as ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
        fullgraph: Raise where a region is not one graph, instead of splitting it.
        strict: See `PerfCallback`.

    Raises:
        ValueError: At the start of a run: unknown backend, mode, or name of a region.

    Example:
        >>> Trainer(callbacks=[Compile(["encoder"], dynamic=True)])

    Source: PyTorch tuning guide, "Fuse operations".
    """

    guide: ClassVar[str] = "T fuse operations (torch.compile); T use CUDA graphs (mode); L 3"
    changes: ClassVar[frozenset[str]] = frozenset(
        {"model", "dynamo_optimize_ddp", "dynamo_recompile_limit"}
    )
    exact: ClassVar[bool] = False
    moment: ClassVar[Literal["setup", "before_wrap", "after_wrap"]] = "after_wrap"

    def __init__(
        self,
        regions: str | list[str] = "auto",
        *,
        mode: str | None = None,
        dynamic: bool | None = None,
        backend: str = "inductor",
        fullgraph: bool = False,
        strict: bool | None = None,
    ) -> None:
        super().__init__(strict=strict)
        self.regions = regions
        self.mode = mode
        self.dynamic = dynamic
        self.backend = backend
        self.fullgraph = fullgraph

    def why_not(self, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the reason not to compile: the strategy, the model, or a missing compiler."""
        self._check_names()
        targets, alone = compilable_regions(module, self.regions)
        return (
            _steps_compiled(module)
            or _unsupported(trainer.strategy)
            or (self._no_region(module, alone) if not targets else None)
            or self._not_worth_it(trainer.strategy.root_device, targets)
            or (
                what_inductor_lacks(trainer.strategy.root_device)
                if self.backend == "inductor"
                else None
            )
            or (batches_unseen(module) if self.mode in _CAPTURING else None)
        )

    @contextmanager
    def applied(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Compile in place, count, and take it back."""
        targets, alone = compilable_regions(module, self.regions)
        seen = batches_unseen(module) is None
        fixed = staged(targets) if self.dynamic is None and seen else {}
        with ExitStack() as stack:
            if _bucket_is_too_small(trainer.strategy.model):
                stack.enter_context(knobs(dynamo_optimize_ddp=False))
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                # Else they could not use the code of the validation during training.
                stack.enter_context(instance_attribute(loop, "inference_mode", False))
            stack.enter_context(compile_report(trainer, self.say))
            if fixed:
                # Room for code of any size behind that of a few fixed ones.
                limit = 2 * KNOBS["dynamo_recompile_limit"].read()
                stack.enter_context(knobs(dynamo_recompile_limit=limit))
            stack.enter_context(_compiled(targets, self._options()))
            _compile(fixed, self._options() | {"dynamic": False})
            if fixed or self.mode in _CAPTURING:
                look = when_shapes_are_many(lambda: self._give_up(targets))
                stack.enter_context(every_batch(trainer, look))
            if self.dynamic is not True and seen:
                stack.enter_context(short_batches_uncompiled(trainer, self._say_short))
            yield _detail(targets, alone, self.backend)

    def _options(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "dynamic": self.dynamic,
            "backend": self.backend,
            "fullgraph": self.fullgraph,
        }

    def _check_names(self) -> None:
        # The list imports every backend with all it needs, which slows what runs after it.
        if self.backend not in _COMMON_BACKENDS:
            backends = torch._dynamo.list_backends(exclude_tags=())
            _require_known("backend", self.backend, backends)
        if self.mode is not None and self.backend == "inductor":
            _require_known("mode", self.mode, list(torch._inductor.list_mode_options()))

    def _no_region(self, module: LightningModule, alone: dict[str, str]) -> str:
        if alone:
            reasons = "; ".join(f"{names}: {why}" for why, names in _grouped(alone))
            return f"{reasons}, and left alone."
        return (
            f"{type(module).__name__} calls single layers only, and alone they have nothing to "
            "fuse. Put them into one module, such as nn.Sequential, or name them in `regions`."
        )

    def _not_worth_it(self, device: torch.device, targets: Regions) -> str | None:
        """Decide for ``regions="auto"`` what measurements on other models say."""
        if self.regions != "auto" or self.backend != "inductor":
            return None
        if device.type == "mps":
            return (
                "TorchInductor's support of MPS is a prototype. Name `regions` to compile anyway."
            )
        share = convolution_share(nn.ModuleList(targets.values()))
        if device.type == "cpu" and share > 0.5:
            return (
                f"{share:.0%} of the layers are convolutions, which on a CPU stay oneDNN's when "
                "compiled. Name `regions` to compile anyway."
            )
        return None

    def _give_up(self, targets: Regions) -> None:
        """Go on with code for any shape, and without recording graphs."""
        options = self._options()
        if self.mode in _CAPTURING:
            options["mode"] = _CAPTURING[self.mode]
            self.say(
                f"more than {FEW_SHAPES} batch shapes were seen, and mode={self.mode!r} records a "
                f"CUDA graph for each: going on with mode={options['mode']!r}. The mode is made "
                "for few shapes: pad batches to a few lengths in the loader's collate_fn."
            )
        _compile(targets, options)

    def _say_short(self, stage: str, samples: int, full: int) -> None:
        self.say(
            f"the last batch ({stage}) has {samples} samples, the others {full}: it runs "
            "uncompiled, since code for both sizes would be slower. Set drop_last=True in the "
            "DataLoader to leave it out, or dynamic=True to compile it too."
        )


@contextmanager
def _compiled(targets: Regions, options: dict[str, Any]) -> Iterator[None]:
    # Dynamo keeps the code of all compiled modules in one cache, but its limit is made for one
    # function: nine different blocks would reach it without any recompilation.
    limit = KNOBS["dynamo_recompile_limit"].read() * max(1, kinds(targets))
    with knobs(dynamo_recompile_limit=limit):
        try:
            _compile(targets, options)
            yield
        finally:
            for module in targets.values():
                _uncompile(module)


def _compile(targets: Regions, options: dict[str, Any]) -> None:
    for module in targets.values():
        module.compile(**options)


def _uncompile(module: nn.Module) -> None:
    """Take `Module.compile` back, for which PyTorch has no public call.

    Its class holds None under the same name, so without the instance's attribute calls are eager.
    """
    vars(module).pop("_compiled_call_impl", None)


def _steps_compiled(module: LightningModule) -> str | None:
    # Lightning unpacks `torch.compile(module)` and puts Dynamo's functions in the steps' places.
    steps = [m for m in vars(module).values() if hasattr(m, "_torchdynamo_orig_callable")]
    if steps or is_compiled(module):
        return (
            f"{type(module).__name__} itself is compiled, and with it steps that log and read the "
            "trainer. Pass the Trainer the LightningModule without torch.compile."
        )
    return None


def _unsupported(strategy: Strategy) -> str | None:
    if isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        return None
    return (
        f"it works with one device and with DDP; {type(strategy).__name__} wraps layers itself. "
        "Call `compile()` on the blocks in `configure_model`, in the order its documentation gives."
    )


def _bucket_is_too_small(model: nn.Module | None) -> bool:
    """Say whether Dynamo's splitting at DDP's buckets would raise.

    It asserts that no bucket is smaller than the first, whose size is fixed at 1 MiB.
    """
    return (
        isinstance(model, DistributedDataParallel) and model.bucket_bytes_cap < _FIRST_BUCKET_BYTES
    )


def _require_known(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"There is no {what} {name!r}.{hint} Known are {', '.join(known)}.")


def _detail(targets: Regions, alone: dict[str, str], backend: str) -> str:
    names = list(targets)
    shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
    count = "1 region" if len(names) == 1 else f"{len(names)} regions"
    rest = "".join(f"; left alone, {why}: {names}" for why, names in _grouped(alone))
    return f"{count} ({shown}), backend {backend}{rest}"


def _grouped(alone: dict[str, str]) -> list[tuple[str, str]]:
    """Return each reason once, with the names that it holds for."""
    return [
        (why, ", ".join(name for name, reason in alone.items() if reason == why))
        for why in dict.fromkeys(alone.values())
    ]
