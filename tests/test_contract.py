"""What every exported item promises, one row of `items.ROWS` each."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from items import ROWS, Row
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from models import Classifier, images, trainer

from lightning_perf import NoEffectWarning, callbacks
from lightning_perf._item import PerfCallback, statuses
from lightning_perf._knobs import KNOBS, knobs, read_knobs

ROOT = Path(__file__).parents[1]

every_item = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
acting_items = pytest.mark.parametrize(
    "row", [row for row in ROWS if row.acts_on_cpu], ids=lambda row: row.id
)


@pytest.fixture(autouse=True)
def ready(request: pytest.FixtureRequest):
    """Give the item something to do, and the process back as it was."""
    row: Row | None = getattr(request.node, "callspec", None) and request.node.callspec.params.get(
        "row"
    )
    with knobs(**read_knobs()), row.around() if row is not None else nullcontext():
        yield


class Boom(Exception):
    """Raised on purpose."""


class Raise(Callback):
    """Raises in one hook."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def setup(self, trainer, pl_module, stage) -> None:
        if self.hook == "setup":
            raise Boom

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self.hook == "step" and batch_idx == 1:
            raise Boom

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_start(self, trainer, pl_module) -> None:
        if self.hook == "ctrl-c":
            raise KeyboardInterrupt

    def on_test_start(self, trainer, pl_module) -> None:
        self.on_train_start(trainer, pl_module)


class Observe(Callback):
    """Notes the knobs while the items are active."""

    def on_train_start(self, trainer, pl_module) -> None:
        self.knobs = read_knobs()

    def on_test_start(self, trainer, pl_module) -> None:
        self.on_train_start(trainer, pl_module)


def fingerprint(module: torch.nn.Module) -> dict[str, object]:
    """What must be as before once a run is over: structure, keys, formats and hooks of a model."""
    return {
        "keys": list(module.state_dict()),
        "classes": [type(m) for m in module.modules()],
        "strides": {n: tuple(p.stride()) for n, p in module.named_parameters()},
        "parameters": {n: id(p) for n, p in module.named_parameters()},
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in module.modules()
        ],
        "attributes": [sorted(vars(m)) for m in module.modules()],
        "compiled": [m._compiled_call_impl is not None for m in module.modules()],
    }


def instantiate(parser: LightningArgumentParser, config: Any) -> Any:
    """Build what a configuration describes; jsonargparse renamed the method."""
    return getattr(parser, "instantiate", parser.instantiate_classes)(config)


@every_item
def test_it_is_registered_tested_and_documented(row: Row) -> None:
    stem = row.cls.__module__.rpartition(".")[2]
    assert row.cls.__name__ in callbacks.__all__
    assert (ROOT / f"tests/callbacks/test_{stem}.py").exists()
    assert (ROOT / f"docs/items/{stem}.md").exists()
    assert row.cls.guide
    assert row.cls.__doc__
    assert "Example" in row.cls.__doc__


def test_every_exported_item_has_a_row() -> None:
    assert {row.cls.__name__ for row in ROWS} == set(callbacks.__all__)


@every_item
def test_a_subclass_writes_nothing_else_of_the_life_cycle(row: Row) -> None:
    for hook in ("setup", "teardown", "on_exception", "__repr__"):
        assert getattr(row.cls, hook) is getattr(PerfCallback, hook)
    assert row.cls.changes <= KNOBS.keys() | {"model", "batches", "optimizer"}


@every_item
def test_repr_evaluates_back(row: Row) -> None:
    item = row.item()
    again = eval(repr(item), vars(callbacks))
    assert vars(again) == vars(item)
    assert repr(again) == repr(item)


@every_item
def test_it_is_pickled_and_built_from_a_class_path(row: Row) -> None:
    item = row.item()
    assert vars(pickle.loads(pickle.dumps(item))) == vars(item)

    parser = LightningArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--item", type=Callback)
    class_path = f"lightning_perf.callbacks.{row.cls.__name__}"
    entry = {"class_path": class_path, "init_args": row.arguments}
    config = parser.parse_args(["--item", json.dumps(entry)])
    Path("saved.yaml").write_text(parser.dump(config))
    assert parser.parse_args(["--config", "saved.yaml"]).item == config.item
    assert vars(instantiate(parser, config).item) == vars(item)


