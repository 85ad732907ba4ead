"""The forward pass of a checkpointed block: run once as it is, and again in the backward pass."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_perf._attributes import instance_attribute
from lightning_perf.callbacks._checkpoint.meter import (
    Meter,
    Profile,
    alive_bytes,
    contexts_keeping,
    storages_of,
    union,
    worth_keeping,
)
from lightning_perf.callbacks._checkpoint.state import BlockState


class Stopwatch:
    """Adds up the time of the blocks it is put around, while it runs."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self.running = False
        self._device = device

    def now(self) -> float:
        """Return the time, once the device has done what it was given."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Add the time of the block."""
        start = self.now() if self.running else 0.0
        try:
            yield
        finally:
            if self.running:
                self.seconds += self.now() - start


class Block:
    """A module that is recomputed in the backward pass, and what its calls tell of it.

    Args:
        module: The module.
        share: Of what the block would save, the share that it may keep: the results that took most
            to compute, once a recomputation told which; 0 keeps nothing but the inputs.
    """

    def __init__(self, module: nn.Module, *, share: float = 0.0) -> None:
        self.module = module
        self.share = share
        self.kept: frozenset[int] = frozenset()
        self.left_alone = False
        self.recording = share > 0
        self.profiles: list[Profile] = []
        self.stopwatch: Stopwatch | None = None
        self.calls = 0
        self.recomputations = 0
        # Both are found out in the first call.
        self.changes_inputs = True
        self.draws_from_process = True
        self.modules = tuple(module.modules())

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass and keep only what its recomputation needs."""
        if not self._is_differentiated((args, kwargs)):
            return type(self.module).forward(self.module, *args, **kwargs)
        call = _Call(self, args, kwargs)
        leaves = call.leaves
        # Of inputs that the block changes in place, the recomputation needs a copy.
        inputs = [_copy(leaf) for leaf in leaves] if self.changes_inputs else leaves
        versions = [_version(leaf) for leaf in leaves]
        out = checkpoint(call, *inputs, use_reentrant=False, context_fn=call.contexts)
        call.forward_is_over()
        if self.calls == 0:
            self.changes_inputs = versions != [_version(leaf) for leaf in leaves]
        self.calls += 1
        return out

    def recomputed(self, profile: Profile) -> None:
        """Note what a recomputation did, and choose what to keep from now on."""
        self.profiles.append(profile)
        if self.share > 0 and len(self.profiles) == 1:
            self.kept = worth_keeping(profile, self.share)
        self.recording = self.stopwatch is not None

    def _is_differentiated(self, given: Any) -> bool:
        leaves = tree_leaves(given)
        if any(isinstance(leaf, Proxy) for leaf in leaves):
            return False  # only traced
        return any(parameter.requires_grad for parameter in self.module.parameters()) or any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
        )


class _Call:
    """One call of a block: the forward pass, and its recomputations.

    The forward pass gets the very arguments of the caller, which it may change; recomputations
    get containers of their own with the tensors that `torch.utils.checkpoint` kept.
    """

    def __init__(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block = block
        self._given: tuple[Any, Any] | None = (args, kwargs)
        self.leaves, self._structure = tree_flatten(self._given)
        self._inputs = [storages_of(leaf) for leaf in self.leaves] if block.recording else []
        self._state = BlockState(block.modules, process_rng=block.draws_from_process)

    def __call__(self, *leaves: Any) -> Any:
        if self._given is not None:
            args, kwargs = self._given
            self._given = None  # else they would live until the backward pass
            return type(self._block.module).forward(self._block.module, *args, **kwargs)
        return self._recorded(leaves) if self._inputs else self._forward(leaves)

    def contexts(self) -> tuple[Any, Any]:
        """Return what `torch.utils.checkpoint` puts around the forward pass and recomputations."""
        kept = self._block.kept
        forward, recompute = contexts_keeping(kept) if kept else (nullcontext(), nullcontext())
        return forward, _Recomputation(self._block, self._state, recompute)

    def forward_is_over(self) -> None:
        """Let go of what only the forward pass needed."""
        self.leaves = []
        self._state.forward_is_over()
        if self._block.calls == 0:
            self._block.draws_from_process = self._state.drew_from_process

    def _forward(self, leaves: Sequence[Any]) -> Any:
        if self._block.changes_inputs:
            leaves = [_copy(leaf) for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return type(self._block.module).forward(self._block.module, *args, **kwargs)

    def _recorded(self, leaves: Sequence[Any]) -> Any:
        # Copies, to see whether the block saves its inputs.
        copies = [_copy(leaf) for leaf in leaves]
        storages = [storages_of(copy) for copy in copies]
        meter = Meter()
        try:
            with meter:
                return self._forward(copies)
        except Exception as stop:
            # `torch.utils.checkpoint` ends a recomputation with an exception once all is there.
            # Its traceback would keep alive what the modules' functions hold.
            traceback.clear_frames(stop.__traceback__)
            raise
        finally:
            copies.clear()
            held = [i for i, copy in zip(self._inputs, storages, strict=True) if alive_bytes(copy)]
            self._block.recomputed(
                Profile(
                    operations=tuple(meter.operations),
                    saved=meter.alive_bytes(),
                    saved_inputs=union(held),
                    inputs=union(self._inputs),
                )
            )
            self._inputs = []


class _Recomputation:
    """Put around each recomputation of one call, outside of what selective checkpointing watches.

    Args:
        block: Whose call it is.
        state: How the forward pass found the block.
        inner: The context that gives back what was kept.
    """

    def __init__(self, block: Block, state: BlockState, inner: Any) -> None:
        self._block = block
        self._state = state
        self._inner = inner
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._block.recomputations += 1
        with ExitStack() as stack:
            if self._block.stopwatch is not None:
                stack.enter_context(self._block.stopwatch.measuring())
            stack.enter_context(self._state.put_back())
            stack.enter_context(self._inner)
            self._stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)


@contextmanager
def recomputing(block: Block) -> Iterator[None]:
    """Recompute a module in each backward pass, for the length of a block of code."""
    forward = _forward_uncompiled if _has_state(block.module) else _forward
    _blocks[block.module] = block
    try:
        with instance_attribute(block.module, "forward", MethodType(forward, block.module)):
            yield
    finally:
        _blocks.pop(block.module, None)


def recomputed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that are recomputed in the backward pass, by their name."""
    return {name: module for name, module in model.named_modules() if module in _blocks}


