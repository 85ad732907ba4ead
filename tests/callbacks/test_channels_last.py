from __future__ import annotations

import copy
import logging
import socket
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from models import Classifier, conv_net, images, mlp, trainer
from ranks import run_ranks
from torch import Tensor, nn

from lightning_perf import NoEffectWarning
from lightning_perf._batches import map_tensors
from lightning_perf._item import statuses
from lightning_perf.callbacks import ChannelsLast
from lightning_perf.callbacks.channels_last import (
    batch_to_channels_last,
    channels_last,
    match_optimizer_state,
    same_layout,
)

NHWC = torch.channels_last
Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Plain:
    image: Tensor


@dataclass(frozen=True)
class Frozen:
    image: Tensor
    name: str = "x"


@dataclass(frozen=True, slots=True)
class Slots:
    image: Tensor


class Movable:
    """A batch object as users write them: it can be moved, and holds tensors."""

    def __init__(self, image: Tensor) -> None:
        self.image = image
        self.parts = [image]
        self.me = self

    def to(self, device: Any) -> Movable:
        return self


class MyList(list):
    pass


class Loader:
    """Hands out the same batch objects in each epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def image(channels: int = 3, size: int = 4) -> Tensor:
    return torch.randn(2, channels, size, size)


def is_nhwc(tensor: Tensor) -> bool:
    c, h, w = tensor.shape[1:]
    return tensor.stride() == (c * h * w, 1, c * w, c)


# --- nested batches


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda t: t, lambda b: b),
        (lambda t: {"a": t}, lambda b: b["a"]),
        (lambda t: OrderedDict(a=t), lambda b: b["a"]),
        (lambda t: UserDict(a=t), lambda b: b["a"]),
        (lambda t: MappingProxyType({"a": t}), lambda b: b["a"]),
        (lambda t: [t, 1], lambda b: b[0]),
        (lambda t: MyList([t]), lambda b: b[0]),
        (lambda t: (t, "s"), lambda b: b[0]),
        (lambda t: Pair(t, None), lambda b: b.image),
        (lambda t: Plain(t), lambda b: b.image),
        (lambda t: Frozen(t), lambda b: b.image),
        (lambda t: Slots(t), lambda b: b.image),
        (lambda t: Movable(t), lambda b: b.image),
        (lambda t: Movable(t), lambda b: b.parts[0]),
        (lambda t: {"a": [(Frozen(t),)]}, lambda b: b["a"][0][0].image),
    ],
)
def test_a_nested_batch_is_converted_and_keeps_its_type(wrap, unwrap) -> None:
    tensor = image()
    batch = wrap(tensor)
    if isinstance(batch, MappingProxyType):
        converted = map_tensors(batch, lambda t: t.contiguous(memory_format=NHWC))
        assert is_nhwc(converted["a"])
        return
    converted = batch_to_channels_last(batch)
    assert type(converted) is type(batch)
    assert is_nhwc(unwrap(converted))
    assert torch.equal(unwrap(converted), tensor)
    # A loader may hand out the same object again.
    assert unwrap(batch) is tensor
    assert tensor.is_contiguous()


def test_a_batch_in_which_nothing_changes_is_returned_as_it_is() -> None:
    batch = {"a": [torch.zeros(3), (torch.zeros(2, 2, 2), "text")], "b": Movable(torch.zeros(1))}
    assert batch_to_channels_last(batch) is batch


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 5, 6])
def test_other_ranks_are_left_alone(rank: int) -> None:
    tensor = torch.randn([2] * rank)
    assert batch_to_channels_last(tensor) is tensor


def test_volumes_are_converted_on_request() -> None:
    volume = torch.randn(2, 3, 4, 4, 4)
    converted = batch_to_channels_last(volume, volumes=True)
    assert (
        converted.stride()
        == torch.empty_like(volume, memory_format=torch.channels_last_3d).stride()
    )
    assert torch.equal(converted, volume)


def test_tensors_without_strides_are_left_alone() -> None:
    sparse = torch.ones(2, 2, 2, 2).to_sparse()
    nested = torch.nested.nested_tensor(
        [torch.ones(2, 2, 2), torch.ones(1, 2, 2)], layout=torch.jagged
    )
    assert nested.dim() == 4
    assert batch_to_channels_last(sparse) is sparse
    assert batch_to_channels_last(nested) is nested


@pytest.mark.parametrize(
    "tensor",
    [
        image(1),
        image(3, 1),
        image(1, 1),
        image()[:, :2],
        image(4, 8).contiguous(memory_format=NHWC)[:, :, ::2, ::2],
        torch.randn(2, 1, 1, 1).expand(2, 3, 4, 4),
        torch.empty(0, 3, 4, 4),
        torch.randint(0, 9, (2, 3, 4, 4)),
    ],
    ids=[
        "one channel",
        "one pixel",
        "one number",
        "slice",
        "step",
        "expanded",
        "empty",
        "integers",
    ],
)
def test_any_four_dimensional_tensor_gets_the_strides_of_nhwc(tensor: Tensor) -> None:
    converted = batch_to_channels_last(tensor)
    assert is_nhwc(converted)
    assert torch.equal(converted, tensor)


def test_subclasses_of_tensors_keep_their_type() -> None:
    from torchvision import tv_tensors

    converted = batch_to_channels_last(tv_tensors.Image(image()))
    assert type(converted) is tv_tensors.Image
    assert is_nhwc(converted)


# --- the function


class Mixed(nn.Module):
    """Convolutions of all dimensions, grouped and 1x1 ones, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(3, 3, 3)
        self.two = nn.Conv2d(3, 4, 3)
        self.point = nn.Conv2d(4, 4, 1)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.up = nn.ConvTranspose2d(4, 2, 2)
        self.three = nn.Conv3d(2, 2, 1)
        self.tied = nn.Conv2d(4, 4, 1)
        self.tied.weight = self.point.weight
        self.linear = nn.Linear(2, 2)
        self.position = nn.Parameter(torch.randn(1, 2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.point(self.two(x)))
        x = self.up(self.depthwise(x))
        x = self.three(x.unsqueeze(2)).squeeze(2)
        return self.linear(
            self.one(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1)[:, :3, None].expand(-1, -1, 4))
        )


