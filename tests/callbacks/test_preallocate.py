"""Preallocate runs the largest input once, before the first step, and says what it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import SimpleProfiler
from models import trainer
from texts import LENGTHS, Net, Texts, pad, texts
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf.callbacks import ExactAccumulation, GarbageCollection, Preallocate
from lightning_perf.callbacks.preallocate import preallocate


class Says:
    """What the items said, without the table."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog

    @property
    def lines(self) -> list[str]:
        mark = "lightning_perf: Preallocate: "
        messages = [record.message for record in self.caplog.records]
        return [m.removeprefix(mark) for m in messages if m.startswith(mark)]


@pytest.fixture
def says(caplog: pytest.LogCaptureFixture) -> Iterator[Says]:
    with caplog.at_level(logging.INFO):
        yield Says(caplog)


def shapes_run(item: Preallocate | None, data: Any, **kwargs: Any) -> list[tuple[int, ...]]:
    ran: list[Any] = []
    callbacks = [] if item is None else [item]
    trainer(**{"callbacks": callbacks, **kwargs}).fit(Net(ran), data)
    return ran


# --- what runs


def test_the_longest_items_run_before_the_first_step_of_a_shuffled_loader(says: Says) -> None:
    data = texts(shuffle=True, generator=torch.Generator().manual_seed(0))
    again = texts(shuffle=True, generator=torch.Generator().manual_seed(0))

    ran = shapes_run(Preallocate(), data)

    assert ran == [(3, 30), *shapes_run(None, again)]
    (line,) = says.lines
    assert line.startswith(
        "ran 3 items of up to 30 (padded 90), found by the lengths of Texts, as any items may "
        "meet; shapes (3, 30), (3,). Memory then: "
    )
    assert "GiB resident" in line


def test_of_fixed_batches_the_heaviest_and_the_longest_run(says: Says) -> None:
    ran = shapes_run(Preallocate(), texts(Texts([9, 9, 9, 9, 1, 1, 1, 1, 20]), batch_size=4))

    assert ran == [(4, 9), (1, 20), (4, 9), (4, 1), (1, 20)]
    assert says.lines[0].startswith(
        "ran 4 items of up to 9 (padded 36) and 1 item of size 20, found by the lengths of Texts, "
        "among the batches of an epoch; shapes (4, 9), (4,) and (1, 20), (1,)."
    )


def test_only_batches_that_are_trained_on_count() -> None:
    assert shapes_run(Preallocate(), texts(), limit_train_batches=2)[0] == (3, 9)
    assert shapes_run(Preallocate(), texts(), overfit_batches=1)[0] == (3, 9)


