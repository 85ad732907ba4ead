"""Communication hooks on one rank: what they send, keep and give back."""

from __future__ import annotations

import copy

import pytest
import torch
from models import conv_net, mlp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_perf.strategies.comm_hooks import (
    BF16Hook,
    CommHook,
    FP16Hook,
    OneBitHook,
    PowerSGDHook,
)
from lightning_perf.strategies.comm_hooks.base import as_matrix
from lightning_perf.strategies.comm_hooks.onebit import _bits, _booleans

pytestmark = pytest.mark.usefixtures("one_rank")

HOOKS = [
    FP16Hook,
    BF16Hook,
    lambda **kwargs: PowerSGDHook(2, **kwargs),
    OneBitHook,
]
every_hook = pytest.mark.parametrize("make", HOOKS, ids=["fp16", "bf16", "powersgd", "onebit"])
FEEDBACK = HOOKS[2:]
with_feedback = pytest.mark.parametrize("make", FEEDBACK, ids=["powersgd", "onebit"])


def wrapped(net: nn.Module, hook: CommHook | None) -> DistributedDataParallel:
    """Several buckets, so that their order matters."""
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.002)
    if hook is not None:
        hook.register(ddp)
    return ddp


def gradients(ddp: DistributedDataParallel, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(ddp.parameters()).dtype
    x = torch.randn(4, 3, 8, 8, generator=generator).to(dtype)
    ddp.zero_grad()
    ddp(x).square().sum().backward()
    return {n: p.grad.clone() for n, p in ddp.module.named_parameters() if p.grad is not None}


@every_hook
def test_plain_steps_come_first(make) -> None:
    net = mlp()
    hook = make(start_iter=2)
    ddp, plain = wrapped(net, hook), wrapped(copy.deepcopy(net), None)
    for step in range(4):
        mine, theirs = gradients(ddp, step), gradients(plain, step)
        equal = all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert equal == (step < 2)
    assert hook.iteration == 4


@pytest.mark.parametrize(("make", "dtype"), [(FP16Hook, torch.float16), (BF16Hook, torch.bfloat16)])
def test_half_precision_travels(make, dtype: torch.dtype) -> None:
    net = mlp()
    hook = make()
    ddp, plain = wrapped(net, hook), wrapped(copy.deepcopy(net), None)
    mine, theirs = gradients(ddp, 0), gradients(plain, 0)
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient.to(dtype).float(), rtol=0, atol=0)
        assert mine[name].dtype == torch.float32
    assert hook.traffic.bytes == 2 * sum(p.numel() for p in net.parameters())


@with_feedback
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_nothing_is_lost(make, memory: torch.memory_format) -> None:
    """What was sent in all steps, and what is kept, are together all gradients."""
    net = conv_net().double().to(memory_format=memory)
    hook = make(start_iter=0)
    ddp, plain = wrapped(net, hook), wrapped(copy.deepcopy(net), None)
    sent: dict[str, Tensor] = {}
    all_: dict[str, Tensor] = {}
    for step in range(6):
        for name, gradient in gradients(ddp, step).items():
            sent[name] = sent.get(name, 0) + gradient
        for name, gradient in gradients(plain, step).items():
            all_[name] = all_.get(name, 0) + gradient
    kept = hook.state_dict()["kept"]["error"]
    assert any(error.abs().max() > 1e-3 for error in kept.values())
    for name, total in all_.items():
        torch.testing.assert_close(sent[name] + kept.get(name, 0), total)


def test_low_rank_gradients_are_sent_whole() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 40, bias=False)).double()
    hook = PowerSGDHook(matrix_approximation_rank=4, start_iter=0)
    ddp, plain = wrapped(net, hook), wrapped(copy.deepcopy(net), None)
    for step in range(3):  # the gradient of a batch of four has rank four
        mine, theirs = gradients(ddp, step)["1.weight"], gradients(plain, step)["1.weight"]
        torch.testing.assert_close(mine, theirs)
    assert torch.linalg.matrix_rank(theirs) == 4
    assert hook.traffic.bytes == 3 * 8 * 4 * (192 + 40)


def test_a_matrix_has_its_rows_outermost_in_memory() -> None:
    weight = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
    assert torch.equal(as_matrix(weight), weight.view(2, 60))
    nhwc = weight.to(memory_format=torch.channels_last)
    assert torch.equal(as_matrix(nhwc), weight.permute(0, 2, 3, 1).reshape(2, 60))
    assert torch.equal(as_matrix(torch.ones(2, 3).T.contiguous().T), torch.ones(3, 2))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_signs_are_packed_into_bits(count: int) -> None:
    signs = torch.rand(count) > 0.5
    bits = _bits(signs)
    assert bits.numel() == -(-count // 8)
    assert torch.equal(_booleans(bits, count), signs)


def test_signs_travel_as_bits() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 40))
    hook = OneBitHook(start_iter=0)
    ddp = wrapped(net, hook)
    gradient = gradients(ddp, 0)["1.weight"]
    assert len(gradient.unique()) == 2
    assert hook.traffic.bytes == 192 * 40 // 8 + 2 * 4 + 40 * 4


