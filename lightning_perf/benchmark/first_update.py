"""The first optimizer step of two runs, compared tensor by tensor.

Losses alone miss real damage: a wrong BatchNorm momentum never shows in a training loss, and Adam
hides a wrong gradient scale. Both show in what the first update does to the model and what it
leaves in the optimizer.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# At its first step, a deep network with BatchNorm turns the rounding of bfloat16 into gradients of
# another direction, but of about the same length. So lengths are compared, and what may differ is
# more where slightly perturbed runs differ more. Faults of 2 % in every tensor must be found where
# they can be.
_SHARED = 0.005
_STATISTIC = 0.05
_STILL = 0.02
_TURNED = 0.5
# Of one tensor: where B rounds as finely as A, and where it does not.
_SINGLE, _SINGLE_COARSE = 0.1, 1.0
_COARSE = 1e-4
# The largest deviation of four perturbed runs is not yet the largest of all.
_FACTOR = 5
# Where perturbed runs turn a tensor further than that, it says nothing alone, and together with
# others only up to the second.
_REPRODUCED = 0.5
_SIMILAR = 0.1
# What is so small beside its like is zero but for rounding, such as the gradient of a convolution's
# bias in front of BatchNorm: in bfloat16 it is a thousand times as large, and still nothing.
_ZERO = 0.03


def model_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, under the names they have when nothing is compiled."""
    for name, parameter in module.named_parameters():
        yield f"parameter/{_plain(name)}", parameter
    for name, buffer in module.named_buffers():
        yield f"buffer/{_plain(name)}", buffer


def save_start(path: Path, module: nn.Module) -> None:
    """Write the model as it is, one tensor at a time."""
    _write(path, ((name, _array(tensor)) for name, tensor in _changing(module)))


