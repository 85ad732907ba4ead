"""Garbage is collected at chosen steps only, and as before after the run."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from models import Classifier, images, trainer
from ranks import TORCHRUN, run_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_perf._item import statuses
from lightning_perf._knobs import knobs, read_knobs
from lightning_perf.callbacks import GarbageCollection
from lightning_perf.callbacks import garbage_collection as module_of_it
from lightning_perf.callbacks.garbage_collection import garbage_collection


class Watch(Callback):
    """Notes at which batch of which loop Python collected, and how many batches there were."""

    def __init__(self) -> None:
        self.at: list[tuple[str, int]] = []
        self.stage, self.batch = "start", -1

    def look(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self.at.append((self.stage, self.batch))

    def setup(self, trainer, pl_module, stage) -> None:
        gc.callbacks.append(self.look)

    def teardown(self, trainer, pl_module, stage) -> None:
        gc.callbacks.remove(self.look)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.stage, self.batch = "train", batch_idx

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.stage, self.batch = "validate", batch_idx


def at(item: GarbageCollection, batches: int, *, module: Any = None, **kwargs: Any) -> list[Any]:
    """Train on so many batches, and return after which of them was collected."""
    watch = Watch()
    run = trainer(callbacks=[item, watch], num_sanity_val_steps=0, **kwargs)
    run.fit(module or Classifier(), images(4 * batches))
    return [batch for stage, batch in watch.at if stage == "train"]


class Cycle:
    """A tensor in a reference cycle, which only a collection ends."""

    alive: ClassVar[weakref.WeakSet[Cycle]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.tensor = torch.zeros(1000)
        self.me = self
        Cycle.alive.add(self)


class Littering(Classifier):
    """Leaves a cycle at each batch, and notes how many there are."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))
        self.most = 0

    def loss(self, batch: Any) -> torch.Tensor:
        Cycle()
        self.most = max(self.most, len(Cycle.alive))
        return super().loss(batch)


@pytest.fixture
def no_cycles() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()
    assert not Cycle.alive


# --- When it is collected -----------------------------------------------------------------------


def test_every_n_batches_across_epochs() -> None:
    assert at(GarbageCollection(3), batches=10) == [1, 4, 7]
    assert at(GarbageCollection(4), batches=3, max_epochs=4) == [2, 0, 1]
    assert at(GarbageCollection(50), batches=10) == []


def test_accumulated_batches_count_one_by_one_and_once() -> None:
    assert at(GarbageCollection(3), batches=10, accumulate_grad_batches=4) == [1, 4, 7]


