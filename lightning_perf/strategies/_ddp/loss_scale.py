"""Gradients that a hook keeps, under a gradient scaler that changes its factor."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision

from lightning_perf.strategies.comm_hooks.base import ErrorFeedback


class LossScale:
    """Keeps what a hook keeps of gradients in proportion to those of the next backward pass.

    Create it before a step of the optimizer, and ask it to follow after.

    Args:
        precision: The run's precision plugin, with or without a gradient scaler.
    """

    def __init__(self, precision: Precision) -> None:
        self._scaler = getattr(precision, "scaler", None)
        self._factor = self._now()

    def _now(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def follow(self, hook: ErrorFeedback) -> None:
        """Rescale what the hook keeps, where the scaler has just changed its factor.

        On a GPU it waits for the step of the optimizer, as the scaler does for the pass before it.
        """
        before, self._factor = self._factor, self._now()
        if self._factor != before:
            hook.rescale(self._factor / before)
