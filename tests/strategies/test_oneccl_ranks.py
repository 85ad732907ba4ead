"""The backend `ccl` on several ranks: right results, an end when others end, nothing left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import TORCHRUN, run_ranks
from strategies.perf_ddp_runs import START

from lightning_perf.strategies import oneccl
from lightning_perf.strategies.oneccl._backend import SHARED_MEMORY

WHY_NOT = oneccl.why_not()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no backend 'ccl': {WHY_NOT}"),
]

THREE = (*TORCHRUN[:-1], "--nproc-per-node=3")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def segments() -> set[str]:
    return {
        path.name for path in SHARED_MEMORY.iterdir() if re.fullmatch(r"\d+:\d+:\d+", path.name)
    }


@pytest.fixture(autouse=True)
def no_shared_memory_is_left() -> Iterator[None]:
    before = segments()
    yield
    assert not segments() - before


def ran(script: str, folder: Path, launcher: tuple[str, ...] = TORCHRUN) -> str:
    """All ranks reach the end of a script that needs a process group, and oneCCL says nothing."""
    start = """
import warnings
from datetime import timedelta
import torch
import torch.distributed as dist
import lightning_perf.strategies.oneccl
from strategies.oneccl_collectives import *
warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own names change
dist.init_process_group("ccl", timeout=timedelta(seconds=60))
"""
    end = "\nprint(f'held on rank {dist.get_rank()}')\n"
    output = run_ranks(start + script + end, folder, launcher=launcher, environ=ONE_THREAD)
    ranks = 3 if launcher == THREE else 2
    assert all(f"held on rank {rank}" in output for rank in range(ranks)), output
    assert "CCL_" not in output
    return output


def test_every_collective_gives_what_it_must(tmp_path: Path) -> None:
    """The process does not destroy the group, which must end well too."""
    ran("check_all()", tmp_path)


def test_three_ranks_and_groups_that_come_and_go(tmp_path: Path) -> None:
    ran(
        """
import os
check_all()
rank = dist.get_rank()
files = len(os.listdir("/proc/self/fd"))
for round in range(5):
    # Again and again the same ranks, which share what oneCCL keeps for them.
    some = dist.new_group([0, 2])
    if rank != 1:
        tensor = torch.full((3,), float(rank + round))
        dist.all_reduce(tensor, group=some)
        same(tensor, torch.full((3,), 2.0 + 2 * round), "group", round)
        dist.destroy_process_group(some)
    if round == 0:
        files = len(os.listdir("/proc/self/fd"))
assert len(os.listdir("/proc/self/fd")) == files
for life in range(3):
    dist.destroy_process_group()
    dist.init_process_group("cpu:ccl" if life else "ccl")
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == 3
try:
    dist.barrier(group=None)
finally:
    dist.destroy_process_group()
dist.init_process_group("ccl")
""",
        tmp_path,
        THREE,
    )


def test_ddp_learns_what_it_learns_with_gloo(tmp_path: Path) -> None:
    """Many buckets, all hooks, accumulation, the search for unused parameters, static graphs."""
    script = """