def save_update(
    path: Path, start: Path, module: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Write what changed in the model since `save_start`, and the optimizers' state."""
    with np.load(start) as before:
        changes = (
            (name, _array(tensor) - before[name])
            for name, tensor in _changing(module)
            if name in before.files
        )
        _write(path, chain(changes, _moments(module, optimizers)))


def compare(a: Path, b: Path, perturbed: Sequence[Path], *, exact: bool) -> list[str]:
    """Say what is wrong with the update in ``b``, taking ``a`` as right.

    Args:
        a: Update of the baseline, as written by `save_update`.
        b: Update to judge.
        perturbed: Updates of the baseline started from slightly other weights. They tell which
            tensors hold nothing but rounding noise.
        exact: Whether every tensor must be bit-identical.

    Returns:
        One line for each finding; none when the updates agree.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(np.load(path)) for path in (a, b, *perturbed)]
        file_a, file_b = files[:2]
        shared = [name for name in file_a.files if name in file_b]
        findings = _named("missing in B", set(file_a.files) - set(shared))
        findings += _named("found only in B", set(file_b.files) - set(shared))
        if exact:
            differing = {name for name in shared if not _identical(file_a[name], file_b[name])}
            return findings + _named("not bit-identical after the first update", differing)
        reshaped = {name for name in shared if file_a[name].shape != file_b[name].shape}
        findings += _named("of another shape in B", reshaped)
        comparisons = [
            _compare(name, file_a[name], file_b[name], [file[name] for file in files[2:]])
            for name in shared
            if name not in reshaped
        ]
    return findings + _judge([comparison for comparison in comparisons if comparison])


@dataclass(frozen=True)
class _Comparison:
    """One tensor of B against the same tensor of A."""

    kind: str
    name: str
    like: tuple[Any, ...]
    """Same for tensors that may be expected to change by about as much."""
    size: float
    """Root mean square of A's elements."""
    length: float
    """Norm of B's tensor over that of A's. Rounding turns a tensor, and by turning it shortens its
    part along A's, but leaves this."""
    cosine: float
    lengths: Sequence[float] = ()
    """The same of the perturbed runs."""
    cosines: Sequence[float] = ()

    @property
    def noise(self) -> float:
        """How far the lengths of perturbed runs are from 1."""
        return max((abs(length - 1) for length in self.lengths), default=0.0)

    @property
    def reproduced(self) -> bool:
        """Whether all perturbed runs have about this tensor."""
        return min(self.cosines, default=1.0) >= _REPRODUCED

    def is_off(self, tolerance: float, usual: float = 0.0) -> bool:
        """Whether B's tensor is longer or shorter than tolerance and noise explain.

        Args:
            tolerance: Allowed where there is no noise: 1 for a half to the double.
            usual: The noise of tensors like this one; four runs may show too little of its own.
        """
        allowed = max(tolerance, _FACTOR * max(self.noise, usual))
        # What rounding adds makes it longer, but not its part along A's.
        along = self.length * self.cosine
        elsewhere = self.cosine < _REPRODUCED  # its length says nothing
        return not elsewhere and _off(self.length, allowed) and _off(along, allowed)

    def is_turned(self) -> bool:
        """Whether the direction is further from A's than noise explains."""
        noise = max((1 - cosine for cosine in self.cosines), default=0.0)
        return not 1 - self.cosine <= max(_TURNED, _FACTOR * noise)


def _compare(name: str, a: Any, b: Any, perturbed: Sequence[Any]) -> _Comparison | None:
    """Compare one tensor; ``None`` if there is nothing in it to compare."""
    kind, _, label = name.partition("/")
    like = kind, label.rpartition(".")[2], a.ndim
    if not np.issubdtype(a.dtype, np.floating):
        equal = 1.0 if _identical(a, b) else float("nan")
        return _Comparison(kind, label, like, size=1.0, length=equal, cosine=1.0)
    a, b = _flat(a), _flat(b)
    if not a.any():
        # A gradient that is zero in exact arithmetic may be rounding noise in B. A parameter that
        # only B trains is found by its name.
        wrong = kind == "buffer" and b.any()
        return _Comparison(kind, label, like, 0.0, length=math.inf, cosine=1.0) if wrong else None
    size = float(np.sqrt(np.mean(a * a)))
    others = [_flat(other) for other in perturbed]
    lengths = [_length(a, other) for other in others]
    cosines = [_cosine(a, other) for other in others]
    if cosines and max(cosines) < _SIMILAR:
        return None
    return _Comparison(kind, label, like, size, _length(a, b), _cosine(a, b), lengths, cosines)


def _not_nothing(comparisons: Sequence[_Comparison]) -> list[_Comparison]:
    """Leave out tensors that are zero but for rounding; buffers that are just zero stay."""
    sizes: dict[Any, list[float]] = {}
    for c in comparisons:
        if c.size:
            sizes.setdefault(c.like, []).append(c.size)
    return [c for c in comparisons if not c.size or c.size >= _ZERO * _median(sizes[c.like])]


def _judge(comparisons: Sequence[_Comparison]) -> list[str]:
    kinds: dict[str, list[_Comparison]] = {}
    for c in _not_nothing(comparisons):
        kinds.setdefault(c.kind, []).append(c)
    parameters, buffers = kinds.pop("parameter", []), kinds.pop("buffer", [])
    usual = _median([c.noise for c in parameters]) if parameters else 0.0
    coarse = bool(parameters) and _median([1 - c.cosine for c in parameters]) > _COARSE
    single = _SINGLE_COARSE if coarse else _SINGLE
    still = [c for c in parameters if c.length < _STILL]
    moved = [c for c in parameters if c not in still and c.reproduced]
    moments = [c for kind in sorted(kinds) for c in kinds[kind] if c.reproduced]
    findings = [
        _shared_scale("the change of the parameters", parameters),
        *(_shared_scale(f"the optimizer's {kind}", kinds[kind]) for kind in sorted(kinds)),
        _group("not moved in B by the first update", [c.name for c in still]),
        _group(
            "moved by another amount",
            [f"{c.name} ({c.length:.3g} times)" for c in moved if c.is_off(single, usual)],
        ),
        _group("moved elsewhere", [c.name for c in moved if c.is_turned()]),
        _group(
            "other optimizer state",
            [
                f"{c.kind} of {c.name} ({c.length:.3g} times)"
                for c in moments
                if c.is_off(single, usual)
            ],
        ),
        _group(
            "other change of a buffer",
            [
                f"{c.name} ({c.length:.3g} times)"
                for c in buffers
                if c.reproduced and c.is_off(_STATISTIC)
            ],
        ),
    ]
    return [finding for finding in findings if finding]


def _shared_scale(what: str, comparisons: Sequence[_Comparison]) -> str:
    """Find a factor that all tensors share, too small to be told from noise in any one of them."""
    if not comparisons:
        return ""
    length = _median([c.length for c in comparisons])
    runs = zip(*(c.lengths for c in comparisons if c.lengths), strict=True)
    noise = max((abs(_median(run) - 1) for run in runs), default=0.0)
    if not _off(length, max(_SHARED, _FACTOR * noise * _likeness(comparisons))):
        return ""
    return f"{what} is {length:.4g} times that of A (median of {len(comparisons)} tensors)"


def _likeness(comparisons: Sequence[_Comparison]) -> float:
    """How much of the perturbed runs' noise is in B: nothing, if all directions are A's."""
    turned = _median([1 - c.cosine for c in comparisons])
    noise = [1 - cosine for c in comparisons for cosine in c.cosines]
    return math.sqrt(max(0.0, turned) / _median(noise)) if noise and _median(noise) > 0 else 0.0


def _named(what: str, names: set[str]) -> list[str]:
    group = _group(what, sorted(" of ".join(name.split("/", 1)) for name in names))
    return [group] if group else []


def _group(what: str, names: Sequence[str], shown: int = 3) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{what}: {', '.join(names[:shown])}{rest}"


def _off(ratio: float, tolerance: float) -> bool:
    # Written so that NaN is off.
    return not 1 / (1 + tolerance) <= ratio <= 1 + tolerance


def _flat(array: Any) -> Any:
    return array.ravel().astype(np.float64)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _length(a: Any, b: Any) -> float:
    return float(np.linalg.norm(b) / np.linalg.norm(a))


def _cosine(a: Any, b: Any) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def _identical(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())


def _changing(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Leave out frozen parameters, so that one frozen in B only is missed by its name."""
    for name, tensor in model_tensors(module):
        if tensor.requires_grad or name.startswith("buffer/"):
            yield name, tensor


def _moments(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Any]]:
    names = {id(parameter): _plain(name) for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                # Implementations disagree on whether the step counter is a tensor.
                if isinstance(value, Tensor) and key != "step" and id(parameter) in names:
                    yield f"{key}/{names[id(parameter)]}", _array(value)


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _array(tensor: Tensor) -> Any:
    """Copy a tensor to a NumPy array in a type that NumPy has and that differences fit in."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        tensor = tensor.long()
    elif tensor.element_size() < 4:
        tensor = tensor.float()
    return tensor.contiguous().numpy()


def _write(path: Path, arrays: Iterable[tuple[str, Any]]) -> None:
    """Write an ``.npz``, holding one array at a time (`numpy.savez` wants all of them)."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
