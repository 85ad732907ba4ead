"""Modules kept in float32 with compiled and recomputed ones, loss scaling, ranks, and a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from mixed_precision import BF16, Dtypes, autocast, net
from models import Classifier, images, trainer
from ranks import TORCHRUN, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_perf.callbacks import Compile, KeepInFP32
from lightning_perf.callbacks.keep_in_fp32 import keep_in_fp32


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_graph_break(backend: str) -> None:
    model, x = net(), torch.randn(4, 3, 8, 8)
    torch._dynamo.reset()
    with keep_in_fp32(model, ["LayerNorm", "Softmax"]) as kept, autocast():
        expected = model(x)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        counted = torch._dynamo.testing.CompileCounterWithBackend(backend)
        compiled = torch.compile(model, backend=counted, fullgraph=True)
        for _ in range(3):
            output = compiled(x)
            output.sum().backward()
        assert counted.frame_count == 1
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, expected)
        assert all(forward.ran for forward in kept.values())


def test_compiled_with_containers_among_the_arguments() -> None:
    class Takes(nn.Module):
        def forward(self, parts: Any, *, more: Any) -> Tensor:
            return parts["a"][0] + more[0]

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.takes = Takes()

        def forward(self, x: Tensor) -> Tensor:
            return self.takes({"a": [x.bfloat16()]}, more=(x.bfloat16(),))

    model = Gives()
    with keep_in_fp32(model, "Takes"), autocast():
        output = torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2))
    assert output.dtype == torch.float32


@pytest.mark.parametrize("order", [1, -1])
def test_with_compile_in_a_run(order: int) -> None:
    def losses(items: list[Callback]) -> list[float]:
        module = Classifier(net())
        trainer(callbacks=items, max_epochs=2, **BF16).fit(module, images())
        return module.losses

    both = [KeepInFP32("LayerNorm"), Compile(["net"], backend="aot_eager")][::order]
    assert losses(both) == pytest.approx(losses([KeepInFP32("LayerNorm")]), rel=1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_in_backward(reentrant: bool) -> None:
    def gradient(recompute: bool) -> Tensor:
        model = net()
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with keep_in_fp32(model, ["LayerNorm", "Softmax"]), autocast():
            output = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
            output.square().sum().backward()
        return model[2].weight.grad

    assert torch.equal(gradient(True), gradient(False))


def test_with_a_loss_scaler() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    module = Classifier(net())
    norm = Dtypes(module.net[2])
    run = trainer(callbacks=[KeepInFP32("LayerNorm")], plugins=[plugin], max_epochs=2)
    run.fit(module, images())
    assert set(norm.seen) == {(torch.float16, torch.float32)}
    assert all(torch.isfinite(torch.tensor(module.losses)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    model, x = net().cuda(), torch.randn(4, 3, 8, 8, device="cuda")
    linear = Dtypes(model[3])
    for names, expected in ((["Softmax"], dtype), (["3"], torch.float32)):
        with keep_in_fp32(model, names), torch.autocast("cuda", dtype):
            model(x).square().sum().backward()
        assert linear.seen[-1][1] == expected
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    script = """
from lightning_perf.callbacks import KeepInFP32
from models import Classifier, images, trainer
from test_keep_in_fp32_with_others import Dtypes, net
import torch

if __name__ == "__main__":
    module = Classifier(net())
    norm = Dtypes(module.net[2])
    run = trainer(
        callbacks=[KeepInFP32("LayerNorm")], strategy="ddp", devices=2, precision="bf16-mixed"
    )
    run.fit(module, images())
    assert set(norm.seen) == {(torch.bfloat16, torch.float32)}
    print(f"rank {run.global_rank} kept it", flush=True)
"""
    output = run_ranks(script, tmp_path, launcher=TORCHRUN)
    assert "rank 0 kept it" in output
    assert "rank 1 kept it" in output
