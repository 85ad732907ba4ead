"""Bytes and FLOPs: what is kept, what is computed again, and which modules it is about."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models import vision_transformer

from lightning_perf.callbacks._checkpoint.meter import Meter, Operation, Profile, worth_keeping
from lightning_perf.callbacks.activation_checkpointing import (
    CheckpointingCost,
    StepCost,
    checkpointed,
    checkpointing_cost,
)


class Encoder(nn.Module):
    """An encoder of BERT's shape."""

    def __init__(self, width: int, dropout: float, layers: int = 24, *, pre_norm: bool = False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            *(width, width // 64, 4 * width, dropout),
            activation="gelu",
            batch_first=True,
            norm_first=pre_norm,
        )
        self.embedding = nn.Embedding(100, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def cost_of(net: nn.Module, x: Tensor, **arguments: Any) -> CheckpointingCost:
    return checkpointing_cost(net, lambda: net(x).square().mean(), turns=1, **arguments)


@pytest.mark.parametrize(
    ("policy", "spared", "extra_flops"),
    [("full", 0.6, 1 / 3), ("selective", 0.4, 0.15), (0.4, 0.6, 0.15)],
)
@pytest.mark.parametrize(
    ("layers", "dropout", "pre_norm"),
    [(24, 0.1, False), (4, 0.1, True), (4, 0.0, False), (4, 0.0, True)],
)
def test_an_encoder_of_berts_shape(
    policy: Any, spared: float, extra_flops: float, layers: int, dropout: float, pre_norm: bool
) -> None:
    net = Encoder(128, dropout, layers, pre_norm=pre_norm)
    cost = cost_of(net, torch.randint(100, (2, 64)), policy=policy)
    assert cost.spared >= spared
    assert 0 <= cost.extra_flops <= extra_flops


def test_the_first_of_each_two_blocks_costs_half() -> None:
    net, x = Encoder(64, 0.0, layers=8), torch.randint(100, (2, 32))
    every, half = cost_of(net, x), cost_of(net, x, every_n=2)
    assert half.extra_flops == pytest.approx(every.extra_flops / 2, rel=1e-6)
    assert half.spared == pytest.approx(every.spared / 2, rel=0.05)


def test_bytes_are_what_autograd_holds() -> None:
    net, x, held = Encoder(64, 0.1, layers=2), torch.randint(100, (2, 32)), {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Meter() as meter:
        loss = net(x).square().mean()
    held.pop(x.untyped_storage().data_ptr())
    assert meter.alive_bytes() == sum(held.values()) + loss.nbytes


def test_a_measurement_leaves_the_model_as_it_was() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)))
    net(torch.randn(4, 8)).sum().backward()
    before = copy.deepcopy([net.state_dict(), [p.grad for p in net.parameters()]])
    x, random = torch.randn(4, 8), torch.get_rng_state()
    cost_of(net, x)
    after = [net.state_dict(), [p.grad for p in net.parameters()]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all("forward" not in vars(part) for part in net.modules())


def test_a_cost_reads_as_one_line() -> None:
    cost = CheckpointingCost(
        StepCost(3 * 2**20, 300, (1.0, 2.0, 1.0)), StepCost(2**20, 400, (1.5, 2.5, 1.2))
    )
    assert str(cost) == (
        "1.0 MiB kept for the backward pass instead of 3.0 MiB (-67%), FLOPs +33.3%, time +25%"
    )


def test_wrong_numbers_are_refused() -> None:
    net = Encoder(64, 0.0, layers=2)
    with pytest.raises(ValueError, match=r"turns=0 .* at least 1"):
        checkpointing_cost(net, lambda: net(torch.zeros(1)), turns=0)
    with pytest.raises(ValueError, match=r"policy='none' .* 'selective'"):
        checkpointing_cost(net, lambda: net(torch.zeros(1)), policy="none")
    with pytest.raises(ValueError, match=r"Linear has no repeated blocks.* Name modules or"):
        checkpointed(nn.Linear(2, 2)).__enter__()
    with pytest.raises(ValueError, match=r"every_n=0 .* at least 1"):
        checkpointed(net, every_n=0).__enter__()


# --- what is worth keeping


def profile(*operations: Operation, saved: int) -> Profile:
    return Profile(operations, saved, saved_inputs={}, inputs={})


def test_the_most_expensive_results_are_kept_first() -> None:
    cheap, dear, dearest = Operation(10, 10), Operation(50, 10), Operation(200, 20)
    assert worth_keeping(profile(cheap, dear, dearest, saved=100), 0.2) == {2}
    assert worth_keeping(profile(cheap, dear, dearest, saved=100), 0.3) == {1, 2}
    assert worth_keeping(profile(cheap, dear, dearest, saved=100), 1.0) == {0, 1, 2}
    assert worth_keeping(profile(cheap, dear, dearest, saved=5), 1.0) == frozenset()


def test_of_equals_the_larger_is_kept() -> None:
    assert worth_keeping(profile(Operation(10, 10), Operation(20, 20), saved=20), 1.0) == {1}


def test_results_that_change_or_are_no_new_memory_are_not_kept() -> None:
    changed, view = Operation(100, 10, changed=True), Operation(100, 0)
    assert worth_keeping(profile(changed, view, saved=100), 1.0) == frozenset()


def test_a_result_changed_in_place_is_noticed() -> None:
    x, layer = torch.randn(4, 8), nn.Linear(8, 8)
    with Meter() as meter:
        layer(x).relu_().add_(1)
        layer(x).relu()
        view = layer(x)[:, :4]
        view.data.mul_(2)
    assert [operation.changed for operation in meter.operations] == [True, False, True]


def test_attention_of_the_cpu_counts() -> None:
    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    with Meter() as meter:
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    forward = 2 * (2 * 2 * 16 * 16 * 8)
    assert [operation.flops for operation in meter.operations] == [forward, forward * 5 / 2]


# --- which modules


def blocks_of(net: nn.Module, *arguments: Any, **options: Any) -> list[str]:
    with checkpointed(net, *arguments, **options) as names:
        return list(names)


def test_blocks_by_class_by_name_and_by_list() -> None:
    net = Encoder(64, 0.0, layers=4)
    layers = [f"encoder.layers.{i}" for i in range(4)]
    assert blocks_of(net) == layers
    assert blocks_of(net, ["TransformerEncoderLayer"]) == layers
    assert blocks_of(net, ["encoder.layers"]) == layers
    assert blocks_of(net, ["encoder.layers.2", "head"]) == ["encoder.layers.2", "head"]
    assert blocks_of(net, every_n=3) == [layers[0], layers[3]]
    assert blocks_of(net, ["encoder", "encoder.layers.1", "MultiheadAttention"]) == ["encoder"]


def test_a_shared_block_is_taken_once() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert blocks_of(nn.ModuleList([block, block, nn.Sequential(*block)])) == ["0", "2"]


def test_the_block_in_a_compiled_wrapper_is_taken() -> None:
    net = nn.ModuleList(
        torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend="eager") for _ in range(2)
    )
    with checkpointed(net, ["OptimizedModule"]):
        net[0](torch.randn(3, 2)).sum().backward()
        assert "forward" in vars(net[0]._orig_mod)
    assert "forward" not in vars(net[0]._orig_mod)


