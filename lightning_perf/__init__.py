"""Reversible speed-ups for PyTorch Lightning. Importing this package changes nothing."""

__version__ = "0.1.0"


class NoEffectWarning(UserWarning):
    """Something the user asked for has no effect here; the text says why."""
