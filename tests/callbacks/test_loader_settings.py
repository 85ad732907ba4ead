"""Loaders are set alike whoever made them, keep their order, and get the workers steps need."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from data_runs import LENGTHS, Notes, SaveAndStop, times
from data_runs import sampler as planned
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from models import Classifier, images, trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_perf._hardware import detect
from lightning_perf._item import Status, statuses
from lightning_perf._knobs import knobs
from lightning_perf._preserve_state import preserve_loader
from lightning_perf.callbacks import (
    DevicePrefetch,
    LoaderSettings,
    Threads,
    _loader_workers,
    loader_settings,
)
from lightning_perf.callbacks._loader_workers import ServedLoader, Settings
from lightning_perf.callbacks._worker_search import Search
from lightning_perf.callbacks.loader_settings import loader_settings as settings_of
from lightning_perf.callbacks.loader_settings import most_workers

NUMBERS = tuple(range(23))


def numbers(**options: Any) -> DataLoader[Any]:
    return DataLoader(NUMBERS, **{"batch_size": 2, **options})


def settings(loader: DataLoader[Any]) -> Settings:
    return Settings.of(loader)


class Look(Callback):
    """Notes the loaders of a run while it is under way."""

    def __init__(self) -> None:
        self.seen: dict[str, Settings] = {}

    def _note(self, name: str, loaders: Any) -> None:
        for loader in CombinedLoader(loaders).flattened:
            self.seen[name] = settings(loader)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self._note("train", trainer.train_dataloader)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, *_) -> None:
        self._note("validate", trainer.val_dataloaders)

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, *_) -> None:
        self._note("test", trainer.test_dataloaders)

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, *_) -> None:
        self._note("predict", trainer.predict_dataloaders)


# --- Which loaders, and what is kept ------------------------------------------------------------


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(NUMBERS, batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class WithLoaders(Notes):
    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = Data.train_dataloader


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("data module", marks=pytest.mark.slow),
        pytest.param("module", marks=pytest.mark.slow),
        "given",
    ],
)
def test_loaders_of_every_loop_whoever_made_them(source: str) -> None:
    module = WithLoaders() if source == "module" else Notes()
    look = Look()
    run = trainer(callbacks=[LoaderSettings(1, prefetch_factor=3), look], max_epochs=2)
    given = {"data module": [Data()], "module": [], "given": [numbers(), numbers()]}[source]
    kept = [settings(loader) for loader in given if isinstance(loader, DataLoader)]
    if source == "data module":
        run.fit(module, datamodule=given[0])
        for function in (run.validate, run.test, run.predict):
            function(module, datamodule=given[0])
    else:
        run.fit(module, *given)
        for function in (run.validate, run.test, run.predict):
            function(module, *given[:1])
    assert set(look.seen) == {"train", "validate", "test", "predict"}
    for seen in look.seen.values():
        assert (seen.num_workers, seen.prefetch_factor) == (1, 3)
    # Put back: the loaders are the user's.
    assert kept == [settings(loader) for loader in given if isinstance(loader, DataLoader)]
    assert times(module.seen["fit"]) == dict.fromkeys(NUMBERS, 2)
    assert times(module.seen["test"]) == dict.fromkeys(NUMBERS, 1)


class Subclass(DataLoader):
    """A loader with something of its own."""


def test_all_else_of_a_loader_stays_and_the_object_too() -> None:
    generator, init = torch.Generator(), print
    loader = Subclass(
        NUMBERS, batch_size=3, shuffle=True, generator=generator, worker_init_fn=init,
        collate_fn=sum, drop_last=True, num_workers=1, timeout=7,
    )  # fmt: skip
    parts = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator", "drop_last")
    before = {name: getattr(loader, name) for name in (*parts, "worker_init_fn", "timeout")}
    attributes = vars(loader).copy()
    with settings_of(loader, 2, persistent_workers=True, prefetch_factor=4):
        assert type(loader) is Subclass
        assert {name: getattr(loader, name) for name in before} == before
        assert (loader.num_workers, loader.persistent_workers) == (2, True)
    assert vars(loader) == attributes
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (1, False, 2)


def test_without_workers_what_depends_on_them_is_left_out() -> None:
    loader = numbers(num_workers=2, persistent_workers=True, prefetch_factor=4, timeout=9,
                     multiprocessing_context="spawn")  # fmt: skip
    before = settings(loader)
    with settings_of(loader, 0, persistent_workers=True, prefetch_factor=8):
        assert settings(loader) == Settings(0, False, False, None, None, 0)
        assert sum(map(len, loader)) == 23
    assert settings(loader) == before
    run = trainer(callbacks=[LoaderSettings(0, prefetch_factor=8, persistent_workers=True)])
    run.fit(Notes(), numbers())
    assert statuses(run)[0].text == "num_workers=0"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="something copies from it here")
def test_pinned_memory_is_left_out_where_no_device_copies_from_it() -> None:
    loader = numbers()
    with settings_of(loader, None, pin_memory=True):
        assert not loader.pin_memory
        assert len(list(loader)) == 12  # PyTorch would warn


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_workers_are_started_as_asked(context: str) -> None:
    loader = numbers()
    with settings_of(loader, 1, multiprocessing_context=context):
        assert loader.multiprocessing_context.get_start_method() == context
        if context == "fork":
            assert torch.cat(list(loader)).tolist() == list(NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_that_are_not_forked(context: str) -> None:
    loader = numbers()
    with settings_of(loader, 1, multiprocessing_context=context, persistent_workers=True):
        for _ in range(2):
            assert torch.cat(list(loader)).tolist() == list(NUMBERS)
    forkserver._forkserver._stop()  # it stays for the whole session otherwise


def test_one_loader_in_two_loops_and_new_loaders_in_each_epoch() -> None:
    class Reloading(Notes):
        def train_dataloader(self) -> Any:
            return loader if self.current_epoch == 1 else numbers()

    loader, look = numbers(), Look()
    before = settings(loader)
    run = trainer(
        callbacks=[LoaderSettings(1), look], max_epochs=3, reload_dataloaders_every_n_epochs=1
    )
    module = Reloading()
    run.fit(module, val_dataloaders=loader)
    assert look.seen["train"].num_workers == look.seen["validate"].num_workers == 1
    assert settings(loader) == before
    assert times(module.seen["fit"]) == dict.fromkeys(NUMBERS, 3)


def test_combined_loaders_and_what_is_no_loader() -> None:
    class Both(Notes):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.note("fit", [*batch["a"], *batch["b"]])
            return self.weight.sum()

    module = Both()
    combined = CombinedLoader({"a": numbers(), "b": torch.tensor([[1], [2]])}, "min_size")
    trainer(callbacks=[LoaderSettings(1)]).fit(module, combined)
    assert [items for _, items in module.seen["fit"]] == [(0, 1, 1), (2, 3, 2)]


def test_limits_overfitting_and_a_fast_run_work() -> None:
    for arguments in (
        {"limit_train_batches": 3, "limit_val_batches": 2},
        {"overfit_batches": 2},
        {"fast_dev_run": 2},
        {"max_steps": 5},
    ):
        plain, served = Notes(), Notes()
        trainer(**arguments).fit(plain, numbers(), numbers())
        item = LoaderSettings(1, persistent_workers=True)
        trainer(callbacks=[item], **arguments).fit(served, numbers(), numbers())
        assert served.seen == plain.seen


def test_an_error_in_a_step_puts_loaders_back_and_ends_workers() -> None:
    class Failing(Notes):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ZeroDivisionError

    loader = numbers()
    before = settings(loader)
    run = trainer(callbacks=[LoaderSettings(1, persistent_workers=True)])
    with pytest.raises(ZeroDivisionError):
        run.fit(Failing(), loader)
    assert settings(loader) == before
    assert loader._iterator is None


@pytest.mark.parametrize("kind", ["bucket", "budget"])
def test_planned_batch_samplers_stay(kind: str) -> None:
    def run(*items: Callback) -> Any:
        module = Notes()
        loader = DataLoader(range(len(LENGTHS)), batch_sampler=planned(kind))
        trainer(callbacks=[Threads(strict=False), *items], max_epochs=3).fit(module, loader)
        return module.seen["fit"]

    plain = run()
    assert run(LoaderSettings(1)) == run(LoaderSettings(1, persistent_workers=True)) == plain


def test_a_resumable_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    from lightning_perf.data import ResumableLoader

    def run(*items: Callback, path: str | None = None) -> Any:
        module = Notes()
        loader = ResumableLoader(NUMBERS, 2, shuffle=True)
        trainer(callbacks=list(items), max_epochs=3).fit(module, loader, ckpt_path=path)
        return module.seen["fit"]

    straight = run()
    item = LoaderSettings(2, persistent_workers=True, prefetch_factor=4)
    first = run(item, SaveAndStop(17, "middle.ckpt"))
    assert first + run(item, path="middle.ckpt") == straight


def test_a_resumable_loader_gets_workers_in_mid_epoch_and_keeps_its_place(clock: Clock) -> None:
    from lightning_perf.data import ResumableLoader

    def run(*items: Callback, path: str | None = None) -> Any:
        module = Timed(clock)
        loader = ResumableLoader(Taking(clock, 0.05), 2, shuffle=True)
        trainer(callbacks=list(items), max_epochs=1).fit(module, loader, ckpt_path=path)
        return [items[:-1] for _, items in module.seen["fit"]]

    straight = run()
    first = run(LoaderSettings(), SaveAndStop(33, "middle.ckpt"))
    assert first + run(LoaderSettings(), path="middle.ckpt") == straight


@pytest.mark.slow
def test_the_sampler_that_lightning_injects_stays() -> None:
    class Sampler(Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            assert isinstance(trainer.train_dataloader.sampler, DistributedSampler)
            self.workers = trainer.train_dataloader.num_workers

    def run(*items: Callback) -> Any:
        module = Notes()
        runner = trainer(callbacks=list(items), max_epochs=2, strategy="ddp")
        try:
            runner.fit(module, numbers(shuffle=True), numbers())
        finally:
            torch.distributed.destroy_process_group()
            for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name)
        return module.seen

    look = Sampler()
    assert run(LoaderSettings(1), look) == run(Sampler())
    assert look.workers == 1


# --- Exactness ----------------------------------------------------------------------------------


class Drawing(Notes):
    """Draws in each step, as dropout does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("fit", [*batch, int(torch.randint(1000, ())), random.randrange(1000)])
        return self.weight.sum()