def weights(backend, hook=None, samples=80, accumulate=1, **options):
    torch.manual_seed(1)
    module = Classifier(mlp())
    strategy = PerfDDPStrategy(
        hook, start_powerSGD_iter=1 if hook else None, bucket_cap_mb=0.002,
        process_group_backend=backend, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t = fit(module, strategy=strategy, samples=samples, accumulate_grad_batches=accumulate)
    assert dist.get_backend() == backend
    return torch.cat([p.detach().flatten() for p in module.parameters()]), t

if __name__ == "__main__":
    found = {}
    cases = [{}, *({"hook": h} for h in ("fp16", "bf16", "powersgd", "onebit")), {"accumulate": 3},
             {"find_unused_parameters": True}, {"static_graph": True},
             {"gradient_as_bucket_view": True}]
    for backend in ("gloo", "ccl"):
        for number, case in enumerate(cases):
            found[backend, number], t = weights(backend, **case)
        dist.destroy_process_group()
    for number, case in enumerate(cases):
        # Two numbers have one sum, whoever adds them; half precision is rounded once more by gloo.
        a, b = found["gloo", number], found["ccl", number]
        if case.get("hook") in ("fp16", "bf16"):
            assert (a - b).abs().max() < 1e-3, (case, (a - b).abs().max())
        else:
            assert torch.equal(a, b), (case, (a - b).abs().max())
    print(f"held on rank {t.global_rank}")
"""
    output = run_ranks(START + script, tmp_path, launcher=TORCHRUN, environ=ONE_THREAD)
    assert "held on rank 0" in output
    assert "held on rank 1" in output


def test_uneven_loaders_and_logged_values(tmp_path: Path) -> None:
    script = """
class Unsized:
    def __init__(self, loader):
        self.loader = loader
    def __iter__(self):
        return iter(self.loader)

class Logs(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("rank", float(self.global_rank), sync_dist=True, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

for wrap in (lambda loader: loader, Unsized):
    strategy = PerfDDPStrategy(uneven="join", process_group_backend="ccl")
    t = trainer(devices=2, strategy=strategy, max_epochs=1, use_distributed_sampler=False)
    loader = wrap(images(samples=40 + 16 * t.global_rank))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t.fit(Logs(mlp()), loader)
    assert t.global_step == 5, t.global_step
    assert t.callback_metrics["rank"].item() == 0.5
print(f"held on rank {t.global_rank}")
"""
    output = run_ranks(START + script, tmp_path, launcher=TORCHRUN, environ=ONE_THREAD)
    assert "held on rank 0" in output
    assert "held on rank 1" in output


def test_fully_sharded_training_learns_the_same(tmp_path: Path) -> None:
    ran(
        """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def trained(sharded):
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)
    net = nn.Sequential(*layers)
    if sharded:
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x = torch.randn(2 * 8, 16, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(2)[dist.get_rank()] if sharded else x
        net(mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    full = [p.full_tensor() if sharded else p for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in full])

mesh = init_device_mesh("cpu", (2,))
assert torch.allclose(trained(True), trained(False), atol=1e-6)
""",
        tmp_path,
    )


# Each rank is started by hand: a launcher would end the others when one ends.
_ALONE = """
import os, signal, subprocess, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import lightning_perf.strategies.oneccl

def rank(number, case):
    dist.init_process_group(
        "ccl", init_method=f"file://{os.getcwd()}/{case}", rank=number, world_size=2,
        timeout=timedelta(seconds=3 if case == "stopped" else 40))
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    pair = dist.new_group([0, 1], backend="gloo")
    if number == 1:
        if case in ("stopped", "killed"):
            os.kill(os.getpid(), signal.SIGSTOP if case == "stopped" else signal.SIGKILL)
        if case == "left":
            return
        raise KeyError("on purpose")
    start = time.monotonic()
    words = "Timed out waiting 3000 ms" if case == "stopped" else "remote process exited: rank 1"
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    future = works[2].get_future().then(lambda f: f.value())
    for wait in (works[0].wait, works[2].wait, future.wait, dist.barrier):
        try:
            wait()
        except RuntimeError as error:
            assert words in str(error), error
            assert "on rank 0 of the ranks 0, 1" in str(error), error
            assert "all_reduce of 100000" in str(error), error
        else:
            raise AssertionError(case)
    assert time.monotonic() - start < 20
    sys.exit(7)

if len(sys.argv) > 2:
    rank(int(sys.argv[2]), sys.argv[1])
    sys.exit()
case = sys.argv[1]
ranks = [subprocess.Popen([sys.executable, __file__, case, str(n)]) for n in range(2)]
try:
    # The end of a process that gave up is its own.
    assert ranks[0].wait(60) == 7
    if case == "stopped":
        ranks[1].kill()
    assert ranks[1].wait(60) == {"stopped": -9, "killed": -9, "left": 0, "raised": 1}[case]
finally:
    for process in ranks:
        process.kill()
        process.wait()
print("held")
"""


@pytest.mark.parametrize("case", ["stopped", "killed", "left", "raised"])
def test_the_others_end_with_an_error_when_a_rank_ends_or_hangs(case: str, tmp_path: Path) -> None:
    before = segments()
    assert "held" in run_ranks(_ALONE, tmp_path, case, environ=ONE_THREAD, timeout=100)
    if case in ("stopped", "killed"):
        # What a killed process leaves, the next group removes.
        left = segments() - before
        assert len(left) <= 1
        script = """
import torch.distributed as dist, lightning_perf.strategies.oneccl
dist.init_process_group("ccl", store=dist.HashStore(), rank=0, world_size=1)
"""
        run_ranks(script, tmp_path, environ=ONE_THREAD)


_LAUNCHED = """
import sys
import torch
from lightning.pytorch.strategies import DDPStrategy
from models import Classifier, images, mlp, trainer
from lightning_perf.strategies import PerfDDPStrategy

class Mine(Classifier):
    def on_train_batch_end(self, *_):
        if sys.argv[2:] == ["raise"] and self.global_step == 2:
            raise KeyError("on purpose")
    def on_train_end(self):
        digest = sum(p.double().sum().item() for p in self.parameters())
        with open(f"{sys.argv[1]}-{self.global_rank}", "w") as file:
            file.write(repr((digest, torch.distributed.get_backend())))

if __name__ == "__main__":
    torch.manual_seed(1)
    method = "popen" if sys.argv[1] == "torchrun" else sys.argv[1]
    cls = PerfDDPStrategy if method == "popen" else DDPStrategy
    strategy = cls(process_group_backend="ccl", start_method=method)
    trainer(devices=2, strategy=strategy).fit(Mine(mlp()), images(samples=40))
"""


def test_every_launcher_gives_the_same(tmp_path: Path) -> None:
    methods = ["popen", "fork", "spawn", "torchrun"]
    for method in methods:
        launcher = TORCHRUN if method == "torchrun" else ()
        run_ranks(_LAUNCHED, tmp_path, method, launcher=launcher, environ=ONE_THREAD)
    found = {(tmp_path / f"{name}-{rank}").read_text() for name in methods for rank in range(2)}
    assert len(found) == 1
    assert "'ccl'" in found.pop()
    for method in ("popen", "spawn"):
        output = run_ranks(_LAUNCHED, tmp_path, method, "raise", environ=ONE_THREAD, fails=True)
        assert "on purpose" in output
