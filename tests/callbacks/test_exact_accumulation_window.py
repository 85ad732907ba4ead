"""Windows in a loop of one's own, on tensors of every kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from big_batch import Big, BigTokens, rows, tokens
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_perf.callbacks import _gradient_window
from lightning_perf.callbacks.exact_accumulation import GradientWindow

EXACT = 1e-9


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def gradients(module: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.to_dense().flatten() for parameter in module.parameters()])


def accumulated(module: Big, batches: list[Any], weights: list[Any]) -> GradientWindow:
    optimizer, window = sgd(module), GradientWindow()
    for batch, weight in zip(batches, weights, strict=True):
        window.weigh(module.loss(batch), weight).backward()
    window.correct(optimizer)
    return window


@pytest.fixture(params=["read on the host", "kept on the device"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numbers are not read, a CPU stands for a GPU."""
    if request.param == "kept on the device":
        monkeypatch.setattr(_gradient_window, "_readable", lambda tensor: False)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("weights", [[4, 2, 3], [0.5, 0.25, 0.375], torch.tensor([4, 2, 3])])
def test_gradients_are_those_of_one_big_batch(weights: Any) -> None:
    data = rows([4, 2, 3])
    module, one = Big(), Big()
    window = accumulated(module, data, list(weights))
    one.together(data).backward()
    torch.testing.assert_close(gradients(module), gradients(one), rtol=EXACT, atol=1e-14)
    text = "windows corrected: 1 of 1; their micro-batches count 0.222 to 0.444 times as much"
    assert str(window.summary).startswith(text)


@pytest.mark.usefixtures("device")
def test_a_micro_batch_of_weight_zero() -> None:
    data = tokens([[3, 1], [2], [1]])
    data[1][1].fill_(-100)
    module, one = BigTokens(), BigTokens()
    accumulated(module, data, [4, 0, 1])
    one.together(data).backward()
    torch.testing.assert_close(gradients(module), gradients(one), rtol=EXACT, atol=1e-14)


@pytest.mark.usefixtures("device")
def test_a_window_of_weight_zero_gives_zero() -> None:
    module = Big()
    accumulated(module, rows([4, 4]), [0, 0])
    assert gradients(module).count_nonzero() == 0


def test_an_empty_window_changes_nothing() -> None:
    module, window = Big(), GradientWindow()
    module.loss(rows([4])[0]).backward()
    before = gradients(module)
    window.correct(sgd(module))
    assert window.empty
    assert torch.equal(gradients(module), before)
    assert str(window.summary) == "windows corrected: 0 of 0"


@pytest.mark.usefixtures("device")
def test_gradients_of_every_kind() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
            self.as_double = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.as_single = nn.Parameter(torch.ones(3))
            self.as_half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.as_complex = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, index: Tensor) -> Tensor:
            dense = self.as_double * self.as_single * self.as_half * self.as_complex.abs()
            return (self.sparse(index) * dense).mean()

    torch.manual_seed(0)
    module = Mixed()
    one = copy.deepcopy(module)
    optimizer, window = sgd(module), GradientWindow()
    indices = [torch.tensor([0, 1, 1, 5]), torch.tensor([2, 1])]
    for index in indices:
        window.weigh(module(index), len(index)).backward()
    window.correct(optimizer)
    one(torch.cat(indices)).backward()
    for mine, theirs in zip(module.parameters(), one.parameters(), strict=True):
        if mine.grad is None:
            assert theirs.grad is None
        else:
            torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense())
    assert module.sparse.weight.grad.is_sparse


def test_a_factor_keeps_its_digits_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.005 is 1.0078 in bfloat16."""
    monkeypatch.setattr(_gradient_window, "_readable", lambda tensor: False)
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    values = torch.tensor([100.0, 102, 104, 106], dtype=torch.bfloat16)
    parameter.grad = values.clone()
    factor = torch.tensor(1.005, dtype=torch.float64)
    _gradient_window.scale_gradients(torch.optim.SGD([parameter], lr=0.1), factor)
    assert torch.equal(parameter.grad, (values.float() * 1.005).bfloat16())
    assert not torch.equal(parameter.grad, values * factor.bfloat16())


def test_with_a_loss_scaler_and_clipping() -> None:
    data = rows([4, 2, 3])
    module, one, window = Big(), Big(), GradientWindow()
    optimizer, scaler = sgd(module), torch.amp.GradScaler("cpu")
    for batch in data:
        scaler.scale(window.weigh(module.loss(batch), len(batch[0]))).backward()
    window.correct(optimizer)
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.01)
    one.together(data).backward()
    assert norm == pytest.approx(gradients(one).norm().item(), rel=EXACT)


def test_with_fabric() -> None:
    fabric, data = Fabric(accelerator="cpu", devices=1), rows([4, 2, 3])
    module, one, window = Big(), Big(), GradientWindow()
    net, optimizer = fabric.setup(module.net, sgd(module.net))
    for x, y in data:
        loss = nn.functional.mse_loss(net(x), y)
        fabric.backward(window.weigh(loss, len(x)))
    window.correct(optimizer)
    one.together(data).backward()
    torch.testing.assert_close(gradients(module), gradients(one), rtol=EXACT, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_on_a_gpu_nothing_is_read_back(dtype: torch.dtype) -> None:
    data = [tuple(part.to("cuda", dtype) for part in batch) for batch in rows([4, 2, 3])]
    counts = [torch.tensor(len(x), device="cuda") for x, _ in data]
    module, one = Big().to("cuda", dtype), Big().to("cuda", dtype)
    optimizer, window = sgd(module), GradientWindow()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            optimizer.zero_grad()
            for batch, count in zip(data, counts, strict=True):
                window.weigh(module.loss(batch), count).backward()
            window.correct(optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    one.together(data).backward()
    tolerance = {torch.float64: EXACT, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(gradients(module), gradients(one), rtol=tolerance, atol=tolerance)
    assert str(window.summary).startswith("windows corrected: 2 of 2")
