"""`PerfDDPStrategy` on two ranks with gloo: what travels, and that all ranks learn the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import SLURM, TORCHRUN, run_ranks
from strategies.perf_ddp_runs import ran

pytestmark = pytest.mark.slow


def test_the_bytes_on_the_wire_are_those_that_are_said(tmp_path: Path) -> None:
    ran(
        """
size = 4 * sum(p.numel() for p in mlp().parameters())
for hook in (None, "fp16", "bf16", "powersgd", "onebit"):
    t = fit(Classifier(mlp()), hook)
    said, steps = t.strategy.gradient_traffic, t.record.steps
    names = {"allreduce", "allgather"}
    calls = sum(sent[n][0] for sent in steps for n in names & sent.keys())
    sent_bytes = sum(sent[n][1] for sent in steps for n in names & sent.keys())
    assert said == Traffic(len(steps), calls, sent_bytes), (hook, said, calls, sent_bytes)
    share = sent_bytes / len(steps) / size
    low, high = {None: (1, 1), "fp16": (.5, .5), "bf16": (.5, .5)}.get(hook, (0, 0.2))
    assert low <= share <= high, (hook, share)

# Besides gradients, only the flag of SIGTERM that Lightning sends in each step since 2.5.2, and the
# buffers. In the second step DDP tells the ranks its new order of buckets.
torch.manual_seed(1)
for module in (mlp(), conv_net()):
    for broadcast in (True, False):
        strategy = PerfDDPStrategy(broadcast_buffers=broadcast)
        t = fit(Classifier(copy.deepcopy(module)), strategy=strategy)
        buffers = [b for b in module.buffers() if broadcast]
        flag = int(hasattr(t.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"))
        sizes = [b.numel() * b.element_size() for b in buffers]
        types = len({b.dtype for b in buffers})
        size = 4 * sum(p.numel() for p in module.parameters())
        for sent in t.record.steps[2:]:
            calls, bytes_ = sent.pop("broadcast", (0, 0))
            assert sent == {"allreduce": (1, size)}, sent
            assert calls == flag + types, (calls, types)
            assert bytes_ - sum(sizes) == 8 * flag, (bytes_, sizes)
""",
        tmp_path,
    )


def test_hooks_learn_what_plain_ddp_learns(tmp_path: Path) -> None:
    """Many small buckets, a validation, accumulation, the search for unused parameters."""
    ran(
        """
for kwargs, options in (
    ({}, {}),
    ({"accumulate_grad_batches": 3}, {"find_unused_parameters": True}),
    ({"precision": "bf16-mixed"}, {"gradient_as_bucket_view": True}),
):
        final = {}
        for hook in (None, "fp16", "bf16", "powersgd", "onebit"):
            strategy = PerfDDPStrategy(
                hook, matrix_approximation_rank=2 if hook == "powersgd" else 1,
                start_powerSGD_iter=1 if hook else None, bucket_cap_mb=0.002, **options,
            )
            torch.manual_seed(1)
            module = Classifier(conv_net())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit(module, samples=80, strategy=strategy, max_epochs=4, **kwargs)
            final[hook] = sum(module.losses[-10:]) / 10
        assert final[None] < 1.4, final
        for hook, loss in final.items():
            assert abs(loss - final[None]) < (0.02 if hook in ("fp16", "bf16") else 0.15), final
""",
        tmp_path,
    )


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Ten steps, and ten more after resuming, are twenty steps."""
    ran(
        """
for hook in ("powersgd", "onebit", "fp16"):
    torch.manual_seed(1)
    straight = Classifier(mlp())
    first = copy.deepcopy(straight)
    options = {"max_epochs": 2, "enable_checkpointing": False}
    fit(straight, hook, **options)
    t = fit(first, hook, **{**options, "max_epochs": 1})
    path = f"{hook}.ckpt"
    t.save_checkpoint(path)
    error = t.strategy.comm_hook.state_dict().get("kept", {}).get("error", {})
    if hook != "fp16":
        mine = torch.cat([e.flatten() for e in error.values()])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert not torch.equal(*both), "each rank has an error of its own"
    second = Classifier(mlp())
    fit(second, hook, ckpt_path=path, **options)
    for (name, a), b in zip(straight.named_parameters(), second.parameters()):
        assert torch.equal(a, b), (hook, name, (a - b).abs().max())
    # Without the state it is another run, and that is said.
    if hook != "fp16":
        third = Classifier(mlp())
        fit(third, strategy=PerfDDPStrategy(hook, start_powerSGD_iter=0, save_hook_state=False),
            ckpt_path=path, **options)
        assert not all(torch.equal(a, b) for a, b in zip(straight.parameters(), third.parameters()))
    # A run without a hook, and a validation, read the checkpoint too.
    fit(Classifier(mlp()), ckpt_path=path, **options)
    t.validate(first, images(), ckpt_path=path, verbose=False)
try:
    fit(Classifier(mlp()), "onebit", ckpt_path="powersgd.ckpt", max_epochs=2)
except RuntimeError as error:
    assert "'name': 'onebit'" in str(error) and "'name': 'powersgd'" in str(error), error
    assert "save_hook_state=False" in str(error)
else:
    raise AssertionError
plain = fit(Classifier(mlp()), max_epochs=1)
plain.save_checkpoint("plain.ckpt")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fit(Classifier(mlp()), "powersgd", ckpt_path="plain.ckpt", max_epochs=2)
missing = "holds no state of the communication hook 'powersgd'"
said = [w for w in caught if missing in str(w.message)]
assert len(said) == (dist.get_rank() == 0)
""",
        tmp_path,
    )


def test_three_ranks_learn_as_one_process(tmp_path: Path) -> None:
    """Without a hook as one process that averages their batches; with each hook alike."""
    ran(
        """
def learned(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])

torch.manual_seed(1)
alone = Classifier(mlp()).double()
start = copy.deepcopy(alone.state_dict())
batches = list(images(samples=24 * RANKS))

class Mine(Classifier):
    def training_step(self, batch, batch_idx):
        x, y = batches[RANKS * batch_idx + dist.get_rank()]
        return super().training_step((x.double(), y), batch_idx)

final = {}
for hook in (None, "fp16", "bf16", "powersgd", "onebit"):
    module = Mine(mlp()).double()
    module.load_state_dict(start)
    t = fit(module, hook, samples=24 * RANKS, max_epochs=1, limit_train_batches=len(batches) // 3)
    assert len(t.record.equal) == len(batches) // 3, len(t.record.equal)
    final[hook] = learned(module)

optimizer = alone.configure_optimizers()
for step in range(len(batches) // 3):
    optimizer.zero_grad()
    for x, y in batches[RANKS * step : RANKS * (step + 1)]:
        (alone.loss((x.double(), y)) / RANKS).backward()
    optimizer.step()
expected = learned(alone)
assert not torch.allclose(expected, learned(Mine(mlp()).double()))
torch.testing.assert_close(final[None], expected, rtol=1e-9, atol=1e-9)
for hook, tolerance in (("fp16", 2e-3), ("bf16", 2e-2), ("powersgd", 0.2), ("onebit", 0.2)):
    assert (final[hook] - expected).abs().max() < tolerance, hook
""",
        tmp_path,
        ranks=3,
    )


def test_what_a_hook_keeps_follows_the_scaler(tmp_path: Path) -> None:
    """In powers of two a changing loss scale is exact, so it must not change what is learned."""
    ran(
        """
from contextlib import nullcontext
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_perf.strategies.comm_hooks.base import ErrorFeedback

class Scaled(MixedPrecision):
    def forward_context(self):
        return nullcontext()

def run(hook, every):
    torch.manual_seed(1)
    module = Classifier(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=every)
    fit(module, hook, precision=None, plugins=[Scaled("16-mixed", "cpu", scaler)])
    assert (scaler.get_scale() > 64) == (every == 2)
    return torch.cat([p.detach().flatten() for p in module.parameters()])

for hook in ("powersgd", "onebit"):
    torch.testing.assert_close(run(hook, 2), run(hook, 1000), rtol=1e-5, atol=1e-6)
    # Otherwise what is kept is too small after each change.
    rescale, ErrorFeedback.rescale = ErrorFeedback.rescale, lambda self, factor: None
    assert (run(hook, 2) - run(hook, 1000)).abs().max() > 1e-3
    ErrorFeedback.rescale = rescale
""",
        tmp_path,
    )


def test_no_sync_averages_once_a_window(tmp_path: Path) -> None:
    ran(
        """
from lightning_perf.callbacks import ExactAccumulation

class Manual(Classifier):
    automatic_optimization = False
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        last = (batch_idx + 1) % 4 == 0 or self.trainer.is_last_batch
        with self.trainer.strategy.accumulate(sync=last):
            self.manual_backward(loss / 4)
        if last:
            self.optimizers().step()
            self.optimizers().zero_grad()

size = 4 * sum(p.numel() for p in mlp().parameters())
torch.manual_seed(1)
net = mlp()
results = {}
for name, module, kwargs in (
    ("automatic", Classifier(copy.deepcopy(net)), {"accumulate_grad_batches": 4}),
    ("manual", Manual(copy.deepcopy(net)), {}),
    ("exact", Classifier(copy.deepcopy(net)),
     {"accumulate_grad_batches": 4, "callbacks": [ExactAccumulation()]}),
):
    t = fit(module, samples=80, **kwargs)  # ten batches on each rank: windows of 4, 4 and 2
    assert len(t.record.steps) == 3, name
    for sent in t.record.steps:
        # Exact accumulation adds the weight of a window that is not full, a 64-bit number.
        assert sent["allreduce"][1] - size in ((0,) if name != "exact" else (0, 8)), (name, sent)
    assert t.strategy.gradient_traffic.steps == 3
    results[name] = torch.cat([p.detach().flatten() for p in module.parameters()])
assert torch.equal(results["automatic"], results["manual"])
assert not torch.equal(results["automatic"], results["exact"])
every = fit(Classifier(copy.deepcopy(net)), samples=80)
assert sum(sent["allreduce"][1] for sent in every.record.steps) == 10 * size
try:
    fit(Manual(mlp()), strategy=PerfDDPStrategy(static_graph=True))
except RuntimeError as error:
    assert "accumulate(sync=False) was called with static_graph=True" in str(error)
else:
    raise AssertionError
""",
        tmp_path,
    )


_LAUNCHED = """
import sys
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from models import Classifier, images, mlp, trainer
from lightning_perf.strategies import PerfDDPStrategy

class Mine(Classifier):
    def on_train_end(self):
        digest = sum(p.double().sum().item() for p in self.parameters())
        with open(f"{sys.argv[1]}-{self.global_rank}", "w") as file:
            file.write(repr(digest))

if __name__ == "__main__":
    torch.manual_seed(1)
    method = sys.argv[1] if sys.argv[1] == "spawn" else "popen"
    strategy = PerfDDPStrategy("powersgd", start_powerSGD_iter=1, start_method=method)
    plugins = [SLURMEnvironment()] if sys.argv[1] == "slurm" else None
    trainer(devices=2, strategy=strategy, plugins=plugins).fit(Mine(mlp()), images(samples=40))
"""

_SRUN = """
import os, subprocess, sys
ranks = [
    subprocess.Popen(
        [sys.executable, "launched.py", "slurm"],
        env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
    )
    for rank in range(2)
]
assert [rank.wait() for rank in ranks] == [0, 0]
"""


def test_every_launcher_gives_the_same(tmp_path: Path) -> None:
    (tmp_path / "launched.py").write_text(_LAUNCHED)
    run_ranks(_LAUNCHED, tmp_path, "popen")
    run_ranks(_LAUNCHED, tmp_path, "spawn")
    run_ranks(_LAUNCHED, tmp_path, "torchrun", launcher=TORCHRUN)
    run_ranks(_SRUN, tmp_path, environ=SLURM)
    names = ["popen", "spawn", "torchrun", "slurm"]
    digests = {(tmp_path / f"{name}-{rank}").read_text() for name in names for rank in range(2)}
    assert len(digests) == 1


def test_digits_are_learned_as_well_with_powersgd(tmp_path: Path) -> None:
    """Twelve buckets, real data; the error of each rank comes later, and is not lost."""
    ran(
        """
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
x, y = x[order], y[order]
accuracy = {}
for hook, rank in ((None, 1), ("powersgd", 1), ("powersgd", 4)):
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *layers, nn.Linear(256, 10))
    module = Classifier(net, lr=0.03)
    strategy = PerfDDPStrategy(
        hook, matrix_approximation_rank=rank, start_powerSGD_iter=30 if hook else None,
        bucket_cap_mb=0.05,
    )
    t = trainer(devices=2, strategy=strategy, max_epochs=24)
    t.fit(module, DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=32))
    with torch.no_grad():
        accuracy[hook, rank] = (net(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
plain = accuracy[None, 1]
assert plain > 0.94, accuracy
assert all(value > plain - 0.02 for value in accuracy.values()), accuracy
""",
        tmp_path,
    )
