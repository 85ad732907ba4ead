"""`CPUDDPStrategy` on two ranks: each on cores of its own, under each launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ranks import TORCHRUN, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="binds threads on Linux only"),
    pytest.mark.skipif(
        len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two CPUs"
    ),
]

START = """
import os, sys, torch
import torch.distributed as dist
from contextlib import suppress
from torch.utils.data import DataLoader, Dataset
from models import Classifier, images, mlp, trainer
from lightning_perf._knobs import KNOBS
from lightning_perf.strategies import CPUDDPStrategy

class Data(Dataset):
    '''The CPUs of the worker are in the image.'''
    def __len__(self):
        return 16
    def __getitem__(self, index):
        image = torch.full((3, 8, 8), -1.0)
        cpus = sorted(os.sched_getaffinity(0))[:192]
        image.view(-1)[: len(cpus)] = torch.tensor(cpus, dtype=torch.float)
        return image, index % 4

class Watched(Classifier):
    workers = threads = cpus = None
    def training_step(self, batch, batch_idx):
        self.workers = sorted(int(cpu) for cpu in set(batch[0][0].flatten().tolist()) - {-1.0})
        self.threads, self.cpus = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
        self.unbound = []
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended since
                cpus = sorted(os.sched_getaffinity(int(thread)))
                if cpus != self.cpus:
                    self.unbound.append(thread)
        return super().training_step(batch, batch_idx)
"""

BOUND = (
    START
    + """
def main():
    before = KNOBS["cpu_affinity"].read()
    module = Watched(mlp())
    t = trainer(strategy=CPUDDPStrategy("gloo", ranks=2, start_method=sys.argv[1]), max_epochs=1)
    t.fit(module, DataLoader(Data(), batch_size=4, num_workers=1))
    if sys.argv[1] == "popen":
        assert KNOBS["cpu_affinity"].read() == before
        mine = module.cpus, module.threads, module.workers, module.unbound
        all_ = [None, None]
        dist.all_gather_object(all_, mine)
        (cpus, threads, workers, _), (others, _, _, _) = all_
        assert set(cpus).isdisjoint(others), all_
        assert all(len(c) == n <= 8 and set(c) <= set(w) and not u for c, n, w, u in all_), all_
    print("held", flush=True)

if __name__ == "__main__":
    main()
"""
)


@pytest.mark.parametrize(
    ("start_method", "launcher", "threads"),
    [
        ("popen", (), None),
        ("popen", (), "8"),
        ("popen", TORCHRUN, None),
        ("popen", TORCHRUN, "8"),
        ("spawn", (), "8"),
        ("fork", (), None),
    ],
)
def test_each_rank_has_cores_of_its_own(
    start_method: str, launcher: tuple, threads: str | None, tmp_path: Path
) -> None:
    environ = {} if threads is None else {"OMP_NUM_THREADS": threads}
    output = run_ranks(BOUND, tmp_path, start_method, launcher=launcher, environ=environ)
    assert output.count("held") == (1 if start_method in ("spawn", "fork") else 2)
    rows = [line.split() for line in output.splitlines() if line.startswith("  rank ")]
    assert [row[:3] for row in rows] == [["rank", "0", "CPUs"], ["rank", "1", "CPUs"]], output
    assert rows[0][3] != rows[1][3]
    assert "2 ranks over gloo" in output


def test_ranks_learn_what_one_process_learns_from_both_batches(tmp_path: Path) -> None:
    output = run_ranks(
        START
        + """
class Mine(Classifier):
    def training_step(self, batch, batch_idx):
        x, y = batches[2 * batch_idx + dist.get_rank()]
        return super().training_step((x.double(), y), batch_idx)

batches = list(images(samples=48))
torch.manual_seed(0)
module, alone = Mine(mlp()).double(), Classifier(mlp()).double()
alone.load_state_dict(module.state_dict())
trainer(strategy=CPUDDPStrategy("gloo", ranks=2), limit_train_batches=6, max_epochs=1).fit(
    module, images(samples=48))
optimizer = alone.configure_optimizers()
losses = []
for step in range(6):
    (x0, y0), (x1, y1) = batches[2 * step : 2 * step + 2]
    optimizer.zero_grad()
    loss = alone.loss((torch.cat([x0, x1]).double(), torch.cat([y0, y1])))
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
both = [None, None]
dist.all_gather_object(both, module.losses)
torch.testing.assert_close([(a + b) / 2 for a, b in zip(*both)], losses, rtol=1e-9, atol=1e-9)
for a, b in zip(module.parameters(), alone.parameters()):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
print("held", flush=True)
""",
        tmp_path,
    )
    assert output.count("held") == 2


def test_what_a_launcher_bound_stays_and_what_cannot_be_moved_is_said(tmp_path: Path) -> None:
    script = (
        # As a launcher would, before torch loads OpenMP, which then looks at the affinity.
        """
import os, sys
local = int(os.environ["LOCAL_RANK"])
if sys.argv[1] == "bound":
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[local]})
os.environ["OMP_PROC_BIND"] = "close"
"""
        + START
        + """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer(strategy=CPUDDPStrategy("gloo"), max_epochs=1).fit(Classifier(mlp()), images())
said = [str(w.message) for w in caught if "OMP_PROC_BIND=close has bound" in str(w.message)]
assert bool(said) == (sys.argv[1] == "shared" and local == 0), said
print("held", flush=True)
"""
    )
    for how in ("bound", "shared"):
        output = run_ranks(script, tmp_path, how, launcher=TORCHRUN)
        assert output.count("held") == 2
        assert output.count("bound by the launcher") == (2 if how == "bound" else 0)


def test_three_ranks_on_fewer_cores_are_not_bound(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    output = run_ranks(
        START
        + f"""
os.sched_setaffinity(0, {cpus})
t = trainer(strategy=CPUDDPStrategy("gloo", ranks=3), max_epochs=1)
t.fit(Classifier(mlp()), images())
print("held", flush=True)
""",
        tmp_path,
    )
    assert output.count("held") == 3
    assert output.count("not bound: 3 ranks share 2 cores") == 3
