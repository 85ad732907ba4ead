"""Batches are fetched ahead of the steps, and nothing else is other than in a plain run."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_runs import Notes, SaveAndStop
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from models import trainer
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf._preserve_state import preserve_state
from lightning_perf.callbacks import DevicePrefetch, LoaderSettings, _ahead_loader
from lightning_perf.callbacks._ahead_loader import AheadLoader
from lightning_perf.callbacks.device_prefetch import copying
from lightning_perf.data import BufferPool, ResumableLoader

NUMBERS = tuple(range(23))


class Numbers(Dataset):
    """Notes what was read when."""

    def __init__(self, items: int = 23) -> None:
        self.items = items
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset):
    """Does not know its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(NUMBERS)


class Drawing(Notes):
    """Draws in each step of each loop, as dropout does, and takes several loaders."""

    def note(self, loop: str, batch: Any) -> None:
        parts = [batch]
        if isinstance(batch, dict):
            parts = [part for part in batch.values() if part is not None]
        numbers = [int(item) for part in parts for item in part]
        super().note(loop, [*numbers, int(torch.randint(1000, ())), random.randrange(1000)])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("validate", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("test", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.note("predict", batch)
        return torch.zeros(1)


def loader(items: int = 23, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(items), **{"batch_size": 2, "shuffle": True, **options})


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "lightning_perf prefetch"]


class Ahead(Callback):
    """Notes how many batches were read when a step ends, and whether a thread reads."""

    def __init__(self, dataset: Numbers, depth: int = 1) -> None:
        self.dataset, self.depth = dataset, depth
        self.ahead: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        batches = -(-len(self.dataset) // 2)
        wanted = min(batch_idx + 1 + self.depth, batches) if batch_idx >= 2 else batch_idx + 1
        deadline = time.monotonic() + 10
        while -(-len(self.dataset.read) // 2) < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        self.ahead.append(-(-len(self.dataset.read) // 2) - batch_idx - 1)
        if batch_idx + 1 == batches:
            self.dataset.read.clear()


# --- In advance, and not further ----------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_so_many_batches_are_fetched_ahead_and_none_that_no_step_will_get(depth: int) -> None:
    data = Numbers()
    look = Ahead(data, depth)
    run = trainer(callbacks=[DevicePrefetch(depth), look], max_epochs=2)
    run.fit(Notes(), DataLoader(data, batch_size=2))
    epoch = [0, 0, *(min(depth, 11 - batch) for batch in range(2, 12))]
    assert look.ahead == epoch * 2
    assert statuses(run)[0].text.endswith("ahead, fetched by a thread")


def test_not_beyond_a_limit() -> None:
    data = Numbers()
    run = trainer(callbacks=[DevicePrefetch(4)], limit_train_batches=5, limit_val_batches=3)
    run.fit(Notes(), DataLoader(data, batch_size=2))
    assert data.read == list(range(10))
    validated = Numbers()
    trainer(callbacks=[DevicePrefetch(4)], limit_val_batches=3).validate(
        Notes(), DataLoader(validated, batch_size=2), verbose=False
    )
    assert validated.read == list(range(6))


# --- The same as in a plain run -----------------------------------------------------------------


def both(run: Any) -> tuple[Any, Any]:
    """Return what a run gives without the item and with it, from the same random numbers."""
    results = []
    for items in ([], [DevicePrefetch(2)]):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        results.append(run(items))
    assert not threads()
    return results[0], results[1]


LOADERS: dict[str, Any] = {
    "0 workers": loader,
    "2 workers": lambda: loader(num_workers=2),
    "persistent": lambda: loader(num_workers=2, persistent_workers=True),
    "generator": lambda: loader(generator=torch.Generator().manual_seed(1)),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "no DataLoader": lambda: CombinedLoader(torch.arange(23).reshape(-1, 1), "min_size"),
    "max_size_cycle": lambda: CombinedLoader({"a": loader(), "b": loader(7)}, "max_size_cycle"),
    "min_size": lambda: CombinedLoader({"a": loader(), "b": loader(15)}, "min_size"),
    "max_size": lambda: CombinedLoader({"a": loader(), "b": loader(7)}, "max_size"),
    "dict": lambda: {"a": loader(), "b": loader(2), "c": loader(4)},
}


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_random_numbers_of_training(kind: str) -> None:
    def run(items: list[Callback]) -> Any:
        module = Drawing()
        trainer(callbacks=items, max_epochs=3).fit(module, LOADERS[kind]())
        return module.seen, torch.rand(3).tolist()

    plain, ahead = both(run)
    assert ahead == plain
    assert len(plain[0]["fit"]) >= 3 * 8


@pytest.mark.parametrize(
    ("mode", "workers"),
    [
        ("sequential", 0),
        pytest.param("sequential", 1, marks=pytest.mark.slow),
        ("max_size", 0),
        ("min_size", 0),
    ],
)
@pytest.mark.filterwarnings("ignore:Your `.*_dataloader`'s sampler has shuffling enabled")
def test_batches_and_random_numbers_of_the_other_loops(mode: str, workers: int) -> None:
    def several() -> Any:
        parts = [loader(size, num_workers=workers) for size in (9, 2, 5)]
        return parts if mode == "sequential" else CombinedLoader(dict(enumerate(parts)), mode)

    def run(items: list[Callback]) -> Any:
        module = Drawing()
        runner = trainer(callbacks=items, max_epochs=2, val_check_interval=6)
        runner.fit(module, loader(), several())
        runner.validate(module, several(), verbose=False)
        runner.test(module, several(), verbose=False)
        if mode == "sequential":
            runner.predict(module, several())
        return module.seen, torch.rand(3).tolist()

    plain, ahead = both(run)
    assert ahead == plain
    assert len(plain[0]["validate"]) > 3


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(shuffle=False)


@pytest.mark.parametrize(
    "arguments",
    [
        {"limit_train_batches": 5, "limit_val_batches": 3},
        {"overfit_batches": 3},
        {"fast_dev_run": 4},
        {"max_steps": 17, "max_epochs": -1},
        {"reload_dataloaders_every_n_epochs": 1},
        {"accumulate_grad_batches": 3},
        {"val_check_interval": 5},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_flags_of_the_trainer(arguments: dict[str, Any]) -> None:
    def run(items: list[Callback]) -> Any:
        module = Drawing()
        runner = trainer(**{"callbacks": items, "max_epochs": 3, **arguments})
        runner.fit(module, datamodule=Data())
        progress = runner.fit_loop.epoch_loop.batch_progress.state_dict()
        return module.seen, progress, runner.global_step

    plain, ahead = both(run)
    assert ahead == plain


def test_a_dataset_that_draws_random_numbers_is_read_when_it_is_needed() -> None:
    class Random(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            super().__getitem__(index)
            return torch.randint(1000, ()) + random.randrange(1000) + np.random.randint(1000)

    def run(items: list[Callback]) -> Any:
        module = Drawing()
        trainer(callbacks=items, max_epochs=3).fit(module, DataLoader(Random(), batch_size=2))
        return module.seen

    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    plain = run([])
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    with pytest.warns(NoEffectWarning, match="draws random numbers in this process") as caught:
        assert run([DevicePrefetch()]) == plain
    assert len([w for w in caught if w.category is NoEffectWarning]) == 1
    with pytest.raises(RuntimeError, match="Give the loader workers"):
        run([DevicePrefetch(strict=True)])


def test_loaders_of_unknown_length_in_turn_are_not_fetched_ahead() -> None:
    loaders = {"a": DataLoader(Stream(), batch_size=2), "b": loader(7)}
    module = Drawing()
    with pytest.warns(NoEffectWarning, match="does not know its length"):
        trainer(callbacks=[DevicePrefetch()]).fit(module, loaders)
    assert len(module.seen["fit"]) == 12


def test_a_combined_loader_of_another_kind_is_left_alone(caplog) -> None:
    class Own(CombinedLoader):
        """Does something else."""

    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    module = Notes()
    trainer(callbacks=[DevicePrefetch(strict=False)]).fit(module, Own(loader(), "min_size"))
    assert len(module.seen["fit"]) == 12
    assert "no effect: Own is a combined loader of its own kind." in caplog.text


# --- Resuming -----------------------------------------------------------------------------------


def resumed(*items: Callback, path: str | None = None) -> Notes:
    module = Notes()
    data = ResumableLoader(NUMBERS, 2, shuffle=True)
    run = trainer(callbacks=[*items], max_epochs=3)
    run.fit(module, data, ckpt_path=path)
    module.loader = data
    module.runner = run
    return module


@pytest.mark.parametrize(("step", "depth"), [(1, 4), (3, 4), (12, 4), (17, 4), (17, 1)])
def test_a_checkpoint_holds_the_place_of_the_steps_and_not_of_the_thread(step, depth) -> None:
    straight = resumed().seen["fit"]
    first = resumed(DevicePrefetch(depth), SaveAndStop(step, "middle.ckpt"))
    assert first.seen["fit"] == straight[:step]
    for items in ([DevicePrefetch(depth)], []):
        assert resumed(*items, path="middle.ckpt").seen["fit"] == straight[step:]
    # Saved after the run, it is the same.
    first.runner.save_checkpoint("after.ckpt")
    places = [
        torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"]
        for path in ("middle.ckpt", "after.ckpt")
    ]
    assert places[0]["combined_loader"] == places[1]["combined_loader"]


def test_a_loader_tells_its_own_place_again_once_it_is_used_again() -> None:
    first = resumed(DevicePrefetch(2), SaveAndStop(5, "middle.ckpt"))
    assert first.loader.state_dict()["given"] == 5
    iterator = iter(first.loader)
    next(iterator)
    assert first.loader.state_dict()["given"] == 1
    assert "state_dict" not in vars(first.loader)
    whole = resumed(DevicePrefetch(2))
    assert "state_dict" not in vars(whole.loader)


def test_a_checkpoint_that_is_saved_because_of_an_error_has_the_right_place() -> None:
    class Fails(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if trainer.global_step == 7:
                raise ZeroDivisionError

    class Save(Callback):
        def on_exception(self, trainer, pl_module, exception) -> None:
            trainer.save_checkpoint("error.ckpt")

    for order in (1, -1):
        items = [DevicePrefetch(3), Save()][::order]
        with pytest.raises(ZeroDivisionError):
            resumed(*items, Fails())
        saved = torch.load("error.ckpt", weights_only=False)
        place = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        assert place[0]["given"] == 8  # the batch of the step that failed was given
        Path("error.ckpt").unlink()


# --- Errors and ends ----------------------------------------------------------------------------


class Failing(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 12:
            raise LookupError("item 12")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("workers", "depth"), [(0, 1), (0, 4), pytest.param(1, 4, marks=pytest.mark.slow)]
)
def test_an_error_in_the_data_comes_at_its_step(workers: int, depth: int) -> None:
    module = Notes()
    run = trainer(callbacks=[DevicePrefetch(depth)])
    with pytest.raises(LookupError, match="item 12"):
        run.fit(module, DataLoader(Failing(), batch_size=2, num_workers=workers))
    assert [items for _, items in module.seen["fit"]] == [(2 * i, 2 * i + 1) for i in range(6)]
    assert not threads()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.usefixtures("signal_handlers")
def test_an_error_in_a_step_ends_the_thread(error: type[BaseException]) -> None:
    class Raise(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx == 4:
                assert threads()
                raise error

    run = trainer(callbacks=[DevicePrefetch(3), Raise()])
    with pytest.raises((error, SystemExit)):
        run.fit(Notes(), loader())
    assert not threads()


@pytest.mark.usefixtures("signal_handlers")
def test_who_waits_for_a_slow_batch_can_interrupt_it() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 8:
                threading.Timer(0.2, _interrupt).start()
                time.sleep(0.6)
            return index

    run = trainer(callbacks=[DevicePrefetch()])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.fit(Notes(), DataLoader(Slow(), batch_size=1))
    assert not threads()


def _interrupt() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGINT)


def test_a_dataset_that_blocks_for_ever_does_not_keep_the_run_from_ending(monkeypatch) -> None:
    monkeypatch.setattr(_ahead_loader, "_PATIENCE", 0.1)
    free = threading.Event()

    class Blocking(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 4:
                free.wait(60)
            return index

    run = trainer(callbacks=[DevicePrefetch()], max_steps=4)
    with pytest.warns(UserWarning, match="a batch that is being fetched, and goes on without it"):
        run.fit(Notes(), DataLoader(Blocking(), batch_size=1))
    free.set()
    for thread in threads():
        thread.join(10)


def test_a_probe_stops_the_thread_while_it_puts_things_back() -> None:
    class Counting(Numbers):
        """Its items depend on how many were read."""

        count = 0

        def __getitem__(self, index: int) -> int:
            self.count += 1
            return self.count

    class Probe(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            with preserve_state(trainer, pl_module):
                time.sleep(0.01)

    module = Notes()
    data = DataLoader(Counting(), batch_size=1)
    trainer(callbacks=[DevicePrefetch(2), Probe()]).fit(module, data)
    assert [items for _, items in module.seen["fit"]] == [(i + 1,) for i in range(23)]


# --- Copies, with stand-ins for a CUDA device ---------------------------------------------------


class Event:
    happened = False

    def query(self) -> bool:
        return self.happened


class SideStream:
    """Notes what it is told to wait for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.waited: list[Event] = []

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)


class Unpinned(BufferPool):
    """Does without a device that copies from pinned memory."""

    def lease(self, shape: Any, dtype: Any = torch.float32, device: Any = "cpu", *, pinned: Any):
        assert pinned
        return super().lease(shape, dtype, device)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[SideStream, SideStream]:
    side, current = SideStream(), SideStream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    return side, current


class Typed(torch.Tensor):
    """A tensor of its own kind."""


def test_a_copied_batch_is_the_same_and_the_step_waits_for_it(streams) -> None:
    side, current = streams
    pool = Unpinned()
    batch = {
        "plain": torch.randn(3, 4),
        "nhwc": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "typed": torch.randn(3).as_subclass(Typed),
        "sparse": torch.eye(3).to_sparse(),
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
        "empty": torch.ones(0, 5),
        "number": torch.tensor(3, dtype=torch.int64),
        "rest": ["text", None, 2.5],
    }
    give = copying(torch.device("cpu"), pool)(batch)
    assert not current.waited
    copied = give()
    assert current.waited == side.events
    for name in ("plain", "nhwc", "typed", "empty", "number"):
        assert torch.equal(copied[name], batch[name])
        assert copied[name].stride() == batch[name].stride()
        assert copied[name].dtype == batch[name].dtype
        assert type(copied[name]) is type(batch[name])
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    assert isinstance(copied["packed"], PackedSequence)
    assert torch.equal(copied["packed"].data, batch["packed"].data)
    assert copied["rest"] == batch["rest"]
    assert copied["plain"].data_ptr() != batch["plain"].data_ptr()
    assert pool.statistics.leased == 0


def test_pinned_memory_is_used_again_only_once_the_copy_has_happened(streams) -> None:
    side, _ = streams
    pool = Unpinned()
    start = copying(torch.device("cpu"), pool)
    for number in range(3):
        assert start([torch.full((8,), float(number))])()[0][0] == number
    assert pool.statistics.reused == 0
    for event in side.events:
        event.happened = True
    for number in range(3):
        assert start([torch.full((8,), float(number))])()[0][0] == number
    assert pool.statistics.reused == 3
    assert pool.statistics.abandoned == 0


@pytest.mark.parametrize("owner", ["module", "data module", "nobody"])
def test_hooks_that_expect_the_host_keep_batches_there(owner: str, streams, monkeypatch) -> None:
    class Hooked(Notes):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

    class HookedData(Data):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    run = trainer()
    monkeypatch.setattr(run.strategy, "_root_device", torch.device("cuda", 0))
    run.datamodule = HookedData() if owner == "data module" else Data()
    module = Hooked() if owner == "module" else Notes()
    prepare, text = DevicePrefetch()._prepare(run, module)
    assert (prepare is None) == (owner != "nobody")
    names = {
        "module": "Hooked.transfer_batch_to_device expects them on the host",
        "data module": "HookedData.on_before_batch_transfer expects them on the host",
        "nobody": "copied on a stream of their own",
    }
    assert text.endswith(names[owner])


# --- With others, and by itself -----------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_with_loader_settings_in_both_orders(persistent: bool) -> None:
    def run(*items: Callback) -> Any:
        torch.manual_seed(3), random.seed(3)
        module = Drawing()
        trainer(callbacks=list(items), max_epochs=3).fit(module, loader())
        return module.seen

    items = [DevicePrefetch(2), LoaderSettings(1, persistent_workers=persistent)]
    assert run(*items) == run(*items[::-1]) == run()
    assert not threads()


def test_a_step_that_takes_the_iterator_gets_the_same() -> None:
    class Iterating(Notes):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            self.note("fit", batch)
            return self.weight.sum()

    def run(items: list[Callback]) -> Any:
        module = Iterating()
        trainer(callbacks=items, max_epochs=2).fit(module, loader())
        return module.seen

    plain, ahead = both(run)
    assert ahead == plain
    assert len(plain["fit"]) == 24


def test_the_loader_without_a_trainer() -> None:
    ahead = AheadLoader(
        loader(shuffle=False), "min_size", 2, device=torch.device("cpu"), prepare=None, tell=print
    )
    for _ in range(2):
        batches = [batch.tolist() for batch, _, _ in ahead]
        assert [item for batch in batches for item in batch] == list(NUMBERS)
    iterator = iter(ahead)
    for _ in range(4):
        next(iterator)
    assert threads()
    ahead.reset()
    assert not threads()