def test_an_optimizer_that_takes_several_steps_in_a_batch_counts_it_once() -> None:
    class LBFGS(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    module = LBFGS()
    assert at(GarbageCollection(3), batches=10, module=module) == [1, 4, 7]
    assert len(module.losses) > 10


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_steps_that_take_an_iterator_count() -> None:
    class Iterating(Classifier):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    watch = Watch()
    trainer(callbacks=[GarbageCollection(3), watch]).fit(Iterating(), images(40))
    assert len(watch.at) == 3


def test_evaluation_batches_count_and_each_evaluation_ends_with_a_collection() -> None:
    watch = Watch()
    run = trainer(callbacks=[GarbageCollection(4), watch], num_sanity_val_steps=0)
    run.fit(Classifier(), images(20), images(24))
    assert watch.at == [("train", 2), ("validate", 1), ("validate", 5)]


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_an_evaluation_alone(function: str) -> None:
    watch = Watch()
    run = trainer(callbacks=[GarbageCollection(2), watch])
    getattr(run, function)(Classifier(), images(20))
    assert len(watch.at) == 3


# --- What it leaves and what it costs -----------------------------------------------------------


@pytest.mark.usefixtures("no_cycles")
def test_cycles_that_hold_tensors_live_for_n_batches_at_most() -> None:
    module = Littering()
    run = trainer(callbacks=[GarbageCollection(5)], max_epochs=3, num_sanity_val_steps=2)
    run.fit(module, images(4 * 12), images(4 * 7))
    run.test(module, images(4 * 23), verbose=False)
    assert module.most == 5


@pytest.mark.usefixtures("no_cycles")
def test_a_cycle_that_a_collection_found_alive_is_found_by_the_next() -> None:
    class Keeping(Littering):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.kept = None if batch_idx == 41 else Cycle()  # alive until the next batch
            return super().training_step(batch, batch_idx)

    module = Keeping()
    trainer(callbacks=[GarbageCollection(5)]).fit(module, images(4 * 42))
    # Two for each of five batches, the one kept, and the one that was kept when objects froze.
    assert module.most <= 12


def test_what_there_is_after_the_first_steps_is_not_looked_at_again() -> None:
    seen = []

    class Count(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            seen.append(len(gc.get_objects()))

    trainer(callbacks=[GarbageCollection(4), Count()]).fit(Classifier(), images(4 * 12))
    assert max(seen[4:]) < min(seen[:3]) / 10
    assert gc.get_freeze_count() == 0


def test_what_is_frozen_is_not_counted_at_each_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts it one by one, which takes as long as the collection it is to spare."""
    counted: list[None] = []
    count = gc.get_freeze_count

    def get_freeze_count() -> int:
        counted.append(None)
        return count()

    with garbage_collection(2) as collector:
        monkeypatch.setattr(gc, "get_freeze_count", get_freeze_count)
        for _ in range(20):
            collector.step()
        assert collector.times == 10
        assert len(counted) == 1


def test_evaluations_that_come_before_the_nth_batch_do_not_put_it_off() -> None:
    seen = []

    class Count(Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            seen.append(gc.get_freeze_count() > 0)

    run = trainer(callbacks=[GarbageCollection(10), Count()], max_epochs=4)
    run.fit(Classifier(), images(8), images(8))
    # Two batches of the sanity check, then two of training and two of validation per epoch.
    assert seen == [False, True, True, True]


def test_who_froze_objects_before_keeps_them_frozen() -> None:
    with knobs(gc_frozen=True):
        before = gc.get_freeze_count()
        trainer(callbacks=[GarbageCollection(2)]).fit(Classifier(), images())
        assert 0 < gc.get_freeze_count() <= before


def test_a_collector_that_was_off_stays_off() -> None:
    with knobs(gc_enabled=False):
        assert at(GarbageCollection(3), batches=4) == [1]
        assert not gc.isenabled()


def test_an_item_in_a_run_inside_a_run() -> None:
    class Inner(Callback):
        def on_train_epoch_end(self, trainer_, pl_module) -> None:
            trainer(callbacks=[GarbageCollection(2)]).fit(Classifier(), images())
            self.enabled = gc.isenabled()

    inner, before = Inner(), read_knobs()
    trainer(callbacks=[GarbageCollection(2), inner]).fit(Classifier(), images())
    assert inner.enabled is False
    assert read_knobs() == before


class AskingForIt(Dataset):
    """Each item says whether the process that reads it collects by itself."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        collects = torch.tensor(gc.isenabled() and os.getpid() != int(os.environ["PARENT"]))
        return torch.full((3, 8, 8), float(collects)), torch.tensor(0)


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="nothing is forked here")
def test_forked_loader_workers_collect_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARENT", str(os.getpid()))
    seen = []

    class Seeing(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append((gc.isenabled(), batch[0].mean().item()))
            return super().training_step(batch, batch_idx)

    loader = DataLoader(AskingForIt(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    trainer(callbacks=[GarbageCollection(2)], max_epochs=2).fit(Seeing(), loader)
    assert seen == [(False, 1.0)] * 4
    assert not module_of_it._collectors


# --- What is said -------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_cycles")
def test_collections_and_objects_are_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    trainer(callbacks=[GarbageCollection(5)]).fit(Littering(), images(4 * 12))
    (line,) = [r.getMessage() for r in caplog.records if "in cycles" in r.getMessage()]
    assert line.startswith("lightning_perf: GarbageCollection: 2 collections took ")
    found = int(line.split("found ")[1].split()[0])
    assert found >= 9


def test_on_a_cpu_there_is_no_cache_and_it_is_said() -> None:
    run = trainer(callbacks=[GarbageCollection(2, empty_cache=True)])
    run.fit(Classifier(), images())
    assert statuses(run)[0].text == "every 2 steps; cpu has no cache"


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_the_cache_of_a_device_is_emptied_after_each_collection(device: str, monkeypatch) -> None:
    emptied = []
    monkeypatch.setattr(getattr(torch, device), "empty_cache", lambda: emptied.append(1))
    empty_cache = module_of_it._empty_cache_of(torch.device(device, 0))
    with garbage_collection(2, empty_cache) as collector:
        for _ in range(5):
            collector.step()
    assert len(emptied) == collector.times == 2


@pytest.mark.parametrize("steps", [0, -1, 2.5, "50", None])
def test_the_context_manager_explains_wrong_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match="whole number of at least 1"), garbage_collection(steps):
        pass


def test_the_context_manager_restores_after_an_error() -> None:
    before = read_knobs()

    def use() -> None:
        with garbage_collection(1) as collector:
            collector.step()
            assert not gc.isenabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert read_knobs() == before
    assert not module_of_it._collectors


# --- All ranks together -------------------------------------------------------------------------

_RANKS = """
import sys
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from models import Classifier, images, trainer
from torch.utils.data import DataLoader
from lightning_perf.callbacks import GarbageCollection
from test_garbage_collection import Watch

class Unequal(Classifier):
    def val_dataloader(self):
        data = images(9, batch_size=1).dataset
        return DataLoader(data, sampler=UnrepeatedDistributedSampler(data), batch_size=1)

if __name__ == "__main__":
    watch = Watch()
    run = trainer(
        devices=2, strategy="ddp", max_epochs=3, num_sanity_val_steps=0,
        callbacks=[GarbageCollection(3), watch], use_distributed_sampler=False,
    )
    run.fit(Unequal(), images(20))
    trained = [batch for stage, batch in watch.at if stage == "train"]
    sys.stdout.write(f"{run.global_rank}: {trained}\\n")
"""


@pytest.mark.slow
def test_all_ranks_collect_at_the_same_step_also_after_unequal_evaluations(tmp_path: Path) -> None:
    text = run_ranks(_RANKS, tmp_path, launcher=TORCHRUN)
    assert "0: [1, 4, 1, 4, 1, 4]" in text
    assert "1: [1, 4, 1, 4, 1, 4]" in text
