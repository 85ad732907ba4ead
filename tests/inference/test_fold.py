"""Folded networks give the same outputs, and nothing else about them changes."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from conv_norm_nets import (
    ONE_PAIR,
    PARAMETRIZED,
    SAME_FOR_ALL,
    Case,
    ConvTwice,
    Net,
    batch,
    chain,
    evaluating,
    frozen,
    randomized,
    shared_bias,
)
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from lightning_perf.inference.fold import Folding, foldable, folded

VOLUME, LINE, FLAT = (2, 3, 4, 4, 4), (4, 3, 8), (5, 3)
KINDS = {
    "1-D": Case(chain(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), ONE_PAIR, shape=LINE),
    "2-D": Case(chain(nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4)), ONE_PAIR),
    "3-D": Case(chain(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4)), ONE_PAIR, shape=VOLUME),
    "transposed 1-D": Case(
        chain(nn.ConvTranspose1d(3, 4, 3), nn.BatchNorm1d(4)), ONE_PAIR, shape=LINE
    ),
    "transposed 2-D": Case(
        chain(nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), nn.BatchNorm2d(4)), ONE_PAIR
    ),
    "transposed 3-D": Case(
        chain(nn.ConvTranspose3d(3, 4, 2, bias=False), nn.BatchNorm3d(4)), ONE_PAIR, shape=VOLUME
    ),
    "transposed with groups": Case(
        chain(nn.ConvTranspose2d(3, 6, 3, groups=3), nn.BatchNorm2d(6)), {}, {"conv": "has groups"}
    ),
    "grouped": Case(chain(nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6)), ONE_PAIR),
    "padded": Case(
        chain(nn.Conv2d(3, 4, 3, padding=2, padding_mode="circular"), nn.BatchNorm2d(4)), ONE_PAIR
    ),
    "linear": Case(chain(nn.Linear(3, 4), nn.BatchNorm1d(4)), ONE_PAIR, shape=FLAT),
    "linear on sequences": Case(
        chain(nn.Linear(8, 3, bias=False), nn.BatchNorm1d(3)), ONE_PAIR, shape=LINE
    ),
    "no affine": Case(chain(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)), ONE_PAIR),
    "synchronized": Case(chain(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4, eps=0.1)), ONE_PAIR),
    "no statistics": Case(
        chain(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
        {},
        {"conv": "it has no running statistics"},
    ),
    "per instance": Case(chain(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4)), {}, {"conv": "a norm"}),
    "frozen": Case(frozen, ONE_PAIR),
    "one evaluating": Case(evaluating, {"0.conv": "0.norm", "1.conv": "1.norm"}),
    "shared bias": Case(shared_bias, {"0.conv": "0.norm"}),
}
CASES = KINDS | SAME_FOR_ALL | PARAMETRIZED


@contextmanager
def counted_norms(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the batch normalizations that are computed."""
    calls, batch_norm = [], nn.functional.batch_norm

    def count(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return batch_norm(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "batch_norm", count)
        yield calls


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    return randomized(make()).eval(), randomized(make()).eval()


def run(net: nn.Module, shape: tuple[int, ...], seed: int = 0) -> Any:
    random.seed(seed)
    return net(batch(shape, seed))


def assert_same(one: Any, two: Any, tolerance: float = 1e-9) -> None:
    for mine, theirs in zip(tuple(one), tuple(two), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_are_those_of_the_untouched_net(case: Case) -> None:
    net, same = twins(case.make)
    state = copy.deepcopy(net.state_dict())
    with folded(net) if foldable(net).pairs else nullcontext():
        for mode in (torch.inference_mode, torch.no_grad):
            for seed in range(2):
                with mode():
                    assert_same(*(run(each, case.shape, seed) for each in (net, same)))
        for name, value in net.state_dict().items():
            assert torch.equal(value, state[name]), name
        assert list(net.state_dict()) == list(state)
        run(net.train(), case.shape), run(same.train(), case.shape)
        for mine, theirs in zip(net.state_dict().values(), same.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs)
    assert not [name for m in net.modules() for name in vars(m) if name.startswith("_conv_norm")]


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_what_folds(case: Case) -> None:
    flow = foldable(case.make())
    assert {pair.layer: pair.norm for pair in flow.pairs} == case.pairs
    for name, reason in case.kept.items():
        assert re.search(reason, flow.kept[name]), flow.kept


@pytest.mark.parametrize(
    "case",
    [case for name, case in KINDS.items() if case.pairs and name != "linear on sequences"],
)
def test_folded_norms_are_not_computed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = twins(case.make)
    with folded(net) as folding, torch.inference_mode():
        net(batch(case.shape))
        assert folding.verified == list(case.pairs)
        with counted_norms(monkeypatch) as calls:
            net(batch(case.shape))
        assert not calls
    with counted_norms(monkeypatch) as calls:
        net(batch(case.shape))
    assert len(calls) == len(case.pairs)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in SAME_FOR_ALL.items() if case.pairs]
)
def test_only_what_was_proven_is_folded(case: Case) -> None:
    net = case.make().eval()
    with folded(net) as folding, torch.no_grad():
        net(batch(case.shape).float())
        assert folding.folded == case.pairs
        assert set(folding.verified) <= set(case.pairs)
        assert not set(folding.folded) & set(folding.kept)


