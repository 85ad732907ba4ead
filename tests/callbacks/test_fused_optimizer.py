from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.plugins import MixedPrecision
from models import Classifier, images, mlp, trainer
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, lr_scheduler

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf.callbacks import ChannelsLast, FusedOptimizer
from lightning_perf.callbacks.fused_optimizer import fused

FUSED = [
    pytest.param(Adam, {}, id="Adam"),
    pytest.param(Adam, {"amsgrad": True, "weight_decay": 0.1}, id="Adam-amsgrad"),
    pytest.param(AdamW, {}, id="AdamW"),
    pytest.param(AdamW, {"maximize": True}, id="AdamW-maximize"),
    pytest.param(AdamW, {"lr": torch.tensor(0.01)}, id="AdamW-tensor lr"),
    pytest.param(SGD, {}, id="SGD"),
    pytest.param(SGD, {"momentum": 0.9, "nesterov": True}, id="SGD-nesterov"),
    pytest.param(Adagrad, {}, id="Adagrad"),
    pytest.param(Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}, id="Adagrad-init"),
]


class Net(Classifier):
    """Trains with the optimizers that a function makes."""

    def __init__(self, make: Any, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Flags(Callback):
    """Notes the flags of the param groups at each step."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[Any, Any]]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append(flags(trainer.optimizers))


def flags(optimizers: Any) -> list[tuple[Any, Any]]:
    return [(g.get("fused"), g.get("foreach")) for o in optimizers for g in o.param_groups]


def twins(make: Any, net: Any = None) -> tuple[Net, Net]:
    first = Net(make, net() if net else None)
    return first, copy.deepcopy(first)


def reason(make: Any, net: nn.Module | None = None, **kwargs: Any) -> str:
    """Fit with the item and return why it was skipped."""
    run = trainer(callbacks=[FusedOptimizer(strict=False), seen := Flags()], max_steps=2, **kwargs)
    run.fit(Net(make, net), images())
    (status,) = statuses(run)
    assert not status.active
    assert len({str(step) for step in seen.seen}) == 1
    return status.text


# --- what is switched


@pytest.mark.parametrize(("cls", "options"), FUSED)
def test_training_is_the_same_with_the_fused_implementation(cls: Any, options: Any) -> None:
    def make(parameters: Any) -> Optimizer:
        return cls(parameters, **{"lr": 0.01, **copy.deepcopy(options)})

    stock, item = twins(make)
    trainer(max_epochs=3).fit(stock, images())
    run = trainer(callbacks=[FusedOptimizer(), seen := Flags()], max_epochs=3)
    run.fit(item, images())
    assert statuses(run)[0].text == f"{cls.__name__}: fused"
    assert seen.seen == [[(True, None)]] * 12
    assert flags(run.optimizers) == [(None, None)]
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)
    for mine, theirs in zip(item.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: RMSprop(p, lr=0.001),
        lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.001),
    ],
)
def test_small_parameters_without_fused_kernels_use_foreach(make: Any) -> None:
    stock, item = twins(make)
    trainer(max_epochs=2).fit(stock, images())
    run = trainer(callbacks=[FusedOptimizer(), seen := Flags()], max_epochs=2)
    run.fit(item, images())
    assert statuses(run)[0].text.endswith(": foreach")
    assert seen.seen[0] == [(None, True)]
    assert flags(run.optimizers) == [(None, None)]
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)


def test_each_param_group_is_judged_by_itself() -> None:
    def make(parameters: Any) -> list[Optimizer]:
        first, second, *rest = parameters
        return [
            AdamW([{"params": [first]}, {"params": [second], "foreach": False}, {"params": rest}])
        ]

    run = trainer(callbacks=[FusedOptimizer(), seen := Flags()])
    run.fit(Net(make), images())
    assert seen.seen[0] == [(True, None), (None, False), (True, None)]
    assert statuses(run)[0].text == "AdamW: fused, left alone (foreach=False was chosen)"
    assert flags(run.optimizers) == [(None, None), (None, False), (None, None)]


def test_several_optimizers_in_manual_optimization() -> None:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.losses.append(loss.item())
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.1, "norm")
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return Adam(self.net[:4].parameters()), SGD(self.net[4:].parameters(), lr=0.1)

    stock = Manual(None)
    item = copy.deepcopy(stock)
    trainer().fit(stock, images())
    run = trainer(callbacks=[FusedOptimizer(), seen := Flags()])
    run.fit(item, images())
    assert seen.seen[0] == [(True, None), (True, None)]
    assert statuses(run)[0].text == "Adam: fused; SGD: fused"
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)


def test_a_subclass_with_torchs_step_is_switched() -> None:
    class Mine(AdamW):
        def __init__(self, parameters: Any, temperature: float) -> None:
            super().__init__(parameters, lr=temperature)

    run = trainer(callbacks=[FusedOptimizer(), seen := Flags()])
    run.fit(Net(lambda p: Mine(p, 0.01)), images())
    assert seen.seen[0] == [(True, None)]


def test_schedulers_accumulation_and_clipping_go_on() -> None:
    def make(parameters: Any) -> Any:
        optimizer = SGD(parameters, lr=0.1, momentum=0.9)
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    stock, item = twins(make)
    options = {
        "max_epochs": 3,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "precision": "bf16-mixed",
    }
    trainer(**options).fit(stock, images())
    trainer(callbacks=[FusedOptimizer(), seen := Flags()], **options).fit(item, images())
    assert seen.seen[-1] == [(True, None)]
    assert item.losses == pytest.approx(stock.losses, rel=1e-3)


class Backbone(Net):
    """Its first layer is frozen at the start, for `BackboneFinetuning`."""

    def __init__(self) -> None:
        super().__init__(None, mlp())
        self.backbone = self.net[:2]

    def configure_optimizers(self) -> Optimizer:
        return Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


def test_param_groups_added_while_training_are_switched(tmp_path: Path) -> None:
    def fit(module: Backbone, *others: Callback, epochs: int, resume: Path | None = None) -> Any:
        finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        run = trainer(callbacks=[*others, finetuning], max_epochs=epochs)
        run.fit(module, images(), ckpt_path=resume)
        return run

    stock = Backbone()
    item = copy.deepcopy(stock)
    fit(stock, Save(tmp_path / "stock.ckpt"), epochs=3)
    run = fit(item, FusedOptimizer(), seen := Flags(), Save(tmp_path / "item.ckpt"), epochs=3)
    assert seen.seen[0] == [(True, None)]
    assert seen.seen[-1] == [(True, None), (True, None)]
    assert flags(run.optimizers) == [(None, None), (None, None)]
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)

    stock, item = Backbone(), Backbone()
    fit(stock, epochs=5, resume=tmp_path / "stock.ckpt")
    fit(item, FusedOptimizer(), seen := Flags(), epochs=5, resume=tmp_path / "item.ckpt")
    assert seen.seen[0] == [(True, None), (True, None)]
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)


# --- what is left alone, and why


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: Adam(p, fused=False), "fused=False was chosen"),
        (lambda p: Adam(p, fused=True), "fused=True was chosen"),
        (lambda p: Adam(p, foreach=True), "foreach=True was chosen"),
        (lambda p: torch.optim.LBFGS(p, max_iter=1), "one implementation only"),
        (lambda p: torch.optim.ASGD(p), "foreach is slower"),
        (lambda p: None, "makes no optimizer"),
    ],
)
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_reasons_of_an_optimizer(make: Any, text: str) -> None:
    assert text in reason(make)


@pytest.mark.parametrize("option", ["differentiable", "capturable"])
def test_options_that_fused_kernels_contradict_are_respected(option: str) -> None:
    optimizer = Adam(mlp().parameters(), **{option: True})
    with pytest.raises(ValueError, match=f"{option}=True was chosen"):
        fused(optimizer).__enter__()


def test_large_parameters_without_fused_kernels_are_left_alone() -> None:
    text = reason(lambda p: RMSprop(p), nn.Sequential(nn.Flatten(), nn.Linear(192, 512)))
    assert "no fused implementation" in text
    assert "foreach is slower" in text


def test_optimizers_of_others_are_left_alone() -> None:
    class Theirs(Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    with pytest.warns(NoEffectWarning, match="Theirs: left alone .its step is not one of torch"):
        trainer(callbacks=[FusedOptimizer()]).fit(Net(Theirs), images())


class Words(nn.Module):
    """An embedding of pixels with sparse gradients, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 4, sparse=True)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words((x[:, 0, 0] > 0).long()).mean(1))


