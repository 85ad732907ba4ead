"""Networks compute, learn and save the same without the biases that a norm subtracts."""

from __future__ import annotations

import copy
import pickle
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from conv_norm_nets import (
    ONE_PAIR,
    PARAMETRIZED,
    SAME_FOR_ALL,
    Case,
    CheckpointedInstances,
    CheckpointedLonger,
    LoopsOverBlock,
    Net,
    Residual,
    batch,
    chain,
    evaluating,
    frozen,
    randomized,
    shared_bias,
    total,
)
from torch import Tensor, nn

from lightning_perf.callbacks.drop_conv_bias import needless_biases, without_conv_bias

VOLUME, LINE = (2, 3, 4, 4, 4), (4, 3, 8)
KINDS = {
    "1-D": Case(chain(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), ONE_PAIR, shape=LINE),
    "2-D": Case(chain(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)), ONE_PAIR),
    "3-D": Case(chain(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4)), ONE_PAIR, shape=VOLUME),
    "transposed 1-D": Case(
        chain(nn.ConvTranspose1d(3, 4, 3), nn.BatchNorm1d(4)), ONE_PAIR, shape=LINE
    ),
    "transposed 2-D": Case(
        chain(nn.ConvTranspose2d(3, 6, 3, stride=2, output_padding=1, groups=3), nn.BatchNorm2d(6)),
        ONE_PAIR,
    ),
    "transposed 3-D": Case(
        chain(nn.ConvTranspose3d(3, 4, 2), nn.BatchNorm3d(4)), ONE_PAIR, shape=VOLUME
    ),
    "padded": Case(
        chain(nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), nn.BatchNorm2d(4)), ONE_PAIR
    ),
    "grouped": Case(chain(nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6)), ONE_PAIR),
    "no affine": Case(chain(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)), ONE_PAIR),
    "cumulative mean": Case(chain(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=None)), ONE_PAIR),
    "only the last mean": Case(
        chain(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=1.0)), ONE_PAIR
    ),
    "no statistics": Case(
        chain(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)), ONE_PAIR
    ),
    "synchronized": Case(chain(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4)), ONE_PAIR),
    "per instance": Case(chain(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4)), ONE_PAIR),
    "per instance, with statistics": Case(
        chain(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
        ONE_PAIR,
        shape=LINE,
    ),
    "groups of one": Case(chain(nn.Conv2d(3, 4, 1), nn.GroupNorm(4, 4)), ONE_PAIR),
    "groups of two": Case(
        chain(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)), {}, {"conv": "several channels each"}
    ),
    "one group": Case(
        chain(nn.Conv2d(3, 4, 1), nn.GroupNorm(1, 4)), {}, {"conv": "several channels each"}
    ),
    "over all": Case(
        chain(nn.Conv2d(3, 4, 1), nn.LayerNorm([4, 6, 6])), {}, {"conv": "no norm|has a norm"}
    ),
    "local": Case(chain(nn.Conv2d(3, 4, 1), nn.LocalResponseNorm(2)), {}, {"conv": "has a norm"}),
    "per instance, checkpointed": Case(CheckpointedInstances, {"block.conv": "block.norm"}),
    "checkpointed, longer": Case(
        lambda: CheckpointedLonger(nn.BatchNorm2d(3, momentum=None)),
        {"block.0.conv": "block.0.norm"},
    ),
    "per instance, checkpointed, longer": Case(
        lambda: CheckpointedLonger(nn.InstanceNorm2d(3, track_running_stats=True)),
        {"block.0.conv": "block.0.norm"},
    ),
    "frozen": Case(frozen, ONE_PAIR),
    "one evaluating": Case(
        evaluating, {"0.conv": "0.norm"}, {"1.conv": "its norm '1.norm': it is in evaluation mode"}
    ),
    "shared bias": Case(shared_bias, {}, {"0.conv": "its bias is shared", "1": "bias is shared"}),
}
# The norm takes channels for samples and positions for channels, and the bias is needed.
UNBATCHED = Case(chain(nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4)), ONE_PAIR, shape=(3, 4))
CASES = {**KINDS, **SAME_FOR_ALL, **PARAMETRIZED, "unbatched": UNBATCHED}


@contextmanager
def dropped(net: nn.Module) -> Iterator[None]:
    """Leave out what can go."""
    with without_conv_bias(net) if needless_biases(net).pairs else nullcontext():
        yield


