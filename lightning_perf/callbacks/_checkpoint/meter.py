"""FLOPs of operations, bytes kept for the backward pass, and which results to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
# PyTorch's formulas, and the CPU's attention, which has the arguments of the one they know.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Results = dict[int, tuple[Any, Any]]
"""Of operations, by their position, the function and what it returned."""

Storages = dict[int, tuple[StorageWeakRef, int]]
"""Storages by address, with their bytes; an address is not used again while it is held here."""


@dataclass
class Operation:
    """One call of an operation that FLOPs are counted for.

    Args:
        flops: Floating-point operations it takes.
        nbytes: Size of its results.
        slow: Whether it takes longer than a matrix product of so many, as attention does.
        changed: Whether something is written into its results later.
    """

    flops: int
    nbytes: int
    slow: bool = False
    changed: bool = False

    @property
    def price(self) -> float:
        """What it takes to compute a byte of it again."""
        return (2 if self.slow else 1) * self.flops / max(1, self.nbytes)


@dataclass(frozen=True)
class Profile:
    """What one recomputation did.

    Args:
        operations: The operations with FLOPs, in the order they ran.
        saved: Bytes that the block's operations save for the backward pass, its inputs apart.
        saved_inputs: The inputs of the block that they save as well.
        inputs: All inputs of the block.
    """

    operations: tuple[Operation, ...]
    saved: int
    saved_inputs: Storages
    inputs: Storages

    @property
    def flops(self) -> int:
        """FLOPs of all operations."""
        return sum(operation.flops for operation in self.operations)

    def kept_flops(self, kept: frozenset[int]) -> int:
        """FLOPs of the operations at some positions."""
        return sum(o.flops for i, o in enumerate(self.operations) if i in kept)

    def kept_bytes(self, kept: frozenset[int]) -> int:
        """Bytes of the results of the operations at some positions."""
        return sum(o.nbytes for i, o in enumerate(self.operations) if i in kept)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts FLOPs, and notes which storages are made, for the length of a block."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.operations: list[Operation] = []
        self._storages: Storages = {}
        self._made: dict[int, Operation | None] = {}

    @property
    def flops(self) -> int:
        """FLOPs of all operations so far."""
        return sum(operation.flops for operation in self.operations)

    def alive_bytes(self) -> int:
        """Return the bytes of the storages made here that something still holds."""
        return alive_bytes({address: self._storages[address] for address in self._made})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and note it."""
        kwargs = kwargs or {}
        # What an operation is given was there before, or is noted already.
        self._storages |= storages_of((args, kwargs))
        out = func(*args, **kwargs)
        self._note_writes(func, args, kwargs)
        made = {a: s for a, s in storages_of(out).items() if a not in self._storages}
        self._storages |= made
        operation = None
        if has_flops(func):
            nbytes = sum(nbytes for _, nbytes in made.values())
            operation = Operation(_flops(func, args, kwargs, out), nbytes, slow=_is_attention(func))
            self.operations.append(operation)
        self._made |= dict.fromkeys(made, operation)
        return out

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        named = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
        for argument in schema.arguments:
            if argument.is_write:
                for address in storages_of(named.get(argument.name)):
                    if operation := self._made.get(address):
                        operation.changed = True


def storages_of(tree: Any) -> Storages:
    """Return the storages of the dense tensors in a nested structure."""
    found: Storages = {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
            storage = leaf.untyped_storage()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # no types in torch
            found[reference.cdata] = reference, storage.nbytes()
    return found


def union(storages: Iterable[Storages]) -> Storages:
    """Return all storages, each once."""
    return {address: storage for some in storages for address, storage in some.items()}


def total_bytes(storages: Storages) -> int:
    """Return the bytes of storages."""
    return sum(nbytes for _, nbytes in storages.values())


def alive_bytes(storages: Storages) -> int:
    """Return the bytes of the storages that something still holds."""
    return sum(nbytes for reference, nbytes in storages.values() if not _expired(reference))


def _expired(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]  # torch has no types here


def has_flops(func: Any) -> bool:
    """Say whether FLOPs are counted for an operation: matrix products, convolutions, attention."""
    return getattr(func, "_overloadpacket", func) in _FORMULAS


def _is_attention(func: Any) -> bool:
    return "attention" in str(func)


def worth_keeping(profile: Profile, share: float) -> frozenset[int]:
    """Choose the operations whose results a block keeps, by their position.

    Results that took the most FLOPs per byte come first, as many as fit.

    Args:
        profile: What a recomputation of the block did.
        share: Of what the block would save, the share that it may keep, its inputs included.
    """
    kept = set()
    before = profile.saved + total_bytes(profile.saved_inputs)
    room = share * before - total_bytes(profile.inputs)
    by_price = sorted(
        enumerate(profile.operations),
        key=lambda item: (item[1].price, item[1].flops),
        reverse=True,
    )
    for position, operation in by_price:
        # A cached result that is written to afterwards cannot be given back as it was.
        if not operation.changed and 0 < operation.nbytes <= room:
            kept.add(position)
            room -= operation.nbytes
    return frozenset(kept)


def contexts_keeping(kept: frozenset[int]) -> tuple[Any, Any]:
    """Return the contexts for `torch.utils.checkpoint` that keep the results at some positions.

    PyTorch's own selective checkpointing counts and stores every operation, in Python; here only
    those that are kept take more than a look.
    """
    results: Results = {}
    return _Keep(kept, results), _GiveBack(results)


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Keeps the results of the operations with FLOPs at some positions, for `_GiveBack`."""

    supports_higher_order_operators = True

    def __init__(self, kept: frozenset[int], results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._kept = kept
        self._results = results
        self._position = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and keep its result, if it is one of those."""
        out = func(*args, **(kwargs or {}))
        if has_flops(func):
            if self._position in self._kept:
                # Without what autograd adds to the result: it would keep the whole block.
                self._results[self._position] = func, tree_map_only(Tensor, _version_of, out)
            self._position += 1
        return out


class _GiveBack(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Gives back what `_Keep` kept, once, instead of running the operation again."""

    supports_higher_order_operators = True

    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._results = results
        self._position = 0

    def __enter__(self) -> Any:
        """Begin with the first operation again."""
        self._position = 0
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return what was kept of an operation, or run it."""
        if has_flops(func):
            its, result = self._results.pop(self._position, (None, None))
            self._position += 1
            # What was written to meanwhile is not what the operation gave.
            if its is func and not any(map(_is_changed, tree_leaves(result))):
                return tree_map_only(_Kept, _tensor_of, result)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Kept:
    tensor: Tensor
    version: int


def _version_of(tensor: Tensor) -> _Kept:
    # Below autograd, and so with a version counter of its own, unless views are noted all the same.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        detached = tensor.detach()
    return _Kept(detached, 0 if tensor.is_inference() else detached._version)


def _tensor_of(kept: _Kept) -> Tensor:
    return kept.tensor


def _is_changed(leaf: Any) -> bool:
    if not isinstance(leaf, _Kept) or leaf.tensor.is_inference():
        return False
    return leaf.tensor._version != leaf.version


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    formula = _FORMULAS[getattr(func, "_overloadpacket", func)]
    # A formula that does not know some arguments must not stop a training.
    with suppress(Exception):
        return int(formula(*args, **kwargs, out_val=out))
    return 0


def readable(nbytes: float) -> str:
    """Return a size as people read it."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.1f} {_UNITS[unit]}"
