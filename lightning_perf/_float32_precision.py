"""Precision of float32 matrix products: two families of switches, and no contradiction.

PyTorch 2.9 put a tree of settings (generic.all -> cuda.all -> cuda.matmul, ...; "none" means: ask
the parent) beside `torch.set_float32_matmul_precision`. The old setter also writes the two matmul
leaves of the tree; the tree never writes the old setting, and once they disagree, the old getter
raises. Hence: while the old getter answers, the old setter is used, which keeps both readable; when
it raises, the process works with the tree, and only the tree is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

MATMUL_PRECISIONS = ("highest", "high", "medium")

_LEAVES_OF_WORD = {
    "highest": {"cuda.matmul": "ieee", "mkldnn.matmul": "ieee"},
    "high": {"cuda.matmul": "tf32", "mkldnn.matmul": "tf32"},
    "medium": {"cuda.matmul": "tf32", "mkldnn.matmul": "bf16"},
}


def _has_precision_tree() -> bool:
    return hasattr(torch._C, "_set_fp32_precision_setter")


# The private functions behind `torch.backends.*.fp32_precision`: in that public interface the
# setter of `mkldnn` writes the generic node instead.
def _get_node(name: str) -> str:
    backend, op = name.split(".")
    value: str = torch._C._get_fp32_precision_getter(backend, op)
    return value


def _set_node(name: str, value: str) -> None:
    backend, op = name.split(".")
    torch._C._set_fp32_precision_setter(backend, op, value)


def _own_value(name: str, parent: str, parent_value: str) -> str:
    """Value set at a node itself; its getter only gives the inherited one.

    Args:
        name: The node, such as ``"cuda.matmul"``.
        parent: The node it asks when it is set to ``"none"``.
        parent_value: The parent's own value, put back afterwards.
    """
    seen = _get_node(name)
    probe = "ieee" if seen != "ieee" else "tf32"
    _set_node(parent, probe)
    inherited = _get_node(name) != seen
    _set_node(parent, parent_value)
    return "none" if inherited else seen


def read_precision_tree() -> dict[str, str]:
    """Return the nodes that decide about matrix products, each with its own value."""
    if not _has_precision_tree():
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = {"generic.all": _get_node("generic.all")}
        # Not the leaves for conv and rnn: their initial state, TF32 unless a parent is set, cannot
        # be written, and nothing here needs it.
        for backend in ("cuda", "mkldnn"):
            root, leaf = f"{backend}.all", f"{backend}.matmul"
            tree[root] = _own_value(root, "generic.all", tree["generic.all"])
            tree[leaf] = _own_value(leaf, root, tree[root])
    return tree


def write_precision_tree(values: dict[str, str]) -> None:
    """Set nodes of the tree."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in values.items():
            _set_node(name, value)


def _old_matmul_precision() -> str | None:
    """What the old getter says, or None where it contradicts the tree and raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in PyTorch 2.9, but all there is before
        try:
            torch._C._get_cublas_allow_tf32()
            return torch.get_float32_matmul_precision()
        except RuntimeError:
            return None


def read_matmul_precision() -> str:
    """Return the word in force, or the leaves where no word says it."""
    word = _old_matmul_precision()
    if word is not None:
        return word
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaves = {name: _get_node(name) for name in _LEAVES_OF_WORD["high"]}
    for word, meaning in _LEAVES_OF_WORD.items():
        if leaves == meaning:
            return word
    return ", ".join(f"{name}={value}" for name, value in leaves.items())


def _set_old_matmul_precision(word: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(word)


def write_matmul_precision(word: str) -> None:
    """Set the word by the family of switches that the process uses."""
    if word not in MATMUL_PRECISIONS:
        raise ValueError(
            f"matmul_precision={word!r} was asked for; it must be one of "
            f"{', '.join(map(repr, MATMUL_PRECISIONS))}."
        )
    if _old_matmul_precision() is None:
        write_precision_tree(_LEAVES_OF_WORD[word])
    else:
        _set_old_matmul_precision(word)


def save_matmul_precision() -> Callable[[], None]:
    """Return the function that puts word and leaves back as they are now."""
    word = _old_matmul_precision()
    tree = read_precision_tree()
    leaves = {name: tree[name] for name in _LEAVES_OF_WORD["high"] if name in tree}

    def restore() -> None:
        if word is not None:
            _set_old_matmul_precision(word)
        # The old setter pins the leaves; untouched ones ask their parent.
        write_precision_tree(leaves)

    return restore