def test_sparse_embeddings_are_left_alone() -> None:
    assert "sparse gradients" in reason(lambda p: SGD(p, lr=0.1, momentum=0.9), Words())


def test_sparse_gradients_nobody_announced_are_found(caplog: pytest.LogCaptureFixture) -> None:
    class Functional(Words):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            index = (x[:, 0, 0] > 0).long()
            return self.last(nn.functional.embedding(index, self.words, sparse=True).mean(1))

    stock, item = twins(lambda p: SGD(p, lr=0.1, momentum=0.9), Functional)
    trainer().fit(stock, images())
    with caplog.at_level(logging.INFO):
        trainer(callbacks=[FusedOptimizer(), seen := Flags()]).fit(item, images())
    assert [r.message for r in caplog.records if "sparse gradients" in r.message]
    assert seen.seen == [[(None, None)]] * 4
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)


def test_complex_parameters_are_left_alone() -> None:
    optimizer = Adam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="complex"):
        fused(optimizer).__enter__()


def test_a_refusal_by_torch_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a device, dtype or torch version without the kernel."""

    def missing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel here\nmore text")

    monkeypatch.setattr(torch, "_fused_adam_", missing)
    optimizer = Adam([nn.Parameter(torch.zeros(100, 100))])
    with pytest.raises(ValueError, match=r"float32 on cpu here \(no kernel here\)"):
        fused(optimizer).__enter__()


def test_sharding_strategies_are_left_alone() -> None:
    run = trainer()
    run.strategy.__class__ = type(
        "ShardingStrategy", (type(run.strategy),), {"restore_checkpoint_after_setup": True}
    )
    assert "ShardingStrategy shards" in FusedOptimizer().why_not(run, Classifier())


class CpuScaler(MixedPrecision):
    """Loss scaling on a CPU, which Lightning offers for GPUs only."""

    def __init__(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        super().__init__("16-mixed", "cpu", scaler)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_loss_scaling_works_and_is_never_paired_with_clipping(clip: float | None) -> None:
    stock, item = twins(lambda p: AdamW(p, lr=0.01), mlp)
    norms: dict[bool, list[float]] = {True: [], False: []}

    class Norms(Callback):
        def __init__(self, mine: bool) -> None:
            self.mine = mine

        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            grads = [p.grad.norm() for p in pl_module.parameters()]
            norms[self.mine].append(torch.stack(grads).norm().item())

    options = {"gradient_clip_val": clip, "max_epochs": 2}
    trainer(plugins=[CpuScaler()], callbacks=[Norms(False)], **options).fit(stock, images())
    items = [FusedOptimizer(strict=False), Norms(True), seen := Flags()]
    run = trainer(plugins=[CpuScaler()], callbacks=items, **options)
    run.fit(item, images())
    (status,) = statuses(run)
    assert status.active is (clip is None)
    assert seen.seen[0] == [(True if clip is None else None, None)]
    if clip:
        assert "precision='16-mixed'" in status.text
        assert "gradient_clip_val=0.5" in status.text
        assert "bf16-mixed" in status.text
    # Hooks see unscaled gradients as ever.
    assert norms[True] == pytest.approx(norms[False], rel=1e-2)
    assert item.losses == pytest.approx(stock.losses, rel=1e-2)


# --- what fused kernels get wrong


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_parameters_whose_first_gradient_comes_late(momentum: float) -> None:
    """Fused SGD raises when only some parameters have a momentum."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.calls = mlp(), mlp(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.first(x) if self.calls == 1 else self.first(x) + self.second(x)

    stock, item = twins(lambda p: SGD(p, lr=0.1, momentum=momentum), Late)
    trainer(max_epochs=2).fit(stock, images())
    trainer(callbacks=[FusedOptimizer(), seen := Flags()], max_epochs=2).fit(item, images())
    assert seen.seen[-1] == [(True, None)]
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)


