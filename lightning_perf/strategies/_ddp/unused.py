"""Which parameters get no gradient under `DistributedDataParallel`, by name."""

from __future__ import annotations

import re
from bisect import bisect_left
from statistics import median
from time import perf_counter
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_STEPS = 10
"""DDP keeps statistics of each of its first ten backward passes, then of few."""

_WITHOUT_GRADIENT = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


def name_indices(message: str, ddp: DistributedDataParallel) -> str | None:
    """Return the names of the parameters that DDP's error gives by index, if it is that error."""
    found = _WITHOUT_GRADIENT.search(message)
    if found is None:
        return None
    names = _names(ddp)
    return ", ".join(names[int(index)] for index in found[1].split())


def logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Return DDP's statistics of its latest backward pass, which it keeps nowhere else."""
    data: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # torch's
    return data


class UnusedSearch:
    """Judges ``find_unused_parameters=True`` by the first steps of a run.

    Args:
        ddp: A wrapped model that searches, before its first step.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._names = _names(ddp)
        self._orders: list[list[int]] = []
        self._reducer = ddp.reducer
        self._timed = _TimedReducer(ddp.reducer)
        ddp.reducer = self._timed  # type: ignore[assignment]  # has all that a reducer has

    def after_step(self) -> bool:
        """Note what got gradients in the step before; return whether all has been seen."""
        order = logging_data(self._ddp).get("prev_iteration_grad_ready_order_indices")
        if order:
            self._orders.append([int(index) for index in order.split(",")])
        return len(self._orders) >= _STEPS - 1

    def close(self) -> tuple[str | None, list[str]]:
        """Stop looking; return why the search has no effect, and what else is to be said."""
        self._ddp.reducer = self._reducer
        if not self._orders:
            return None, []
        steps = f"the first {len(self._orders)} steps"
        cost = (
            f"The search takes {1e3 * median(self._timed.seconds):.2f} ms of each step on this "
            "rank and one more collective, and DDP does not rearrange its buckets."
        )
        used = [set(order) for order in self._orders]
        once = used[0].union(*used)
        never = set(range(len(self._names))) - once
        sometimes = once - used[0].intersection(*used)
        lines = []
        if never:
            lines.append(
                f"no gradient in {steps} got {self._named(never)}. If that is always so, freeze "
                f"them by requires_grad_(False) and drop the search. {cost}"
            )
        if sometimes:
            lines.append(f"no gradient in some of {steps} got {self._named(sometimes)}. {cost}")
        if late := self._out_of_order():
            lines.append(
                "gradients become ready in another order than the reverse of that in which these "
                f"modules are defined: {', '.join(late)}. Their buckets wait. Define modules in "
                "the order of their use."
            )
        if never or sometimes:
            return None, lines
        return f"all parameters got a gradient in each of {steps}. {cost}", lines

    def _named(self, indices: set[int]) -> str:
        return ", ".join(self._names[index] for index in sorted(indices))

    def _out_of_order(self) -> list[str]:
        """Return the fewest modules without which the rest is in the order of definition."""
        modules = [name.rpartition(".")[0] for name in self._names]
        defined = list(dict.fromkeys(modules))
        ready = dict.fromkeys(modules[index] for index in self._orders[-1])
        positions = [defined.index(module) for module in ready]
        kept = _longest_decreasing(positions)
        return [defined[position] for position in positions if position not in kept]


class _TimedReducer:
    """DDP's reducer, with the time that it takes to look for unused parameters."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def prepare_for_backward(self, outputs: Any) -> None:
        start = perf_counter()
        self._reducer.prepare_for_backward(outputs)
        self.seconds.append(perf_counter() - start)


def _names(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of parameters in the order of DDP's indices."""
    return [
        name
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    ]


def _longest_decreasing(values: list[int]) -> set[int]:
    """Return a longest decreasing subsequence of different numbers."""
    ends: list[int] = []  # negated last values of the best subsequence of each length
    chains: list[list[int]] = []
    for value in values:
        length = bisect_left(ends, -value)
        chain = [*(chains[length - 1] if length else []), value]
        ends[length : length + 1] = [-value]
        chains[length : length + 1] = [chain]
    return set(chains[-1]) if chains else set()
