"""Named modules run in float32 inside autocast, and nothing else changes."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback
from mixed_precision import BF16, Dtypes, autocast, net
from models import Classifier, LateClassifier, conv_net, images, trainer
from torch import Tensor, nn

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf.callbacks import KeepInFP32
from lightning_perf.callbacks.keep_in_fp32 import find_modules, keep_in_fp32


class Inside(nn.Module):
    """Says in which dtype it computes, and whether autocast is on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs, torch.is_autocast_enabled("cpu")))
        return args[0]


# --- in a run


@pytest.mark.parametrize("late", [False, True])
def test_named_modules_compute_in_float32_in_all_loops(late: bool) -> None:
    module = LateClassifier(net) if late else Classifier(net())
    seen: list[Dtypes] = []

    class Watch(Callback):
        def on_fit_start(self, trainer, pl_module) -> None:
            seen.extend(Dtypes(pl_module.net[index]) for index in (1, 2, 4))

    run = trainer(callbacks=[KeepInFP32(["LayerNorm", "net.4"]), Watch()], **BF16)
    run.fit(module, images(), images())
    assert statuses(run)[0].text == "net.2, net.4"
    linear, norm, softmax = seen
    assert set(linear.seen) == {(torch.float32, torch.bfloat16)}
    # Inputs reach hooks as the layer before gave them; outputs stay in float32.
    assert set(norm.seen) == set(softmax.seen) == {(torch.bfloat16, torch.float32)}
    for dtypes in seen:
        dtypes.seen.clear()
    run.test(module, images(), verbose=False)
    run.predict(module, images())
    assert len(norm.seen) == 8
    assert set(norm.seen) == {(torch.bfloat16, torch.float32)}
    assert all("forward" not in vars(child) for child in module.modules())


@pytest.mark.parametrize("layer", [nn.Softmax(dim=-1), nn.LayerNorm(16)])
def test_rounding_is_less(layer: nn.Module) -> None:
    """In bfloat16 a result keeps two or three digits."""
    x = torch.randn(64, 16).bfloat16()
    exact = copy.deepcopy(layer).double()(x.double())

    def error() -> float:
        with autocast():
            return ((layer(x).double() - exact).abs().max() / exact.abs().max()).item()

    assert error() > 1e-3
    with keep_in_fp32(nn.Sequential(layer), type(layer).__name__):
        assert error() < 1e-6


