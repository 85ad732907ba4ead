"""Blocks of every kind compute, draw, count and learn the same when they are recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_blocks import KINDS, WIDTH, Block, Net, same, trained, twins
from torch import Tensor, nn

from lightning_perf.callbacks.activation_checkpointing import checkpointed

POLICIES = ["full", 1.0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_training_is_the_same_bit_for_bit(kind: str, policy: Any, autocast: bool) -> None:
    plain, recomputed = twins(lambda: Net(KINDS[kind]))
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x), enabled=autocast)
    with checkpointed(recomputed, ["blocks"], policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x), enabled=autocast), expected)


class Structured(Block):
    """Takes and gives structures, fills a list of the caller, and may get no gradient."""

    def forward(
        self, x: Tensor, *, scale: dict[str, Tensor], losses: list[Tensor]
    ) -> dict[str, Any]:
        y = super().forward(x) * scale["by"]
        losses.append(y.mean())
        return {"out": (y, [y + 1]), "none": None}


class StructuredNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            scale = {"by": x.mean(1, keepdim=True)}
            x = block(x, scale=scale, losses=losses)["out"][1][0]
        assert len(losses) == 3
        return x.mean() + torch.stack(losses).sum()


@pytest.mark.parametrize("policy", POLICIES)
def test_structures_and_keyword_arguments(policy: Any) -> None:
    plain, recomputed = twins(StructuredNet)
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x))
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x)), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_keyword_argument_changed_afterwards_is_noticed(policy: Any) -> None:
    """Autograd watches what it saved, and so does a recomputation."""
    net, x = nn.ModuleList([Structured(), Structured()]), torch.randn(4, WIDTH)
    with checkpointed(net, policy=policy):
        net[0](x, scale={"by": torch.ones(1)}, losses=[])["out"][0].sum().backward()
        scale = torch.ones(1)
        loss = net[0](x, scale={"by": scale}, losses=[])["out"][0].sum()
        scale.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_shared_weights_and_a_cached_cast(policy: Any) -> None:
    """Autocast casts a shared weight once in the forward pass."""

    class Shared(Net):
        def __init__(self) -> None:
            super().__init__(Block)
            for block in self.blocks:
                block.first = self.blocks[0].first

    plain, recomputed = twins(Shared)
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x), enabled=True)
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x), enabled=True), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_blocks_and_inputs_without_gradient(policy: Any) -> None:
    def make() -> Net:
        net = Net(KINDS["dropout"])
        for block in list(net.blocks)[:2]:
            block.requires_grad_(False)
        return net

    plain, recomputed = twins(make)
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x))
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x)), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_inside_of_the_step(policy: Any) -> None:
    """A penalty on the gradient goes backward through blocks twice."""

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value = net(x)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.square().sum()

    plain, recomputed = twins(lambda: Net(KINDS["batch norm"]))
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: loss(plain, x))
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: loss(recomputed, x)), expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("since", [0, 2])
def test_a_second_backward_pass(policy: Any, since: int) -> None:
    plain, recomputed = twins(lambda: Net(KINDS["counters"]))
    x, grads = torch.randn(4, WIDTH), []
    for net in (plain, recomputed):
        with checkpointed(net, policy=policy) if net is recomputed else torch.enable_grad():
            for step in range(4):
                loss = net(x)
                if step >= since:
                    loss.backward(retain_graph=True)
                loss.backward()
        grads.append([p.grad for p in net.parameters()])
    assert same(*grads)


def test_a_result_that_a_later_step_writes_to_is_not_given_back() -> None:
    class Changing(Block):
        steps = 0

        def between(self, x: Tensor) -> Tensor:
            self.steps += 1
            return x.mul_(2).relu_() if self.steps > 2 else x.mul(2).relu()

    plain, recomputed = twins(lambda: nn.Sequential(Changing(), Changing()))
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x).mean(), steps=5)
    with checkpointed(recomputed, policy=1.0):
        assert same(trained(recomputed, lambda: recomputed(x).mean(), steps=5), expected)


def test_settings_changed_between_forward_and_backward() -> None:
    """The recomputation sees the block as the forward pass saw it."""
    plain, recomputed = twins(lambda: Net(KINDS["dropout"]))
    x, grads = torch.randn(4, WIDTH), []
    for net in (plain, recomputed):
        torch.manual_seed(0)
        with checkpointed(net) if net is recomputed else torch.enable_grad():
            loss = net(x)
            net.eval()
            loss.backward()
        assert not any(part.training for part in net.modules())
        grads.append([p.grad for p in net.parameters()])
    assert same(*grads)