def test_mixed_models_convert_what_can_be() -> None:
    model = Mixed()
    before = {name: p.stride() for name, p in model.named_parameters()}
    objects = [id(p) for p in model.parameters()]
    keys = list(model.state_dict())
    x = torch.randn(2, 3, 12, 12)
    expected = model(x)
    with channels_last(model) as convert:
        strides = {name: p.stride() for name, p in model.named_parameters()}
        changed = {name for name in strides if strides[name] != before[name]}
        assert changed == {"two.weight", "point.weight", "depthwise.weight", "up.weight"}
        assert all(is_nhwc(model.get_parameter(name)) for name in changed)
        assert list(model.state_dict()) == keys
        out = model(convert(x))
        out.sum().backward()
        torch.testing.assert_close(out, expected)
    assert {name: p.stride() for name, p in model.named_parameters()} == before
    assert [id(p) for p in model.parameters()] == objects
    assert all(same_layout(p.grad, p) for p in model.parameters() if p.grad is not None)
    assert torch.equal(model(x), expected)


def test_volume_weights_are_converted_on_request() -> None:
    model = nn.Conv3d(2, 4, 3)
    with pytest.raises(ValueError, match=r"no 2-D convolution.*volumes=True"):
        channels_last(model).__enter__()
    with channels_last(model, volumes=True):
        assert model.weight.is_contiguous(memory_format=torch.channels_last_3d)
        assert not model.weight.is_contiguous()
    assert model.weight.is_contiguous()


def test_a_model_already_in_nhwc_keeps_its_format() -> None:
    model = conv_net().to(memory_format=NHWC)
    before = {name: p.stride() for name, p in model.named_parameters()}
    with channels_last(model):
        pass
    assert {name: p.stride() for name, p in model.named_parameters()} == before


def test_lazy_and_reparametrized_convolutions_work() -> None:
    model = nn.Sequential(
        nn.LazyConv2d(4, 3),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)),
    )
    keys = list(model.state_dict())
    x = torch.randn(2, 3, 9, 9)
    with channels_last(model) as convert:
        assert is_nhwc(model[1].parametrizations.weight.original1)
        model(convert(x))
        model.eval()
        out = model(convert(x))
    torch.testing.assert_close(model(x), out)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("fused", [True, False])
