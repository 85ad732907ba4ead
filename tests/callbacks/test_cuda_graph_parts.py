"""Signatures, frozen state, and the stand-ins of a trial run."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cpu_graphs import CPUGraph, _Recorder, cpu_graphs
from models import Classifier, conv_net
from torch import Tensor, nn

from lightning_perf.callbacks._graph.engine import StepEngine
from lightning_perf.callbacks._graph.probe import Watched
from lightning_perf.callbacks._graph.signature import constants, filled, flatten
from lightning_perf.callbacks._graph.state import FrozenState


class Named(NamedTuple):
    one: Any
    two: Any


def key(value: Any) -> Any:
    return flatten(value)[1]


X = torch.zeros(2, 3)

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "shape": (X, X[:1]),
    "stride": (X, torch.zeros(3, 2).t()),
    "dtype": (X, X.int()),
    "device": (X, X.to("meta")),
    "requires_grad": (X, X.clone().requires_grad_()),
    "a parameter": (X, nn.Parameter(X, requires_grad=False)),
    "list or tuple": ([X], (X,)),
    "names": ({"a": X}, {"b": X}),
    "order": ({"a": X, "b": X[:1]}, {"b": X[:1], "a": X}),
    "nesting": ([[X], X], [X, [X]]),
    "number": ([X, 1], [X, 2]),
    "type of a number": ([X, 1], [X, True]),
    "nothing": ([X, None], [X]),
    "empty": ([X, []], [X, {}]),
    "named tuple": (Named(X, 1), (X, 1)),
    "objects": ([X, object()], [X, object()]),
    "sparse": (X, X.to_sparse()),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_makes_another_signature(name: str) -> None:
    one, two = DIFFERENT[name]
    assert key(one) != key(two)
    assert key(one) == key(one)
    hash(key(two))


def test_values_do_not_matter() -> None:
    def batch(fill: float) -> Any:
        return {"a": [torch.full((2,), fill), (1, "x", None, {})], "b": Named(torch.ones(1), [])}

    assert key(batch(1.0)) == key(batch(2.0))


def test_a_structure_is_filled_with_other_tensors_in_order() -> None:
    batch = {"a": [X, 1], "b": Named(X, (X, None)), "c": OrderedDict(d=X)}
    tensors = [torch.full((1,), float(i)) for i in range(len(flatten(batch)[0]))]
    assert flatten(filled(batch, tensors))[0] == tensors
    assert batch["a"][0] is X


def test_a_list_that_contains_itself() -> None:
    loop: list[Any] = [X]
    loop.append(loop)
    assert key(loop) == key(loop)


def test_values_that_a_graph_would_freeze_are_named_with_their_place() -> None:
    batch = {"x": [X, None, True, ()], "meta": {"name": "a"}, "pair": Named(1.5, X)}
    assert list(constants(batch)) == [("batch['meta']['name']", "a"), ("batch['pair'][0]", 1.5)]


# --- frozen state


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda net: setattr(net, name, value)


def _swap(net: Any) -> None:
    net.net[0] = nn.Conv2d(3, 8, 3, padding=1)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (_set("lr", 0.1), "lr"),
    "flag of a layer": (lambda net: net.net[1].eval(), "net.1.training"),
    "setting of a layer": (lambda net: setattr(net.net[1], "momentum", 0.5), "net.1.momentum"),
    "list": (lambda net: net.losses.append(1.0), "losses"),
    "list replaced": (_set("losses", [1.0]), "losses"),
    "dict": (lambda net: net.settings.update(a=2), "settings"),
    "object": (_set("criterion", len), "criterion"),
    "tensor replaced": (_set("scale", torch.ones(())), "scale"),
    "layer replaced": (_swap, "net.0"),
    "weight replaced": (lambda n: setattr(n.net[0], "weight", nn.Parameter(X)), "net.0.weight"),
    "weight moved": (lambda n: setattr(n.net[0].weight, "data", X), "the memory of net.0.weight"),
    "buffer replaced": (
        lambda net: setattr(net.net[1], "running_mean", torch.zeros(8)),
        "net.1.running_mean",
    ),
    "frozen": (
        lambda net: net.net[0].requires_grad_(False),
        "net.0.weight.requires_grad",
    ),
    "hook": (lambda n: n.net[0].register_forward_hook(print), "the hooks of its layers"),
}


class Model(Classifier):
    def __init__(self) -> None:
        super().__init__(conv_net())
        self.settings = {"a": 1, "b": [1]}
        self.criterion: Any = max
        self.scale = torch.ones(())
        self.queue = deque([1, 2])


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_named(change: str) -> None:
    model = Model()
    state = FrozenState(model)
    assert state.changed() is None
    CHANGES[change][0](model)
    assert state.changed() == CHANGES[change][1]


def test_values_that_change_in_place_and_equal_ones_are_no_change() -> None:
    model = Model()
    state = FrozenState(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), model.scale):
            tensor.add_(1)
    model.lr = float("0.05")
    model.settings = {"a": 1, "b": model.settings["b"]}
    model.new = 1
    model.eval().train()
    model._current_fx_name = "training_step"
    assert state.changed() is None


def test_only_attributes_that_were_read_matter() -> None:
    model = Model()
    state = FrozenState(model, {"lr"})
    model.losses.append(1.0)
    assert state.changed() is None
    model.lr = 1.0
    assert state.changed() == "lr"


# --- stand-ins


USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda i: i + 1,
    "reversed": lambda i: 2**i,
    "modulo": lambda i: i % 3 == 0,
    "compare": lambda i: i < 4,
    "bool": bool,
    "index": lambda i: list(range(9))[i],
    "range": lambda i: list(range(i)),
    "text": lambda i: f"{i:03d} {i} {i!r}",
    "key": lambda i: {5: "a"}.get(i),
    "float": float,
    "negative": operator.neg,
    "slice": lambda i: torch.arange(9)[:i].tolist(),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_number_is_noticed_and_gives_what_the_number_gives(use: str) -> None:
    noticed: list[int] = []
    watched = Watched(5, lambda: noticed.append(1))
    passed = [watched]
    assert not noticed
    assert USES[use](passed[0]) == USES[use](5)
    assert noticed


def test_a_product_with_a_tensor_is_noticed_although_it_fails() -> None:
    noticed: list[int] = []
    with pytest.raises(TypeError):
        torch.ones(2) * Watched(5, lambda: noticed.append(1))
    assert noticed


# --- the engine that stands in for the GPU is as treacherous


def test_a_graph_on_the_cpu_computes_nothing_before_its_first_replay() -> None:
    x = torch.ones(3)
    graph = CPUGraph()
    with _Recorder(graph):
        y = x * 2
    assert y.isnan().all()
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [8.0] * 3


def test_a_graph_on_the_cpu_freezes_numbers_and_refuses_to_wait() -> None:
    factor, x = 2, torch.ones(3)
    graph = CPUGraph()
    with _Recorder(graph):
        y = x * factor
        y += 1
    factor = 5
    for _ in range(2):
        graph.replay()
        assert y.tolist() == [3.0] * 3
    with pytest.raises(RuntimeError, match="not permitted"), _Recorder(CPUGraph()):
        x.sum().item()


def test_the_step_engine_copies_inputs_and_shares_one_stream() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        return (x.square().sum(),)

    with cpu_graphs() as graphs:
        engine = StepEngine()
        first = engine.capture(step, (torch.zeros(3),))
        second = engine.capture(step, (torch.zeros(2),))
        assert engine.replay(first, [torch.full((3,), 2.0)])[0] == 12
        assert engine.replay(second, [torch.full((2,), 3.0)])[0] == 18
        assert engine.replay(first, [torch.ones(3)])[0] == 3
        assert [graph.replays for graph in graphs] == [2, 1]
