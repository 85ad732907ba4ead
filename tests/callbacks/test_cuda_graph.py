"""Training from graphs gives what eager training gives, in both scopes."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_graphs import CPUGraph, cpu_graphs
from graph_runs import Record, Steps, assert_same, fit, twins
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from models import conv_net, images, trainer
from torch import Tensor, nn

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf.callbacks import CUDAGraph, FusedOptimizer
from lightning_perf.callbacks._graph.engine import ENGINES

both_scopes = pytest.mark.parametrize("scope", ["network", "step"])


def half_with_scaler() -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "fp16 with a scaler": {"plugins": half_with_scaler},
    "fp16, accumulated, clipped": {
        "plugins": half_with_scaler,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
    },
    "float64": {"precision": "64-true"},
    "validation inside the epoch": {"val_check_interval": 2, "accumulate_grad_batches": 2},
}

# Parts of these are in the others.
SLOW = {"clipping", "bf16", "fp16 with a scaler", "float64"}
settings = [pytest.param(s, marks=pytest.mark.slow if s in SLOW else ()) for s in SETTINGS]


@both_scopes
@pytest.mark.parametrize("setting", settings)
def test_everything_is_the_same_bit_for_bit(scope: str, setting: str) -> None:
    stock, run = twins(Steps, scope, **copy.copy(SETTINGS[setting]))
    assert_same(stock, run)
    # Eight batches an epoch: three to warm up, and a short one at each end.
    assert len(stock.record.losses) == 16
    assert set(run.replays) == {11}


@both_scopes
@pytest.mark.parametrize("others", [(FusedOptimizer,)], ids=lambda others: others[0].__name__)
def test_it_works_beside_other_items(scope: str, others: Any) -> None:
    stock, run = twins(Steps, scope, *others)
    assert_same(stock, run)
    assert set(run.replays) == {11}


@both_scopes
def test_short_batches_that_come_back_get_a_graph_of_their_own(scope: str) -> None:
    stock, run = twins(Steps, scope, max_epochs=6)
    assert_same(stock, run)
    # 42 full batches and 6 short ones.
    graphs = run.replays[::2] if scope == "network" else run.replays
    assert graphs == [39, 3]


@pytest.mark.slow
@both_scopes
def test_an_accumulation_that_changes(scope: str) -> None:
    stock, run = twins(
        Steps, scope, lambda: GradientAccumulationScheduler({0: 1, 2: 2}), max_epochs=4
    )
    assert_same(stock, run)


@both_scopes
def test_layers_made_in_configure_model(scope: str) -> None:
    class Late(Steps):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def configure_model(self) -> None:
            if isinstance(self.net, nn.Identity):
                torch.manual_seed(1)
                self.net = conv_net()

    stock, run = twins(Late, scope)
    assert_same(stock, run)
    assert set(run.replays) == {11}


@both_scopes
def test_a_second_fit_records_anew(scope: str) -> None:
    module, other = Steps(), Steps()
    other.load_state_dict(module.state_dict())
    for _ in range(2):
        fit(module)
    with cpu_graphs() as graphs:
        for number in (1, 2):
            run = fit(other, CUDAGraph(scope, strict=True))
            assert len(graphs) == number * (2 if scope == "network" else 1)
            assert {graph.replays for graph in graphs} == {11}
            assert "forward" not in vars(other.net)
    assert [p.tolist() for p in module.parameters()] == [p.tolist() for p in other.parameters()]
    run.trainer.save_checkpoint("after.ckpt")


@both_scopes
def test_it_says_what_it_did(scope: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), cpu_graphs():
        run = fit(Steps(), CUDAGraph(scope))
    (said,) = [r.message for r in caplog.records if "replayed" in r.message]
    assert "replayed 11 of 16 calls from 1 graph; 2 had a rare signature" in said
    assert statuses(run.trainer)[0].text.startswith("forward")


@both_scopes
def test_an_error_in_a_step_undoes_it(scope: str) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx == 5:
                raise KeyError("stop")

    module = Steps()
    with cpu_graphs(), pytest.raises(KeyError, match="stop"):
        fit(module, CUDAGraph(scope), Stop())
    assert "forward" not in vars(module.net)
    module.net(torch.randn(4, 3, 8, 8)).sum().backward()
    assert pickle.loads(pickle.dumps(module))


@both_scopes
@pytest.mark.parametrize("after", [1, 2])
def test_a_capture_that_fails_is_undone_and_training_goes_on(scope: str, after: int) -> None:
    class Broken(CPUGraph):
        def __init__(self) -> None:
            super().__init__()
            if len(self.recorded) >= after:
                raise RuntimeError("operation not permitted")

    if scope == "step" and after == 2:
        pytest.skip("one graph only")
    with pytest.warns(NoEffectWarning, match="the capture failed: .*not permitted") as caught:
        stock, run = twins(Steps, scope, graph=Broken, strict=None)
    assert len([w for w in caught if w.category is NoEffectWarning]) == 1
    assert_same(stock, run)
    assert sum(run.replays) == 0


@both_scopes
def test_a_reason_found_while_training_is_as_strict_as_one_before(
    scope: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Reads(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 if x.sum() > 0 else 2)

    def make() -> Steps:
        return Steps(Reads(*conv_net()))

    with (
        cpu_graphs(),
        pytest.raises(RuntimeError, match=r"reads a value on the host.*strict=False"),
    ):
        fit(make(), CUDAGraph(scope, strict=True))
    with cpu_graphs(), caplog.at_level(logging.INFO):
        fit(make(), CUDAGraph(scope, strict=False))
    assert [r for r in caplog.records if "reads a value on the host" in r.message]
    with pytest.warns(NoEffectWarning, match=r"in test_cuda_graph.py:\d+, `return super"):
        stock, run = twins(make, scope, strict=None)
    assert_same(stock, run)
    assert not run.graphs


# --- traps of stale memory and frozen values, which the comparison must find


class Stale(CPUGraph):
    """Does not run: everything holds what the capture left."""

    def replay(self) -> None:
        if self.replays:
            return
        super().replay()


@both_scopes
def test_a_stale_buffer_is_found_by_the_comparison(scope: str) -> None:
    stock, run = twins(Steps, scope, graph=Stale)
    with pytest.raises(AssertionError):
        assert_same(stock, run)
    assert run.record.losses[:4] == stock.record.losses[:4]
    assert run.record.losses[4:] != stock.record.losses[4:]


@both_scopes
def test_inputs_that_are_not_copied_are_found_by_the_comparison(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ENGINES["cuda"][scope]
    replay = engine.replay
    first: dict[int, Any] = {}

    def forgetful(self: Any, graph: Any, inputs: Any) -> Any:
        return replay(self, graph, first.setdefault(id(graph), inputs))

    monkeypatch.setattr(engine, "replay", forgetful)
    stock, run = twins(Steps, scope)
    assert run.record.losses != stock.record.losses


@both_scopes
def test_a_frozen_python_value_is_found_by_the_comparison(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the model is compared before each replay; without that, losses are wrong."""
    monkeypatch.setattr("lightning_perf.callbacks._graph.state.FrozenState.changed", lambda _: None)
    stock, run = twins(Scaled, scope, Raise)
    assert run.record.losses != stock.record.losses


