"""Communication hooks with NCCL. One GPU allows one rank: averaging is tried, not sending."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from models import Classifier, conv_net, images, trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_perf import NoEffectWarning
from lightning_perf.strategies import PerfDDPStrategy
from lightning_perf.strategies.comm_hooks import BF16Hook, FP16Hook, OneBitHook, PowerSGDHook

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HOOKS = [
    FP16Hook,
    BF16Hook,
    lambda: PowerSGDHook(4, start_iter=2),
    lambda: OneBitHook(start_iter=2),
]


@pytest.fixture
def one_nccl_rank() -> Iterator[None]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


def losses(ddp: DistributedDataParallel, steps: int = 40) -> list[float]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step % 4)
        x = torch.randn(16, 3, 8, 8, generator=generator).cuda()
        y = torch.randint(4, (16,), generator=generator).cuda()
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.usefixtures("one_nccl_rank")
@pytest.mark.parametrize("make", HOOKS, ids=["fp16", "bf16", "powersgd", "onebit"])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_a_hook_learns_on_a_gpu(make, memory: torch.memory_format) -> None:
    torch.manual_seed(1)
    net = conv_net().cuda().to(memory_format=memory)
    plain = losses(DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=0.001))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
    hook = make()
    hook.register(ddp)
    found = losses(ddp)
    assert hook.traffic.steps == 40
    assert found[-1] < 0.7 * found[0]
    assert abs(sum(found[-4:]) - sum(plain[-4:])) / 4 < 0.15


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_the_strategy_trains_on_one_gpu(precision: str) -> None:
    run = trainer(accelerator="cuda", strategy=PerfDDPStrategy("bf16"), precision=precision)
    module = Classifier(conv_net())
    try:
        with pytest.warns(NoEffectWarning, match="one process"):
            run.fit(module, images())
    finally:
        dist.destroy_process_group()
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    assert len(module.losses) == 4
