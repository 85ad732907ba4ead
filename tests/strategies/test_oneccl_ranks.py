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


IMPORTS = """
import os, signal, sys, time, warnings
from datetime import timedelta
import torch
import torch.distributed as dist
from strategies.forked_ranks import on_ranks, start
from strategies.oneccl_collectives import check_all, same
import lightning_perf.strategies.oneccl
warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own names change
"""


def ran(script: str, folder: Path) -> None:
    """A script reaches its end, and oneCCL says nothing."""
    output = run_ranks(script + "\nprint('held')\n", folder, environ=ONE_THREAD)
    assert "held" in output
    assert "CCL_" not in output


def test_every_collective_gives_what_it_must(tmp_path: Path) -> None:
    """On two and three ranks; groups that are not destroyed, and some that come and go."""
    ran(
        IMPORTS
        + """
def collectives():
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
    before = dict(os.environ)
    dist.init_process_group("ccl", timeout=timedelta(seconds=60))
    assert dict(os.environ) == before
    # What oneCCL does when it gets a signal is not all that is done.
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == ["SIGTERM"]
    check_all()

def groups():
    dist.init_process_group("ccl", timeout=timedelta(seconds=60))
    check_all()
    rank = dist.get_rank()
    for round in range(4):
        # Again and again the same ranks, which share what oneCCL keeps for them.
        some = dist.new_group([0, 2])
        if rank != 1:
            tensor = torch.full((3,), float(rank + round))
            dist.all_reduce(tensor, group=some)
            same(tensor, torch.full((3,), 2.0 + 2 * round), "group", round)
            dist.destroy_process_group(some)
        open_files = len(os.listdir("/proc/self/fd"))
        before = open_files if round == 0 else before
        assert open_files <= before
    for life in range(2):
        dist.destroy_process_group()
        dist.init_process_group("cpu:ccl" if life else "ccl")
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == 3

on_ranks(collectives, 2)
on_ranks(groups, 3)
""",
        tmp_path,
    )


def test_fully_sharded_training_learns_the_same(tmp_path: Path) -> None:
    ran(
        IMPORTS
        + """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def trained(mesh):
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)
    net = nn.Sequential(*layers)
    if mesh:
        for layer in layers[::2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x = torch.randn(2 * 8, 16, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(2)[dist.get_rank()] if mesh else x
        net(mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    full = [p.full_tensor() if mesh else p for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in full])

def both():
    dist.init_process_group("ccl")
    assert torch.allclose(trained(init_device_mesh("cpu", (2,))), trained(None), atol=1e-6)

on_ranks(both, 2)
""",
        tmp_path,
    )


def test_ddp_learns_what_it_learns_with_gloo(tmp_path: Path) -> None:
    """Many buckets, all hooks, accumulation, unused parameters, static graphs, uneven loaders."""
    ran(
        START
        + """
from strategies.forked_ranks import on_ranks

HOOKS = ("fp16", "bf16", "powersgd", "onebit")
CASES = [{}, *({"hook": hook} for hook in HOOKS), {"accumulate": 3}, {"static_graph": True},
         {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]

def weights(backend, hook=None, accumulate=1, **options):
    torch.manual_seed(1)
    module = Classifier(mlp())
    strategy = PerfDDPStrategy(
        hook, start_powerSGD_iter=1 if hook else None, bucket_cap_mb=0.002,
        process_group_backend=backend, **options)
    fit(module, strategy=strategy, samples=80, accumulate_grad_batches=accumulate)
    assert dist.get_backend() == backend
    return torch.cat([p.detach().flatten() for p in module.parameters()])

class Unsized:
    def __init__(self, loader):
        self.loader = loader
    def __iter__(self):
        return iter(self.loader)

class Logs(Classifier):
    def training_step(self, batch, batch_idx):
        rank = self.global_rank
        self.log("mean", float(rank), sync_dist=True, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

def uneven(wrap):
    strategy = PerfDDPStrategy(uneven="join", process_group_backend="ccl")
    t = trainer(devices=2, strategy=strategy, max_epochs=1, use_distributed_sampler=False)
    t.fit(Logs(mlp()), wrap(images(samples=40 + 16 * t.global_rank)))
    assert t.global_step == len(images(samples=40)), t.global_step
    assert t.callback_metrics["mean"].item() == 0.5

def learn():
    warnings.simplefilter("ignore")
    plain = [weights("gloo", **case) for case in CASES]
    dist.destroy_process_group()
    for case, gloo in zip(CASES, plain):
        ccl = weights("ccl", **case)
        # Two numbers have one sum, whoever adds them, but half precision may be rounded otherwise.
        if case.get("hook") in ("fp16", "bf16"):
            assert torch.allclose(gloo, ccl, atol=1e-3), case
        else:
            assert torch.equal(gloo, ccl), case
    uneven(lambda loader: loader)
    uneven(Unsized)

if __name__ == "__main__":
    on_ranks(learn, 2)
""",
        tmp_path,
    )


def test_the_others_end_with_an_error_when_a_rank_ends_or_hangs(tmp_path: Path) -> None:
    """A process that gave up ends as it wants to; what killed ones leave is removed later."""
    ran(
        IMPORTS
        + """
ENDS = {"stopped": -signal.SIGKILL, "killed": -signal.SIGKILL, "left": 0, "raised": 1}

def rank(case):
    number = int(os.environ["RANK"])
    seconds = 3 if case == "stopped" else 100
    dist.init_process_group("ccl", timeout=timedelta(seconds=seconds))
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    if number == 1:
        if case in ("stopped", "killed"):
            os.kill(os.getpid(), signal.SIGSTOP if case == "stopped" else signal.SIGKILL)
        if case == "left":
            return
        raise KeyError("on purpose")
    began = time.monotonic()
    words = "Timed out waiting 3000 ms" if case == "stopped" else "remote process exited: rank 1"
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    future = works[2].get_future().then(lambda f: f.value())
    for wait in (works[0].wait, works[2].wait, future.wait, dist.barrier):
        try:
            wait()
        except RuntimeError as error:
            assert words in str(error), error
            assert "all_reduce of 100000 elements on rank 0 of the ranks 0, 1" in str(error), error
        else:
            raise AssertionError(case)
    assert time.monotonic() - began < 60
    sys.exit(7)

pairs = {case: start(rank, 2, case) for case in ENDS}
for case, (first, second) in pairs.items():
    first.join()
    assert first.exitcode == 7, (case, first.exitcode)
    if case == "stopped":
        second.kill()
    second.join()
    assert second.exitcode == ENDS[case], (case, second.exitcode)

def alone():
    dist.init_process_group("ccl")
    left = [name for name in os.listdir("/dev/shm") if name.startswith(gone)]
    assert not left, left

gone = tuple(f"{second.pid}:" for _, second in pairs.values())
on_ranks(alone, 1)
""",
        tmp_path,
    )


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
    output = run_ranks(_LAUNCHED, tmp_path, "popen", "raise", environ=ONE_THREAD, fails=True)
    assert "on purpose" in output
