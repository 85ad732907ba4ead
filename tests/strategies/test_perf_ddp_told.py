"""`PerfDDPStrategy` on two ranks: what goes wrong elsewhere in silence is told, and by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import TORCHRUN, run_ranks
from strategies.perf_ddp_runs import START, ran

pytestmark = pytest.mark.slow

_DEAD = (
    START
    + """
class Dead(Classifier):
    def __init__(self):
        super().__init__(mlp())
        self.spare = nn.Linear(3, 3)
"""
)


def test_unused_parameters_are_named_in_the_error_and_by_the_search(tmp_path: Path) -> None:
    output = run_ranks(
        _DEAD
        + """
try:
    fit(Dead())
except RuntimeError as error:
    said = f"Without a gradient on rank {dist.get_rank()}: spare.weight, spare.bias."
    assert said in str(error), error
else:
    raise AssertionError
t = fit(Dead(), strategy=PerfDDPStrategy(find_unused_parameters=True), samples=160)
assert t.strategy.gradient_traffic.collectives == 2 * 20
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fit(Classifier(mlp()), strategy=PerfDDPStrategy(find_unused_parameters=True), samples=160)
said = [w for w in caught if "find_unused_parameters=True has no effect" in str(w.message)]
assert len(said) == (dist.get_rank() == 0), caught
print("held", flush=True)
""",
        tmp_path,
        launcher=TORCHRUN,
        environ={"OMP_NUM_THREADS": "1"},
    )
    assert output.count("held") == 2
    assert "no gradient in the first 9 steps got spare.weight, spare.bias." in output


def test_a_static_graph_averages_or_is_refused(tmp_path: Path) -> None:
    """Whatever this version of torch does: with accumulation, checkpointing, compilation."""
    ran(
        """
from lightning_perf.callbacks import ActivationCheckpointing, Compile
from models import residual_net

def outcome(static, **kwargs):
    torch.manual_seed(1)
    module = Classifier(residual_net())
    try:
        fit(module, strategy=PerfDDPStrategy(static_graph=static), samples=96, **kwargs)
    except RuntimeError as error:
        assert "static_graph=True was asked for" in str(error), error
        assert "Pass static_graph=False" in str(error)
        return None
    return torch.cat([p.detach().flatten() for p in module.parameters()])

def items():
    return {
        "none": [],
        "checkpointing": [ActivationCheckpointing()],
        "compile": [Compile(backend="eager")],
        "both": [ActivationCheckpointing(), Compile(backend="eager")],
    }

for name in items():
    for batches in (1, 3):
        kwargs = {"accumulate_grad_batches": batches}
        plain = outcome(False, callbacks=items()[name], **kwargs)
        static = outcome(True, callbacks=items()[name], **kwargs)
        said = "refused" if static is None else "equal"
        assert static is None or torch.allclose(plain, static, rtol=1e-4, atol=1e-6), name
        if dist.get_rank() == 0:
            print(name, batches, said, flush=True)
""",
        tmp_path,
    )


def test_gradients_that_differ_under_a_static_graph_end_the_run(tmp_path: Path) -> None:
    """What the test on two layers does not see is seen in the first steps of the model."""
    ran(
        """
class Apart(Classifier):
    def on_after_backward(self):
        if self.global_step == 1 and self.global_rank == 1:
            self.net[1].weight.grad += 1

try:
    fit(Apart(mlp()), strategy=PerfDDPStrategy(static_graph=True))
except RuntimeError as error:
    assert "the gradients of the ranks differ: net.1.weight. Pass static_graph=False" in str(error)
else:
    raise AssertionError
""",
        tmp_path,
    )


def test_uneven_ranks_are_named_or_end_together(tmp_path: Path) -> None:
    ran(
        """
from torch.utils.data import DataLoader, IterableDataset, Subset

class Counted(Classifier):
    epochs = 0
    def on_train_epoch_end(self):
        self.epochs += 1

class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count
    def __iter__(self):
        for index in range(self.count):
            yield torch.full((3, 8, 8), float(index)), index % 4

class SizedStream(Stream):
    def __len__(self):
        return self.count

rank = dist.get_rank() if dist.is_initialized() else int(__import__("os").environ["RANK"])
count = (12, 8)[rank]
sized = DataLoader(images(samples=48).dataset, batch_size=4)
loaders = {
    "sized": lambda: DataLoader(Subset(sized.dataset, range(4 * count)), batch_size=4),
    "stream": lambda: DataLoader(Stream(4 * count), batch_size=4),
    "sized stream": lambda: DataLoader(SizedStream(4 * count), batch_size=4),
    "half known": lambda: DataLoader((Stream, SizedStream)[rank](4 * count), batch_size=4),
}

def run(loader, uneven, **kwargs):
    module = Counted(mlp())
    t = trainer(**{"devices": 2, "use_distributed_sampler": False, "max_epochs": 2,
                   "strategy": PerfDDPStrategy(uneven=uneven), **kwargs})
    t.fit(module, loader, images())
    return module

for name, make in loaders.items():
    try:
        run(make(), "error")
    except RuntimeError as error:
        said = str(error)
        counts = "rank 0 has 12, rank 1 has 8" if "known" not in name and name != "stream" else (
            "After 8 batches rank 1 has no other one")
        assert counts in said and "uneven='join'" in said, (name, said)
    else:
        raise AssertionError(name)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = run(make(), "join")
    assert (len(module.losses), module.epochs) == (16, 2), (name, len(module.losses))
    told = [w for w in caught if "left out" in str(w.message)]
    assert bool(told) == (rank == 0), name
    # A limit that both reach makes them even, and epochs of even loaders are left alone.
    if name.startswith("sized"):
        assert len(run(make(), "error", limit_train_batches=5).losses) == 10
even = DataLoader(Stream(12), batch_size=4)
assert len(run(even, "error").losses) == 6
assert len(run(DataLoader(Stream(12), batch_size=4), None).losses) == 6
""",
        tmp_path,
    )


def test_evaluation_may_be_uneven_but_not_empty(tmp_path: Path) -> None:
    ran(
        """
from torch.utils.data import DataLoader, Subset

rank, data = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]), images().dataset

def some(batches):
    return DataLoader(Subset(data, range(4 * batches)), batch_size=4)

def run(batches):
    torch.manual_seed(1)
    module = Classifier(conv_net())
    t = trainer(devices=2, use_distributed_sampler=False, max_epochs=2,
                strategy=PerfDDPStrategy(timeout=__import__("datetime").timedelta(seconds=30)))
    t.fit(module, some(4), some(batches))
    t.validate(module, some(batches), verbose=False)
    buffers = torch.cat([b.detach().flatten().double() for b in module.buffers()])
    return module.losses, buffers

even, uneven = run(2), run((4, 2)[rank])
assert even[0] == uneven[0]
assert torch.equal(even[1], uneven[1])
for stage in ("fit", "validate", "test", "predict"):
    t = trainer(devices=2, use_distributed_sampler=False, strategy=PerfDDPStrategy())
    loaders = (some(4), some((1, 0)[rank])) if stage == "fit" else (some((1, 0)[rank]),)
    try:
        getattr(t, stage)(Classifier(conv_net()), *loaders)
    except RuntimeError as error:
        assert "rank 1 has no batches, and other ranks have" in str(error), error
    else:
        raise AssertionError(stage)
    dist.barrier()
""",
        tmp_path,
    )
