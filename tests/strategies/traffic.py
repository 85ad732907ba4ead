"""Counts collectives where torch dispatches them, whoever asked for them."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Wire(TorchDispatchMode):
    """Number and bytes of the collectives of this rank, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2].rstrip("_")
            # Of a gather the output comes first; what is sent, after it.
            sent = args[1] if name == "allgather" else args[0]
            tensors = [leaf for leaf in tree_leaves(sent) if isinstance(leaf, torch.Tensor)]
            self.calls[name] += 1
            self.bytes[name] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()