def test_gradients_of_another_layout_are_found(caplog: pytest.LogCaptureFixture) -> None:
    """Fused CPU kernels ignore strides and compute wrong updates without an error."""

    class Transposed(Net):
        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.grad = parameter.grad.t().contiguous().t()

    stock = Transposed(lambda p: Adam(p, lr=0.01), mlp())
    item = copy.deepcopy(stock)
    trainer(max_epochs=2).fit(stock, images())
    with caplog.at_level(logging.INFO):
        trainer(callbacks=[FusedOptimizer()], max_epochs=2).fit(item, images())
    assert [r.message for r in caplog.records if "laid out differently" in r.message]
    assert item.losses == pytest.approx(stock.losses, rel=1e-4)


def test_restored_state_of_another_layout_is_laid_out_like_its_parameter() -> None:
    """A user's own NHWC model, resumed from a checkpoint of the NCHW one."""
    x = torch.randn(2, 3, 8, 8)

    def train(optimizer: Optimizer, model: nn.Module) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    stock = nn.Conv2d(3, 4, 3)
    one = AdamW(stock.parameters(), lr=0.1)
    train(one, stock)
    item = copy.deepcopy(stock).to(memory_format=torch.channels_last)
    two = AdamW(item.parameters(), lr=0.1)
    with fused(two):
        two.load_state_dict(copy.deepcopy(one.state_dict()))
        train(two, item)
    train(one, stock)
    for mine, theirs in zip(item.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_parameters_with_gaps_in_memory_are_left_alone() -> None:
    optimizer = Adam([nn.Parameter(torch.randn(4, 8)[:, ::2])])
    with pytest.raises(ValueError, match="not dense in memory"):
        fused(optimizer).__enter__()


# --- checkpoints


class Save(Callback):
    """Saves in the middle of a run, as checkpoint callbacks do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("others", [(), (ChannelsLast,)], ids=["alone", "with ChannelsLast"])
@pytest.mark.parametrize("saved_with_it", [True, False])
@pytest.mark.parametrize("loaded_with_it", [True, False])
@pytest.mark.parametrize(
    ("cls", "options"),
    [(AdamW, {"amsgrad": True}), (SGD, {"momentum": 0.9}), (Adagrad, {}), (RMSprop, {})],
)
def test_every_way_of_saving_and_resuming_agrees(
    cls: Any, options: Any, saved_with_it: bool, loaded_with_it: bool, others: Any, tmp_path: Path
) -> None:
    def make(parameters: Any) -> Optimizer:
        return cls(parameters, lr=0.01, **options)

    def items(wanted: bool) -> list[Callback]:
        return [FusedOptimizer(), *(other() for other in others)] if wanted else []

    straight, first = twins(make)
    trainer(max_epochs=2).fit(straight, images())
    trainer(callbacks=[*items(saved_with_it), Save(tmp_path / "x.ckpt")]).fit(first, images())

    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["optimizer_states"][0]
    assert [(g.get("fused"), g.get("foreach")) for g in saved["param_groups"]] == [(None, None)]
    steps = [state["step"] for state in saved["state"].values() if "step" in state]
    assert all(step.device.type == "cpu" for step in steps)

    resumed = Net(make)
    run = trainer(callbacks=[*items(loaded_with_it), seen := Flags()], max_epochs=2)
    run.fit(resumed, images(), ckpt_path=tmp_path / "x.ckpt")
    assert any(seen.seen[0][0]) is loaded_with_it
    assert resumed.losses == pytest.approx(straight.losses[4:], rel=1e-4)


def test_a_choice_in_the_checkpoint_is_respected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Net(lambda p: Adam(p, lr=0.01, fused=False))
    trainer(callbacks=[Save(tmp_path / "x.ckpt")]).fit(first, images())
    run = trainer(callbacks=[FusedOptimizer(), seen := Flags()], max_epochs=2)
    with caplog.at_level(logging.INFO):
        run.fit(Net(lambda p: Adam(p, lr=0.01)), images(), ckpt_path=tmp_path / "x.ckpt")
    assert seen.seen[0] == [(False, None)]
    assert [r.message for r in caplog.records if "after restoring" in r.message]
    assert flags(run.optimizers) == [(False, None)]


def test_a_checkpoint_after_an_error_is_as_without_it(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            raise KeyError("stop")

    run = trainer(callbacks=[FusedOptimizer(), Stop()])
    with pytest.raises(KeyError, match="stop"):
        run.fit(Net(AdamW), images())
    (optimizer,) = run.optimizers
    state_dict = optimizer.state_dict()
    assert flags([optimizer]) == [(None, None)]
    fresh = AdamW(copy.deepcopy(list(run.lightning_module.parameters())))
    fresh.load_state_dict(state_dict)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_state_dict_post_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


# --- without Lightning


def train(optimizer: Optimizer, model: nn.Module, steps: int, *, closure: bool = False) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(4, 3, 8, 8, generator=generator)

        def loss(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            value = model(x).square().mean()
            value.backward()
            return value

        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize(("cls", "options"), FUSED)
def test_the_function_switches_in_the_middle_of_training_and_back(
    cls: Any, options: Any, closure: bool
) -> None:
    stock, item = mlp(), mlp()
    item.load_state_dict(stock.state_dict())
    one, two = (
        cls(model.parameters(), **{"lr": 0.01, **copy.deepcopy(options)}) for model in (stock, item)
    )
    for steps in (2, 3, 2):
        train(one, stock, steps, closure=closure)
    train(two, item, 2, closure=closure)
    with fused(two):
        assert flags([two]) == [(True, None)]
        train(two, item, 3, closure=closure)
        inside = two.state_dict()
    assert flags([two]) == [(None, None)]
    assert inside["param_groups"] == two.state_dict()["param_groups"]
    train(two, item, 2, closure=closure)
    for mine, theirs in zip(item.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_function_takes_the_wrapper_of_fabric() -> None:
    fabric, model = Fabric(accelerator="cpu", devices=1), mlp()
    optimizer = Adam(model.parameters())
    _, wrapper = fabric.setup(model, optimizer)
    with fused(wrapper):
        assert flags([optimizer]) == [(True, None)]
    assert flags([optimizer]) == [(None, None)]


def test_choosing_leaves_random_numbers_alone() -> None:
    optimizer = Adam(mlp().parameters())
    before = torch.get_rng_state()
    with fused(optimizer):
        assert torch.equal(torch.get_rng_state(), before)


def test_double_precision_keeps_its_step_counts() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = mlp()
        optimizer = Adam(model.parameters())
        x = torch.randn(2, 3, 8, 8)
        for _ in range(2):
            model(x).sum().backward()
            with fused(optimizer):
                optimizer.step()
                steps = [s["step"].dtype for s in optimizer.state.values()]
                state_dict = optimizer.state_dict()
            saved = [s["step"].dtype for s in state_dict["state"].values()]
            after = [s["step"].dtype for s in optimizer.state.values()]
            assert set(steps) == {torch.float32}
            assert set(saved) == set(after) == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("cls", "options"), FUSED)
def test_step_counts_live_where_the_implementation_wants_them(cls: Any, options: Any) -> None:
    stock, item = mlp().cuda(), mlp().cuda()
    item.load_state_dict(stock.state_dict())
    one = cls(stock.parameters(), **{"lr": 0.01, **options})
    two = cls(item.parameters(), **{"lr": 0.01, **options})
    x = torch.randn(4, 3, 8, 8, device="cuda")

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def devices(state: dict[Any, Any]) -> set[str]:
        return {s["step"].device.type for s in state.values() if "step" in s}

    for _ in range(6):
        step(stock, one)
    step(item, two)
    with fused(two):
        step(item, two)
        assert devices(two.state) <= {"cuda"}
        saved = copy.deepcopy(two.state_dict())
        assert devices(saved["state"]) <= {"cpu"}
        two.load_state_dict(saved)
        assert devices(two.state) <= {"cuda"}
        step(item, two)
    assert devices(two.state) <= {"cpu"}
    two.load_state_dict(saved)
    step(item, two)
    assert torch.isfinite(torch.cat([p.flatten() for p in item.parameters()])).all()
