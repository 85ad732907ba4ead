"""The life of an item in a run: order, undo on every way out, strictness, the status table."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from models import Classifier, LateClassifier, images, trainer
from ranks import run_ranks

from lightning_perf import NoEffectWarning
from lightning_perf._item import PerfCallback, instance_attribute, statuses
from lightning_perf._knobs import knobs, read_knobs

events: list[str] = []


@pytest.fixture(autouse=True)
def fresh_events() -> None:
    events.clear()


class Probe(PerfCallback):
    """Notes when it is applied and undone."""

    guide = "none"
    changes = frozenset({"model"})
    exact = True

    def __init__(self, name: str = "probe", *, fails: str = "", strict: bool | None = None) -> None:
        super().__init__(strict=strict)
        self.name = name
        self.fails = fails

    @contextmanager
    def applied(self, trainer, module) -> Iterator[str | None]:
        if self.fails == "apply":
            raise ValueError("cannot apply")
        events.append(f"+{self.name}")
        try:
            yield f"detail of {self.name}"
        finally:
            events.append(f"-{self.name}")
            if self.fails == "undo":
                raise ValueError("cannot undo")


class BeforeWrap(Probe):
    moment = "before_wrap"

    @contextmanager
    def applied(self, trainer, module) -> Iterator[str | None]:
        assert not isinstance(module.net, torch.nn.Identity), "configure_model comes first"
        assert not trainer.optimizers
        with super().applied(trainer, module) as detail:
            yield detail


class AfterWrap(Probe):
    moment = "after_wrap"

    @contextmanager
    def applied(self, trainer, module) -> Iterator[str | None]:
        assert trainer.optimizers or trainer.state.fn != "fit"
        with super().applied(trainer, module) as detail:
            yield detail


class FitOnly(Probe):
    functions = frozenset({"fit"})


class Idle(Probe):
    def why_not(self, trainer, module) -> str | None:
        return "there is nothing to do."


class Anomaly(PerfCallback):
    """Claims a process-wide switch."""

    guide = "none"
    changes = frozenset({"anomaly_mode"})
    exact = True

    @contextmanager
    def applied(self, trainer, module) -> Iterator[str | None]:
        with knobs(anomaly_mode=True):
            yield None


class AnomalyToo(Anomaly):
    """Claims the same one."""


class RaiseIn(Callback):
    """Raises in one hook, whichever it is."""

    def __init__(self, hook: str, error: type[BaseException] = ZeroDivisionError) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise error

        setattr(self, hook, fail)


def test_items_act_at_their_moment_whatever_their_order_and_are_undone_in_reverse() -> None:
    items = [AfterWrap("after"), BeforeWrap("before"), Probe("one"), Probe("two")]
    trainer(callbacks=items).fit(LateClassifier(), images())
    assert events == ["+one", "+two", "+before", "+after", "-after", "-before", "-two", "-one"]


def test_every_entry_point_applies_and_undoes() -> None:
    module, run = Classifier(), trainer(callbacks=[Probe("a"), AfterWrap("b")])
    run.fit(module, images())
    run.validate(module, images(), verbose=False)
    run.test(module, images(), verbose=False)
    run.predict(module, images())
    assert events == ["+a", "+b", "-b", "-a"] * 4


def test_an_item_for_training_is_not_involved_in_evaluation() -> None:
    run = trainer(callbacks=[FitOnly()])
    run.validate(Classifier(), images(), verbose=False)
    assert events == []
    assert statuses(run) == ()


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.parametrize(
    "hook",
    [
        "on_fit_start",
        "on_train_start",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_validation_start",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ],
)
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("first", [True, False])
def test_undone_whatever_raises_wherever(
    hook: str, error: type[BaseException], first: bool
) -> None:
    ours, theirs = [Probe("a"), Probe("b"), AfterWrap("c")], [RaiseIn(hook, error)]
    run = trainer(callbacks=theirs + ours if first else ours + theirs)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        run.fit(Classifier(), images(), images())
    assert events == ["+a", "+b", "+c", "-c", "-b", "-a"]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_only_what_was_applied_is_undone_when_a_setup_raises(position: int) -> None:
    items: list[Callback] = [Probe("a"), Probe("b")]
    items.insert(position, RaiseIn("setup"))
    with pytest.raises(ZeroDivisionError):
        trainer(callbacks=items).fit(Classifier(), images())
    applied = ["+a", "+b"][:position]
    assert events == applied + [event.replace("+", "-") for event in reversed(applied)]


def test_errors_of_an_item_itself_undo_the_others() -> None:
    with pytest.raises(ValueError, match="cannot apply"):
        trainer(callbacks=[Probe("a"), BeforeWrap("b", fails="apply")]).fit(Classifier(), images())
    assert events == ["+a", "-a"]


@pytest.mark.parametrize("ending", ["success", "error"])
def test_a_failing_undo_is_reported_and_hides_neither_the_others_nor_the_error(
    ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    items: list[Callback] = [Probe("a"), Probe("b", fails="undo"), Probe("c")]
    module = Classifier()
    with caplog.at_level(logging.ERROR):
        if ending == "error":
            with pytest.raises(ZeroDivisionError):
                trainer(callbacks=[*items, RaiseIn("on_train_start")]).fit(module, images())
        else:
            trainer(callbacks=items).fit(module, images())
    assert events == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert "could not be undone" in caplog.text
    assert "cannot undo" in caplog.text


@pytest.mark.usefixtures("signal_handlers")
def test_a_stale_stack_is_closed_at_the_next_setup() -> None:
    run = trainer(callbacks=[RaiseIn("on_exception"), RaiseIn("on_train_start"), Probe("a")])
    with pytest.raises(ZeroDivisionError):
        run.fit(Classifier(), images())
    assert events == ["+a"], "Lightning told nobody of the end"
    run.callbacks[:] = [c for c in run.callbacks if isinstance(c, Probe)]
    run.fit(Classifier(), images())
    assert events == ["+a", "-a", "+a", "-a"]


def test_a_second_trainer_inside_a_hook_has_its_own_stack() -> None:
    probe = Probe("a")

    class Nested(Callback):
        def on_train_start(self, outer, module) -> None:
            trainer(callbacks=[probe]).fit(Classifier(), images())
            events.append("inner done")

    trainer(callbacks=[probe, Nested()]).fit(Classifier(), images())
    assert events == ["+a", "+a", "-a", "inner done", "-a"]


def test_two_items_with_the_same_switch_are_refused_by_name() -> None:
    switches = read_knobs()
    with pytest.raises(ValueError, match=r"Anomaly\(\) and AnomalyToo\(\) both set .*anomaly_mode"):
        trainer(callbacks=[Anomaly(), AnomalyToo()]).fit(Classifier(), images())
    with pytest.raises(ValueError, match="Keep one"):
        trainer(callbacks=[Anomaly(), Anomaly()]).fit(Classifier(), images())
    assert read_knobs() == switches


def test_a_reason_is_a_warning_a_line_or_an_error() -> None:
    with pytest.warns(NoEffectWarning, match="Idle has no effect here: there is nothing to do."):
        trainer(callbacks=[Idle()]).fit(Classifier(), images())
    trainer(callbacks=[Idle(strict=False)]).fit(Classifier(), images())
    with pytest.raises(RuntimeError, match="strict=True: remove it, or pass strict=False"):
        trainer(callbacks=[Probe("a"), Idle(strict=True)]).fit(Classifier(), images())
    assert events == ["+a", "-a"]


def test_the_status_table_is_printed_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run = trainer(callbacks=[Probe("a"), Idle(strict=False), BeforeWrap("b")])
        run.fit(Classifier(), images(), images())
    assert [(s.item, s.active, s.text) for s in statuses(run)] == [
        ("Probe", True, "detail of a"),
        ("Idle", False, "there is nothing to do."),
        ("BeforeWrap", True, "detail of b"),
    ]
    tables = [r.getMessage() for r in caplog.records if "lightning_perf" in r.getMessage()]
    assert tables == [
        "lightning_perf:\n"
        "  active   Probe       detail of a\n"
        "  skipped  Idle        there is nothing to do.\n"
        "  active   BeforeWrap  detail of b"
    ]


def test_loggers_hold_the_items_and_the_preset(tmp_path: Path) -> None:
    from lightning_perf.presets import Preset

    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tensorboard")]
    run = trainer(
        logger=loggers, callbacks=[Preset("cpu"), Probe(), Idle(strict=False)], log_every_n_steps=1
    )
    run.fit(Classifier(), images())
    for logger in loggers:
        text = (Path(logger.log_dir) / "hparams.yaml").read_text()
        assert "lightning_perf/preset: cpu\n" in text
        assert "lightning_perf/active: Probe\n" in text
        assert "lightning_perf/skipped: Idle\n" in text


@pytest.mark.skipif(
    "enable_autolog_hparams" not in inspect.signature(Trainer).parameters,
    reason="this Lightning has no enable_autolog_hparams",
)
def test_autologging_of_hyperparameters_can_be_off(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    run = trainer(
        logger=logger, callbacks=[Probe()], enable_autolog_hparams=False, log_every_n_steps=1
    )
    run.fit(Classifier(), images())
    logger.save()
    assert not list(tmp_path.rglob("hparams.yaml"))


def test_a_trainer_of_pytorch_lightning_is_explained() -> None:
    import pytorch_lightning
    from pytorch_lightning.demos.boring_classes import BoringModel

    try:
        run = pytorch_lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Probe()],
        )
    except ValueError:
        pytest.skip("this pytorch_lightning refuses callbacks of lightning itself")
    with pytest.raises(
        TypeError, match=r"Probe was given a pytorch_lightning.*Replace `import pyt"
    ):
        run.fit(BoringModel())
    assert events == []


def test_instance_attributes_nest_and_are_put_back() -> None:
    class Thing:
        value = 0

    thing = Thing()
    with instance_attribute(thing, "value", 1), instance_attribute(thing, "value", 2):
        assert thing.value == 2
    assert vars(thing) == {}
    thing.value = 3
    with instance_attribute(thing, "value", 4):
        assert thing.value == 4
    assert thing.value == 3


def test_a_copied_item_is_independent() -> None:
    item = Probe("a")
    run = trainer(callbacks=[copy.deepcopy(item)])
    run.fit(Classifier(), images())
    assert vars(item) == vars(Probe("a"))


_TWO_RANKS = """
import os, sys
from contextlib import contextmanager
from lightning.pytorch import Trainer
from lightning_perf._item import PerfCallback, statuses
from models import Classifier, images

class Uneven(PerfCallback):
    guide, changes, exact = "none", frozenset(), True
    def why_not(self, trainer, module):
        return "rank 1 is different." if {uneven} and trainer.global_rank == 1 else None
    @contextmanager
    def applied(self, trainer, module):
        yield "works"

if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="{strategy}", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Uneven(strict=False)],
    )
    trainer.fit(Classifier(), images())
    print("finished", flush=True)
"""


def two_ranks(folder: Path, *, uneven: bool, strategy: str) -> str:
    script = _TWO_RANKS.format(uneven=uneven, strategy=strategy)
    return run_ranks(script, folder, environ={"OMP_NUM_THREADS": "1"}, fails=uneven)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_two_ranks_agree_and_print_one_table(tmp_path: Path, strategy: str) -> None:
    output = two_ranks(tmp_path, uneven=False, strategy=strategy)
    assert output.count("active   Uneven") == 1
    assert "finished" in output


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    output = two_ranks(tmp_path, uneven=True, strategy="ddp")
    assert "The ranks disagree on which items act: rank 0: [('Uneven', True)]" in output
