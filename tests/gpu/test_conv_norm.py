"""`DropConvBias` and `FuseConvBN` on a GPU: kernels that round more coarsely, and CUDA graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from lightning_perf.callbacks.drop_conv_bias import without_conv_bias
from lightning_perf.inference.fold import folded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NETWORKS = ["resnet18", "mobilenet_v2", "vgg11_bn"]


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = models.get_model(name, num_classes=10).cuda()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return net


def images() -> torch.Tensor:
    return torch.randn(8, 3, 224, 224, device="cuda")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_every_pair_passes_its_verification(name: str, tf32: bool, channels_last: bool) -> None:
    net, x = network(name).eval(), images()
    if channels_last:
        net, x = (each.to(memory_format=torch.channels_last) for each in (net, x))
    with (
        torch.backends.cudnn.flags(allow_tf32=tf32),
        torch.inference_mode(),
        folded(net) as folding,
    ):
        net(x)
        assert folding.verified == list(folding.folded)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pair_passes_its_verification_in_half_precision(
    name: str, dtype: torch.dtype
) -> None:
    net, x = network(name).eval(), images()
    with torch.inference_mode(), torch.autocast("cuda", dtype), folded(net) as folding:
        net(x)
        assert folding.verified == list(folding.folded)


def test_training_agrees_in_double_precision() -> None:
    net = network("vgg11_bn").double()
    net.classifier = nn.Linear(512 * 7 * 7, 10).cuda().double()
    same, x = copy.deepcopy(net), images()[:2].double()
    with without_conv_bias(net):
        for each in (net, same):
            each(x).square().sum().backward()
    for (name, mine), theirs in zip(net.named_parameters(), same.parameters(), strict=True):
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-8, msg=name)
    for mine, theirs in zip(net.buffers(), same.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_recorded_step_updates_the_running_mean() -> None:
    """The running mean takes the bias up inside the graph, in each replay."""

    def train(net: nn.Module, run: Any) -> None:
        for seed in range(4):
            torch.manual_seed(seed)
            run(torch.randn(4, 3, 16, 16, device="cuda")).sum().backward()

    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).cuda()
    same = copy.deepcopy(net)
    with without_conv_bias(net):
        outer = nn.Sequential(net)  # graphed callables must have no hooks; ours has none
        state = copy.deepcopy(net.state_dict())
        graphed = torch.cuda.make_graphed_callables(
            outer, (torch.randn(4, 3, 16, 16, device="cuda"),)
        )
        net.load_state_dict(state)  # as it was before the warm-up
        train(net, graphed)
    train(same, same)
    for mine, theirs in zip(net.buffers(), same.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
