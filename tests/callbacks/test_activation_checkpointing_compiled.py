"""Recomputed blocks together with torch.compile and with several ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import DrawingBlock, Plain, Shared, fit, network, seeded
from models import Classifier, images, trainer
from ranks import run_ranks
from torch import Tensor, nn

from lightning_perf._item import statuses
from lightning_perf._knobs import read_knobs
from lightning_perf.callbacks import ActivationCheckpointing, Compile
from lightning_perf.callbacks.activation_checkpointing import checkpointed


@pytest.fixture
def nothing_compiled() -> None:
    """Drop the code that other tests compiled of the same classes."""
    torch.compiler.reset()


def compiled_fit(block: Any, regions: Any = "auto") -> Classifier:
    compile_item = Compile(regions, backend="aot_eager", strict=False)
    module = Classifier(seeded(lambda: network(block)))
    return fit(ActivationCheckpointing(), compile_item, module=module)


@pytest.mark.parametrize("regions", ["auto", pytest.param("whole", marks=pytest.mark.slow)])
def test_compiled_blocks_learn_the_same(regions: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    expected = fit(module=Classifier(seeded(lambda: network(Plain))))
    assert compiled_fit(Plain, regions).losses == pytest.approx(expected.losses, rel=1e-5)
    assert "nothing is measured: the compiler decides what its code recomputes" in caplog.text


@pytest.mark.parametrize("regions", ["auto", "whole"])
def test_blocks_with_running_statistics_are_not_compiled(regions: str) -> None:
    """By version and backend, torch.compile updates them twice, or raises."""
    expected = fit(module=Classifier(seeded(network)))
    module = compiled_fit(DrawingBlock, regions)
    blocks = [block for block in module.modules() if isinstance(block, DrawingBlock)]
    assert [int(block.norm.num_batches_tracked) for block in blocks] == [8] * 3
    assert module.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.usefixtures("nothing_compiled")
def test_blocks_share_their_compiled_code(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    compiled_fit(Plain)
    # One with gradients, and one without for validation.
    assert "Compile: epoch 0: 2 graphs compiled" in caplog.text


class Breaks(Plain):
    """torch.compile does not get through it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch._dynamo.graph_break()
        return x + self.last(self.first(x).relu())


def test_a_graph_break_in_a_block_changes_nothing_twice() -> None:
    module = compiled_fit(Breaks)
    assert [b.calls for b in module.modules() if isinstance(b, Breaks)] == [8 + 2 + 8] * 3


def saved_bytes(share: float | str | None) -> int:
    """Return what autograd holds after a compiled forward pass with that memory budget."""
    held: dict[int, int] = {}

    class Look(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            def pack(tensor: Tensor) -> Tensor:
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            held.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return super().training_step(batch, batch_idx)

    module = Look(seeded(lambda: network(Plain)))
    items = [] if share is None else [ActivationCheckpointing(policy=share)]
    before = read_knobs()
    fit(*items, Compile(backend="aot_eager"), module=module, limit_val_batches=0)
    assert read_knobs() == before
    return sum(held.values())


def test_a_share_is_the_compilers_memory_budget() -> None:
    """Also after the same code was compiled without it."""
    everything = saved_bytes(None)
    assert saved_bytes(0.1) < everything
    assert saved_bytes(None) == everything


@pytest.mark.parametrize(
    "compile_item", [None, Compile(backend="eager"), Compile("whole", strict=False)]
)
def test_without_compiled_code_a_share_is_kept_by_the_blocks(
    compile_item: Compile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lightning_perf.callbacks.compile.what_inductor_lacks", lambda device: "no compiler"
    )
    items = [ActivationCheckpointing(policy=0.3), *([compile_item] if compile_item else [])]
    run = trainer(callbacks=items)
    run.fit(Classifier(network(Plain)), images())
    assert statuses(run)[0].text == "3 blocks (net.2.0, net.2.1, net.2.2), at most 30% kept"


# --- several ranks


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone: the reducer of DDP works as with others."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("policy", ["full", 1.0])
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.usefixtures("one_rank")
def test_no_parameter_is_ready_twice(options: dict[str, bool], policy: Any) -> None:
    """As with reentrant checkpointing, shared weights and a search for unused parameters."""
    (pixels, labels), grads = next(iter(images())), []
    for recompute in (False, True):
        net = seeded(lambda: Shared(32))
        ddp = nn.parallel.DistributedDataParallel(net, **options)
        with checkpointed(net, policy=policy) if recompute else nullcontext():
            for _ in range(3):
                nn.functional.cross_entropy(ddp(pixels), labels).backward()
        grads.append({name: parameter.grad for name, parameter in net.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


RANKS = """
import sys
from models import Classifier, images, trainer
from lightning.pytorch import seed_everything
from lightning_perf.callbacks import ActivationCheckpointing, Compile
from checkpoint_runs import Shared, network


def fit(net, items, **options):
    seed_everything(3, verbose=False)
    module = Classifier(net())
    run = trainer(callbacks=items, devices=2, max_epochs=2, **options)
    run.fit(module, images(32))
    return module.losses


unused = "ddp_find_unused_parameters_true"
if sys.argv[1] == "eager":
    for policy, accumulate in (("full", 2), (1.0, 1)):
        options = {"strategy": unused, "accumulate_grad_batches": accumulate}
        recompute = ActivationCheckpointing(policy=policy)
        plain = fit(lambda: Shared(32), [], **options)
        assert fit(lambda: Shared(32), [recompute], **options) == plain, options
    plain = fit(network, [], strategy="ddp")
    assert fit(network, [ActivationCheckpointing(policy=1.0)], strategy="ddp") == plain
else:
    for width, regions in ((128, "auto"), (256, "whole")):
        make = lambda: Shared(width)
        compiled = [ActivationCheckpointing(), Compile(regions, backend="aot_eager")]
        mine, plain = fit(make, compiled, strategy=unused), fit(make, [], strategy=unused)
        assert all(abs(a - b) < 1e-5 for a, b in zip(mine, plain)), (width, regions)
print("agreed", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_two_ranks_learn_the_same(how: str, tmp_path: Path) -> None:
    """Shared and unused weights, accumulation, running statistics; compiled, two widths."""
    assert run_ranks(RANKS, tmp_path, how, timeout=250).count("agreed") == 2
