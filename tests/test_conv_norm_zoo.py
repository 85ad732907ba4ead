"""Every classification network of torchvision is right with both items, or left alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from lightning_perf.callbacks.drop_conv_bias import needless_biases, without_conv_bias
from lightning_perf.inference.fold import foldable, folded

QUICK = ["googlenet", "vgg11_bn"]
NETWORKS = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in models.list_models(module=models)
    if name != "regnet_y_128gf"  # too large to build
]
LARGEST = 30_000_000
"""Parameters of the largest network that is run; of larger ones only the flow is looked at."""
TWINS = re.compile(
    "densenet(161|169|201)|efficientnet_b[1-7]|efficientnet_v2_[ml]|mnasnet(0_75|1_0|1_3)"
    "|regnet_[xy]_(800mf|1_6gf|3_2gf)|resnet34|shufflenet_v2_x(1_0|1_5|2_0)|vgg(13|16|19)_bn"
)
"""Deeper or wider than one that is run, of the same layers: also only the flow is looked at."""
OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False},
    # Its second head needs large images; that of GoogLeNet does not.
    "inception_v3": {"init_weights": False, "aux_logits": False},
}
# Norms that do not follow a convolution: in a DenseNet most follow a concatenation.
NORMS_ELSEWHERE = {
    "densenet121": 62,
    "densenet161": 82,
    "densenet169": 86,
    "densenet201": 102,
    "maxvit_t": 11,
}


def build(name: str, device: str) -> nn.Module:
    options = OPTIONS.get(name, {})
    with torch.device(device):
        net = models.get_model(name, num_classes=5, **options)
        if isinstance(net, models.VGG):  # nine tenths of its weights are here, and no convolution
            net.classifier = nn.Linear(512 * 7 * 7, 5)
    return net


def blueprint(name: str) -> nn.Module:
    """Return the network without memory for its weights, if that is possible."""
    try:
        return build(name, "meta")
    except NotImplementedError:  # it computes its sizes with tensors
        return build(name, "cpu")


def randomized(net: nn.Module) -> nn.Module:
    """Make every number of norms and biases count, without making activations explode."""
    generator = torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(module.bias, generator=generator)
        if isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.normal_(module.bias, generator=generator)
    return net.double()


def batch(name: str) -> Tensor:
    size = 96 if name == "inception_v3" else 64
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(2)).double()


def tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [part for part in output if part is not None]


def assert_close(one: Tensor, two: Tensor, name: str) -> None:
    largest = two.abs().max().clamp(min=1e-9)
    assert (one - two).abs().max() <= 1e-7 * largest, name


@contextmanager
def seeded() -> Iterator[None]:
    """Drop the same activations and the same layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def norms(net: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in net.modules())


def is_run(name: str, net: nn.Module) -> bool:
    size = sum(parameter.numel() for parameter in net.parameters())
    return size <= LARGEST and not TWINS.fullmatch(name)


@pytest.mark.parametrize("name", NETWORKS)
def test_folded_and_separate_norms_agree(name: str) -> None:
    empty = blueprint(name)
    expected = norms(empty) - NORMS_ELSEWHERE.get(name, 0)
    if not expected or not is_run(name, empty):
        assert len(foldable(empty).pairs) == expected
        return
    net = randomized(build(name, "cpu")).eval()
    same, state = copy.deepcopy(net), copy.deepcopy(net.state_dict())
    with folded(net) as folding, torch.inference_mode():
        assert len(folding.folded) == expected
        for _ in range(2):
            assert_close(net(batch(name)), same(batch(name)), name)
        aside = [layer for layer in folding.folded if layer not in folding.verified]
        assert all(layer.lower().startswith("aux") for layer in aside)  # heads for training only
    for key, value in net.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_with_and_without_needless_biases_learn_the_same(name: str) -> None:
    """Their convolutions before norms have no bias but in VGG; here they get one."""
    empty = blueprint(name)
    assert len(needless_biases(empty).pairs) == (norms(empty) if "vgg" in name else 0)
    if not norms(empty) or not is_run(name, empty):
        return
    net = build(name, "cpu")
    pairs = foldable(net).pairs
    for pair in pairs:
        layer = net.get_submodule(pair.layer)
        layer.bias = nn.Parameter(torch.zeros(layer.out_channels))
    net = randomized(net).train()
    same = copy.deepcopy(net)
    with without_conv_bias(net) as flow:
        assert flow.pairs == pairs
        for each in (net, same):
            with seeded():
                outputs = tensors(each(batch(name)))
                sum(output.square().sum() for output in outputs).backward()
                each.outputs = [output.detach() for output in outputs]
        for mine, theirs in zip(net.outputs, same.outputs, strict=True):
            assert_close(mine, theirs, name)
        largest = max(p.grad.abs().max() for p in same.parameters() if p.grad is not None)
        biases = {f"{pair.layer}.bias" for pair in pairs}
        for (key, mine), theirs in zip(net.named_parameters(), same.parameters(), strict=True):
            if key in biases:
                assert mine.grad is None
                assert theirs.grad.abs().max() < 1e-7 * largest
            else:
                torch.testing.assert_close(
                    mine.grad, theirs.grad, rtol=1e-5, atol=1e-7 * float(largest)
                )
        for (key, mine), theirs in zip(
            net.state_dict().items(), same.state_dict().values(), strict=True
        ):
            assert_close(mine.double(), theirs.double(), key)
        with torch.inference_mode():
            assert_close(net.eval()(batch(name)), same.eval()(batch(name)), name)
    assert not [key for m in net.modules() for key in vars(m) if key.startswith("_conv_norm")]