def test_a_softmax_that_would_overflow_float16() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(4, 4, bias=False)
            nn.init.constant_(self.scores.weight, 300.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(x)

    model, x = Attention(), torch.full((1, 4), 100.0)
    with torch.autocast("cpu", torch.float16):
        assert model(x).isinf().all()
        with keep_in_fp32(model, "scores"):
            assert model(x).isfinite().all()


def test_gradients_flow_and_keep_their_dtype() -> None:
    model, x = net(), torch.randn(4, 3, 8, 8, requires_grad=True)
    with keep_in_fp32(model, ["LayerNorm"]), autocast():
        model(x).float().square().sum().backward()
    assert x.grad is not None
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_outside_autocast_nothing_changes() -> None:
    model, x = net(), torch.randn(4, 3, 8, 8)
    expected = model(x)
    inside = Inside()
    with keep_in_fp32(model, ["LayerNorm"]), keep_in_fp32(nn.Sequential(inside), "Inside"):
        assert torch.equal(model(x), expected)
        half = x.bfloat16()
        assert inside(half) is half
        with torch.autocast("cpu", enabled=False):
            assert inside(half) is half


# --- arguments


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Record:
    tensor: Tensor
    name: str


def test_every_half_tensor_among_the_arguments_is_cast() -> None:
    half, index = torch.ones(2, dtype=torch.bfloat16), torch.tensor([1])
    double, record = torch.ones(2, dtype=torch.float64), Record(half, "x")
    holder = nn.Sequential(Inside())
    arguments = [half, half.half()]
    with keep_in_fp32(holder, "Inside"), autocast():
        holder[0](half, {"a": arguments, 1: (index, "text")}, Pair(half, double), out=record, n=3)
    ((args, kwargs, enabled),) = holder[0].seen
    assert not enabled
    assert args[0].dtype == torch.float32
    assert [value.dtype for value in args[1]["a"]] == [torch.float32] * 2
    assert args[1][1][0] is index
    assert args[1][1][1] == "text"
    assert isinstance(args[2], Pair)
    assert [value.dtype for value in args[2]] == [torch.float32, torch.float64]
    assert kwargs["out"].tensor.dtype == torch.float32
    assert kwargs["n"] == 3
    # The caller's own objects stay as they are.
    assert record.tensor is half
    assert arguments[0] is half


def test_arguments_without_a_tensor() -> None:
    holder = nn.Sequential(Inside())
    with keep_in_fp32(holder, "Inside"), autocast():
        assert holder[0]("text", n=1) == "text"


def test_autocast_of_another_device_is_left_alone() -> None:
    holder = nn.Sequential(Inside())
    meta = torch.ones(2, dtype=torch.bfloat16, device="meta")
    with keep_in_fp32(holder, "Inside"), autocast():
        assert holder[0](meta) is meta
        holder[0](meta, torch.ones(2, dtype=torch.bfloat16))
    assert [enabled for _, _, enabled in holder[0].seen] == [True, False]


# --- copies


def test_a_copy_runs_its_own_weights_and_a_pickle_too() -> None:
    model, x = net(), torch.randn(2, 16)
    with keep_in_fp32(model, ["LayerNorm"]):
        twin = copy.deepcopy(model)
        nn.init.zeros_(twin[2].weight)
        loaded = pickle.loads(pickle.dumps(model))
        nn.init.constant_(loaded[2].bias, 7.0)
        nn.init.zeros_(loaded[2].weight)
        with autocast():
            assert model[2](x).count_nonzero()
            assert not twin[2](x).count_nonzero()
            assert (loaded[2](x.bfloat16()) == 7).all()
            assert loaded[2](x.bfloat16()).dtype == torch.float32
    assert list(loaded.state_dict()) == list(model.state_dict())


def test_a_copy_that_averages_weights_in_a_run() -> None:
    class Average(Callback):
        def on_fit_start(self, trainer, pl_module) -> None:
            self.copy = copy.deepcopy(pl_module.net)

        def on_train_end(self, trainer, pl_module) -> None:
            x = torch.randn(2, 16)
            with autocast():
                self.differ = not torch.equal(self.copy[2](x), pl_module.net[2](x))

    module, average = Classifier(net(), lr=1.0), Average()
    trainer(callbacks=[KeepInFP32("LayerNorm"), average], max_epochs=2, **BF16).fit(
        module, images()
    )
    assert average.differ


def test_the_signature_of_forward_is_still_seen() -> None:
    model = net()
    before = inspect.signature(model[2].forward)
    with keep_in_fp32(model, ["LayerNorm"]):
        assert inspect.signature(model[2].forward) == before


def test_a_forward_that_was_replaced_on_the_object_stays() -> None:
    model = net()
    vars(model[4])["forward"] = lambda x: x * 2
    mine = model[4].forward
    with keep_in_fp32(model, ["Softmax"]), autocast():
        doubled = model[4](torch.ones(1, dtype=torch.bfloat16))
    assert doubled == 2
    assert doubled.dtype == torch.float32
    assert model[4].forward is mine


# --- what is said


def test_modules_that_never_ran_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Attention reads the weights of its last layer and does not call it."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(2).transpose(1, 2)[..., :1].expand(-1, -1, 8)
            return self.head(self.attention(x, x, x)[0].mean(1))

    names = ["net.attention.out_proj", "net.head"]
    with caplog.at_level(logging.INFO):
        run = trainer(callbacks=[KeepInFP32(names)], **BF16)
        run.fit(Classifier(Attends()), images())
    assert (
        "modules that ran in float32: 1 of 2. Never called inside autocast: "
        "net.attention.out_proj. Name the module around them that is called."
    ) in caplog.text


def test_many_modules_are_counted_by_class() -> None:
    blocks = [nn.Sequential(nn.Linear(192, 192), nn.LayerNorm(192)) for _ in range(9)]
    module = Classifier(nn.Sequential(nn.Flatten(), *blocks, nn.Linear(192, 4)))
    run = trainer(callbacks=[KeepInFP32(["LayerNorm", "net.10"])], **BF16)
    run.fit(module, images())
    assert statuses(run)[0].text == "9 LayerNorm, 1 Linear"


def test_half_precision_weights_under_mixed_precision_are_warned_of() -> None:
    module = Classifier(net())
    module.net[1].bfloat16()
    with pytest.warns(UserWarning, match=r"2 parameters are in half precision.*'net.1.weight'"):
        trainer(callbacks=[KeepInFP32("LayerNorm")], **BF16).fit(module, images())


def test_modules_with_half_precision_weights_are_left_alone() -> None:
    model = nn.Sequential(conv_net()[:7], nn.Flatten(), nn.Linear(8, 4), nn.LayerNorm(4))
    model[0].bfloat16()
    run = trainer(callbacks=[KeepInFP32(["BatchNorm2d", "LayerNorm"])], **BF16)
    with pytest.warns(UserWarning, match="parameters are in half precision"):
        run.fit(Classifier(model), images())
    assert statuses(run)[0].text == (
        "net.3; left alone, as their weights are in half precision: net.0.1, net.0.4"
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "precision='32-true' is the work of Precision, and KeepInFP32 acts in the autocast"),
        ({"precision": "64-true"}, "the work of DoublePrecision"),
        ({"precision": "bf16-true"}, "the work of HalfPrecision"),
    ],
)
def test_it_stands_aside_without_autocast(options: dict[str, Any], reason: str) -> None:
    with pytest.warns(NoEffectWarning, match=reason):
        trainer(callbacks=[KeepInFP32("LayerNorm")], **options).fit(Classifier(net()), images())


