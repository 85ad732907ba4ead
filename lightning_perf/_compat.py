"""The only file that touches private attributes of Lightning.

Each use says why no public way will do, and with which versions it was checked.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import TrainerState
from lightning.pytorch.utilities.combined_loader import CombinedLoader

RUN_STATE: tuple[type, ...] = (
    _Loop,
    _BaseProgress,
    _LoggerConnector,
    _ResultCollection,
    TrainerState,
)
"""Types of the objects below a trainer whose attributes change as a run advances: loops and their
progress, logged values, the stage. Loops have a public ``state_dict``, but it leaves out what was
logged and what a running epoch has in hand (2.5.0 - 2.6.6)."""


def callbacks(trainer: Trainer) -> list[Callback]:
    """Return the trainer's list of callbacks: public, but set by a connector and not declared."""
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared
    return found


def detects_anomalies(trainer: Trainer) -> bool:
    """Return whether ``Trainer(detect_anomaly=True)`` was asked for.

    The argument is kept in ``_detect_anomaly`` only (2.5.0 - 2.6.6).
    """
    return bool(trainer._detect_anomaly)


def hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """Return the hyperparameters that Lightning will hand to the loggers.

    Whether they were saved with ``logger=True`` is kept in ``_log_hyperparams`` only, and how those
    of module and data module are put together in a private function (2.5.0 - 2.6.6).
    """
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # public, but not declared
    sources = (trainer.lightning_module, datamodule)
    return {
        name: value
        for source in sources
        if source is not None and source._log_hyperparams
        for name, value in source.hparams_initial.items()
        if name != "_class_path"  # LightningCLI's own
    }


def combined_loaders(trainer: Trainer) -> list[CombinedLoader]:
    """Return the `CombinedLoader` of every loop that has one already.

    Their iteration state lies in the object itself; the public ``trainer.train_dataloader`` and the
    like give the user's loaders without it (2.5.0 - 2.6.6).
    """
    loaders = (loop._combined_loader for loop in _data_loops(trainer))
    return [loader for loader in loaders if loader is not None]


def given_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders handed to ``fit`` and the like, for loops that have not set them up yet.

    Until then they are kept in ``_data_source`` only (2.5.0 - 2.6.6).
    """
    sources = (loop._data_source.instance for loop in _data_loops(trainer))
    given = [source for source in sources if not isinstance(source, (DataHooks, type(None)))]
    return [loader for source in given for loader in CombinedLoader(source).flattened]


def _data_loops(trainer: Trainer) -> tuple[Any, ...]:
    return (
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    )
