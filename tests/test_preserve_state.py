from __future__ import annotations

import gc
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer import call
from models import trainer as make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_perf._preserve_state import preserve_model, preserve_rng, preserve_state


class Boom(Exception):
    """Raised on purpose."""


class Everything(LightningModule):
    """Has every kind of state that a training step changes."""

    def __init__(self, *, log: bool = True) -> None:
        super().__init__()
        self.should_log = log
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)
        )
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.accuracy = MulticlassAccuracy(3)
        self.several = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
        self.hidden_metrics = {"mean": [MeanMetric()]}  # not a submodule
        self.ema = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        self.outputs: list[Tensor] = []
        self.steps = 0
        self.noise = torch.Generator().manual_seed(3)
        self.losses: list[float] = []
        self.batches: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        inputs = inputs + torch.rand(inputs.shape, generator=self.noise)
        logits = self.frozen(self.net(inputs)) * (1 + random.random() + np.random.rand())
        loss = nn.functional.cross_entropy(logits, labels)
        self.accuracy.update(logits, labels)
        self.several.update(logits, labels)
        self.hidden_metrics["mean"][0].update(loss)
        self.outputs.append(loss.detach())
        self.steps += 1
        for name, p in self.net.named_parameters():
            self.ema[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        self.losses.append(loss.item())
        self.batches.append(inputs.sum().item())
        if self.should_log:
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            self.log_dict(self.several, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(inputs), labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def data(**kwargs: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(96, 6, generator=generator)
    labels = torch.randint(0, 3, (96,), generator=generator)
    return DataLoader(
        TensorDataset(inputs, labels),
        batch_size=8,
        **{"shuffle": True, "generator": torch.Generator().manual_seed(11), **kwargs},
    )


def values(thing: Any) -> Any:
    """A comparable copy of any nested structure; a tensor becomes its place and its values."""
    if isinstance(thing, Tensor):
        place = (thing.data_ptr(), tuple(thing.stride())) if thing.layout == torch.strided else ()
        return (place, str(thing.dtype), thing.requires_grad, str(thing.detach().tolist()))
    if isinstance(thing, np.ndarray):
        return thing.tolist()
    if isinstance(thing, torch.Generator):
        return thing.get_state().tolist()
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, np.random.Generator):
        return str(thing.bit_generator.state)
    if isinstance(thing, nn.Module):
        return {name: values(value) for name, value in vars(thing).items() if name != "_trainer"}
    if isinstance(thing, dict):
        return [
            (id(k) if isinstance(k, Tensor) else k, values(v)) for k, v in thing.items()
        ]  # in order
    if isinstance(thing, (list, tuple, deque)):
        return [values(v) for v in thing]
    if isinstance(thing, (int, float, str, set, type(None))):
        return deepcopy(thing)
    return id(thing)


def of_model(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[Any]:
    return [
        values(model),
        [values(p.grad) for p in model.parameters()],
        [m.training for m in model.modules()],
        list(model.state_dict()),
        *[(values(o.state), values(o.param_groups)) for o in optimizers],
    ]


def of_process() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]


def of_run(trainer: Trainer) -> list[Any]:
    """What a run consists of, seen through public ways where there are any."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return [
        of_model(trainer.lightning_module, *trainer.optimizers),
        of_process(),
        [values(vars(c.scheduler)) for c in trainer.lr_scheduler_configs],
        deepcopy(trainer.fit_loop.state_dict()),
        deepcopy(vars(trainer.state)),
        (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        values(trainer.callback_metrics),
        values(trainer.logged_metrics),
        values(trainer.progress_bar_metrics),
        {key: values(m) for key, m in trainer.fit_loop.epoch_loop._results.items()},
        trainer.lightning_module._current_fx_name,
        values(trainer.train_dataloader.generator),
        values(scaler.state_dict() if scaler else None),
    ]


def warm_up(trainer: Trainer, module: Everything) -> None:
    """Two whole training steps on batches of the loader, and everything else one could think of."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    (optimizer,) = trainer.optimizers
    for index, batch in zip(range(2), trainer.train_dataloader, strict=False):
        loss = call._call_strategy_hook(trainer, "training_step", batch, index)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        trainer.lr_scheduler_configs[0].scheduler.step()
    optimizer.zero_grad()
    module.eval()
    module.net.requires_grad_(False)
    module.accuracy.reset()
    module.accuracy(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    module.invented = "attribute"
    trainer.fit_loop.epoch_loop.batch_progress.increment_ready()
    trainer.fit_loop.epoch_progress.current.completed += 3
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.increment_ready()
    trainer._logger_connector._callback_metrics["invented"] = torch.tensor(1.0)
    trainer.should_stop = True
    trainer.validating = True


class WarmUp(Callback):
    """Runs a warm-up under the guard at one moment, and looks at the state around it."""

    def __init__(self, hook: str, *, step: int | None = None, fail: bool = False) -> None:
        self.hook, self.step, self.fail = hook, step, fail
        self.ran = 0

    def act(self, trainer: Trainer, module: Everything) -> None:
        before = of_run(trainer)
        with suppress(Boom), preserve_state(trainer, module):
            warm_up(trainer, module)
            assert of_run(trainer) != before
            if self.fail:
                raise Boom
        assert of_run(trainer) == before
        self.ran += 1

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.hook == "train":
            self.act(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.hook == "epoch" and trainer.current_epoch == 1:
            self.act(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.hook == "batch" and batch_idx == self.step:
            self.act(trainer, pl_module)


def train(*callbacks: Callback, log: bool = True, **kwargs: Any) -> tuple[Everything, Trainer]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    module = Everything(log=log)
    trainer = make_trainer(
        max_epochs=2, accumulate_grad_batches=2, callbacks=list(callbacks), **kwargs
    )
    trainer.fit(module, data(), data(shuffle=False))
    return module, trainer


def same_outcome(one: tuple[Everything, Trainer], other: tuple[Everything, Trainer]) -> None:
    (a, run_a), (b, run_b) = one, other
    assert len(a.losses) == 24
    assert a.losses == b.losses
    assert a.batches == b.batches
    assert all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))
    assert run_a.callback_metrics == run_b.callback_metrics
    assert run_a.logged_metrics == run_b.logged_metrics
    assert run_a.global_step == run_b.global_step
    assert (a.steps, a.outputs) == (b.steps, b.outputs)


@pytest.mark.parametrize("fail", [False, True], ids=["", "raising"])
@pytest.mark.parametrize(
    ("hook", "step"),
    # Batch 5 lies in the middle of a window of accumulation: gradients exist.
    [("train", None), ("batch", 0), ("batch", 5), ("epoch", None)],
)
def test_a_warm_up_leaves_no_trace(hook: str, step: int | None, fail: bool) -> None:
    warm = WarmUp(hook, step=step, fail=fail)

    same_outcome(train(), train(warm))

    assert warm.ran


def test_a_warm_up_of_a_module_that_logs_nothing_leaves_no_trace() -> None:
    same_outcome(train(log=False), train(WarmUp("batch", step=3), log=False))


def test_without_the_guard_the_same_warm_up_does_leave_traces() -> None:
    class Unguarded(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            warm_up(trainer, pl_module)
            trainer.should_stop = False
            trainer.training = True
            pl_module.net.requires_grad_(True)

    assert train()[0].losses != train(Unguarded())[0].losses


def test_the_gradient_scaler_is_put_back() -> None:
    def scaling() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}

    warm = WarmUp("batch", step=4)

    same_outcome(train(**scaling()), train(warm, **scaling()))

    assert warm.ran == 2


def test_persistent_workers_under_way_are_not_disturbed() -> None:
    class Iterate(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 2:
                with preserve_state(trainer, pl_module):
                    next(iter(trainer.train_dataloader))

    seen = []
    for callbacks in ([], [Iterate()]):
        module = Everything()
        loader = data(num_workers=1, persistent_workers=True)
        torch.manual_seed(1)
        trainer = make_trainer(max_epochs=2, callbacks=callbacks)
        trainer.fit(module, loader)
        seen.append(module.batches)
        del trainer, loader
        gc.collect()  # ends the workers

    assert len(seen[0]) == 24
    assert seen[0] == seen[1]


def test_positions_of_samplers_and_datasets_are_put_back() -> None:
    class Stream(IterableDataset[Any]):
        def __init__(self) -> None:
            self.position = 0
            self.noise = np.random.default_rng(1)

        def __iter__(self) -> Any:
            for _ in range(16):
                self.position += 1
                yield torch.full((6,), self.noise.random()), torch.tensor(self.position % 3)

    class Iterate(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            with preserve_state(trainer, pl_module):
                list(trainer.train_dataloader)

    seen = []
    for callbacks in ([], [Iterate()]):
        module, stream = Everything(), Stream()
        torch.manual_seed(1)
        module.noise.manual_seed(1)
        make_trainer(max_epochs=2, callbacks=callbacks).fit(module, DataLoader(stream, 4))
        seen.append((module.batches, stream.position))

    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 8


@pytest.mark.parametrize("given", ["loader", "datamodule", "module"])
def test_loaders_that_are_not_set_up_yet_are_put_back(given: str) -> None:
    class Data(LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.loader = data()

        def train_dataloader(self) -> DataLoader[Any]:
            return self.loader

    class WithData(Everything):
        def train_dataloader(self) -> DataLoader[Any]:
            self.order = getattr(self, "order", torch.Generator().manual_seed(11))
            return data(generator=self.order)

    class Iterate(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            with preserve_state(trainer, pl_module):
                trainer.fit_loop.setup_data()
                list(trainer.train_dataloader)

    seen = []
    for callbacks in ([], [Iterate()]):
        module = WithData() if given == "module" else Everything()
        source = {"loader": data(), "datamodule": Data(), "module": None}[given]
        torch.manual_seed(1)
        make_trainer(callbacks=callbacks, limit_val_batches=0).fit(module, source)
        seen.append(module.batches)

    assert len(seen[0]) == 12
    assert seen[0] == seen[1]


def test_data_of_a_loader_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(torch.randn(8, 6), torch.zeros(8, dtype=torch.long)) for _ in range(3)]
    copied: list[int] = []
    clone = Tensor.clone

    def watching(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied.append(self.untyped_storage().data_ptr())
        return clone(self, *args, **kwargs)

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(Tensor, "clone", watching)
                with preserve_state(trainer, pl_module):
                    pass

    loader = DataLoader(batches, batch_size=None, sampler=RandomSampler(batches))
    make_trainer(callbacks=[Look()]).fit(Everything(), loader)

    assert copied
    assert not {x.untyped_storage().data_ptr() for batch in batches for x in batch} & set(copied)


# --- Without a trainer ---------------------------------------------------------------------------


class Odd(nn.Module):
    """Keeps state in unusual places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.tied = self.conv
        self.register_buffer("absent", None)
        self.register_buffer("expanded", torch.zeros(1, 4).expand(3, 4))
        self.metric = MulticlassAccuracy(3)
        self.numbers = [1, [2, {"three": 3}]]
        self.counter = Counter(a=2)
        self.ordered = OrderedDict(b=1, a=2)
        self.kept = deque([1, 2], maxlen=2)
        self.names = {"x"}
        self.array = np.zeros(3)
        self.read_only = np.zeros(3)
        self.read_only.flags.writeable = False
        self.plain = torch.zeros(3)
        self.dice = random.Random(1)
        self.np_dice = np.random.default_rng(1)
        self.torch_dice = torch.Generator().manual_seed(1)
        self.pair = (torch.zeros(2), MeanMetric())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).sum()


def step(model: Odd, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 3, 5, 5)).backward()
    optimizer.step()


def compute_into(model: Odd) -> None:
    model.plain += model.conv.bias[:3]


MUTATIONS: dict[str, Callable[[Odd, torch.optim.Optimizer], Any]] = {
    "training step": step,
    "two steps": lambda m, o: (step(m, o), step(m, o)),
    "zeroed gradients": lambda m, o: o.zero_grad(),
    "zeroed in place": lambda m, o: o.zero_grad(set_to_none=False),
    "dropped gradient": lambda m, o: setattr(m.conv.bias, "grad", None),
    "new gradient": lambda m, o: setattr(m.conv.bias, "grad", torch.ones(4)),
    "double": lambda m, o: m.double(),
    "channels_last": lambda m, o: m.to(memory_format=torch.channels_last),
    "swapped data": lambda m, o: setattr(m.conv.weight, "data", torch.ones(4, 3, 3, 3)),
    "new parameter": lambda m, o: setattr(m.conv, "weight", nn.Parameter(torch.ones(4, 3, 3, 3))),
    "additional parameter": lambda m, o: m.register_parameter("p", nn.Parameter(torch.ones(1))),
    "removed bias": lambda m, o: setattr(m.conv, "bias", None),
    "replaced buffer": lambda m, o: setattr(m.norm, "running_mean", torch.ones(4)),
    "filled buffer": lambda m, o: setattr(m, "absent", torch.ones(1)),
    "replaced submodule": lambda m, o: setattr(m, "norm", nn.Identity()),
    "deleted submodule": lambda m, o: delattr(m, "conv"),
    "reordered submodules": lambda m, o: m._modules.update(conv=m._modules.pop("conv")),
    "hook": lambda m, o: m.conv.register_forward_hook(lambda *args: None),
    "frozen": lambda m, o: m.requires_grad_(False),
    "unfrozen buffer": lambda m, o: m.norm.running_var.requires_grad_(True),
    "eval": lambda m, o: m.eval(),
    "partly eval": lambda m, o: m.norm.eval(),
    "metric": lambda m, o: m.metric.update(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])),
    "metric computed": lambda m, o: m.metric(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])),
    "metric in a tuple": lambda m, o: m.pair[1].update(2.0),
    "tensor in a tuple": lambda m, o: m.pair[0].add_(1),
    "list": lambda m, o: m.numbers.append(1),
    "nested list": lambda m, o: m.numbers[1][1].update(three=4),
    "counter": lambda m, o: m.counter.update("aab"),
    "ordered": lambda m, o: m.ordered.move_to_end("b"),
    "deque": lambda m, o: m.kept.append(3),
    "set": lambda m, o: m.names.discard("x"),
    "read-only array": lambda m, o: setattr(m, "read_only", None),
    "array": lambda m, o: m.array.__iadd__(1),
    "plain tensor": lambda m, o: m.plain.add_(1),
    "resized tensor": lambda m, o: m.plain.resize_(2),
    "computed into": lambda m, o: compute_into(m),
    "deleted attribute": lambda m, o: delattr(m, "plain"),
    "generators": lambda m, o: (
        m.dice.random(),
        m.np_dice.random(),
        torch.rand(1, generator=m.torch_dice),
    ),
    "learning rate": lambda m, o: o.param_groups[0].update(lr=7),
    "new group": lambda m, o: o.add_param_group({"params": [torch.ones(1, requires_grad=True)]}),
    "optimizer state": lambda m, o: o.state[m.conv.weight]["exp_avg"].add_(1),
    "replaced state": lambda m, o: o.load_state_dict(deepcopy(o.state_dict())),
    "cleared state": lambda m, o: o.state.clear(),
}


@pytest.mark.parametrize(("used", "fail"), [(True, False), (False, True)], ids=["", "raising"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_each_kind_of_change_is_undone(name: str, used: bool, fail: bool) -> None:
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters())
    if used or name == "optimizer state":
        step(model, optimizer)
    before, generators = of_model(model, optimizer), of_process()
    kept = [*model.parameters(), *model.buffers()]

    with suppress(Boom), preserve_model(model, [optimizer]):
        MUTATIONS[name](model, optimizer)
        torch.rand(1), random.random(), np.random.rand()
        if used:
            assert of_model(model, optimizer) != before
        if fail:
            raise Boom

    assert of_model(model, optimizer) == before
    assert of_process() == generators
    assert all(a is b for a, b in zip(kept, [*model.parameters(), *model.buffers()], strict=True))


def test_metrics_updated_in_inference_mode_are_put_back() -> None:
    metric = nn.ModuleList([MulticlassAccuracy(3)])
    sample = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    with torch.inference_mode():
        metric[0].update(*sample)
    before = of_model(metric)

    with preserve_model(metric), torch.inference_mode():
        metric[0].update(*sample)
        metric[0].tp.add_(1)

    assert of_model(metric) == before
    assert metric[0].update_count == 1


def test_the_guard_works_within_inference_mode() -> None:
    model = Odd()
    before = of_model(model)

    with torch.inference_mode(), preserve_model(model):
        model(torch.randn(2, 3, 5, 5))
        assert of_model(model) != before

    assert of_model(model) == before
    model(torch.randn(2, 3, 5, 5)).backward()


def test_sparse_gradients_are_put_back() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1, 3])).sum().backward()
    gradient = model.weight.grad
    expected = gradient.to_dense()

    with preserve_model(model):
        model(torch.tensor([1, 2])).sum().backward()

    assert model.weight.grad is gradient
    assert torch.equal(gradient.to_dense(), expected)


def test_schedulers_and_scalers_are_put_back() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = deepcopy((scheduler.state_dict(), scaler.state_dict(), optimizer.state_dict()))

    with preserve_model(model, [optimizer], others=[scheduler, scaler]):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update(4.0)
        scheduler.step(1.0)
        scheduler.step(2.0)
        assert optimizer.param_groups[0]["lr"] < 1.0

    assert before == (scheduler.state_dict(), scaler.state_dict(), optimizer.state_dict())


def test_lazy_layers_are_refused_and_nothing_is_touched() -> None:
    model = nn.Sequential(nn.LazyLinear(2))

    with (
        pytest.raises(RuntimeError, match=r"lazy layer .* Pass one batch through the model first"),
        preserve_model(model),
    ):
        pytest.fail("The block must not run.")


def test_generators_of_the_process_are_put_back() -> None:
    before = of_process()

    with suppress(Boom), preserve_rng():
        torch.manual_seed(9)
        random.seed(9)
        np.random.seed(9)
        raise Boom

    assert of_process() == before


def test_values_return_to_the_same_storage_of_views() -> None:
    model = nn.Module()
    flat = torch.zeros(6)
    model.register_buffer("first", flat[:2])
    model.register_buffer("rest", flat[2:])

    with preserve_model(model):
        flat.add_(1)

    assert torch.equal(flat, torch.zeros(6))


def test_a_graph_that_waits_for_its_backward_still_has_it() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(8, 3)
    waiting = net(x).sum()
    expected = torch.autograd.grad(waiting, list(net.parameters()), retain_graph=True)
    with preserve_model(net, [optimizer]):
        net(x).square().sum().backward()
        optimizer.step()
    waiting.backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
