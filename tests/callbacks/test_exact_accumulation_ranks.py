"""On two ranks, gradients are those of one process with one big batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from big_batch import Big, BigTokens, loader, rows, tokens
from lightning.pytorch.plugins import MixedPrecision
from models import trainer
from ranks import TORCHRUN, run_ranks
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_perf._item import statuses
from lightning_perf.callbacks import ExactAccumulation

EXACT = 1e-9


class Together:
    """Puts together the micro-batches of all ranks."""

    def all_batches(self) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.window)
        return [batch for batches in found for batch in batches]


class Rows(Together, Big):
    pass


class Tokens(Together, BigTokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("all", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Single(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def loss(self, batch: Any) -> Any:
        return super().loss(tuple(part.float() for part in batch))


class Reductions(TorchDispatchMode):
    """Counts the all-reduces of single numbers in double precision: no gradient is one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allreduce" in func.name():
            self.count += any(t.dim() == 0 and t.is_floating_point() for t in args[0])
        return func(*args, **(kwargs or {}))


def fit(module: Any, data: tuple[Any, Any], weight: Any, **kwargs: Any) -> dict[str, Any]:
    """Train with one part of the data on each rank."""
    patient = kwargs.pop("patient", False)
    run = trainer(
        callbacks=[ExactAccumulation(weight)] if weight else [],
        strategy="ddp",
        devices=2,
        use_distributed_sampler=False,
        **{"accumulate_grad_batches": 2, **kwargs},
    )
    if patient:
        # Lightning talks of SIGTERM before each batch, so that ranks need as many of them.
        run.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    with Reductions() as reductions:
        run.fit(module, loader(data[run.global_rank]))
    if weight:
        assert statuses(run)[0].active
    steps = len(module.errors)
    return {"errors": module.errors, "steps": steps, "reductions": reductions.count, "run": run}


def equal_sizes() -> None:
    data = rows([4] * 5), rows([4] * 5, 1)
    options = {"accumulate_grad_batches": 4, "max_epochs": 2}
    without = fit(Rows(), data, None, **options)
    assert [error > 0.3 for error in without["errors"]] == [False, True, False, True]
    found = fit(Rows(), data, "batches", **options)
    assert max(found["errors"]) < EXACT
    # Once an epoch: only its last window could have another length elsewhere.
    assert found["reductions"] == 2


def unequal_sizes() -> None:
    data = rows([3, 1, 5]), rows([7, 2, 2], 1)
    for options in ({}, {"gradient_clip_val": 0.01}, {"accumulate_grad_batches": 1}):
        found = fit(Rows(), data, "samples", max_epochs=2, **options)
        assert max(found["errors"]) < EXACT
        assert found["reductions"] == found["steps"] + 1


def unequal_tokens() -> None:
    data = tokens([[3, 4], [1, 1], [9]]), tokens([[2], [5, 7], [1]], 1)
    assert max(fit(Tokens(), data, "tokens", max_epochs=2)["errors"]) < EXACT
    data[1][1][1].fill_(-100)
    assert max(fit(Tokens(), data, "tokens")["errors"]) < EXACT


def logged_losses() -> None:
    data = tokens([[3, 4], [9]]), tokens([[2], [5, 7]], 1)
    module = Tokens()
    expected = BigTokens().together([*data[0], *data[1]]).item()
    run = fit(module, data, "tokens", max_steps=1)["run"]
    assert abs(run.callback_metrics["all"].item() / expected - 1) < EXACT


def mixed_precision() -> None:
    data = rows([3, 1, 5]), rows([7, 2, 2], 1)
    scaled = MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))
    for options in ({"plugins": [scaled]}, {"precision": "bf16-mixed"}):
        assert max(fit(Single(), data, "samples", **options)["errors"]) < 0.03


def different_numbers_of_micro_batches() -> None:
    data = rows([4] * 6), rows([4] * 5, 1)
    options = {"accumulate_grad_batches": 3, "patient": True}
    assert max(fit(Rows(), data, "batches", **options)["errors"]) < EXACT
    data = rows([4] * 5), rows([2] * 6, 1)
    assert max(fit(Rows(), data, "samples", **options)["errors"]) < EXACT


CASES = (
    equal_sizes,
    unequal_sizes,
    unequal_tokens,
    logged_losses,
    mixed_precision,
    different_numbers_of_micro_batches,
)
_SCRIPT = """
from test_exact_accumulation_ranks import CASES

if __name__ == "__main__":
    for case in CASES:
        case()
        print(f"case {case.__name__} held", flush=True)
"""


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    output = run_ranks(_SCRIPT, tmp_path, launcher=TORCHRUN)
    for case in CASES:
        assert output.count(f"case {case.__name__} held") == 2, output