def test_it_stands_aside_when_all_weights_are_half() -> None:
    run = trainer(callbacks=[KeepInFP32("LayerNorm")], max_steps=1, **BF16)
    with pytest.warns(NoEffectWarning, match="weights of net.2 are in half precision already"):
        run.fit(Classifier(net().bfloat16()), images())


# --- names


def test_a_class_stands_for_its_subclasses_and_a_name_for_one_module() -> None:
    class Mine(nn.LayerNorm):
        pass

    model = nn.Sequential(Mine(2), nn.LayerNorm(2), nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    assert list(find_modules(model, ["LayerNorm"])) == ["0", "1"]
    assert list(find_modules(model, ["Mine"])) == ["0"]
    assert list(find_modules(model, ["3", "0", "0"])) == ["3", "0"]
    assert list(find_modules(model, "Linear")) == ["2"]


def test_a_shared_module_is_found_by_each_of_its_names() -> None:
    shared = nn.LayerNorm(2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert find_modules(model, ["b"]) == {"b": shared}
    assert find_modules(model, ["b", "LayerNorm", "a"]) == {"b": shared}


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["LayerNrm"], "'LayerNrm'.* none that class. Did you mean 'LayerNorm'?"),
        (["net.9"], "'net.9'"),
        (["net.2", "softmax"], "'softmax'.*Functions, such as those of torch.nn.functional"),
        (["Module"], "'Module'"),
        (["Classifier"], "'Classifier'"),
        ([""], "give names of modules"),
        ([], "give names of modules"),
        ([nn.LayerNorm], "give names of modules"),
        (["net.5"], "'net.5' in float32, but a ModuleList is never called itself"),
    ],
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_wrong_names_are_explained(modules: Any, message: str, precision: str) -> None:
    model = nn.Sequential(*net(), nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match=message):
        trainer(callbacks=[KeepInFP32(modules)], precision=precision).fit(
            Classifier(model), images()
        )
