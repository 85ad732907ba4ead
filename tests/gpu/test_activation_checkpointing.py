"""Recomputation on a CUDA device: random numbers of the device, mixed precision, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_blocks import KINDS, WIDTH, Net, trained, twins
from checkpoint_runs import fit
from torch import Tensor, nn

from lightning_perf.callbacks import ActivationCheckpointing
from lightning_perf.callbacks.activation_checkpointing import checkpointed, checkpointing_cost

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Those two compute with tensors of the CPU.
ON_THE_DEVICE = [kind for kind in KINDS if kind not in ("plain tensor", "own generators")]


def assert_close(mine: Any, theirs: Any) -> None:
    if isinstance(mine, Tensor):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_close(one, other)
    elif isinstance(mine, float):
        assert mine == pytest.approx(theirs, rel=1e-4)
    else:
        assert mine == theirs


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("kind", ON_THE_DEVICE)
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_training_is_the_same(kind: str, policy: Any, dtype: torch.dtype | None) -> None:
    plain, recomputed = (net.cuda() for net in twins(lambda: Net(KINDS[kind])))
    x = torch.randn(4, WIDTH, device="cuda")
    autocast = {"device": "cuda", "enabled": dtype is not None, "dtype": dtype or torch.float16}
    expected = trained(plain, lambda: plain(x), **autocast)
    expected_next = torch.rand(2, device="cuda")
    with checkpointed(recomputed, ["blocks"], policy=policy):
        assert_close(trained(recomputed, lambda: recomputed(x), **autocast), expected)
    assert torch.equal(torch.rand(2, device="cuda"), expected_next)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_trainer_learns_the_same(policy: Any, precision: Any) -> None:
    options = {"accelerator": "cuda", "precision": precision, "accumulate_grad_batches": 2}
    plain = fit(**options)
    recomputed = fit(ActivationCheckpointing(policy=policy, strict=True), **options)
    assert recomputed.losses == pytest.approx(plain.losses, rel=1e-3)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(recomputed.state_dict()[name], value, rtol=1e-3, atol=1e-4)


class Encoder(nn.Module):
    """BERT-large's 24 layers at a quarter of its width."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).square().mean()


def peak(net: nn.Module, x: Tensor) -> int:
    """Bytes that a forward and backward take at most, beyond weights and gradients."""
    for _ in range(2):  # the first one also allocates gradients, and tells what to keep
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        net(x).backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("policy", "most"), [("full", 0.4), ("selective", 0.6)])
def test_the_device_needs_less_memory(policy: Any, most: float) -> None:
    net, x = Encoder().cuda(), torch.randn(16, 128, 256, device="cuda")
    plain = peak(net, x)
    with checkpointed(net, policy=policy):
        assert peak(net, x) <= most * plain


@pytest.mark.parametrize(("policy", "most"), [("full", 1 / 3), ("selective", 0.15)])
def test_bytes_and_flops_of_a_step_are_counted(policy: Any, most: float) -> None:
    net, x = Encoder().cuda(), torch.randn(8, 128, 256, device="cuda", requires_grad=True)
    cost = checkpointing_cost(net, lambda: net(x), policy=policy)
    assert cost.recomputed.saved_bytes <= 0.6 * cost.without.saved_bytes
    assert cost.recomputed.flops <= (1 + most) * cost.without.flops
