"""Items in pairs, and each under accumulation, mixed precision, clipping and DDP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from items import REFUSED, ROWS, Row
from lightning.pytorch import Trainer
from models import Classifier, images, residual_net, trainer
from ranks import TORCHRUN, run_ranks

from lightning_perf._item import statuses

ACTING = [row for row in ROWS if row.acts_on_cpu]
BY_NAME = {row.id: row for row in ROWS}
SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 3},
    "bf16": {"precision": "bf16-mixed"},
    "accumulation, bf16, clipping": {
        "accumulate_grad_batches": 3,
        "precision": "bf16-mixed",
        "gradient_clip_val": 0.5,
    },
}
# bfloat16 has 8 bits: what rounds differently differs by that much.
BF16_TOLERANCE = 0.03


def learned(rows: Sequence[Row], **kwargs: Any) -> tuple[Trainer, list[float]]:
    """Train, validate and test with the items, and return all losses."""
    torch.manual_seed(0)
    module = Classifier(residual_net(), lr=0.02)
    arguments: dict[str, Any] = {}
    with ExitStack() as stack:
        for row in rows:
            stack.enter_context(row.around())
            arguments |= row.trainer
        items = [row.item(strict=False) for row in rows]
        run = trainer(**{**arguments, "callbacks": items, "max_epochs": 2, **kwargs})
        run.fit(module, images(20), images())
        active = statuses(run)
        run.test(module, images(), verbose=False)
        run.together = {s.item: s for s in (*active, *statuses(run))}
    return run, module.losses + module.test_losses


@cache
def expected(settings: str, changes_the_loss: tuple[str, ...] = ()) -> list[float]:
    """Return the losses without items, but for those that change what is learned."""
    rows = [BY_NAME[name] for name in changes_the_loss]
    return learned(rows, **json.loads(settings))[1]


def check(rows: Sequence[Row], **kwargs: Any) -> None:
    arguments: dict[str, Any] = {}
    for row in rows:
        arguments |= row.trainer
    arguments |= kwargs
    run, losses = learned(rows, **kwargs)
    same = expected(json.dumps(arguments), tuple(row.id for row in rows if row.changes_learning))
    tolerance = max(row.tolerance for row in rows)
    if tolerance and "precision" in arguments:
        tolerance = BF16_TOLERANCE
    assert losses == pytest.approx(same, rel=tolerance, abs=tolerance)
    for row in rows:
        assert run.together[row.id].active, run.together[row.id].text


def pairs(*, refused: bool) -> list[Any]:
    return [
        pytest.param(a, b, id=f"{a.id}-{b.id}")
        for a, b in combinations(ACTING, 2)
        if ((a.id, b.id) in REFUSED) is refused
    ]


@pytest.mark.parametrize(("a", "b"), pairs(refused=False))
def test_two_items_act_together_and_the_model_learns_the_same(a: Row, b: Row) -> None:
    check([a, b])


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), pairs(refused=False))
def test_the_order_of_two_items_does_not_matter_or_is_told(a: Row, b: Row) -> None:
    (run, losses), (turned, others) = learned([a, b]), learned([b, a])
    # One may find less to do behind the other, and then says so.
    same = all(run.together[row.id].text == turned.together[row.id].text for row in (a, b))
    tolerance = 0.0 if same else max(a.tolerance, b.tolerance)
    assert losses == pytest.approx(others, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(("a", "b"), pairs(refused=True))
def test_a_pair_that_cannot_work_says_why(a: Row, b: Row) -> None:
    for rows in ([a, b], [b, a]):
        run, _ = learned(rows)
        assert any(REFUSED[a.id, b.id] in status.text for status in run.together.values())


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("row", ACTING, ids=lambda row: row.id)
def test_an_item_acts_with(row: Row, settings: str) -> None:
    check([row], **SETTINGS[settings])


_RANKS = """
from test_together import ACTING, check

if __name__ == "__main__":
    for row in ACTING:
        check([row], strategy="ddp", devices=2)
        check([row], strategy="ddp", devices=2, accumulate_grad_batches=2)
        print(f"{row.id} acted", flush=True)
"""


@pytest.mark.slow
def test_every_item_acts_in_two_processes(tmp_path: Path) -> None:
    output = run_ranks(_RANKS, tmp_path, launcher=TORCHRUN, timeout=280)
    for row in ACTING:
        assert output.count(f"{row.id} acted") == 2
