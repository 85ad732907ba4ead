"""Samplers and the resumable loader in runs of a plain Trainer: loops, flags, resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_runs import ITEMS, Notes, SaveAndStop, SaveInValidation, epochs_of, sampler, times
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from models import trainer
from torch.utils.data import DataLoader

from lightning_perf.callbacks import GarbageCollection, Preallocate
from lightning_perf.data import LengthBucketBatchSampler, ResumableLoader, pad_collate

Make = Callable[..., DataLoader[Any]]


def planned(cls: Any = DataLoader, kind: str = "budget", **options: Any) -> DataLoader[Any]:
    names = ("shuffle", "seed", "drop_last")
    of_sampler = {name: options.pop(name) for name in names if name in options}
    return cls(range(ITEMS), batch_sampler=sampler(kind, **of_sampler), **options)


def shuffled(**options: Any) -> DataLoader[Any]:
    return ResumableLoader(range(ITEMS), batch_size=4, shuffle=True, **options)


def in_order(**options: Any) -> DataLoader[Any]:
    return ResumableLoader(range(ITEMS), batch_size=4, **options)


MAKERS: dict[str, Make] = {
    "bucket": lambda **options: planned(kind="bucket", **options),
    "budget": planned,
    "resumable budget": lambda **options: planned(ResumableLoader, **options),
    "resumable shuffled": shuffled,
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


class Data(LightningDataModule):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> DataLoader[Any]:
        return self.make()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def fit(make: Make, *, ckpt_path: Any = None, **kwargs: Any) -> Notes:
    module = Notes()
    run = trainer(**{"max_epochs": 3, "limit_val_batches": 0, **kwargs})
    run.fit(module, make(), ckpt_path=ckpt_path)
    return module


def require_every_item_once(seen: Any) -> None:
    assert set(times(seen).values()) == {3}
    first, second, third = epochs_of(seen)
    assert len(first) == len(second) == len(third)
    assert first != second != third
    assert sorted(sum(first, ())) == sorted(sum(second, ())) == list(range(ITEMS))


@every_maker
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_each_epoch_brings_every_item_once_in_a_new_order(
    make: Make, workers: dict[str, Any]
) -> None:
    require_every_item_once(fit(lambda: make(**workers)).seen["fit"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_can_be_started_in_any_way(method: str) -> None:
    workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    make = MAKERS["resumable budget"]
    require_every_item_once(fit(lambda: make(**workers)).seen["fit"])


@every_maker
@pytest.mark.filterwarnings("ignore:Your .* sampler has shuffling enabled")
def test_all_loops_with_a_data_module(make: Make) -> None:
    module, data = Notes(), Data(make)
    run = trainer(max_epochs=2, num_sanity_val_steps=1)
    run.fit(module, data)
    assert set(times(module.seen["fit"]).values()) == {2}
    validated = module.seen["validate"]
    assert set(times(validated[1:]).values()) == {2}
    run.validate(module, data, verbose=False)
    run.test(module, data, verbose=False)
    found = run.predict(module, data)
    assert times(module.seen["test"]) == times(module.seen["predict"])
    assert set(times(module.seen["test"]).values()) == {1}
    assert sorted(int(item) for batch in found or [] for item in batch) == list(range(ITEMS))
    run.fit_loop.max_epochs = 3
    run.fit(module, data)
    assert set(times(module.seen["fit"]).values()) == {3}


def test_prediction_gives_all_items_whatever_the_sampler_leaves_out() -> None:
    module = Notes()
    trainer().predict(module, planned(drop_last=True))
    assert set(times(module.seen["predict"]).values()) == {1}
    assert len(times(module.seen["predict"])) == ITEMS
    left_out = planned(kind="bucket", drop_last=True)
    trainer(max_epochs=1).fit(module, left_out)
    assert len(times(module.seen["fit"])) == ITEMS - 1


@every_maker
def test_flags_that_shorten_a_run(make: Make) -> None:
    whole = epochs_of(fit(make).seen["fit"])
    some = epochs_of(fit(make, limit_train_batches=3).seen["fit"])
    assert some == [epoch[:3] for epoch in whole]
    assert len(fit(make, fast_dev_run=2).seen["fit"]) == 2
    half = epochs_of(fit(make, limit_train_batches=0.5, max_epochs=1).seen["fit"])
    assert len(half[0]) == len(whole[0]) // 2


@every_maker
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_are_made_again(make: Make, workers: int) -> None:
    module = Notes()
    run = trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, limit_val_batches=0)
    run.fit(module, Data(lambda: make(num_workers=workers)))
    whole = fit(lambda: make(num_workers=workers))
    assert module.seen["fit"] == whole.seen["fit"]


def test_overfitting_takes_the_same_batches_in_each_epoch() -> None:
    """Where Lightning can ask for it, or an item is there; a plain loader never learns of it."""

    def overfit(make: Make, **kwargs: Any) -> bool:
        first, second, third = epochs_of(fit(make, overfit_batches=2, **kwargs).seen["fit"])
        return len(first) == 2 and first == second == third

    turned_off = "enabled train dataloader shuffling"
    with pytest.warns(UserWarning, match=turned_off):
        assert overfit(MAKERS["resumable budget"])
    with pytest.warns(UserWarning, match=turned_off):
        assert overfit(shuffled)
    assert overfit(in_order)
    loader = planned()
    assert overfit(lambda: loader, callbacks=[GarbageCollection()])
    assert loader.batch_sampler.shuffle  # type: ignore[union-attr]  # ours has it
    assert overfit(lambda: planned(shuffle=False))
    assert not overfit(planned)


def test_fabric_names_the_epoch_too() -> None:
    for make in MAKERS.values():
        loader = Fabric(accelerator="cpu", devices=1).setup_dataloaders(make())
        epochs = [[tuple(batch.tolist()) for batch in loader] for _ in range(2)]
        assert epochs[0] != epochs[1]
        assert all(sorted(sum(epoch, ())) == list(range(ITEMS)) for epoch in epochs)


def test_several_loaders_at_once() -> None:
    class Both(Notes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("fit", batch["long"])
            self.note("test", batch["short"])
            return self.weight.sum()

    def both() -> Any:
        short = ResumableLoader(range(10), batch_size=4, shuffle=True)
        return CombinedLoader({"long": planned(), "short": short}, "max_size_cycle")

    module = Both()
    trainer(max_epochs=2).fit(module, both())
    assert set(times(module.seen["fit"]).values()) == {2}
    epochs = epochs_of(module.seen["test"])
    assert all(sorted(sum(epoch[:3], ())) == list(range(10)) for epoch in epochs)
    assert epochs[0][:3] != epochs[1][:3]


def straight_and_resumed(
    make: Make, path: Path, step: int, kwargs: dict[str, Any], save: Any = SaveAndStop
) -> tuple[Any, Any]:
    straight = fit(make, **kwargs).seen["fit"]
    callbacks = kwargs.get("callbacks", [])
    stop = [*callbacks, save(step, str(path))]
    before = fit(make, **{**kwargs, "callbacks": stop}).seen["fit"]
    after = fit(make, ckpt_path=path, **kwargs)
    return straight, [*before, *after.seen["fit"]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "stopped.ckpt"


@pytest.mark.parametrize("step", [1, 7, 11, 14, 16])
@pytest.mark.parametrize("limit", [1.0, 7])
def test_a_run_goes_on_with_the_batch_that_is_next(
    checkpoint: Path, step: int, limit: float
) -> None:
    kwargs = {"limit_train_batches": limit}
    straight, resumed = straight_and_resumed(MAKERS["resumable budget"], checkpoint, step, kwargs)
    assert resumed == straight


@pytest.mark.parametrize(
    ("make", "persistent"),
    [
        (shuffled, True),
        (MAKERS["resumable budget"], False),
        pytest.param(in_order, True, marks=pytest.mark.slow),
        pytest.param(shuffled, False, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_workers_that_have_prepared_batches(
    checkpoint: Path, make: Make, persistent: bool
) -> None:
    options = {"num_workers": 2, "persistent_workers": persistent, "prefetch_factor": 3}
    straight, resumed = straight_and_resumed(lambda: make(**options), checkpoint, 16, {})
    assert resumed == straight


@pytest.mark.parametrize(
    ("step", "workers"),
    [
        (1, 0),
        (11, 0),
        (14, 0),
        (16, 2),
        *[pytest.param(s, 2, marks=pytest.mark.slow) for s in (1, 11, 14)],
    ],
)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_plain_loader_goes_on_exactly_where_an_item_is_there(
    checkpoint: Path, step: int, workers: int
) -> None:
    def with_workers() -> DataLoader[Any]:
        return planned(num_workers=workers)

    items = {"callbacks": [GarbageCollection()]}
    straight, resumed = straight_and_resumed(with_workers, checkpoint, step, items)
    assert resumed == straight


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_plain_loader_alone_does_not(checkpoint: Path) -> None:
    straight, resumed = straight_and_resumed(planned, checkpoint, 16, {})
    assert resumed != straight


@pytest.mark.parametrize("step", [4, 8, 11])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_checkpoints_are_saved_in_a_validation_too(checkpoint: Path, step: int) -> None:
    interval = 4 if step != 11 else 11  # the length of an epoch

    class WithValidation(Data):
        def __call__(self) -> WithValidation:
            return self

    for maker, items in ((MAKERS["resumable budget"], []), (planned, [GarbageCollection()])):
        kwargs = {"limit_val_batches": 1, "val_check_interval": interval, "callbacks": items}
        straight, resumed = straight_and_resumed(
            WithValidation(maker), checkpoint, step, kwargs, SaveInValidation
        )
        assert resumed == straight


def test_another_order_in_the_middle_of_an_epoch_is_refused(checkpoint: Path) -> None:
    stop = [SaveAndStop(5, str(checkpoint))]
    fit(MAKERS["resumable budget"], callbacks=stop)
    message = r"middle of an epoch.* seed 0 \(now 3\)\. Which items are left cannot be told"
    with pytest.raises(RuntimeError, match=message):
        fit(
            lambda: planned(ResumableLoader, seed=3),
            ckpt_path=checkpoint,
        )
    # At the end of an epoch nothing is left.
    fit(MAKERS["resumable budget"], max_epochs=1, callbacks=[SaveAndStop(11, str(checkpoint))])
    resumed = fit(lambda: planned(ResumableLoader, seed=3), ckpt_path=checkpoint)
    assert set(times(resumed.seen["fit"]).values()) == {2}


class Means(Notes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.weight * batch).mean()


def test_preallocate_finds_the_largest_batch_of_a_sampler() -> None:
    lengths = [3] * 30 + [40] * 4
    batches = LengthBucketBatchSampler(lengths, 2)

    collate, widths = pad_collate(None), []

    def noted(items: Any) -> Any:
        widths.append(max(map(len, items)))
        return collate(items)

    loader = DataLoader([[1.0] * n for n in lengths], batch_sampler=batches, collate_fn=noted)
    trainer(callbacks=[Preallocate()]).fit(Means(), loader)
    # With the first batch already there.
    assert 40 in widths[:2]
    assert sorted(widths) == [3] * 15 + [40] * 3