@pytest.mark.parametrize("own", [{}, {"generator": True}, {"num_workers": 1}, {"persistent": True}])
@pytest.mark.parametrize(
    ("workers", "asked"), [(0, {}), (1, {}), (1, {"persistent_workers": True})]
)
def test_order_and_random_numbers_are_those_of_a_plain_run(own, asked, workers) -> None:
    def run(*items: Callback) -> Any:
        options: dict[str, Any] = {"num_workers": own.get("num_workers", 0)}
        if "persistent" in own:
            options = {"num_workers": 1, "persistent_workers": True}
        if "generator" in own:
            options["generator"] = torch.Generator().manual_seed(5)
        torch.manual_seed(3), random.seed(3)
        module = Drawing()
        loader = DataLoader(NUMBERS, batch_size=8, shuffle=True, **options)
        trainer(callbacks=list(items), max_epochs=3).fit(module, loader)
        return module.seen["fit"]

    assert run(LoaderSettings(workers, **asked)) == run()


# --- As many workers as steps need --------------------------------------------------------------


class Clock:
    """Stands still in between; loader workers have another one."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_loader_workers, "clock", clock)
    monkeypatch.setattr(loader_settings, "most_workers", lambda *_: 2)
    return clock


class Taking(Dataset):
    """Takes its time."""

    def __init__(self, clock: Clock, seconds: float, items: int = 160) -> None:
        self.clock, self.seconds, self.items = clock, seconds, items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> int:
        self.clock.now += self.seconds
        return index


class Timed(Notes):
    """Its steps take a tenth of a second; it notes how many workers there are."""

    def __init__(self, clock: Clock, seconds: float = 0.1) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.workers: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.now += self.seconds
        self.note("fit", [*batch, int(torch.randint(1000, ()))])
        self.workers.append(len(multiprocessing.active_children()))
        return self.weight.sum()


def timed(clock: Clock, seconds: float, *items: Callback, epochs: int = 2, **options: Any) -> Timed:
    torch.manual_seed(3)
    module = Timed(clock)
    loader = DataLoader(Taking(clock, seconds), batch_size=2, shuffle=True, **options)
    trainer(callbacks=list(items), max_epochs=epochs).fit(module, loader)
    return module


def test_data_that_steps_wait_for_get_workers_in_mid_epoch_and_no_batch_is_lost(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    plain = timed(clock, 0.05)
    auto = timed(clock, 0.05, LoaderSettings())
    assert auto.seen == plain.seen
    assert set(plain.workers) == {0}
    # Two batches passed over and eight looked at, of which the first has no step before it.
    assert set(auto.workers[:11]) == {0}
    assert set(auto.workers[11:70]) == {2}
    assert set(auto.workers[80:150]) == {2}
    said = [r.getMessage() for r in caplog.records if "LoaderSettings: " in r.getMessage()]
    assert said[0].endswith("MiB of their own.")
    assert said[1:] == [
        "lightning_perf: LoaderSettings: 2 workers: steps wait for data 0% of the time."
    ]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_come_in_mid_epoch_serve_later_epochs_too(clock, persistent: bool) -> None:
    plain = timed(clock, 0.05, epochs=4)
    auto = timed(clock, 0.05, LoaderSettings(persistent_workers=persistent), epochs=4)
    assert auto.seen == plain.seen
    assert set(auto.workers[85:150]) == {2}


def test_workers_may_come_while_a_thread_fetches_ahead(clock: Clock) -> None:
    plain = timed(clock, 0.05)
    for items in ([LoaderSettings(), DevicePrefetch()], [DevicePrefetch(), LoaderSettings()]):
        both = timed(clock, 0.05, *items)
        assert both.seen == plain.seen
        assert 2 in both.workers


def test_data_that_nobody_waits_for_get_none(clock: Clock, caplog) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch")
    auto = timed(clock, 0.002, LoaderSettings())
    assert set(auto.workers) == {0}
    said = [r.getMessage() for r in caplog.records if "LoaderSettings: " in r.getMessage()]
    assert said == [
        "lightning_perf: LoaderSettings: no worker: steps wait for data 4% of the time."
    ]


def test_workers_that_make_steps_no_shorter_go_again(clock: Clock, caplog) -> None:
    """As where the cores are the training's: steps get longer by what is not waited for."""
    caplog.set_level("INFO", logger="lightning.pytorch")

    class Crowded(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.clock.now += 0.1 if self.workers[-1] else 0.0
            return loss

    def run(*items: Callback) -> Crowded:
        torch.manual_seed(3)
        module = Crowded(clock)
        loader = DataLoader(Taking(clock, 0.05), batch_size=2, shuffle=True)
        trainer(callbacks=list(items), max_epochs=2).fit(module, loader)
        return module

    plain, auto = run(), run(LoaderSettings())
    assert auto.seen == plain.seen
    assert 2 in auto.workers[:40]
    assert set(auto.workers[50:]) == {0}
    said = [r.getMessage() for r in caplog.records if "LoaderSettings: " in r.getMessage()]
    assert said[-1].endswith("no worker: 2 workers did not make steps shorter.")


def test_a_loader_with_workers_hands_over_to_more(clock: Clock) -> None:
    def run(served: bool) -> list[list[int]]:
        loader = numbers(num_workers=1, shuffle=True, generator=torch.Generator().manual_seed(1))
        if not served:
            return [batch.tolist() for _ in range(3) for batch in loader]
        server = ServedLoader(loader, settings(loader), None, print)
        batches = []
        for epoch in range(3):
            for index, batch in enumerate(iterator := iter(loader)):
                batches.append(batch.tolist())
                if (epoch, index) in ((0, 2), (1, 3)):
                    iterator._prepare(2 - epoch)
        server.close()
        return batches

    assert run(served=True) == run(served=False)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_ends_before_more_workers_take_over(persistent: bool) -> None:
    def run(served: bool) -> list[list[int]]:
        torch.manual_seed(3)
        loader = numbers(num_workers=1, shuffle=True, persistent_workers=persistent)
        server = ServedLoader(loader, settings(loader), None, print) if served else None
        batches = []
        for epoch in range(3):
            for index, batch in enumerate(iterator := iter(loader)):
                batches.append(batch.tolist())
                if index == 3 and epoch == 0:
                    if served:
                        iterator._prepare(2)
                    break
        if server is not None:
            assert loader.num_workers == 2
            server.close()
        return batches

    assert run(served=True) == run(served=False)


def test_a_probe_of_the_loader_changes_no_random_number() -> None:
    def run(served: bool) -> list[list[int]]:
        torch.manual_seed(3)
        loader = numbers(num_workers=1, shuffle=True, persistent_workers=True)
        server = ServedLoader(loader, settings(loader), None, print) if served else None
        with preserve_loader(loader):
            next(iter(loader))
        batches = [batch.tolist() for _ in range(2) for batch in loader]
        if server is not None:
            server.close()
        return [*batches, torch.rand(3).tolist()]

    assert run(served=True) == run(served=False)


def test_an_iterable_dataset_keeps_its_workers(caplog: pytest.LogCaptureFixture) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    caplog.set_level("INFO", logger="lightning.pytorch")
    for item in (LoaderSettings(2), LoaderSettings()):
        module = Notes()
        trainer(callbacks=[item]).fit(module, DataLoader(Stream(), batch_size=2))
        assert [items for _, items in module.seen["fit"]] == [(0, 1), (2, 3), (4, 5)]
    said = [r.getMessage() for r in caplog.records if "LoaderSettings: " in r.getMessage()]
    assert len(said) == 1
    assert "Stream keeps 0 workers: of an iterable dataset they decide which data come." in said[0]


def test_a_loader_with_iterations_of_its_own_keeps_its_workers_unless_told_a_number() -> None:
    class Own(DataLoader):
        def _get_iterator(self) -> Any:
            return iter([[self.num_workers]])

    said: list[str] = []
    loader = Own(NUMBERS)
    with settings_of(loader, "auto", say=said.append):
        assert list(loader) == [[0]]
    assert said[0].startswith("Own keeps 0 workers: its iterations are not PyTorch's")
    with settings_of(loader, 2):
        assert list(loader) == [[2]]


# --- The search itself --------------------------------------------------------------------------


def search(workers: int, most: int, step: dict[int, tuple[float, float]]) -> tuple[list[int], str]:
    """Return the numbers that a search tries, where each has its seconds of waiting and rest."""
    found, tried = Search(workers, most), [workers]
    for _ in range(10_000):
        if found.result:
            break
        number = found.note(*step[tried[-1]])
        if number is not None:
            tried.append(number)
    assert found.workers == tried[-1]
    return tried, found.result


def test_a_search_goes_up_while_steps_get_shorter() -> None:
    steps = {0: (0.9, 0.1), 4: (0.3, 0.1), 8: (0.1, 0.1), 16: (0.0, 0.1)}
    assert search(0, 4, steps)[0] == [0, 4]
    assert search(0, 64, {0: (0.09, 0.1), 1: (0.0, 0.1)}) == (
        [0, 1],
        "steps wait for data 0% of the time",
    )
    assert search(2, 8, {2: (0.4, 0.1), 8: (0.1, 0.1)})[0] == [2, 8]


def test_a_search_goes_one_step_back_at_most_and_never_below_the_beginning() -> None:
    steps = {1: (0.1, 0.1), 3: (0.12, 0.1)}
    assert search(1, 8, steps) == ([1, 3, 1], "3 workers did not make steps shorter")


def test_a_search_has_no_more_than_is_allowed_even_if_steps_take_no_time() -> None:
    assert search(0, 3, {0: (0.5, 0.0), 3: (0.1, 0.0)})[0] == [0, 3]
    assert search(4, 2, {4: (0.5, 0.1)}) == (
        [4],
        "steps wait for data 83% of the time, and more workers than CPUs are not tried",
    )


def test_a_validation_between_two_steps_is_not_taken_for_a_step() -> None:
    found = Search(0, 4)
    numbers = [found.note(0.1, 60.0 if step == 5 else 0.1) for step in range(20)]
    assert [number for number in numbers if number] == [2]


def test_ranks_share_the_cpus_and_a_quota_counts() -> None:
    from dataclasses import replace

    machine = replace(detect(), logical_cpus=16, quota=None)
    assert [most_workers(machine, ranks) for ranks in (1, 2, 5, 32)] == [16, 8, 3, 1]
    assert most_workers(replace(machine, quota=6.5), 2) == 3
    assert most_workers(replace(machine, quota=0.5), 1) == 1


# --- With others --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_threads_make_room_for_the_workers_that_are_set(first: bool, monkeypatch) -> None:
    from lightning_perf.callbacks import threads

    asked: list[int] = []

    def intra_op_threads(hardware: Any, ranks: int = 1, loader_workers: int = 0) -> int:
        asked.append(loader_workers)
        return 1

    monkeypatch.setattr(threads, "intra_op_threads", intra_op_threads)
    monkeypatch.setattr(threads, "detect", partial(replace, detect(), cores=2, quota=None))
    monkeypatch.setattr(Threads, "_range", lambda *_: (2, 1))
    items: list[Callback] = [Threads(), LoaderSettings(1)]
    monkeypatch.setattr(threads, "decided_elsewhere", lambda *_: None)
    with knobs(intra_op_threads=3):
        trainer(callbacks=items if first else items[::-1]).fit(Classifier(), images())
    assert asked == [1]


def test_what_is_set_is_said() -> None:
    run = trainer(callbacks=[LoaderSettings(1, persistent_workers=True, prefetch_factor=4)])
    run.fit(Notes(), numbers())
    text = "num_workers=1, persistent_workers=True, prefetch_factor=4"
    assert statuses(run)[0].text == text
    if not torch.accelerator.is_available():
        run = trainer(callbacks=[LoaderSettings(1, pin_memory=True)])
        run.fit(Notes(), numbers())
        text = "num_workers=1, pin_memory left out, as no device copies from it"
        assert statuses(run)[0].text == text
        run = trainer(callbacks=[LoaderSettings(None, pin_memory=True, strict=False)])
        run.fit(Notes(), numbers())
        assert statuses(run) == (
            Status("LoaderSettings", False, "no device here copies from pinned memory."),
        )
