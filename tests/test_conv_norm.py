"""Which convolutions are found to feed one norm and nothing else, and why the others are not."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from conv_norm_nets import PARAMETRIZED, SAME_FOR_ALL, Case, Counts, Net, Stores, Wrapped
from torch import nn

from lightning_perf._conv_norm import CONVOLUTIONS, Flow, find_pairs, list_kept
from lightning_perf.callbacks.drop_conv_bias import needless_biases
from lightning_perf.inference.fold import foldable

FINDERS = pytest.mark.parametrize("find", [needless_biases, foldable])


def found(flow: Flow) -> dict[str, str]:
    return {pair.layer: pair.norm for pair in flow.pairs}


@FINDERS
@pytest.mark.parametrize("case", SAME_FOR_ALL.values(), ids=SAME_FOR_ALL)
def test_the_flow_decides(case: Case, find: Any) -> None:
    flow = find(case.make())
    if case.pairs is not None:
        assert found(flow) == case.pairs
    for name, reason in case.kept.items():
        assert re.search(reason, flow.kept[name]), flow.kept


@pytest.mark.parametrize("case", PARAMETRIZED.values(), ids=PARAMETRIZED)
def test_only_the_convolutions_of_torch_count(case: Case) -> None:
    flow = needless_biases(case.make())
    assert found(flow) == {}
    for name, reason in case.kept.items():
        assert re.search(reason, flow.kept[name]), flow.kept
    assert found(foldable(case.make())) == {}


@FINDERS
def test_the_scope_is_the_smallest_module_that_makes_both_calls(find: Any) -> None:
    net = nn.Sequential(Net(), nn.Sequential(nn.Tanh(), Net()), Wrapped())
    scopes = {pair.layer: pair.scope for pair in find(net).pairs}
    assert scopes == {"0.conv": "0", "1.1.conv": "1.1", "2.first.1": "2"}


@FINDERS
def test_looking_changes_nothing(find: Any) -> None:
    net = nn.Sequential(Counts(), Stores(), nn.Dropout())
    net[1].eval()
    before = [sorted(vars(module)) for module in net.modules()]
    training = [module.training for module in net.modules()]
    state, numbers = torch.get_rng_state(), random.getstate()
    find(net)
    assert [sorted(vars(module)) for module in net.modules()] == before
    assert [module.training for module in net.modules()] == training
    assert net[0].calls == 0
    assert net[0].seen == []
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == numbers


def test_outputs_that_hooks_and_lists_get_hold_of_are_found() -> None:
    collected: list[Any] = []

    class Collects(Net):
        def forward(self, x: Any) -> Any:
            y = self.conv(x)
            collected.append(y)
            return self.norm(y)

    assert found(needless_biases(Collects())) == {}


@FINDERS
def test_models_without_a_norm_are_not_traced(find: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("lightning_perf._conv_norm._trace", fail)
    flow = find(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Linear(3, 3)))
    assert flow.pairs == ()
    assert flow.kept["0"] == "no module above it has a norm"


@FINDERS
def test_a_layer_alone_has_no_norm(find: Any) -> None:
    assert find(nn.Conv2d(3, 3, 1)).pairs == ()


@FINDERS
def test_lazy_layers_wait_for_their_shape(find: Any) -> None:
    net = nn.Sequential(nn.LazyConv2d(3, 1), nn.LazyBatchNorm2d(), Net())
    assert found(find(net)) == {"2.conv": "2.norm"}
    net(torch.randn(2, 3, 4, 4))
    assert found(find(net)) == {"0": "1", "2.conv": "2.norm"}


@FINDERS
def test_a_compiled_model_is_traced_as_it_is(find: Any) -> None:
    net = nn.Sequential(Net(), Wrapped())
    net[0].compile(backend="eager")
    assert found(find(net)) == {"0.conv": "0.norm", "1.first.1": "1.second.0"}
    whole = torch.compile(Net(), backend="eager")
    assert found(find(whole)) == {"_orig_mod.conv": "_orig_mod.norm"}


def test_each_forward_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    trace = torch.fx.Tracer.trace

    def count(self: Any, root: Any, *args: Any) -> Any:
        traced.append(type(root).__name__)
        return trace(self, root, *args)

    monkeypatch.setattr(torch.fx.Tracer, "trace", count)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))]
    assert len(needless_biases(nn.Sequential(*layers)).pairs) == 3
    assert traced == ["Sequential", "Sequential"]  # in training and in evaluation


def test_the_reasons_are_listed_in_one_line() -> None:
    kept = {f"conv{i}": "it has hooks" for i in range(5)}
    assert list_kept(kept, most=1) == "'conv0' (it has hooks), 4 more"


def test_a_pair_that_does_not_fit_is_kept_with_its_norm() -> None:
    net = Net()
    flow = find_pairs(net, {"conv": net.conv}, (nn.BatchNorm2d,), lambda layer, norm: "too small")
    assert flow.kept == {"conv": "its norm 'norm': too small"}
    assert isinstance(net.conv, CONVOLUTIONS)
