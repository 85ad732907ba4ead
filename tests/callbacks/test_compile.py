"""Compile: in place, what stays as it was, and back."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from compiling import (
    Parts,
    calls_of,
    deep,
    fit,
    graphs,
    odd,
)
from lightning.pytorch import LightningModule, seed_everything
from models import Classifier, LateClassifier, images, mlp, trainer
from ranks import run_ranks
from torch import nn
from torch._dynamo.utils import counters

from lightning_perf._item import statuses
from lightning_perf._knobs import read_knobs
from lightning_perf.callbacks.compile import Compile, compiled

pytestmark = pytest.mark.usefixtures("no_compiled_code")


def test_the_context_manager_compiles_in_place_and_undoes_also_after_an_error() -> None:
    net = deep()
    x, keys, calls = torch.randn(2, 3, 8, 8), list(net.state_dict()), calls_of(net)
    expected = net(x)
    attributes = {n: set(vars(m)) for n, m in net.named_modules()}

    def use() -> None:
        with compiled(net, backend="eager") as names:
            assert names == ("1.0", "1.1", "1.2")
            assert [name for name, on in calls_of(net).items() if on] == list(names)
            assert list(net.state_dict()) == keys
            torch.testing.assert_close(net(x), expected)
            assert graphs() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert calls_of(net) == calls
    assert {n: set(vars(m)) for n, m in net.named_modules()} == attributes


@pytest.mark.parametrize("options", [{"mode": "fastest"}, {"backend": "no such"}])
def test_the_context_manager_undoes_when_torch_refuses_an_option(options: dict) -> None:
    net = deep()
    with pytest.raises(Exception, match=r"fastest|no such"), compiled(net, **options):
        pass
    assert not any(calls_of(net).values())


def test_hooks_still_run_and_copies_are_eager() -> None:
    net, seen = deep(), []
    net[1][1].register_forward_hook(lambda *_: seen.append(1))
    with compiled(net, backend="eager"):
        net(torch.randn(2, 3, 8, 8))
        assert seen == [1]
        assert not any(calls_of(copy.deepcopy(net)).values())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_training_then_every_evaluation_learns_the_same(backend: str) -> None:
    plain, module = Classifier(deep()), Classifier(deep())
    module.load_state_dict(plain.state_dict())
    fit(plain, max_epochs=2)
    run = fit(module, Compile(backend=backend), max_epochs=2)
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
    assert run.callback_metrics["val_loss"].item() == pytest.approx(
        trainer().validate(plain, images(), verbose=False)[0]["val_loss"], rel=1e-4
    )
    run.validate(module, images(), verbose=False)
    run.test(module, images(), verbose=False)
    run.predict(module, images())
    run.fit_loop.max_epochs = 3
    run.fit(module, images(), images())
    assert not any(calls_of(module).values())


def test_evaluation_after_training_and_a_second_fit_compile_nothing() -> None:
    module = Classifier(deep())
    run = fit(module, Compile(backend="eager"), max_epochs=2)
    assert graphs() == 2, "training and validation, three blocks sharing each"
    run.validate(module, images(), verbose=False)
    run.test(module, images(), verbose=False)
    run.predict(module, images())
    fit(module, Compile(backend="eager"))
    fit(Classifier(deep()), Compile(backend="eager"))
    assert graphs() == 2


def test_evaluation_needs_no_inference_mode_and_the_trainer_keeps_its_own() -> None:
    class Watching(Classifier):
        def test_step(self, batch, batch_idx) -> None:
            super().test_step(batch, batch_idx)
            self.seen = (torch.is_inference_mode_enabled(), torch.is_grad_enabled())

    module = Watching(deep())
    run = trainer(callbacks=[Compile(backend="eager")])
    run.test(module, images(), verbose=False)
    assert module.seen == (False, False)
    assert run.test_loop.inference_mode is True
    run = trainer()
    run.test(module, images(), verbose=False)
    assert module.seen == (True, False)


def test_steps_and_logging_stay_eager() -> None:
    class Watching(Classifier):
        def training_step(self, batch, batch_idx):
            self.compiling = torch.compiler.is_dynamo_compiling()
            self.epochs = [*getattr(self, "epochs", []), self.current_epoch]
            return super().training_step(batch, batch_idx)

    module = Watching(deep())
    fit(module, Compile(backend="eager", fullgraph=True), max_epochs=3)
    assert module.compiling is False
    assert module.epochs == [0] * 4 + [1] * 4 + [2] * 4
    assert not counters["graph_break"]


@pytest.mark.parametrize("regions", ["auto", "whole", ["encoder", "last"]])
def test_a_lightning_module_that_calls_its_children_trains_the_same(regions) -> None:
    seed_everything(1, verbose=False)
    plain = Parts()
    module = copy.deepcopy(plain)
    fit(plain)
    run = fit(module, Compile(regions, backend="eager"))
    assert statuses(run)[0].active
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, msg=name)


@pytest.mark.parametrize("saved_with_it", [True, False])
def test_a_plain_class_loads_the_checkpoint(saved_with_it: bool, tmp_path: Path) -> None:
    module = Parts()
    items = [Compile("whole", backend="eager")] if saved_with_it else []
    fit(module, *items).save_checkpoint(tmp_path / "it.ckpt")
    loaded = Parts.load_from_checkpoint(tmp_path / "it.ckpt", weights_only=True)
    assert list(loaded.state_dict()) == list(Parts().state_dict())
    fit(loaded, Compile(backend="eager"))


def test_a_checkpoint_written_during_the_run_has_the_same_keys_and_size(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    sizes, keys = [], []
    for items in ([], [Compile(backend="eager")]):
        folder = tmp_path / str(len(items))
        checkpoint = ModelCheckpoint(folder, filename="it")
        fit(Classifier(deep()), checkpoint, *items, enable_checkpointing=True)
        saved = torch.load(folder / "it.ckpt", weights_only=True)
        sizes.append(sum(v.numel() for v in saved["state_dict"].values()))
        keys.append(list(saved["state_dict"]))
    assert keys[0] == keys[1]
    assert sizes[0] == sizes[1]


def test_layers_made_in_configure_model_are_compiled() -> None:
    run = fit(LateClassifier(), Compile(backend="eager"))
    assert statuses(run)[0].text == "1 region (net), backend eager"


def test_manual_optimization_with_two_networks_trains_the_same() -> None:
    class Two(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.one, self.two = mlp(), mlp()
            self.flags: list[bool] = []

        def training_step(self, batch, batch_idx: int) -> None:
            x, y = batch
            for optimizer, net in zip(self.optimizers(), (self.one, self.two), strict=True):
                self.toggle_optimizer(optimizer)
                self.flags.append(all(p.requires_grad for p in net.parameters()))
                self.flags.append(
                    sum(p.requires_grad for p in self.parameters())
                    == sum(1 for _ in net.parameters())
                )
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.one(x) + self.two(x), y)
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.one, self.two)]

    plain = Two()
    module = copy.deepcopy(plain)
    trainer().fit(plain, images())
    trainer(callbacks=[Compile(backend="aot_eager")]).fit(module, images())
    assert all(module.flags)
    assert len(module.flags) == 16
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, msg=name)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_precision_and_accumulation(precision: str) -> None:
    plain, module = Classifier(deep()), Classifier(deep())
    module.load_state_dict(plain.state_dict())
    fit(plain, precision=precision, accumulate_grad_batches=3)
    fit(module, Compile(backend="eager"), precision=precision, accumulate_grad_batches=3)
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("regions", ["auto", "whole"])
def test_inductor_learns_the_same(regions: str) -> None:
    plain, module = Classifier(deep()), Classifier(deep())
    module.load_state_dict(plain.state_dict())
    fit(plain, max_epochs=2, data=odd())
    run = fit(module, Compile(regions), max_epochs=2, data=odd())
    training = graphs()
    run.test(module, odd(), verbose=False)
    assert statuses(run)[0].active
    assert graphs() == training == 2
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)


_TWO_RANKS = """
import copy, sys
import torch
from lightning.pytorch.strategies import DDPStrategy
from compiling import deep
from models import Classifier, images, trainer
from lightning_perf._knobs import read_knobs
from lightning_perf.callbacks.compile import Compile

def fit(module, *items, **strategy):
    run = trainer(
        devices=2, max_epochs=2, callbacks=list(items),
        strategy=DDPStrategy(process_group_backend="gloo", **strategy),
    )
    run.fit(module, images(18), images())  # a short last batch on each rank
    return run

if __name__ == "__main__":
    torch.manual_seed(0)
    start = Classifier(deep())
    plain = copy.deepcopy(start)
    fit(plain)
    for regions, strategy in (("auto", {}), ("whole", {"bucket_cap_mb": 0.001})):
        torch._dynamo.reset()
        module = copy.deepcopy(start)
        run = fit(module, Compile(regions, backend="aot_eager"), **strategy)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value, msg=name)
        assert read_knobs()["dynamo_optimize_ddp"] is True
        sys.stdout.write(f"same {run.global_rank}\\n")
"""


@pytest.mark.slow
def test_two_ranks_learn_the_same_also_with_small_buckets(tmp_path: Path) -> None:
    before = read_knobs()
    text = run_ranks(_TWO_RANKS, tmp_path, environ={"OMP_NUM_THREADS": "1"})
    assert text.count("same 0") == 2
    assert read_knobs() == before