def test_several_loaders_are_taken_to_give_their_largest_at_once(says: Says) -> None:
    class Two(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.note((tuple(batch["a"][0].shape), tuple(batch["b"][0].shape)))
            return super().training_step(batch["a"], batch_idx)

    ran: list[Any] = []
    loaders = {"a": texts(), "b": texts(Texts([2] * 4 + [50]), batch_size=2, shuffle=True)}
    trainer(callbacks=[Preallocate()]).fit(Two(ran), loaders)

    assert ran[0] == ((3, 30), (2, 50))
    assert "3 items of up to 30 (padded 90) with 2 items of up to 50 (padded 100)" in says.lines[0]


def test_a_length_may_be_given_with_its_dimension(says: Says) -> None:
    assert shapes_run(Preallocate(max_length=40, dim=1), texts())[:2] == [(3, 40), (3, 9)]
    assert says.lines[0].startswith(
        "ran the first batch, tiled in dimension 1 from 9 to 40; shapes (3, 40), (3,)."
    )
    assert shapes_run(Preallocate(max_length=9, dim=-1), texts())[:2] == [(3, 9), (3, 9)]


def test_a_tiled_batch_has_real_inputs_and_targets() -> None:
    seen: list[Any] = []

    class Keep(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append([part.clone() for part in batch])
            batch[1].zero_()  # a step that writes to its batch
            batch[0].zero_()
            return super().training_step(batch, batch_idx)

    trainer(callbacks=[Preallocate(max_length=20, dim=1)]).fit(Keep(), texts())

    (tiled, labels), (first, targets), *_ = seen
    assert torch.equal(tiled, torch.cat([first] * 3, 1)[:, :20])
    assert torch.equal(labels, targets)
    assert targets.tolist() == [0, 1, 2]


def test_the_items_may_be_given(says: Says) -> None:
    assert shapes_run(Preallocate(indices=[7, 11]), texts())[0] == (2, 8)
    assert says.lines[0].startswith("ran the items 7, 11; shapes (2, 8), (2,).")


@pytest.mark.parametrize("owner", ["module", "datamodule", "both"])
def test_the_batch_may_be_given_by_a_hook(owner: str, says: Says) -> None:
    def largest_batch(self: Any) -> Any:
        length = 50 if isinstance(self, LightningModule) else 60
        return [torch.zeros(2, length, dtype=torch.long), torch.zeros(2, dtype=torch.long)]

    class Hooked(Net):
        pass

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return texts()

    if owner != "datamodule":
        Hooked.largest_batch = largest_batch
    if owner != "module":
        Data.largest_batch = largest_batch
    ran: list[Any] = []
    trainer(callbacks=[Preallocate()]).fit(Hooked(ran), datamodule=Data())

    assert ran[:2] == [(2, 60 if owner == "datamodule" else 50), (3, 9)]
    name = "Data" if owner == "datamodule" else "Hooked"
    assert says.lines[0].startswith(f"ran what {name}.largest_batch returns; shapes (2, ")


def test_an_attribute_of_that_name_that_is_no_method_is_nothing() -> None:
    module = Net(ran := [])
    module.largest_batch = 64
    trainer(callbacks=[Preallocate()]).fit(module, texts())
    assert ran[0] == (3, 30)


def test_arguments_win_over_the_hook() -> None:
    class Hooked(Net):
        def largest_batch(self) -> Any:
            raise AssertionError

    trainer(callbacks=[Preallocate(indices=[0])]).fit(Hooked(ran := []), texts())
    assert ran[0] == (1, 3)


# --- how it runs


class Counting(torch.optim.SGD):
    """Notes its steps where no guard looks."""

    steps: list[int]

    def step(self, closure: Any = None) -> Any:
        self.steps.append(1)
        return super().step(closure)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("closure", [False, True])
def test_of_manual_optimization_everything_runs_but_updates(
    raw: bool, closure: bool, says: Says
) -> None:
    schedules: list[int] = []

    class Schedule(torch.optim.lr_scheduler.StepLR):
        def step(self, *args: Any) -> None:
            schedules.append(1)
            super().step(*args)

    class Manual(Net):
        automatic_optimization = False

        def __init__(self, ran: list[Any]) -> None:
            super().__init__(ran)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=not raw)

            def compute() -> Tensor:
                optimizer.zero_grad()
                loss = super(Manual, self).training_step(batch, batch_idx)
                self.manual_backward(loss)
                return loss

            if closure:
                optimizer.step(compute)
            else:
                compute()
                optimizer.step()
            self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = Counting(self.parameters(), lr=0.1)
            optimizer.steps = []
            return [optimizer], [Schedule(optimizer, 2)]

    runs = []
    for callbacks in ([], [Preallocate()]):
        torch.manual_seed(0)
        schedules.clear()
        run = trainer(callbacks=callbacks)
        run.fit(module := Manual(ran := []), texts())
        assert len(run.optimizers[0].steps) == 4
        runs.append((ran, len(schedules), [p.tolist() for p in module.parameters()]))

    assert runs[1][0] == [(3, 30), *runs[0][0]]
    assert runs[0][1:] == runs[1][1:]
    assert says.lines[0].endswith(
        "Optimization is manual: the backward passes were those of training_step; steps of "
        "optimizers and schedulers in it were left out."
    )


def test_gradients_are_none_afterwards() -> None:
    seen = []

    class Look(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append([p.grad for p in self.parameters()])
            return super().training_step(batch, batch_idx)

    trainer(callbacks=[Preallocate()]).fit(Look(), texts())
    assert seen[:2] == [[None] * 3] * 2


def test_a_real_backward_ran_with_the_loss_scaled_for_accumulation() -> None:
    gradients = []

    class Look(Net):
        def on_after_backward(self) -> None:
            gradients.append(self.out.weight.grad.clone())

    for accumulate in (1, 4):
        torch.manual_seed(0)
        trainer(callbacks=[Preallocate()], accumulate_grad_batches=accumulate).fit(Look(), texts())
    assert torch.allclose(gradients[0], 4 * gradients[5])


class Told(Callback):
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Any) -> None:
        self.told.append("before")

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        self.told.append("after")


class Metrics(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Any] = []

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.logged.append(args)


def test_callbacks_loggers_and_the_profiler_are_not_told() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.logger.log_metrics({"mine": 1.0}, step=batch_idx)
            return super().training_step(batch, batch_idx)

    told, logger, profiler = Told(), Metrics(), SimpleProfiler()
    run = trainer(callbacks=[Preallocate(), told], logger=logger, profiler=profiler)
    run.fit(Logs(ran := []), texts())

    assert len(ran) == 5
    assert told.told == ["before", "after"] * 4
    assert len(logger.logged) == 4
    assert len(profiler.recorded_durations["[Strategy]SingleDeviceStrategy.training_step"]) == 4
    assert run.loggers == [logger]
    assert run.profiler is profiler


def test_the_hooks_of_the_module_run_as_in_training() -> None:
    class Hooks(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [torch.cat([batch[0], batch[0]], 1), batch[1]]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] % 5, batch[1]]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.width = batch[0].shape[1]

        def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
            assert self.width == batch[0].shape[1]
            assert batch[0].max() <= 4
            return super().training_step(batch, 0)

    trainer(callbacks=[Preallocate()]).fit(Hooks(ran := []), texts())
    assert ran[:2] == [(3, 60), (3, 18)]


