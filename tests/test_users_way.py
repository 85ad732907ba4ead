"""What users do with a Trainer, once plainly and once with a preset: the same must come out."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightnings
from models import conv_net, images, trainer
from torch import nn
from users import Project, active, agree, both, fit, plain, preset, project, trace

from lightning_perf._item import PerfCallback, statuses
from lightning_perf.callbacks import ChannelsLast, DisableDebugAPIs
from lightning_perf.presets import Preset, trainer_kwargs

# --- Flags of the Trainer -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        {"fast_dev_run": True},
        {"overfit_batches": 2},
        {"limit_train_batches": 2, "limit_val_batches": 1},
        {"limit_val_batches": 0},
        {"max_epochs": 0},
        {"num_sanity_val_steps": 0},
        {"num_sanity_val_steps": -1},
        {"max_steps": 3, "max_epochs": -1},
        {"enable_progress_bar": True, "enable_model_summary": True},
        {"inference_mode": False},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        {"val_check_interval": 2, "check_val_every_n_epoch": 1},
        {"reload_dataloaders_every_n_epochs": 1},
        {"profiler": "simple"},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.5, "precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"barebones": True},
    ],
    ids=lambda flags: next(iter(flags)) + "=" + str(next(iter(flags.values()))),
)
@pytest.mark.filterwarnings("ignore:.*barebones=True")
def test_flags_of_the_trainer(flags: dict[str, Any]) -> None:
    if "barebones" in flags:
        for name in ("logger", "enable_checkpointing", "enable_progress_bar"):
            flags = {**flags, name: None}
        flags = {**flags, "enable_model_summary": None}
    theirs, ours, run = both(fit, **{"max_epochs": 2, **flags})
    # AdamW turns the rounding of small gradients into steps of full size.
    agree(theirs, ours, atol=2e-2 if "bf16-mixed" in flags.values() else 1e-3)
    assert active(run) == {"ChannelsLast", "Compile", "FusedOptimizer"}


# --- Lightning's own callbacks ------------------------------------------------------------------


def average() -> Callback:
    if not hasattr(lightnings, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    return lightnings.EMAWeightAveraging()


@pytest.mark.parametrize(
    "make",
    [
        average,
        lambda: lightnings.StochasticWeightAveraging(0.01, swa_epoch_start=1),
        lambda: lightnings.EarlyStopping("val_loss", patience=0, mode="max"),
        lambda: lightnings.ModelCheckpoint(monitor="val_loss", save_last=True),
        lambda: lightnings.LearningRateFinder(num_training_steps=15),
        lambda: lightnings.BatchSizeFinder("power", steps_per_trial=1, max_trials=2),
        lambda: lightnings.GradientAccumulationScheduler({1: 2}),
        lambda: lightnings.BackboneFinetuning(unfreeze_backbone_at_epoch=1),
    ],
    ids=[
        "EMA",
        "SWA",
        "EarlyStopping",
        "ModelCheckpoint",
        "lr",
        "batch_size",
        "accumulate",
        "fine",
    ],
)
@pytest.mark.filterwarnings("ignore:.*(Swapping scheduler|lr_find|interval=)")
def test_callbacks_of_lightning_beside_ours(make: Callable[[], Callback]) -> None:
    class WithBackbone(Project):
        def __init__(self) -> None:
            super().__init__(batch_size=2)
            self.backbone = self.net[0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=self.lr)

    theirs, ours, run = both(
        fit,
        lambda: project(WithBackbone),
        max_epochs=3,
        callbacks=[make],
        enable_checkpointing=True,
    )
    agree(theirs, ours)
    assert ours.lr == pytest.approx(theirs.lr)
    assert ours.batch_size == theirs.batch_size
    assert "ChannelsLast" in active(run)


# --- Ways through a project ---------------------------------------------------------------------


def test_validate_fit_test_predict_and_fit_again() -> None:
    results: list[Any] = []

    def use(run: Trainer, module: LightningModule) -> None:
        results.append(run.validate(module, verbose=False))
        run.fit(module)
        run.fit_loop.max_epochs = 3
        run.fit(module)
        results.append(run.test(module, verbose=False))
        results.append(run.predict(module)[0].tolist())

    theirs, ours, _ = both(use, max_epochs=2)
    agree(theirs, ours)
    assert len(ours.losses) == 15
    assert results[3:5] == [[pytest.approx(d, rel=1e-2) for d in logged] for logged in results[:2]]
    torch.testing.assert_close(
        torch.tensor(results[5]), torch.tensor(results[2]), rtol=1e-2, atol=1e-3
    )


class StopOnce(Callback):
    """Raises once, in the middle of the first epoch."""

    def __init__(self, error: type[BaseException]) -> None:
        self.errors = [error]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx == 2 and self.errors:
            raise self.errors.pop()


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("same_trainer", [True, False])
def test_stopped_in_the_middle_and_started_again(
    error: type[BaseException], same_trainer: bool
) -> None:
    def use(run: Trainer, module: LightningModule) -> None:
        before = trace(module)
        with pytest.raises((SystemExit, RuntimeError)):
            run.fit(module)
        assert trace(module) == {**before, "attributes": trace(module)["attributes"]}
        again = run if same_trainer else (preset if active(run) else plain)(max_epochs=2)
        again.fit(module)

    theirs, ours, run = both(use, max_epochs=2, callbacks=[lambda: StopOnce(error)])
    agree(theirs, ours)
    assert "FusedOptimizer" in active(run)


class Curriculum(Project):
    """Its step reads the trainer, whose numbers compiled code would have frozen."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * (1 + self.current_epoch) / (1 + self.global_step)


