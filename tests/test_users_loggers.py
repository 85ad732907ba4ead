"""What loggers hold after a run: the preset and the items, beside the user's hyperparameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from models import images, trainer
from users import Project, preset, project

from lightning_perf._item import statuses
from lightning_perf.callbacks import ChannelsLast
from lightning_perf.presets import trainer_kwargs


class ConfigLogger(Logger):
    """Like that of Weights & Biases: a name, a version, and one dictionary that is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}

    name = "config"
    version = "0"

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.config.update(params)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass


class ParameterStore(ConfigLogger):
    """Like MLflow: what has a value keeps it."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        changed = {k for k in self.config.keys() & params.keys() if self.config[k] != params[k]}
        if changed:
            raise RuntimeError(f"Changing param values is not allowed: {sorted(changed)}")
        super().log_hyperparams(params)


class Remembered(Project):
    def __init__(self, width: int = 8, secret: str = "no") -> None:
        super().__init__()
        self.save_hyperparameters("width")


class Data(LightningDataModule):
    def __init__(self, shards: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return images()


def shown_by_tensorboard(folder: str) -> dict[str, str]:
    """The hyperparameters that TensorBoard's HPARAMS tab shows for a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    events = EventAccumulator(folder).Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    hyperparameters = metadata.parse_session_start_info_plugin_data(content).hparams
    return {
        name: value.string_value or value.number_value for name, value in hyperparameters.items()
    }


def test_loggers_hold_preset_items_and_the_users_hyperparameters(tmp_path: Path) -> None:
    loggers = [ConfigLogger(), TensorBoardLogger(tmp_path / "t"), CSVLogger(tmp_path / "c")]
    preset(logger=loggers, log_every_n_steps=1).fit(Remembered(), datamodule=Data())
    config, tensorboard, csv = loggers
    active = config.config["lightning_perf/active"]
    assert active == "ChannelsLast, FusedOptimizer, Compile"
    assert "DisableDebugAPIs" in config.config["lightning_perf/skipped"]
    ours = {"lightning_perf/active", "lightning_perf/skipped", "lightning_perf/preset"}
    assert set(config.config) == {"width", "shards", *ours}
    assert shown_by_tensorboard(tensorboard.log_dir)["width"] == 8
    assert set(shown_by_tensorboard(tensorboard.log_dir)) == set(config.config)
    for logger in (tensorboard, csv):
        text = (Path(logger.log_dir) / "hparams.yaml").read_text()
        assert all(f"{name}: {value}\n" in text for name, value in config.config.items())


def test_hyperparameters_that_the_user_keeps_from_loggers_stay_so() -> None:
    class Private(Project):
        def __init__(self, secret: str = "s") -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)

    logger = ConfigLogger()
    preset(logger=logger, log_every_n_steps=1).fit(Private())
    assert "secret" not in logger.config
    assert "lightning_perf/active" in logger.config


def test_a_logger_that_refuses_the_items_does_not_end_the_run() -> None:
    logger, module = ParameterStore(), project()
    preset(logger=logger, log_every_n_steps=1).fit(module)
    run = trainer(logger=logger, log_every_n_steps=1, callbacks=[ChannelsLast()])
    with pytest.warns(UserWarning, match=r"ParameterStore did not take .*Changing param values"):
        run.fit(module)
    assert len(module.losses) == 10
    assert logger.config["lightning_perf/preset"] == "cpu"


def test_fast_dev_run_logs_nothing() -> None:
    logger = ConfigLogger()
    preset(logger=logger, fast_dev_run=True).fit(project())
    assert logger.config == {}


def test_without_its_callbacks_a_preset_leaves_no_mark() -> None:
    logger = ConfigLogger()
    run = trainer(**trainer_kwargs("cpu", callbacks=None, logger=logger, log_every_n_steps=1))
    run.fit(project())
    assert statuses(run) == ()
    assert logger.config == {}