def test_optimizer_state_of_another_format_is_followed(fused: bool) -> None:
    """Fused CPU kernels ignore strides: without this their updates are wrong."""

    def train(convert: bool, restore: dict | None, steps: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3)
        x = torch.randn(2, 3, 8, 8)
        if convert:
            model.weight.data = model.weight.data.contiguous(memory_format=NHWC)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        if restore is not None:
            optimizer.load_state_dict(copy.deepcopy(restore))
            match_optimizer_state(optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return model, optimizer

    _, optimizer = train(False, None, 3)
    expected, _ = train(False, optimizer.state_dict(), 2)
    model, _ = train(True, optimizer.state_dict(), 2)
    torch.testing.assert_close(
        model.weight.detach(), expected.weight.detach(), rtol=1e-4, atol=1e-5
    )


# --- the item


class Recorder(Classifier):
    """Trains on a nested batch and notes the format of all images it sees, by step."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.formats: dict[str, list[bool]] = {}

    def note(self, step: str, batch: Any) -> Any:
        self.formats.setdefault(step, []).append(
            is_nhwc(batch["in"][0].image) and is_nhwc(batch["object"].image)
        )
        return batch["in"][0].image, batch["labels"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(self.note("train", batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validate" if self.trainer.state.fn == "validate" else "fit", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(self.note("predict", batch)[0])


def nested_batches() -> Loader:
    return Loader(
        [
            {
                "in": [Plain(x)],
                "object": Movable(x.clone()),
                "labels": y,
                "rank 3": torch.zeros(2, 3, 4),
                "rank 5": torch.zeros(1, 2, 3, 4, 5),
                "ragged": [torch.zeros(3), None, "text"],
            }
            for x, y in images()
        ]
    )


def test_every_batch_of_every_loop_is_converted() -> None:
    module = Recorder()
    batches = nested_batches()
    run = trainer(callbacks=[ChannelsLast()])
    run.fit(module, batches, batches)
    run.validate(module, batches, verbose=False)
    run.test(module, batches, verbose=False)
    run.predict(module, batches)
    assert {step: all(seen) for step, seen in module.formats.items()} == {
        "fit": True,
        "train": True,
        "validate": True,
        "test": True,
        "predict": True,
    }
    assert len(module.formats["train"]) == 4
    assert all(batch["in"][0].image.is_contiguous() for batch in batches.batches)


@pytest.mark.parametrize("rank", [3, 5])
def test_batches_of_other_ranks_train(rank: int) -> None:
    class Reshape(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(-1, 3, 8, 8)

    shape = (4, 3, 64) if rank == 3 else (4, 1, 3, 8, 8)
    batches = Loader([(x.reshape(shape), y) for x, y in images()])
    plain = Classifier(nn.Sequential(Reshape(), conv_net()))
    item = Classifier(nn.Sequential(Reshape(), conv_net()))
    item.load_state_dict(plain.state_dict())
    trainer().fit(plain, batches)
    trainer(callbacks=[ChannelsLast()]).fit(item, batches)
    assert item.losses == pytest.approx(plain.losses, rel=1e-4)


def test_a_model_without_convolutions_is_named() -> None:
    with pytest.warns(NoEffectWarning, match=r"Classifier has no 2-D convolution.*Remove"):
        trainer(callbacks=[ChannelsLast()]).fit(Classifier(mlp()), images())


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_it_stands_aside_for_dataloader_iter_steps() -> None:
    class Iterates(Classifier):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    run = trainer(callbacks=[ChannelsLast(strict=False)], max_steps=2)
    run.fit(Iterates(), images())
    assert "dataloader_iter" in statuses(run)[0].text


def test_it_stands_aside_for_sharding_strategies() -> None:
    run = trainer()
    run.strategy.__class__ = type(
        "ShardingStrategy", (type(run.strategy),), {"restore_checkpoint_after_setup": True}
    )
    assert "ShardingStrategy shards" in ChannelsLast().why_not(run, Classifier())


class Formats(Callback):
    """Notes the hooks on convolutions while training runs."""

    def __init__(self) -> None:
        self.hooks: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.hooks.append(sum(len(m._forward_hooks) for m in pl_module.modules()))


class Grey(nn.Module):
    """Its output, one channel, has strides of both formats."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).contiguous(memory_format=torch.contiguous_format)


class Permute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "ChannelsLast: " in r.message]


def test_layers_that_fell_back_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        Permute(),
        nn.Conv2d(8, 8, 3),
        nn.Conv2d(8, 8, 1),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    formats = Formats()
    with caplog.at_level(logging.INFO):
        trainer(callbacks=[ChannelsLast(), formats]).fit(Classifier(net), images())
    (message,) = messages(caplog)
    assert "1 of 3 convolutions" in message
    assert "net.2" in message
    assert "net.0" not in message
    assert formats.hooks == [3, 0, 0, 0]


@pytest.mark.parametrize("channels", [1, 3])
def test_ambiguous_strides_raise_no_alarm(channels: int, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(
        nn.Conv2d(channels, 8, 3), nn.Conv2d(8, 1, 1), Grey(), nn.Conv2d(1, 8, 3),
        nn.Conv2d(8, 8, 3, groups=8), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1),
        nn.Conv2d(4, 4, 1), nn.Flatten(),
    )  # fmt: skip
    seen: list[bool] = []
    for layer in [layer for layer in net if isinstance(layer, nn.Conv2d)][:4]:
        layer.register_forward_hook(lambda m, a, out: seen.append(is_nhwc(out)))
    batches = Loader([(x[:, :channels].contiguous(), y) for x, y in images()])
    with caplog.at_level(logging.INFO):
        trainer(callbacks=[ChannelsLast()]).fit(Classifier(net), batches)
    assert messages(caplog) == []
    assert len(seen) == 16
    assert all(seen)