# Not an attribute of the modules: copies of a module, such as those of weight averaging, are none
# of ours and run as they are.
_blocks: WeakKeyDictionary[nn.Module, Block] = WeakKeyDictionary()


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _traced(module, args, kwargs)
    return _eager(module, args, kwargs)


def _forward_eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _eager(module, args, kwargs)


# Bound methods of one function, so that torch.compile shares its code among blocks; by their name
# they are pickled as the module's own, so that a pickle needs nothing from here.
_forward.__name__ = _forward_eager.__name__ = "forward"
_forward_uncompiled = torch.compiler.disable(_forward_eager)  # type: ignore[no-untyped-call]  # no types in torch


def _eager(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    block = _blocks.get(module)
    if block is None or block.left_alone or not torch.is_grad_enabled() or _is_traced():
        return type(module).forward(module, *args, **kwargs)
    return block.run(args, kwargs)


def _traced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand the block to torch.compile, which recomputes it without its side effects."""
    if not torch.is_grad_enabled():
        return type(module).forward(module, *args, **kwargs)
    states: list[BlockState] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs)
        # After a graph break inside, the block is left to Python.
        if states:
            with states[0].put_back():
                return type(module).forward(module, *args, **kwargs)
        states.append(BlockState(module.modules(), process_rng=True))
        try:
            return type(module).forward(module, *args, **kwargs)
        finally:
            states[0].forward_is_over()

    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _has_state(module: nn.Module) -> bool:
    """Say whether a module saves buffers, which its forward pass may change.

    torch.compile, by version and backend, changes them twice when it recomputes, or raises.
    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return not module.state_dict().keys() <= parameters


def _is_traced() -> bool:
    tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]  # not declared
    return bool(tracing())


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # A result where gradients flow: a leaf could not be changed in place.
    return leaf.detach().requires_grad_(leaf.requires_grad).clone()


def _version(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor) and not leaf.is_inference():
        return leaf._version
    return None