def step(net: nn.Module, shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """Run forward and backward, update, and return all outputs and gradients but zero ones."""
    random.seed(seed)
    net.zero_grad()
    x = batch(shape, seed).requires_grad_()
    output = net(x)
    total(output).backward()
    seen = [x.grad, *(output if isinstance(output, tuple) else (output,))]
    gradients = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    largest = max([1.0, *(gradient.abs().max() for gradient in gradients.values())])
    with torch.no_grad():
        for name, gradient in gradients.items():
            net.get_parameter(name).sub_(gradient / largest, alpha=0.1)
            # What a norm cancels is zero but for rounding.
            seen += [gradient] if gradient.abs().max() > 1e-9 * largest else []
    return [tensor.detach().clone() for tensor in seen]


def evaluate(net: nn.Module, shape: tuple[int, ...]) -> list[Tensor]:
    """Run in evaluation mode and return the output."""
    random.seed(7)
    modes = [(module, module.training) for module in net.modules()]
    with torch.no_grad():
        output = net.eval()(batch(shape, 9))
    for module, training in modes:
        module.training = training
    return list(output) if isinstance(output, tuple) else [output]


def everything(
    net: nn.Module,
    shape: tuple[int, ...],
    around: Callable[[nn.Module], AbstractContextManager[Any]],
) -> list[Tensor]:
    """Train and evaluate before, during and after, and return all that comes out of it."""
    seen = step(net, shape, 0) + evaluate(net, shape)
    with around(net):
        seen += evaluate(net, shape)
        for seed in range(1, 4):
            seen += step(net, shape, seed)
        seen += evaluate(net, shape)
        seen += [value.clone() for value in net.state_dict().values()]
    seen += evaluate(net, shape) + step(net, shape, 5)
    return seen + list(net.state_dict().values())


def assert_same(one: list[Tensor], two: list[Tensor]) -> None:
    for mine, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_gradients_and_state_are_those_of_the_untouched_net(case: Case) -> None:
    net, same = randomized(case.make()), randomized(case.make())
    assert_same(
        everything(net, case.shape, dropped),
        everything(same, case.shape, lambda net: nullcontext()),
    )


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_which_norms_subtract_the_bias(case: Case) -> None:
    flow = needless_biases(case.make())
    assert {pair.layer: pair.norm for pair in flow.pairs} == case.pairs
    for name, reason in case.kept.items():
        assert re.search(reason, flow.kept[name]), flow.kept


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_the_bias_takes_no_part(case: Case) -> None:
    net = randomized(case.make())
    with dropped(net):
        net(batch(case.shape)).sum().backward()
        for name in case.pairs:
            conv = net.get_submodule(name)
            assert conv.bias.grad is None
            assert not conv.bias.requires_grad
            output = conv.forward(batch(case.shape))
            assert torch.equal(output, type(conv).forward(conv, batch(case.shape)))  # from outside


def test_a_convolution_without_bias_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    biases = []
    forward = nn.Conv2d._conv_forward

    def note(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        biases.append(bias is not None)
        return forward(self, input, weight, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", note)
    net = Net()
    with without_conv_bias(net):
        net(torch.randn(2, 3, 4, 4))
        net.eval()(torch.randn(2, 3, 4, 4))
    net.train()(torch.randn(2, 3, 4, 4))
    assert biases == [False, True, True]


# --- calls that were not traced, and changes while it acts


class Changes:
    """A change of the net in the middle, with both nets at the same state."""

    def __init__(self, change: Callable[[nn.Module], Any]) -> None:
        self.change = change

    def __call__(self, net: nn.Module, *, item: bool) -> list[Tensor]:
        shape, seen = (4, 3, 6, 6), []
        with without_conv_bias(net) if item else nullcontext():
            seen += step(net, shape, 1)
            self.change(net)
            for seed in (2, 3):
                seen += step(net, shape, seed)
            seen += evaluate(net, shape)
        seen += step(net, shape, 4)
        return seen + list(net.state_dict().values())


def load_others(net: nn.Module) -> None:
    net.load_state_dict(randomized(Net()).state_dict())


def assign_others(net: nn.Module) -> None:
    net.load_state_dict(randomized(Net()).state_dict(), assign=True)


def average(net: nn.Module) -> None:
    """Write through `data`, as averages of weights do."""
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data.copy_(tensor.data * 2)


CHANGES = {
    "norm frozen in training": lambda net: net.norm.eval(),
    "statistics off": lambda net: setattr(net.norm, "track_running_stats", False),
    "all unfrozen": lambda net: net.requires_grad_(True),
    "norm frozen for good": lambda net: net.norm.eval().requires_grad_(False),
    "state loaded": load_others,
    "state assigned": assign_others,
    "averages written": average,
    "hook on the convolution": lambda net: net.conv.register_forward_hook(lambda *args: None),
    "hook that changes its output": lambda net: net.conv.register_forward_hook(
        lambda module, args, output: output * output
    ),
    "hook on the norm": lambda net: net.norm.register_forward_pre_hook(
        lambda module, args: (args[0] * args[0],)
    ),
    "norm replaced": lambda net: setattr(net, "norm", nn.GroupNorm(1, 3).double()),
    "synchronized": nn.SyncBatchNorm.convert_sync_batchnorm,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_stays_right_when_the_net_changes_under_it(change: Any) -> None:
    net = randomized(Net())
    same = copy.deepcopy(net)
    changes = Changes(change)
    assert_same(changes(net, item=True), changes(same, item=False))


def test_layers_called_from_outside_give_and_learn_what_they_always_did() -> None:
    def train(net: nn.Module) -> list[Tensor]:
        x = batch((4, 3, 6, 6))
        (total(net(x)) + total(net.conv(x))).backward()
        net.eval()
        (total(net(x)) + total(net.conv(x)) + total(net.norm(x))).backward()
        net.train()
        return [p.grad for p in net.parameters()] + list(net.state_dict().values())

    net = randomized(Net())
    same = copy.deepcopy(net)
    with without_conv_bias(net):
        mine = train(net)
    assert_same(mine, train(same))
    assert net.conv.bias.grad.abs().max() > 1


def test_an_error_in_between_leaves_no_half_a_call() -> None:
    net = randomized(Net())
    with without_conv_bias(net), pytest.raises(ValueError, match="4D"):
        net(torch.zeros(3, 6, 6).double())
    assert not [name for m in net.modules() for name in vars(m) if name.startswith("_conv_norm")]
    assert net.conv.bias.requires_grad

    net = randomized(Net())
    same = copy.deepcopy(net)
    with without_conv_bias(net):
        net.norm.weight = nn.Parameter(torch.ones(2).double())
        with pytest.raises(RuntimeError):
            net(batch((2, 3, 4, 4)))
        net.norm.weight = same.norm.weight
        assert torch.equal(net.conv(batch((2, 3, 4, 4))), same.conv(batch((2, 3, 4, 4))))


def test_a_copy_made_inside_stands_on_its_own() -> None:
    net = randomized(Net())
    with without_conv_bias(net):
        twin = copy.deepcopy(net)
        mean = net.norm.running_mean.clone()
        twin(batch((4, 3, 6, 6)))
        assert torch.equal(net.norm.running_mean, mean)
        net(batch((4, 3, 6, 6)))
        torch.testing.assert_close(twin.norm.running_mean, net.norm.running_mean)
        assert twin.conv.forward.__self__ is twin.conv


def test_a_pickled_model_computes_as_its_classes_say() -> None:
    net = randomized(Net())
    with without_conv_bias(net):
        stored = pickle.dumps(net)
    restored = pickle.loads(stored)
    restored(batch((4, 3, 6, 6)))
    net(batch((4, 3, 6, 6)))
    torch.testing.assert_close(restored.norm.running_mean, net.norm.running_mean)


def test_compiled_blocks_share_their_code() -> None:
    from torch._dynamo.testing import CompileCounter

    def blocks() -> nn.Module:
        return randomized(nn.Sequential(*[Net() for _ in range(4)])).float()

    counter, net, same = CompileCounter(), blocks(), blocks()
    with without_conv_bias(net):
        for block in net:
            block.compile(backend=counter, fullgraph=True)
        for _ in range(3):
            x = batch((4, 3, 6, 6)).float().requires_grad_()
            torch.testing.assert_close(net(x), same(x), rtol=1e-4, atol=1e-4)
        assert counter.frame_count == 1
        for mine, theirs in zip(net.buffers(), same.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)
    torch.compiler.reset()


def test_a_compiled_model_whose_norm_is_frozen_learns_its_bias() -> None:
    net = randomized(Net()).float()
    same = copy.deepcopy(net)
    with without_conv_bias(net):
        net.norm.eval()
        net.compile(backend="eager")
        x = batch((4, 3, 6, 6)).float()
        net(x).square().sum().backward()
        same.norm.eval()
        same(x).square().sum().backward()
    torch.testing.assert_close(net.conv.bias.grad, same.conv.bias.grad)
    torch.compiler.reset()


# --- wrong uses


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no convolution with a bias. Remove DropConvBias"),
        (Residual, "Residual has no bias that only a norm after it sees: 'conv' .its output goes"),
        (lambda: Net().eval(), "its norm 'norm': it is in evaluation mode"),
    ],
)
def test_a_model_without_such_a_bias_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        without_conv_bias(make()).__enter__()


def test_it_cannot_be_entered_twice() -> None:
    net = Net()
    with without_conv_bias(net), pytest.raises(ValueError, match="its forward was replaced"):
        without_conv_bias(net).__enter__()
    assert "forward" not in vars(net)


def test_layers_taken_one_by_one_keep_their_biases_in_use() -> None:
    net = randomized(LoopsOverBlock())
    with without_conv_bias(net):
        total(net(batch((4, 3, 6, 6)))).backward()
        assert net.block[0].bias.grad is not None