def test_a_replaced_forward_is_left_alone() -> None:
    net = Encoder(64, 0.0, layers=2)
    replaced = net.encoder.layers[0]
    replaced.forward = replaced.forward
    assert blocks_of(net) == ["encoder.layers.1"]
    with pytest.raises(ValueError, match=r"encoder.layers.0: its `forward` was replaced"):
        blocks_of(net, ["encoder.layers.0"])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("encoder", r"'auto' or a list .* blocks=\['encoder'\]"),
        (["encoder.layer"], "Did you mean 'encoder.layers'"),
        (["TransformerLayer"], "Did you mean 'TransformerEncoderLayer'"),
    ],
)
def test_unknown_blocks_are_explained(blocks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks_of(Encoder(64, 0.0, layers=2), blocks)


# --- networks of others


def small_vit() -> nn.Module:
    return vision_transformer.VisionTransformer(32, 8, 3, 2, 32, 64, dropout=0.1, num_classes=10)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "resnet18": models.resnet18,
    "vit": small_vit,
}
SLOW_ZOO: dict[str, Any] = {
    name: (lambda name=name: models.get_model(name, weights=None))
    for name in (
        "convnext_tiny",
        "densenet121",
        "efficientnet_b0",
        "mnasnet0_5",
        "mobilenet_v2",
        "mobilenet_v3_small",
        "regnet_y_400mf",
        "resnet50",
        "resnext50_32x4d",
        "shufflenet_v2_x0_5",
        "squeezenet1_1",
        "swin_t",
        "vgg11_bn",
    )
}
# Their blocks are not in lists of one class.
NAMED = {
    "densenet121": ["_DenseLayer"],
    "mobilenet_v2": ["InvertedResidual"],
    "squeezenet1_1": ["Fire"],
    "vgg11_bn": ["features"],
}


@pytest.mark.parametrize(
    "name", [*ZOO, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_ZOO)]
)
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_networks_of_torchvision_learn_the_same(name: str, policy: str) -> None:
    torch.manual_seed(0)
    plain = {**ZOO, **SLOW_ZOO}[name]()
    recomputed = copy.deepcopy(plain)
    size = 32 if name == "vit" else 64
    x, found = torch.randn(2, 3, size, size), []
    for net in (plain, recomputed):
        torch.manual_seed(1)
        blocks = NAMED.get(name, "auto")
        with checkpointed(net, blocks, policy=policy) if net is recomputed else torch.enable_grad():
            for _ in range(2):
                out = net(x)
                loss = (out if isinstance(out, Tensor) else out.logits).square().mean()
                loss.backward()
        found.append((loss, [p.grad for p in net.parameters()], list(net.state_dict().values())))
    (loss, grads, state), (same_loss, same_grads, same_state) = found
    assert torch.equal(loss, same_loss)
    assert all(map(torch.equal, filter(_there, grads), filter(_there, same_grads)))
    assert all(map(torch.equal, state, same_state))


def _there(gradient: Tensor | None) -> bool:
    return gradient is not None


def test_a_class_is_proposed() -> None:
    with pytest.raises(ValueError, match=r"Name .* such as blocks=\['InvertedResidual'\]"):
        blocks_of(models.mobilenet_v2())


@pytest.mark.parametrize(("policy", "least"), [("full", 0.25), ("selective", 0.15)])
def test_a_network_of_convolutions_spares_memory(policy: str, least: float) -> None:
    cost = cost_of(models.resnet18(), torch.randn(2, 3, 64, 64), policy=policy)
    assert cost.spared > least
    assert cost.extra_flops < 1 / 3