def test_watching_does_not_recompile_a_compiled_model() -> None:
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    class Compiled(Callback):
        def on_fit_start(self, trainer, pl_module) -> None:
            pl_module.net.compile(backend=backend)

    torch._dynamo.reset()
    trainer(callbacks=[ChannelsLast(), Compiled()]).fit(Classifier(), images())
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("saved_with_it", [True, False])
@pytest.mark.parametrize("loaded_with_it", [True, False])
def test_momentum_survives_every_way_of_saving_and_loading(
    saved_with_it: bool, loaded_with_it: bool, fused: bool, tmp_path
) -> None:
    class Momentum(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01, fused=fused)

    class Save(Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    def items(wanted: bool) -> list[Callback]:
        return [ChannelsLast()] if wanted else []

    straight, resumed = Momentum(), Momentum()
    start = {k: v.clone() for k, v in straight.state_dict().items()}
    trainer(max_epochs=2).fit(straight, images())
    first = Momentum()
    first.load_state_dict(start)
    trainer(callbacks=[*items(saved_with_it), Save()]).fit(first, images())
    saved = torch.load(tmp_path / "0.ckpt", weights_only=True)
    for state in saved["optimizer_states"][0]["state"].values():
        assert state["exp_avg"].is_contiguous()
    trainer(callbacks=items(loaded_with_it), max_epochs=2).fit(
        resumed, images(), ckpt_path=tmp_path / "0.ckpt"
    )
    assert resumed.losses == pytest.approx(straight.losses[4:], rel=1e-4)


def test_optimizer_and_gradients_follow_after_an_error() -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            raise KeyError("stop")

    module = Classifier()
    run = trainer(callbacks=[ChannelsLast(), Stop()])
    with pytest.raises(KeyError, match="stop"):
        run.fit(module, images())
    for parameter, state in run.optimizers[0].state.items():
        assert parameter.is_contiguous()
        assert parameter.grad.stride() == parameter.stride()
        assert state["momentum_buffer"].stride() == parameter.stride()


def test_precisions_keep_the_format() -> None:
    class Check(Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            weight = pl_module.net[3].weight
            self.seen = (weight.dtype, is_nhwc(weight))

    for precision, dtype in {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}.items():
        check = Check()
        trainer(callbacks=[ChannelsLast(), check], precision=precision).fit(Classifier(), images())
        assert check.seen == (dtype, True)


# --- DDP


def pointwise_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 1),
        nn.Conv2d(16, 4, 1, stride=2), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Flatten(),
    )  # fmt: skip


class BatchesOnly(Callback):
    """Half of the work by hand: NHWC batches, weights as they were."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        batch[0] = batch[0].contiguous(memory_format=NHWC)


def fit_under_ddp(item: Callback, *, rank: int = 0, devices: int = 1) -> tuple[list[str], Any]:
    """Fit as one rank of a gloo group; return DDP's complaints about strides, and losses."""

    class Environment(LightningEnvironment):
        creates_processes_externally = True

    environment = Environment()
    environment.set_world_size(devices)
    environment.set_global_rank(rank)
    strategy = DDPStrategy(cluster_environment=environment, process_group_backend="gloo")
    module = Classifier(pointwise_net())
    once = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(callbacks=[item], devices=devices, strategy=strategy).fit(module, images())
    finally:
        torch.set_warn_always(once)
        torch.distributed.destroy_process_group()
    return [str(w.message) for w in caught if "strides" in str(w.message)], module.losses


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("item", "complains"), [(ChannelsLast(), False), (BatchesOnly(), True)], ids=["item", "control"]
)
def test_ddp_does_not_complain_about_strides(
    item: Callback, complains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ddp_environment(free_port(), rank=0, devices=1).items():
        monkeypatch.setenv(name, value)
    complaints, losses = fit_under_ddp(item)
    assert bool(complaints) is complains, complaints
    assert len(losses) == 4


def ddp_environment(port: str, *, rank: int, devices: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",  # else Lightning sets it, for good
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(devices),
    }


_TWO_RANKS = """
import sys

import torch
from models import Classifier, images, trainer
from test_channels_last import pointwise_net

from lightning_perf.callbacks import ChannelsLast

if __name__ == "__main__":
    torch.set_warn_always(True)
    module = Classifier(pointwise_net())
    run = trainer(callbacks=[ChannelsLast()], devices=2, strategy="ddp")
    run.fit(module, images())
    sys.stdout.write(f"rank {run.global_rank}: {len(module.losses)} steps\\n")
"""


@pytest.mark.slow
def test_two_processes_train_without_a_complaint(tmp_path: Path) -> None:
    output = run_ranks(_TWO_RANKS, tmp_path, environ={"OMP_NUM_THREADS": "1"})
    assert "rank 0: 2 steps" in output
    assert "rank 1: 2 steps" in output
    assert "strides" not in output
