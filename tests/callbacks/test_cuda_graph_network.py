"""A network's forward and backward as graphs: what callers do with networks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cpu_graphs import cpu_graphs
from graph_runs import (
    Dense,
    Steps,
    assert_same,
    compare,
    graphed,
    inputs,
    plain,
    reason,
    same,
    train,
    twins,
    warned,
)
from models import conv_net, mlp
from torch import Tensor, nn

from lightning_perf.callbacks import ChannelsLast, Compile
from lightning_perf.callbacks._graph.network_record import NetworkGraph
from lightning_perf.callbacks.cuda_graph import cuda_graphed, trainable_networks

# --- what callers do


def test_forward_and_backward_are_replayed() -> None:
    forward, backward = compare(Dense)
    assert forward.replays == backward.replays == 5


def test_gradients_that_accumulate_over_several_backwards() -> None:
    def twice(net: nn.Module, x: Tensor) -> None:
        for part in x.split(2):
            plain(net, part)

    assert compare(Dense, twice)[0].replays == 13


def test_without_a_copy_the_second_gradient_would_overwrite_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch #181723, which `release_gradients` is there for."""
    monkeypatch.setattr(NetworkGraph, "release_gradients", lambda _: None)

    def twice(net: nn.Module, x: Tensor) -> None:
        for part in x.split(2):
            plain(net, part)

    with pytest.raises(AssertionError):
        compare(Dense, twice)


def test_gradients_that_are_zeroed_in_place() -> None:
    def step(net: nn.Module, x: Tensor) -> None:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        plain(net, x)

    def kept(net: nn.Module, steps: int = 8) -> list[Any]:
        gradients = []
        for x in inputs(steps):
            step(net, x)
            gradients.append([p.grad.clone() for p in net.parameters()])
        return gradients

    net = Dense()
    expected = kept(net)
    net.zero_grad()
    with graphed(net) as graphs:
        assert same(kept(net), expected)
        assert graphs[0].replays == 5


def test_gradients_belong_to_the_user_after_the_block() -> None:
    net = Dense()
    with graphed(net) as graphs:
        train(net, plain)
        before = [p.grad.clone() for p in net.parameters()]
        backward = graphs[1]
    backward.replay()
    assert same([p.grad for p in net.parameters()], before)


def test_two_calls_before_one_backward() -> None:
    def siamese(net: nn.Module, x: Tensor) -> None:
        (net(x) - net(x.flip(0))).square().sum().backward()

    assert compare(Dense, siamese)[0].replays == 7


def test_outputs_that_are_dropped_do_not_block_the_next_call() -> None:
    def skipping(net: nn.Module, x: Tensor) -> None:
        net(x)
        plain(net, x)

    assert compare(Dense, skipping)[0].replays == 13


def test_outputs_that_are_kept_and_changed_in_place_are_the_callers_own() -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        out = torch.relu_(net(x))
        out.sum().backward()
        return out

    compare(Dense, step)


def test_a_second_backward_through_the_same_call() -> None:
    def twice(net: nn.Module, x: Tensor) -> None:
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert compare(Dense, twice)[1].replays == 10


def test_backward_of_an_overwritten_call_is_refused() -> None:
    net = Dense()
    with graphed(net):
        train(net, plain)
        old = net(torch.randn(4, 8)).sum()
        old.backward(retain_graph=True)
        plain(net, torch.randn(4, 8))
        with pytest.raises(RuntimeError, match="an earlier call of Dense, whose activations"):
            old.backward()


def test_gradients_of_gradients_are_found_while_warming_up() -> None:
    def penalty(net: nn.Module, x: Tensor) -> None:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    assert "differentiated again (create_graph=True)" in reason(Dense, penalty)


def test_gradients_of_gradients_that_come_late_are_refused() -> None:
    net = Dense()
    with graphed(net):
        train(net, plain)
        out = net(torch.randn(4, 8)).sum()
        with pytest.raises(RuntimeError, match="create_graph=True, and graphs cannot"):
            torch.autograd.grad(out, list(net.parameters()), create_graph=True)


def test_evaluation_never_replays() -> None:
    def step(net: nn.Module, x: Tensor) -> Any:
        plain(net, x)
        with torch.no_grad():
            first = net(x)
        net.eval()
        second = net(x)
        with torch.inference_mode():
            third = net(x)
        net.train()
        return first, second.detach(), third.clone()

    assert compare(lambda: nn.Sequential(Dense(), nn.Dropout(0.5)), step)[0].replays == 5