@pytest.mark.parametrize(
    ("row", "arguments", "message"),
    [
        pytest.param(row, arguments, message, id=f"{row.id}-{arguments}")
        for row in ROWS
        for arguments, message in row.wrong
    ],
)
def test_wrong_arguments_are_explained(row: Row, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(callbacks=[row.cls(**arguments)]).fit(Classifier(), images())


@every_item
def test_an_unknown_argument_is_refused(row: Row) -> None:
    with pytest.raises(TypeError, match="speed"):
        row.cls(speed="fast")


@acting_items
@pytest.mark.parametrize("late", [False, True])
def test_it_fits_twice_then_evaluates_and_leaves_no_trace(row: Row, late: bool) -> None:
    module = row.model(late=late)
    row.run(module)
    before, switches = fingerprint(module), read_knobs()
    run = row.run(module, row.item())
    assert [(s.item, s.active) for s in statuses(run)] == [(row.id, True)]
    run.fit_loop.max_epochs = 2
    run.fit(module, images(), images())
    run.test(module, images(), verbose=False)
    run.predict(module, images())
    assert fingerprint(module) == before
    assert read_knobs() == switches


@acting_items
def test_only_what_it_declares_changes(row: Row) -> None:
    switches = read_knobs()
    observe = Observe()
    row.run(row.model(), row.item(), observe)
    changed = {name for name in switches if observe.knobs[name] != switches[name]}
    assert changed <= row.cls.changes


@acting_items
@pytest.mark.parametrize("where", ["setup", "step", "ctrl-c"])
@pytest.mark.usefixtures("signal_handlers")
def test_it_is_undone_after_an_error(row: Row, where: str) -> None:
    module = row.model()
    row.run(module)
    before, switches = fingerprint(module), read_knobs()
    with pytest.raises(SystemExit if where == "ctrl-c" else Boom):
        row.run(module, row.item(), Raise(where))
    assert fingerprint(module) == before
    assert read_knobs() == switches


@acting_items
def test_losses_agree_with_a_run_without_it(row: Row) -> None:
    without, with_item = row.model(), row.model()
    with_item.load_state_dict(without.state_dict())
    row.run(without, max_epochs=3)
    row.run(with_item, row.item(), max_epochs=3)
    expected = without.losses or without.test_losses
    losses = with_item.losses or with_item.test_losses
    if row.changes_learning:
        assert losses != expected
        assert losses[0] == expected[0]
    elif row.cls.exact:
        assert losses == expected
        assert row.tolerance == 0
    else:
        assert losses == pytest.approx(expected, rel=row.tolerance)


@acting_items
@pytest.mark.parametrize("saved_with_it", [True, False])
@pytest.mark.parametrize("loaded_with_it", [True, False])
def test_checkpoints_load_with_and_without_it(
    row: Row, saved_with_it: bool, loaded_with_it: bool, tmp_path: Path
) -> None:
    def fit(with_it: bool, epochs: int, path: Path | None = None) -> tuple[Classifier, Trainer]:
        module = row.model()
        module.load_state_dict(start)
        items = [row.item()] if with_it else []
        run = trainer(**row.trainer, callbacks=items, max_epochs=epochs)
        run.fit(module, images(), images(), ckpt_path=path)
        return module, run

    start = {key: value.clone() for key, value in row.model().state_dict().items()}
    straight, _ = fit(loaded_with_it, epochs=2)
    _, run = fit(saved_with_it, epochs=1)
    run.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(start)

    resumed, _ = fit(loaded_with_it, epochs=2, path=tmp_path / "last.ckpt")
    assert len(resumed.losses) == 4
    if saved_with_it == loaded_with_it or not row.changes_learning:
        assert resumed.losses == pytest.approx(straight.losses[4:], rel=max(row.tolerance, 1e-4))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if not row.acts_on_cpu or row.idle_model], ids=lambda row: row.id
)
@pytest.mark.parametrize("strict", [None, False, True])
def test_a_reason_not_to_act_leaves_everything_alone(row: Row, strict: bool | None) -> None:
    module = row.idle_model() if row.idle_model else Classifier()
    row.run(module)
    before, switches = fingerprint(module), read_knobs()
    item, observe = row.item(strict=strict), Observe()
    if strict:
        with pytest.raises(RuntimeError, match=f"{row.id} has no effect here: .*strict=False"):
            row.run(module, item, observe)
    elif strict is None:
        with pytest.warns(NoEffectWarning, match=f"{row.id} has no effect here: ") as caught:
            run = row.run(module, item, observe)
        assert len([w for w in caught if w.category is NoEffectWarning]) == 1
        assert observe.knobs == switches
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error", NoEffectWarning)
            run = row.run(module, item, observe)
        assert observe.knobs == switches
    if not strict:
        (status,) = statuses(run)
        assert not status.active
        assert re.search(r"\w{3}", status.text)
    assert fingerprint(module) == before
    assert read_knobs() == switches


def test_importing_the_package_changes_nothing() -> None:
    switches = read_knobs()
    importlib.import_module("lightning_perf.callbacks")
    importlib.import_module("lightning_perf.presets")
    assert read_knobs() == switches
