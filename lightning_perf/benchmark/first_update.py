"""The first optimizer step of two runs, compared tensor by tensor.

Losses alone miss real damage: a wrong BatchNorm momentum never shows in a training loss, and Adam
hides a wrong gradient scale. Both show in what the first update does to the model and what it
leaves in the optimizer.
"""

from __future__ import annotations

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

# Under bf16-mixed the medians of small networks stay within 0.3 % and single tensors within 2 %,
# while faults of 2 % in every tensor must be found.
_MEDIAN = 0.005
_SINGLE = 0.1
_STATISTIC = 0.02
_STILL = 0.02
# A tensor that slightly perturbed runs do not reproduce holds rounding noise, such as the gradient
# of a convolution's bias in front of BatchNorm, which is zero in exact arithmetic.
_REPRODUCED = 0.5
# Medians are taken over about this many elements of a tensor.
_SAMPLE = 1_000_000


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
    slope: float
    """``<a, b> / <a, a>``."""
    ratio: float
    """Median of the elementwise ``b / a``. Elements that flip their sign under rounding, as some
    of Adam's first changes do, move the slope but not this."""
    spread: float
    """Largest deviation of the two from 1 in the perturbed runs."""

    def off(self, value: float, tolerance: float) -> bool:
        """Whether a slope or ratio is further from 1 than tolerance and noise explain."""
        return _off(value, max(tolerance, 3 * self.spread))


def _compare(name: str, a: Any, b: Any, perturbed: Sequence[Any]) -> _Comparison | None:
    """Compare one tensor; ``None`` if there is nothing in it to compare."""
    kind, _, label = name.partition("/")
    if not np.issubdtype(a.dtype, np.floating):
        equal = 1.0 if _identical(a, b) else float("nan")
        return _Comparison(kind, label, slope=equal, ratio=equal, spread=0.0)
    a, b = _flat(a), _flat(b)
    if not a.any():
        # A gradient that is zero in exact arithmetic may be rounding noise in B. A parameter that
        # only B trains is found by its name.
        wrong = kind == "buffer" and b.any()
        return _Comparison(kind, label, slope=0.0, ratio=0.0, spread=0.0) if wrong else None
    spread = 0.0
    for other in map(_flat, perturbed):
        if _cosine(a, other) < _REPRODUCED:
            return None
        spread = max(spread, abs(_slope(a, other) - 1), abs(_ratio(a, other) - 1))
    return _Comparison(kind, label, _slope(a, b), _ratio(a, b), spread)


def _judge(comparisons: Sequence[_Comparison]) -> list[str]:
    parameters = [c for c in comparisons if c.kind == "parameter"]
    buffers = [c for c in comparisons if c.kind == "buffer"]
    moments = [c for c in comparisons if c.kind not in ("parameter", "buffer")]
    still = [c for c in parameters if abs(c.slope) < _STILL]
    findings = [
        _shared_scale("the change of the parameters", parameters),
        *(
            _shared_scale(f"the optimizer's {kind}", [c for c in moments if c.kind == kind])
            for kind in sorted({c.kind for c in moments})
        ),
        _group("not moved in B by the first update", [c.name for c in still]),
        _group(
            "moved by another amount",
            [
                f"{c.name} ({c.ratio:.3g} times)"
                for c in parameters
                if c not in still and c.off(c.ratio, _SINGLE)
            ],
        ),
        _group(
            "other optimizer state",
            [
                f"{c.kind} of {c.name} ({c.slope:.3g} times)"
                for c in moments
                if c.off(c.slope, _SINGLE)
            ],
        ),
        _group(
            "other change of a buffer",
            [f"{c.name} ({c.slope:.3g} times)" for c in buffers if c.off(c.slope, _STATISTIC)],
        ),
    ]
    return [finding for finding in findings if finding]


def _shared_scale(what: str, comparisons: Sequence[_Comparison]) -> str:
    """Find a factor that all tensors share, too small to be told from noise in any one of them."""
    ratio = float(np.median([c.ratio for c in comparisons])) if comparisons else 1.0
    if not _off(ratio, _MEDIAN):
        return ""
    return f"{what} is {ratio:.4g} times that of A (median of {len(comparisons)} tensors)"


def _named(what: str, names: set[str]) -> list[str]:
    group = _group(what, sorted(" of ".join(name.split("/", 1)) for name in names))
    return [group] if group else []


def _group(what: str, names: Sequence[str], shown: int = 3) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{what}: {', '.join(names[:shown])}{rest}"


def _off(value: float, tolerance: float) -> bool:
    # Written so that NaN is off.
    return not abs(value - 1) <= tolerance


def _flat(array: Any) -> Any:
    return array.ravel().astype(np.float64)


def _slope(a: Any, b: Any) -> float:
    return float(a @ b / (a @ a))


def _cosine(a: Any, b: Any) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def _ratio(a: Any, b: Any) -> float:
    step = max(1, a.size // _SAMPLE)
    a, b = a[::step], b[::step]
    moved = a != 0
    return float(np.median(b[moved] / a[moved])) if moved.any() else 1.0


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