def test_the_precision_is_that_of_the_run() -> None:
    kinds = []

    class Look(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            kinds.append(self.out(self.embed(batch[0]).mean(1)).dtype)
            return super().training_step(batch, batch_idx)

    trainer(callbacks=[Preallocate()], precision="bf16-mixed").fit(Look(), texts())
    assert set(kinds) == {torch.bfloat16}


@pytest.mark.parametrize("others", [[ExactAccumulation("samples")], [GarbageCollection(2)]])
def test_items_that_count_steps_do_not_count_this_one(
    others: list[Callback], caplog: pytest.LogCaptureFixture
) -> None:
    reports = []
    for mine in ([], [Preallocate()]):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            run = trainer(callbacks=[*others, *mine], accumulate_grad_batches=3)
            run.fit(Net(), texts(batch_size=5))
        name = type(others[0]).__name__
        # What garbage it found, and in which time, is not to be compared.
        lines = [r.message.split(" took ")[0] for r in caplog.records if f" {name}: " in r.message]
        reports.append(lines)
    assert reports[0] == reports[1] != []


def test_what_items_put_around_the_strategy_does_not_see_this_step() -> None:
    class Count(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            self.calls: list[str] = []
            for name in ("training_step", "backward", "optimizer_step"):
                setattr(trainer.strategy, name, partial(self.call, name, trainer.strategy))

        def call(self, name: str, strategy: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return getattr(type(strategy), name)(strategy, *args, **kwargs)

    run = trainer(callbacks=[Preallocate(), count := Count()])
    run.fit(Net(ran := []), texts())
    assert len(ran) == 5
    assert count.calls == ["optimizer_step", "training_step", "backward"] * 4
    assert {"training_step", "backward", "optimizer_step"} <= vars(run.strategy).keys()


# --- when it runs


def test_it_runs_in_each_fit_and_in_nothing_else() -> None:
    class Evaluates(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.out(self.embed(batch[0]).mean(1)).sum()

        test_step = predict_step = validation_step

    module, run = Evaluates(ran := []), trainer(callbacks=[Preallocate()])
    run.fit(module, texts(), texts())
    run.validate(module, texts(), verbose=False)
    run.test(module, texts(), verbose=False)
    run.predict(module, texts())
    assert len(ran) == 5
    run.fit_loop.max_epochs = 2
    run.fit(module, texts(), texts())
    assert ran[5] == (3, 30)
    assert len(ran) == 10


def test_it_runs_again_for_other_data_but_not_for_the_same() -> None:
    class Grows(Net):
        def train_dataloader(self) -> Any:
            return texts(Texts([2, 40]) if self.current_epoch == 2 else None, batch_size=6)

    run = trainer(callbacks=[Preallocate()], max_epochs=3, reload_dataloaders_every_n_epochs=1)
    run.fit(Grows(ran := []))
    assert ran == [(6, 30), (6, 9), (6, 30), (6, 9), (6, 30), (2, 40), (2, 40)]


def test_it_runs_for_each_batch_size_that_a_search_tries() -> None:
    class Sized(Net):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return texts(Texts(LENGTHS * 4), batch_size=self.batch_size)

    module = Sized(ran := [])
    finder = BatchSizeFinder(
        max_trials=2, steps_per_trial=1, init_val=2, batch_arg_name="batch_size"
    )
    trainer(callbacks=[finder, Preallocate()], enable_checkpointing=True).fit(module)
    assert module.batch_size == 4
    assert ran[:4] == [(2, 30), (2, 9), (4, 30), (4, 9)]


def test_it_runs_after_a_checkpoint_was_restored(tmp_path: Any) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    outcomes = []
    for items in ([], [Preallocate()]):
        torch.manual_seed(3)
        trainer(callbacks=[Save(), *items]).fit(Net(), texts())
        module = Net(ran := [])
        with pytest.warns(UserWarning, match="ended before the epoch ended"):
            trainer(callbacks=items).fit(module, texts(), ckpt_path=tmp_path / "middle.ckpt")
        outcomes.append([p.tolist() for p in module.parameters()])
    assert ran[0] == (3, 30)
    assert outcomes[0] == outcomes[1]


# --- why not


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Texts()[index] for index in range(6))


class Untold(DataLoader[Any]):
    """Changes its batches after collating, which nobody can know."""

    def __iter__(self) -> Any:
        for sequences, labels in super().__iter__():
            yield {"x": sequences, "y": labels}


class TakesDict(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch["x"], batch["y"]], batch_idx)


class SkipsLong(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch[0].shape[1] > 20 else super().training_step(batch, batch_idx)


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.LazyLinear(3)


class Iterates(Net):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


WHY_NOT: dict[str, tuple[Callable[[], LightningModule], Callable[[], Any], str]] = {
    "a stream": (Net, lambda: texts(Stream()), "Stream is an IterableDataset.*`max_length` and `d"),
    "no loader": (Net, lambda: Rows(), "Rows is no DataLoader"),
    "other batches": (
        TakesDict,
        lambda: Untold(Texts(), 3, collate_fn=pad),
        "the loader gives batches of the kind .*dict.* and this is another: 3 items",
    ),
    "lazy": (Lazy, texts, "lazy layers"),
    "takes an iterator": (Iterates, texts, "takes `dataloader_iter`"),
}


class Rows:
    def __iter__(self) -> Iterator[Any]:
        return iter([pad([Texts()[0]])])


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("case", WHY_NOT)
def test_where_the_largest_batch_is_unknown_it_stands_aside(
    case: str, strict: bool | None, says: Says
) -> None:
    make, data, reason = WHY_NOT[case]
    run = trainer(callbacks=[Preallocate(strict=strict)])
    expected: Any = {
        None: pytest.warns(NoEffectWarning, match=f"Preallocate has no effect here: .*{reason}"),
        True: pytest.raises(RuntimeError, match=f"{reason}.*strict=False"),
        False: nullcontext(),
    }[strict]
    with expected:
        run.fit(make(), data())
    if strict is False and statuses(run)[0].active:
        assert says.lines[0].startswith("no effect: ")
    if not strict:
        assert run.global_step > 0


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_step_that_skips_its_largest_batch_is_no_success() -> None:
    with pytest.warns(NoEffectWarning, match=r"training_step returned no loss for 3 items of up"):
        trainer(callbacks=[Preallocate()]).fit(SkipsLong(), texts())


def test_a_failing_step_raises_its_own_error_and_names_the_batch(says: Says) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch[0].shape[1] > 20:
                raise IndexError("position 21")
            return super().training_step(batch, batch_idx)

    with pytest.raises(IndexError, match="position 21"):
        trainer(callbacks=[Preallocate()]).fit(Fails(), texts())
    assert says.lines[0].startswith("training_step failed, or its batch, at 3 items of up to 30")


# --- without Lightning


def test_the_function_leaves_nothing_but_what_allocators_keep() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.get_rng_state()

    def step() -> None:
        model(torch.randn(64, 4)).sum().backward()
        optimizer.step()

    preallocate(model, step, [optimizer])

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), generator)
