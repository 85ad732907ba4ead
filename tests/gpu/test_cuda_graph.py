"""Training from CUDA graphs on a CUDA device: losses, launches, memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graph_runs import Steps
from lightning.pytorch import Callback
from models import conv_net, mlp, trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf.callbacks import CUDAGraph, FusedOptimizer
from lightning_perf.callbacks.cuda_graph import cuda_graphed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

both_scopes = pytest.mark.parametrize("scope", ["network", "step"])


class Tokens(nn.Module):
    """A small transformer on the rows of the images."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(x.flatten(1).view(len(x), 8, 24)).mean(1))


def convolutions() -> nn.Module:
    return nn.Sequential(*conv_net()[:-1], nn.Dropout(0.2), nn.Linear(8, 4))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (mlp, "32-true"),
    "convolutions with BatchNorm and dropout": (convolutions, "32-true"),
    "transformer in bf16": (Tokens, "bf16-mixed"),
    "transformer in fp16": (Tokens, "16-mixed"),
}


class Look(Callback):
    """Keeps losses on the device, and how much memory is in use after each step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.memory: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(outputs["loss"])
        self.memory.append(torch.cuda.memory_allocated())


def data(samples: int = 404, batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(samples, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size, pin_memory=True)


def fit(module: Any, *callbacks: Callback, **kwargs: Any) -> Look:
    look = Look()
    torch.manual_seed(3)
    arguments = {"accelerator": "cuda", "max_epochs": 2, **kwargs}
    trainer(**arguments, callbacks=[*callbacks, look]).fit(module, data(), data(32))
    return look


def twins(make: Callable[[], nn.Module], scope: str, **kwargs: Any) -> tuple[Look, Look]:
    torch.manual_seed(2)
    module = Steps(make())
    other = copy.deepcopy(module)
    return fit(module, **kwargs), fit(other, CUDAGraph(scope, strict=True), **kwargs)


@both_scopes
@pytest.mark.parametrize("name", NETWORKS)
def test_a_hundred_losses_are_those_of_eager_training(scope: str, name: str) -> None:
    make, precision = NETWORKS[name]
    stock, item = twins(make, scope, precision=precision)

    losses, expected = torch.stack(item.losses), torch.stack(stock.losses)
    assert len(losses) == 102
    tolerance = 1e-4 if precision == "32-true" else 2e-2
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)


@both_scopes
@pytest.mark.parametrize(
    "kwargs",
    [
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"val_check_interval": 7, "accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_accumulation_clipping_and_validation_in_the_epoch(scope: str, kwargs: Any) -> None:
    stock, item = twins(convolutions, scope, **kwargs)

    torch.testing.assert_close(
        torch.stack(item.losses), torch.stack(stock.losses), rtol=1e-4, atol=1e-4
    )


@both_scopes
def test_memory_stays_flat(scope: str) -> None:
    _, item = twins(convolutions, scope)

    # The last batch of an epoch is short, and runs eagerly.
    assert max(item.memory[60:100]) <= max(item.memory[10:50])


def launches(net: nn.Module, x: Tensor, steps: int = 5) -> float:
    """Return how often the host starts work on the device in one step."""
    for _ in range(steps):
        net(x).sum().backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            net(x).sum().backward()
        torch.cuda.synchronize()
    starts = ("cudaLaunchKernel", "cudaGraphLaunch", "cuLaunchKernel", "cudaLaunchKernelExC")
    return sum(e.count for e in profiler.key_averages() if e.key in starts) / steps


def test_a_step_launches_a_few_graphs_instead_of_many_kernels() -> None:
    net = nn.Sequential(*itertools.chain(*((nn.Linear(32, 32), nn.ReLU()) for _ in range(20))))
    net, x = net.cuda(), torch.randn(4, 32, device="cuda")
    for parameter in net.parameters():
        parameter.grad = None
    eager = launches(net, x)
    net.zero_grad()
    with cuda_graphed(net, strict=True):
        graphed = launches(net, x)

    assert eager > 100
    # Gradients are added one by one where there are some already: 40 parameters.
    assert graphed < eager - 60


class Steady(Steps):
    """Logs nothing, so that what is launched is the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)[0]


class Profiled(Callback):
    """Counts launches from the 20th batch to the 30th."""

    def __init__(self) -> None:
        self.launches = 0.0
        self._profiler: Any = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 20:
            torch.cuda.synchronize()
            self._profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profiler.__enter__()
        if batch_idx == 30:
            torch.cuda.synchronize()
            self._profiler.__exit__(None, None, None)
            starts = ("cudaLaunchKernel", "cudaGraphLaunch", "cuLaunchKernel")
            averages = self._profiler.key_averages()
            self.launches = sum(e.count for e in averages if e.key in starts) / 10


@both_scopes
def test_a_training_step_launches_less(scope: str) -> None:
    def deep() -> nn.Module:
        layers = itertools.chain(*((nn.Linear(192, 192), nn.ReLU()) for _ in range(20)))
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(192, 4))

    counts = []
    for items in ([], [CUDAGraph(scope, strict=True)]):
        torch.manual_seed(0)
        fit(Steady(deep()), FusedOptimizer(), *items, look := Profiled(), max_epochs=1)
        counts.append(look.launches)

    assert counts[1] < counts[0] / 2


class Broken(nn.Sequential):
    """Waits for the device in a way that nothing but the capture notices."""

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return super().forward(x)


@both_scopes
@pytest.mark.filterwarnings("ignore:CUDAGraph")
def test_a_capture_that_fails_leaves_the_device_usable(scope: str) -> None:
    torch.manual_seed(2)
    module = Steps(Broken(*mlp()))
    other = copy.deepcopy(module)
    stream = torch.cuda.current_stream()
    stock, item = fit(module), fit(other, CUDAGraph(scope))

    assert torch.cuda.current_stream() == stream
    torch.testing.assert_close(
        torch.stack(item.losses), torch.stack(stock.losses), rtol=1e-5, atol=1e-6
    )


@pytest.fixture
def memory() -> Iterator[None]:
    """Fail a test whose graphs keep memory."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.usefixtures("memory")
def test_graphs_give_their_memory_back() -> None:
    net = convolutions().cuda()
    with cuda_graphed(net, strict=True):
        for _ in range(6):
            net(torch.randn(256, 3, 8, 8, device="cuda")).sum().backward()
    del net