class Scaled(Steps):
    """Multiplies by a Python number that a callback changes."""

    class Net(nn.Sequential):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    def __init__(self) -> None:
        super().__init__(self.Net(*conv_net()))
        self.net.factor = 1.0


class Raise(Callback):
    """Changes the number at the start of each epoch."""

    def __init__(self, every_batch: bool = False) -> None:
        self.every_batch = every_batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self.every_batch or not batch_idx:
            pl_module.net.factor += 1.0


@both_scopes
def test_a_number_that_changes_each_epoch_is_recorded_anew(scope: str) -> None:
    stock, run = twins(Scaled, scope, Raise, max_epochs=3)
    assert_same(stock, run)
    counts = run.replays[::2] if scope == "network" else run.replays
    assert counts == [4, 4, 4]


@both_scopes
def test_a_number_that_always_changes_is_never_frozen(scope: str) -> None:
    stock, run = twins(Scaled, scope, partial(Raise, every_batch=True), strict=False)
    assert_same(stock, run)
    assert all(count <= 1 for count in run.replays)


@both_scopes
def test_layers_unfrozen_in_the_middle(scope: str) -> None:
    class Unfreeze(Callback):
        def on_fit_start(self, trainer, pl_module) -> None:
            for parameter in pl_module.net[0].parameters():
                parameter.requires_grad = False

        def on_train_epoch_start(self, trainer, pl_module) -> None:
            if trainer.current_epoch == 1:
                for parameter in pl_module.net[0].parameters():
                    parameter.requires_grad = True

    stock, run = twins(lambda: Steps(conv_net()), scope, Unfreeze, max_epochs=3)
    assert_same(stock, run)
    assert sum(run.replays) > 10


@both_scopes
def test_weights_that_move_in_memory(scope: str) -> None:
    class Move(Callback):
        def on_train_epoch_start(self, trainer, pl_module) -> None:
            for parameter in pl_module.parameters():
                parameter.data = parameter.data.clone()

    stock, run = twins(Steps, scope, Move, max_epochs=3, strict=False)
    assert_same(stock, run)


# --- copies and checkpoints


class Copies(Callback):
    """Copies the module in the middle of the run, as averaging of weights does."""

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.copy = copy.deepcopy(pl_module.net)
        self.pickled = pickle.dumps(pl_module.net)
        torch.save(pl_module.net, buffer := io.BytesIO())
        self.saved = buffer


@both_scopes
def test_a_copy_of_the_network_runs_its_own_weights(scope: str) -> None:
    with cpu_graphs():
        run = fit(Steps(), CUDAGraph(scope), copies := Copies())
    x = torch.randn(4, 3, 8, 8)
    loaded = torch.load(copies.saved, weights_only=False) if copies.saved.seek(0) == 0 else None
    for other in (copies.copy, pickle.loads(copies.pickled), loaded):
        out = run.module.net.eval()(x)
        assert torch.equal(other.eval()(x), out)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.train()(x).sum().backward()
        assert torch.equal(run.module.net(x), out)
        assert all(p.grad is not None for p in other.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("saved_with_it", [True, False])
@pytest.mark.parametrize("loaded_with_it", [True, False])
def test_every_way_of_saving_and_resuming_steps_agrees(
    saved_with_it: bool, loaded_with_it: bool, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    start = Steps(conv_net())

    def run(with_it: bool, epochs: int, path: Path | None = None) -> tuple[Record, Any]:
        record, module = Record(), copy.deepcopy(start)
        with cpu_graphs():
            items = [CUDAGraph("step", strict=True)] if with_it else []
            other = trainer(callbacks=[*items, record], max_epochs=epochs)
            other.fit(module, images(samples=30), images(), ckpt_path=path)
        return record, other

    straight, _ = run(False, 4)
    _, first = run(saved_with_it, 2)
    first.save_checkpoint(tmp_path / "x.ckpt")
    resumed, _ = run(loaded_with_it, 4, tmp_path / "x.ckpt")
    assert resumed.losses == straight.losses[16:]