def test_a_step_that_reads_the_trainer() -> None:
    theirs, ours, run = both(fit, lambda: project(Curriculum), max_epochs=3)
    agree(theirs, ours)
    assert "Compile" in active(run)


class TwoNetworks(Project):
    """Manual optimization with two optimizers, toggled as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = conv_net()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        for optimizer, net in zip(self.optimizers(), (self.net, self.critic), strict=True):
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.net.parameters())
        return [adam, torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)]


def test_manual_optimization_with_several_optimizers() -> None:
    theirs, ours, run = both(fit, lambda: project(TwoNetworks), max_epochs=2)
    agree(theirs, ours)
    assert len(ours.losses) == 20
    assert [s.text for s in statuses(run) if s.item == "FusedOptimizer"] == [
        "Adam: fused; SGD: fused"
    ]


class Predictor(LightningModule):
    """Made for prediction: no optimizer, no training step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def test_a_module_without_an_optimizer_predicts() -> None:
    module = Predictor()
    expected = plain().predict(module, images())
    run = preset()
    torch.testing.assert_close(run.predict(module, images()), expected)
    assert active(run) == {"ChannelsLast", "Compile"}


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_module_that_trains_without_an_optimizer_is_told() -> None:
    class Statistics(Project):
        def configure_optimizers(self) -> None:
            return None

    run = preset(max_epochs=1)
    run.fit(project(Statistics))
    (fused,) = [status for status in statuses(run) if status.item == "FusedOptimizer"]
    assert fused.text == "Statistics.configure_optimizers makes no optimizer."


# --- Checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("continued_with", [plain, preset])
@pytest.mark.parametrize("saved_with", [plain, preset])
@pytest.mark.parametrize("how", [{}, {"weights_only": True}, {"weights_only": False}], ids=str)
def test_resumed_with_or_without(
    saved_with: Any, continued_with: Any, how: dict[str, bool], tmp_path: Path
) -> None:
    if how and "weights_only" not in inspect.signature(Trainer.fit).parameters:
        pytest.skip("this Lightning has no weights_only")
    straight = project()
    plain(max_epochs=3).fit(straight)

    def keep() -> lightnings.ModelCheckpoint:
        return lightnings.ModelCheckpoint(dirpath=tmp_path, save_last=True)

    saved = project()
    saved_with(max_epochs=2, callbacks=[keep()], enable_checkpointing=True).fit(saved)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert not [key for key in checkpoint["callbacks"] if "ModelCheckpoint" not in key]

    module = project()
    run = continued_with(max_epochs=3, callbacks=[keep()], enable_checkpointing=True)
    run.fit(module, ckpt_path="last", **how)
    assert module.losses == pytest.approx(straight.losses[10:], rel=1e-3)
    assert {int(state["step"]) for state in run.optimizers[0].state.values()} == {15}
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == 3


@pytest.mark.parametrize("saved_with", [plain, preset])
def test_a_checkpoint_is_an_ordinary_one(saved_with: Any, tmp_path: Path) -> None:
    module = project()
    run = saved_with()
    run.fit(module)
    run.save_checkpoint(tmp_path / "whole.ckpt")
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    for file in ("whole.ckpt", "weights.ckpt"):
        again = Project.load_from_checkpoint(tmp_path / file)
        for name, value in module.state_dict().items():
            assert torch.equal(again.state_dict()[name], value)
            assert again.state_dict()[name].stride() == value.stride()


# --- What goes into a Trainer -------------------------------------------------------------------


def test_a_project_that_sets_precision_and_callbacks_keeps_them() -> None:
    theirs = [lightnings.ModelCheckpoint(save_last=True), ChannelsLast(volumes=True)]
    kwargs = trainer_kwargs(
        "cpu_bf16", precision="64-true", callbacks=theirs, enable_checkpointing=True, logger=False
    )
    run = trainer(**kwargs)
    assert run.precision == "64-true"
    assert [c for c in run.callbacks if isinstance(c, ChannelsLast)] == [theirs[1]]
    assert run.checkpoint_callback is theirs[0]
    run.fit(project())
    assert Path(theirs[0].last_model_path).exists()
    assert "ChannelsLast" in active(run)


@pytest.mark.parametrize("wrong", ["no", "false", 2, [True]])
def test_a_wrong_strict_is_explained(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"strict=.*None to warn, True to raise, or False"):
        DisableDebugAPIs(strict=wrong)


def test_callbacks_of_a_used_trainer_are_copied_and_pickled() -> None:
    run = preset()
    run.fit(project())
    ours = [c for c in run.callbacks if isinstance(c, PerfCallback | Preset)]
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert [repr(callback) for callback in again] == [repr(callback) for callback in ours]
        second = trainer(callbacks=again)
        second.fit(project())
        assert active(second) == active(run)