def test_the_pass_of_torch_gets_a_convolution_that_is_called_twice_wrong() -> None:
    """Its result is off by about one; ours is untouched."""
    net, same = twins(ConvTwice)
    x = batch((4, 3, 6, 6))
    fused = fuse(copy.deepcopy(net))
    with torch.no_grad():
        assert (fused(x) - same(x)).abs().max() > 0.1
    with pytest.raises(ValueError, match=r"Nothing to fold: 0 of 1 BatchNorm folded; kept: 'conv'"):
        folded(net).__enter__()


# --- when it does not act


SETTINGS: dict[str, Callable[[nn.Module], Any]] = {
    "gradients": lambda net: torch.enable_grad(),
    "training": lambda net: (net.train(), torch.no_grad())[1],
    "norm in training": lambda net: (net.norm.train(), torch.no_grad())[1],
    "hook on the layer": lambda net: (
        net.conv.register_forward_hook(lambda m, args, out: out * 2),
        torch.no_grad(),
    )[1],
    "hook on the norm": lambda net: (
        net.norm.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
        torch.no_grad(),
    )[1],
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_both_layers_run_as_ever_with(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, same = twins(Net)
    with folded(net):
        with torch.no_grad():
            net(batch((4, 3, 6, 6)))
        with setting(net), counted_norms(monkeypatch) as calls:
            output = net(batch((4, 3, 6, 6)))
        assert len(calls) == 1
        with setting(same):
            assert torch.equal(output, same(batch((4, 3, 6, 6))))
        if output.requires_grad:
            output.sum().backward()
            same(batch((4, 3, 6, 6))).sum().backward()
            assert_same(*([p.grad for p in n.parameters()] for n in (net, same)))


def test_layers_called_from_outside_run_as_ever() -> None:
    net, same = twins(Net)
    x = batch((4, 3, 6, 6))
    with folded(net), torch.inference_mode():
        net(x)
        for module in ("conv", "norm"):
            assert torch.equal(net.get_submodule(module)(x), same.get_submodule(module)(x))


def test_a_call_that_fails_leaves_no_trace() -> None:
    class Fails(Net):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            if self.fail:
                raise KeyError
            return self.norm(y)

    net, same = twins(Fails)
    x = batch((4, 3, 6, 6))
    with folded(net), torch.no_grad():
        net(x)
        net.fail = True
        with pytest.raises(KeyError):
            net(x)
        assert torch.equal(net.norm(x), same.norm(x))


def test_empty_batches_pass() -> None:
    net, _ = twins(Net)
    with folded(net) as folding, torch.no_grad():
        assert net(batch((0, 3, 6, 6))).shape == (0, 3, 6, 6)
        assert folding.verified == []


# --- weights that change


def update(net: nn.Module) -> None:
    """Change weights and statistics as a training step does."""
    net.train()
    net(batch((4, 3, 6, 6))).square().sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.01).step()
    net.zero_grad()
    net.eval()


def other_bias(net: nn.Module) -> None:
    net.conv.bias = nn.Parameter(torch.ones(3).double())


WEIGHTS: dict[str, Callable[[nn.Module], Any]] = {
    "trained": update,
    "loaded": lambda net: net.load_state_dict(Net().double().state_dict()),
    "assigned": lambda net: net.load_state_dict(Net().double().state_dict(), assign=True),
    "replaced": other_bias,
    "reset": lambda net: net.norm.reset_running_stats(),
    "in float32": lambda net: net.float(),
    "in bfloat16": lambda net: net.bfloat16(),
}


@pytest.mark.parametrize("change", WEIGHTS.values(), ids=WEIGHTS)
def test_folded_weights_follow(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    net, same = twins(Net)
    with folded(net):
        with torch.inference_mode():
            net(batch((4, 3, 6, 6)))
        for each in (net, same):
            torch.manual_seed(2)
            change(each)
        x = batch((4, 3, 6, 6)).to(net.conv.weight.dtype)
        with torch.inference_mode():
            tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(x.dtype, 0.1)
            assert_same(net(x), same(x), tolerance)
            with counted_norms(monkeypatch) as calls:
                net(x)
            assert not calls


def test_a_tensor_in_the_place_of_another_is_noticed() -> None:
    net, same = twins(Net)
    x = batch((4, 3, 6, 6))
    with folded(net), torch.no_grad():
        for value in (1, 2):
            for each in (net, same):  # neither of them was written to
                each.conv.bias = nn.Parameter(torch.full((3,), value).double())
            assert_same(net(x), same(x))


def test_a_copy_made_inside_folds_its_own_weights() -> None:
    net, same = twins(Net)
    x = batch((4, 3, 6, 6))
    with folded(net), torch.no_grad():
        net(x)
        twin = copy.deepcopy(net)
        for each in (twin, same):
            each.conv.weight.mul_(2)
        assert_same(twin(x), same(x))
        assert (twin(x) - net(x)).abs().max() > 0.1


# --- verification


@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_precision_has_its_tolerance(precision: torch.dtype) -> None:
    net = randomized(nn.Sequential(*[Net() for _ in range(4)])).to(precision).eval()
    with folded(net) as folding, torch.inference_mode():
        net(batch((4, 3, 6, 6)).to(precision))
        assert len(folding.verified) == 4


def test_autocast_is_followed() -> None:
    net, same = (net.float() for net in twins(Net))
    x = batch((4, 3, 6, 6)).float()
    with folded(net) as folding, torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == same(x).dtype == torch.bfloat16
        assert_same(net(x).float(), same(x).float(), 0.1)
        assert folding.verified == ["conv"]


def wrong(*args: Any, **kwargs: Any) -> Any:
    weight, bias = right(*args, **kwargs)
    return weight, bias + 1


right = nn.utils.fusion.fuse_conv_bn_weights


def test_a_wrong_result_is_found_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_perf.inference.fold.fuse_conv_bn_weights", wrong)
    net, same = twins(Net)
    with folded(net) as folding, torch.inference_mode():
        with pytest.warns(UserWarning, match="'norm' is not folded into 'conv': the folded output"):
            output = net(batch((4, 3, 6, 6)))
        assert torch.equal(output, same(batch((4, 3, 6, 6))))
        assert torch.equal(net(batch((4, 3, 6, 6))), output)
        assert folding.folded == {}
        assert "differs by" in folding.kept["conv"]


def test_values_that_are_not_numbers_are_not_folded() -> None:
    net, _ = twins(Net)
    with (
        folded(net) as folding,
        torch.no_grad(),
        pytest.warns(UserWarning, match="differs by nan"),
    ):
        net(batch((4, 3, 6, 6)) * float("nan"))
    assert folding.folded == {}


def test_a_norm_in_float32_after_a_layer_in_half_precision() -> None:
    net = Net().eval()
    net.conv.bfloat16()
    x = torch.randn(4, 3, 6, 6).bfloat16()
    expected = net(x)
    with folded(net) as folding, torch.no_grad():
        output = net(x)
    assert folding.verified == ["conv"]
    assert output.dtype == expected.dtype == torch.bfloat16


def test_compiled_code_uses_what_was_verified_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import EagerAndRecordGraphs

    backend = EagerAndRecordGraphs()
    net, same = twins(Net)
    x = batch((4, 3, 6, 6))
    with folded(net), torch.no_grad():
        net(x)
        net.compile(backend=backend, fullgraph=True)
        assert_same(net(x), same(x))
        assert_same(net(batch((4, 3, 6, 6), 1)), same(batch((4, 3, 6, 6), 1)))
        (graph,) = backend.graphs
        assert "batch_norm" not in graph.code
    torch.compiler.reset()


def test_compiled_code_alone_is_not_folded() -> None:
    net, same = twins(Net)
    x = batch((4, 3, 6, 6))
    net.compile(backend="eager")
    with folded(net) as folding, torch.no_grad():
        assert_same(net(x), same(x))
        assert folding.verified == []
    torch.compiler.reset()


# --- wrong uses


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv2d(3, 3, 1), "Nothing to fold: Conv2d has no BatchNorm"),
        (lambda: nn.BatchNorm2d(3), "0 of 1 BatchNorm folded"),
        (ConvTwice, "ConvTwice.forward calls it 2 times"),
    ],
)
def test_a_model_without_a_pair_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        folded(make()).__enter__()


def test_it_cannot_be_entered_twice() -> None:
    net = Net().eval()
    with folded(net), pytest.raises(ValueError, match="its forward was replaced"):
        folded(net).__enter__()
    assert "forward" not in vars(net)


def test_what_is_folded_is_told_by_name() -> None:
    with folded(nn.Sequential(Net(), nn.Conv2d(3, 3, 1))) as folding:
        assert isinstance(folding, Folding)
        assert folding.folded == {"0.conv": "0.norm"}
        assert folding.kept == {"1": "Sequential.forward returns its output"}