@with_feedback
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_is_seen_and_forgotten(make, bad: float) -> None:
    """A gradient scaler skips such a step; the error that is kept must not stay infinite."""
    net = mlp()
    hook = make(start_iter=0)
    ddp = wrapped(net, hook)
    gradients(ddp, 0)
    before = copy.deepcopy(hook.state_dict()["kept"]["error"])
    handle = net[1].register_full_backward_hook(lambda *_: None)
    handle.remove()
    handle = net[1].weight.register_hook(
        lambda gradient: gradient.index_fill(0, torch.tensor(3), bad)
    )
    assert not gradients(ddp, 1)["1.weight"].isfinite().all()
    handle.remove()
    after = hook.state_dict()["kept"]["error"]
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert all(gradient.isfinite().all() for gradient in gradients(ddp, 2).values())


@with_feedback
def test_a_gradient_of_zeros_does_not_spoil_what_follows(make) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 40, bias=False)).double()
    hook = make(start_iter=0)
    ddp = wrapped(net, hook)
    ddp(torch.zeros(4, 3, 8, 8).double()).sum().backward()
    assert not net[1].weight.grad.any()
    first, second = gradients(ddp, 0)["1.weight"], gradients(ddp, 0)["1.weight"]
    assert first.norm() > 0
    assert second.norm() > 0


@every_hook
def test_several_types_in_one_model(make) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bf16 = nn.Linear(192, 40).bfloat16()
            self.fp32 = nn.Linear(40, 40)
            self.fp64 = nn.Linear(40, 40).double()
            self.complex = nn.Parameter(torch.randn(40, 4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            x = self.bf16(x.flatten(1).bfloat16())
            x = self.fp64(self.fp32(x.float()).double())
            return (x.to(torch.complex64) @ self.complex).abs()

    net = Mixed()
    hook = make(start_iter=0)
    ddp, plain = wrapped(net, hook), wrapped(copy.deepcopy(net), None)
    ddp_gradients, plain_gradients = [], []
    for found, model in ((ddp_gradients, ddp), (plain_gradients, plain)):
        model(torch.ones(4, 3, 8, 8)).sum().backward()
        found += [(n, p.grad) for n, p in model.module.named_parameters()]
    for (name, mine), (_, theirs) in zip(ddp_gradients, plain_gradients, strict=True):
        assert mine.dtype == theirs.dtype
        if name.startswith("bf16"):
            assert torch.equal(mine, theirs), name
        elif name == "complex":  # DDP sends two real numbers, and hooks see those
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)
        else:
            assert mine.isfinite().all()
    assert not torch.equal(dict(ddp_gradients)["fp64.weight"], dict(plain_gradients)["fp64.weight"])


@with_feedback
def test_a_state_is_loaded(make) -> None:
    net = conv_net()
    hook = make(start_iter=1)
    ddp = wrapped(net, hook)
    for step in range(4):
        gradients(ddp, step)
    again = make(start_iter=1)
    torch.save(hook.state_dict(), "state.pt")
    again.load_state_dict(torch.load("state.pt", weights_only=True))
    mine = gradients(wrapped(copy.deepcopy(net), again), 4)
    theirs = gradients(ddp, 4)
    assert again.iteration == 5
    for name, gradient in theirs.items():
        assert torch.equal(mine[name], gradient)


def test_a_state_is_loaded_into_another_memory_format() -> None:
    net = conv_net()
    hook = OneBitHook(start_iter=1)
    ddp = wrapped(net, hook)
    for step in range(4):
        gradients(ddp, step)
    again = OneBitHook(start_iter=1)
    again.load_state_dict(hook.state_dict())
    nhwc = copy.deepcopy(net).to(memory_format=torch.channels_last)
    mine, theirs = gradients(wrapped(nhwc, again), 4), gradients(ddp, 4)
    for name, gradient in theirs.items():
        # The numbers of a mean are added in another order.
        torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=1e-4)


def test_an_error_of_a_collective_reaches_the_backward_pass(monkeypatch) -> None:
    hook = PowerSGDHook(start_iter=0)
    ddp = wrapped(mlp(), hook)
    monkeypatch.setattr(hook, "keep_error", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradients(ddp, 0)


def test_a_backend_without_the_type_is_named(monkeypatch) -> None:
    def all_reduce(tensor: Tensor, **kwargs) -> None:
        raise RuntimeError("Invalid scalar type")  # gloo of PyTorch 2.6

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    with pytest.raises(
        RuntimeError,
        match=r"'bf16' was asked for, and gloo of PyTorch .* does not average torch\.bfloat16",
    ):
        wrapped(mlp(), BF16Hook())


@pytest.mark.parametrize("wrong", [{"start_iter": -1}, {"matrix_approximation_rank": 0}])
def test_wrong_arguments_are_explained(wrong: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* was asked for"):
        PowerSGDHook(**wrong)
