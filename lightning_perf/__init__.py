"""Reversible speed-ups for PyTorch Lightning. Importing this package changes nothing."""

__version__ = "0.1.0"