def test_inputs_that_need_gradients_come_from_another_network() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Dense(), Dense()

    def step(net: Pair, x: Tensor) -> Any:
        plain(lambda x: net.decoder(net.encoder(x)), x)
        return x

    torch.manual_seed(1)
    net = Pair()
    other = copy.deepcopy(net)
    stock = train(net, step)
    with (
        cpu_graphs() as graphs,
        cuda_graphed(other.encoder, strict=True),
        cuda_graphed(other.decoder, strict=True),
    ):
        assert same(train(other, step), stock)
        assert [graph.replays for graph in graphs] == [5] * 4


@dataclass
class Output:
    out: Tensor
    hidden: dict[str, Tensor]
    size: int
    nothing: None = None


class Structured(Dense):
    """Takes and returns more than tensors."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None, twice: bool = False) -> Output:
        hidden = self[1](self[0](x))
        out = self[2](hidden if mask is None else hidden * mask)
        if twice:
            out = out * 2
        return Output(out, {"hidden": hidden.detach(), "top": out.argmax(-1)}, len(x))


def test_keyword_arguments_flags_and_structured_outputs() -> None:
    count = 0

    def step(net: nn.Module, x: Tensor) -> Any:
        nonlocal count
        count += 1
        mask = x.new_ones(16) * x[0, 0] if count % 3 else None
        result = net(x, mask=mask, twice=count % 2 == 0)
        result.out.square().sum().backward()
        assert isinstance(result, Output)
        result.hidden["hidden"].numpy()
        return result.out, result.hidden, result.size, result.nothing

    graphs = compare(Structured, step, steps=24)
    assert len(graphs) == 8


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_networks(layer: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = layer(8, 6, num_layers=2, dropout=0.2), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0])

    assert compare(Recurrent, shape=(5, 4, 8))[0].replays == 5


def test_tied_weights_and_unused_ones() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.unused = (nn.Linear(8, 8) for _ in range(3))
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).tanh())

    assert compare(Tied)[0].replays == 5


def test_weight_and_spectral_norm() -> None:
    class Normed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
                nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
                nn.Linear(8, 8),
            )

    assert compare(Normed)[0].replays == 5


def test_images_in_nhwc() -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        return plain(net, x.to(memory_format=torch.channels_last))

    compare(conv_net, step, shape=(4, 3, 8, 8))


def test_frozen_layers_and_frozen_statistics() -> None:
    class Partly(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
            self[0].requires_grad_(False)

        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self[1].eval()
            return self

    assert compare(lambda: Partly().train())[0].replays == 5


def test_hooks_around_the_network_run_each_time() -> None:
    def make() -> nn.Module:
        net = Dense()
        net.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        net.register_forward_hook(lambda module, args, out: out + 1)
        return net

    assert compare(make)[0].replays == 5


def test_hooks_that_come_later_stop_the_replays() -> None:
    seen: list[int] = []

    def step(net: nn.Module, x: Tensor) -> Tensor:
        if len(seen) == 1:
            net[0].register_forward_hook(lambda *_: seen.append(1))
        return plain(net, x)

    net = Dense()
    with warned("its layer 0 has hooks"), graphed(net, strict=None) as graphs:
        train(net, plain, 5)
        seen.append(0)
        train(net, step, 6)
    assert graphs[0].replays == 2
    assert len(seen) == 7


# --- in a Trainer run


@pytest.mark.parametrize("first", [True, False])
def test_beside_compile_the_compiled_network_is_left_alone(first: bool) -> None:
    def other() -> Compile:
        return Compile(backend="eager")

    stock, run = twins(lambda: Steps(mlp()), "network", other, strict=False)
    assert_same(stock, run)
    assert not run.graphs


def test_beside_channels_last_whose_hooks_go_after_the_first_batch() -> None:
    stock, run = twins(lambda: Steps(conv_net()), "network", ChannelsLast)
    assert_same(stock, run)
    assert run.replays == [11, 11]


def test_networks_are_attributes_of_several_layers() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.net = Dense()
            self.several = nn.ModuleList([Dense(), nn.Linear(4, 4)])
            self.named = nn.ModuleDict({"a": Dense()})
            self.outer = nn.Sequential(self.net, nn.Linear(4, 4))
            self.frozen = Dense().requires_grad_(False)
            self.loss = nn.Sequential(nn.Softmax(), nn.Identity(), nn.Identity())

    assert list(trainable_networks(Module())) == ["several.0", "named.a", "outer"]
