"""What recomputed blocks mean to hooks, tracing, copies, and checkpointing of others."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from checkpoint_blocks import KINDS, WIDTH, Block, Net, same, trained, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_perf.callbacks.activation_checkpointing import checkpointed, recomputed_blocks

POLICIES = ["full", 1.0]

# --- where it does nothing


class Calls:
    """Counts the calls of a module's layers."""

    def __init__(self, net: nn.Module) -> None:
        self.count = 0
        for part in net.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_hook(self.called)

    def called(self, *_: Any) -> None:
        self.count += 1


def test_layers_run_twice_with_gradients_and_once_without() -> None:
    net, x = Net(Block), torch.randn(4, WIDTH)
    calls = Calls(net)
    with checkpointed(net):
        net(x).backward()
        assert calls.count == 16
        for mode in (torch.no_grad(), torch.inference_mode()):
            calls.count = 0
            with mode:
                net(x)
            assert calls.count == 8


def test_a_frozen_network_is_not_recomputed() -> None:
    net = Net(Block).requires_grad_(False)
    calls = Calls(net)
    with checkpointed(net):
        assert not net(torch.randn(4, WIDTH)).requires_grad
    assert calls.count == 8


def test_hooks_of_a_block_run_once() -> None:
    net, seen = Net(Block), []
    block = net.blocks[1]
    block.register_forward_pre_hook(lambda *_: seen.append("pre"))
    block.register_forward_hook(lambda *_: seen.append("post"))
    block.register_full_backward_hook(lambda *_: seen.append("backward"))
    block.first.register_full_backward_hook(lambda *_: seen.append("inner"))
    with checkpointed(net):
        net(torch.randn(4, WIDTH)).backward()
    assert seen == ["pre", "post", "inner", "backward"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_tracing_sees_the_block_itself() -> None:
    net, x = Net(Block), torch.randn(4, WIDTH)
    with checkpointed(net):
        traced = torch.jit.trace(net, x)
        symbolic = torch.fx.symbolic_trace(net)
    assert torch.equal(traced(x), net(x))
    assert torch.equal(symbolic(x), net(x))


# --- copies


def test_a_copy_uses_its_own_weights() -> None:
    """Weight averaging copies the module in the middle of a run."""
    net, x = Net(KINDS["batch norm"]), torch.randn(4, WIDTH)
    plain = copy.deepcopy(net)
    with checkpointed(net):
        copied = copy.deepcopy(net)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        assert torch.equal(copied(x), plain(x))
        calls = Calls(copied)
        copied(x).backward()
        assert calls.count == 8
        assert list(recomputed_blocks(net)) == ["blocks.0", "blocks.1", "blocks.2"]
        assert not recomputed_blocks(copied)
    assert not recomputed_blocks(net)


def test_a_pickle_needs_nothing_from_here() -> None:
    net, x = Net(Block), torch.randn(4, WIDTH)
    with checkpointed(net):
        pickled, file = pickle.dumps(net), io.BytesIO()
        torch.save(net, file)
    assert b"lightning_perf" not in pickled
    again = pickle.loads(pickled)
    file.seek(0)
    for loaded in (again, torch.load(file, weights_only=False)):
        assert torch.equal(loaded(x), net(x))


def test_nothing_is_left_behind() -> None:
    net, x = Net(Block), torch.randn(4, WIDTH)
    before = [sorted(vars(part)) for part in net.modules()]
    keys = list(net.state_dict())
    with checkpointed(net):
        loss = net(x)
        assert list(net.state_dict()) == keys
    assert [sorted(vars(part)) for part in net.modules()] == before
    loss.backward()  # a graph from inside still works
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_an_error_in_a_block_is_the_users() -> None:
    class Raises(Block):
        def between(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    net = Net(Raises)
    with pytest.raises(KeyError, match="mine"), checkpointed(net):
        net(torch.randn(4, WIDTH))
    assert not any("forward" in vars(part) for part in net.modules())


# --- together with checkpointing of others


class Recomputes(Block):
    """Recomputes itself."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpointing_inside_of_a_block(policy: Any) -> None:
    plain, recomputed = twins(lambda: Net(Recomputes))
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x))
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x)), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpointing_around_a_block(policy: Any, reentrant: bool) -> None:
    class Outside(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x.square().mean()

    plain, recomputed = twins(lambda: Outside(KINDS["dropout"]))
    x = torch.randn(4, WIDTH)
    expected = trained(plain, lambda: plain(x))
    with checkpointed(recomputed, policy=policy):
        assert same(trained(recomputed, lambda: recomputed(x)), expected)
