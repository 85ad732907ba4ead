"""Batches are transformed once, in the loops asked for, with random numbers of their own."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from items import drawn
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities import CombinedLoader
from models import Classifier, conv_net, images, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from lightning_perf._item import statuses
from lightning_perf.callbacks import ChannelsLast, DeviceTransforms, Preallocate

ALL = ("train", "validate", "test", "predict")


class Count(nn.Module):
    """Marks each image as transformed, and notes the random number it drew for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def forward(self, batch: Any) -> Any:
        inputs, labels = batch
        self.drawn.append(torch.rand(1).item())
        return inputs + 1000, labels


class Looking(Classifier):
    """Notes in which loop how often the images of a batch were transformed."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, list[int]] = {}
        self.hooks: Counter[str] = Counter()

    def loss(self, batch: Any) -> Tensor:
        stage = self.trainer.state.stage.value
        self.times.setdefault(stage, []).append(round(batch[0].mean().item() / 1000))
        return super().loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class WithHook(Looking):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.hooks["module"] += 1
        return batch


class Data(LightningDataModule):
    """Four batches for each loop."""

    def train_dataloader(self) -> Any:
        return images()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class DataWithHook(Data):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.trainer.lightning_module.hooks["data"] += 1
        return batch


def all_loops(module: Looking, data: Any, *items: Callback, **kwargs: Any) -> dict[str, list[int]]:
    run = trainer(callbacks=list(items), max_epochs=2, **kwargs)
    for function in (run.fit, run.validate, run.test):
        function(module, data)
    run.predict(module, data, return_predictions=False)
    return module.times


# --- How often and where ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
@pytest.mark.parametrize("module", [Looking, WithHook])
@pytest.mark.parametrize("data", [Data, DataWithHook])
def test_training_batches_are_transformed_once_whoever_has_the_hooks(module, data) -> None:
    count = Count()
    looking = module()
    times = all_loops(looking, data(), DeviceTransforms(count))
    assert times["train"] == [1] * 8
    assert times["sanity_check"] == [0] * 2
    assert times["validate"] == [0] * 12
    assert times["test"] == times["predict"] == [0] * 4
    assert len(count.drawn) == 8
    batches = sum(len(seen) for seen in times.values())
    # The user's hook of either still sees each batch once; that of the data module wins.
    owner = "data" if data is DataWithHook else "module" if module is WithHook else None
    assert looking.hooks == ({owner: batches} if owner else {})


@pytest.mark.parametrize("loop", ALL)
def test_each_loop_by_itself(loop: str) -> None:
    times = all_loops(Looking(), Data(), DeviceTransforms(Count(), stages=[loop]))
    for stage, seen in times.items():
        asked = stage == loop or (stage, loop) == ("sanity_check", "validate")
        assert seen == [int(asked)] * len(seen), stage


def test_one_transform_for_training_and_another_for_all_loops_in_the_order_of_the_list() -> None:
    def doubled(batch: Any) -> Any:
        return [batch[0] * 2, batch[1]]

    items = (DeviceTransforms(Count()), DeviceTransforms(doubled, stages=ALL))
    times = all_loops(Looking(), Data(), *items)
    assert set(times["train"]) == {2}
    assert set(times["validate"]) == {0}
    assert set(all_loops(Looking(), Data(), *items[::-1])["train"]) == {1}


def test_layouts_of_other_items_are_those_of_the_transformed_batch() -> None:
    class Layout(Classifier):
        def loss(self, batch: Any) -> Tensor:
            assert batch[0].is_contiguous(memory_format=torch.channels_last)
            return super().loss(batch)

    def transposed(batch: Any) -> Any:
        return [batch[0].contiguous().clone(memory_format=torch.contiguous_format), batch[1]]

    for items in ([DeviceTransforms(transposed), ChannelsLast()], [ChannelsLast()]):
        trainer(callbacks=items).fit(Layout(), images())
    trainer(callbacks=[ChannelsLast(), DeviceTransforms(transposed)]).fit(Layout(), images())


def test_what_a_combined_loader_gives_is_passed_as_it_is() -> None:
    class Both(Classifier):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch["a"]) + super().loss(batch["b"])

    seen = []

    def note(batch: Any) -> Any:
        seen.append(sorted(batch))
        return batch

    loaders = CombinedLoader({"a": images(), "b": images(8)}, "max_size_cycle")
    trainer(callbacks=[DeviceTransforms(note)]).fit(Both(), loaders)
    assert seen == [["a", "b"]] * 4


def test_transforms_run_without_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)
    seen = []

    def scaled(batch: Any) -> Any:
        seen.append((batch[0] * weight).requires_grad)
        return batch

    trainer(callbacks=[DeviceTransforms(scaled)]).fit(Classifier(), images())
    assert seen == [False] * 4


# --- Random numbers -----------------------------------------------------------------------------


class Noisy(Classifier):
    """Draws in its forward pass, from all three generators."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(conv_net(), nn.Dropout(0.5)))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + random.random() + np.random.rand())


def shuffled() -> DataLoader[Any]:
    return DataLoader(images().dataset, batch_size=4, shuffle=True)


def seeded_losses(*items: Callback, **kwargs: Any) -> list[float]:
    module = Noisy()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    trainer(callbacks=list(items), max_epochs=3, **kwargs).fit(module, shuffled(), images())
    return module.losses


def test_the_random_numbers_of_model_and_data_are_as_without_it() -> None:
    assert seeded_losses(DeviceTransforms(drawn, stages=ALL)) == seeded_losses()


def numbers(item_seed: int = 0, *others: Callback, **kwargs: Any) -> list[float]:
    count = Count()
    torch.manual_seed(random.randrange(99))  # whatever the seed of the run
    run = trainer(callbacks=[DeviceTransforms(count, seed=item_seed), *others], **kwargs)
    run.fit(Classifier(), images(), images())
    return count.drawn


def test_its_own_random_numbers_follow_from_seed_epoch_and_batch() -> None:
    first = numbers(max_epochs=3)
    assert first == numbers(max_epochs=3) == numbers(max_epochs=3, num_sanity_val_steps=0)
    assert len(set(first)) == 12
    assert not set(first) & set(numbers(1, max_epochs=3))
    assert first == numbers(max_epochs=3, accumulate_grad_batches=2)
    assert first == numbers(0, Preallocate(), max_epochs=3)[-12:]


def test_functions_that_draw_from_python_and_numpy_are_seeded_too() -> None:
    def run() -> list[float]:
        seen: list[float] = []

        def note(batch: Any) -> Any:
            seen.extend((random.random(), np.random.rand()))
            return batch

        trainer(callbacks=[DeviceTransforms(note)]).fit(Classifier(), images())
        return seen

    first = run()
    assert first == run()
    assert len(set(first)) == 8


def test_a_run_that_is_resumed_within_an_epoch_goes_on_with_the_same_numbers() -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint("middle.ckpt")
                trainer.should_stop = True

    from lightning_perf.data import ResumableLoader

    def run(*others: Callback, path: str | None = None) -> list[float]:
        count = Count()
        loader = ResumableLoader(images().dataset, 4)
        callbacks = [DeviceTransforms(count), *others]
        run = trainer(callbacks=callbacks, max_epochs=3, use_distributed_sampler=False)
        run.fit(Classifier(), loader, ckpt_path=path)
        return count.drawn

    straight = run()
    assert run(Save()) == straight[:6]
    assert run(path="middle.ckpt") == straight[6:]


def test_every_evaluation_has_the_same_numbers() -> None:
    count = Count()
    item = DeviceTransforms(count, stages=["validate"])
    run = trainer(callbacks=[item], max_epochs=3)
    run.fit(Classifier(), images(), images())
    sanity, *evaluations = count.drawn[:2], *np.reshape(count.drawn[2:], (3, 4)).tolist()
    assert evaluations[0] == evaluations[1] == evaluations[2]
    assert sanity == evaluations[0][:2]
    run.validate(Classifier(), images(), verbose=False)
    assert count.drawn[-4:] == evaluations[0]


def test_ranks_draw_other_numbers() -> None:
    def numbers_of(rank: int) -> set[float]:
        count = Count()
        run = trainer(callbacks=[DeviceTransforms(count)])
        run.strategy.global_rank = rank
        run.fit(Classifier(), images())
        return set(count.drawn)

    assert len(numbers_of(0) | numbers_of(1) | numbers_of(2)) == 12


# --- What is given ------------------------------------------------------------------------------


def test_a_module_with_buffers_stays_out_of_the_checkpoint() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("by", torch.ones(1))

        def forward(self, batch: Any) -> Any:
            return batch[0] + self.by, batch[1]

    module = Classifier()
    keys = list(module.state_dict())
    run = trainer(callbacks=[DeviceTransforms(Shift())])
    run.fit(module, images())
    run.save_checkpoint("last.ckpt")
    saved = torch.load("last.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == keys
    assert not any("DeviceTransforms" in key for key in saved["callbacks"])


def test_transforms_of_torchvision_change_the_images_and_not_the_labels() -> None:
    seen = []

    class Note(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            seen.append(batch)

    item = DeviceTransforms(v2.RandomHorizontalFlip(p=1.0))
    trainer(callbacks=[item, Note()]).fit(Classifier(), images())
    for (changed, labels), (plain, same) in zip(seen, images(), strict=True):
        assert torch.equal(changed, plain.flip(-1))
        assert torch.equal(labels, same)


def test_transforms_are_made_from_a_configuration() -> None:
    flip = {"class_path": "torchvision.transforms.v2.RandomHorizontalFlip", "init_args": {"p": 1.0}}
    entry = {
        "class_path": "lightning_perf.callbacks.DeviceTransforms",
        "init_args": {"transform": flip, "stages": ["train", "test"]},
    }
    parser = LightningArgumentParser()
    parser.add_argument("--item", type=Callback)
    config = parser.parse_args(["--item", json.dumps(entry)])
    item = getattr(parser, "instantiate", parser.instantiate_classes)(config).item
    assert isinstance(item.transform, v2.RandomHorizontalFlip)
    assert item.transform.p == 1.0
    assert item.stages == ("train", "test")


def test_a_transform_that_returns_nothing_is_explained() -> None:
    def forgot(batch: Any) -> None:
        batch[0].mul_(2)

    with pytest.raises(TypeError, match="forgot was to return the transformed batch and returned"):
        trainer(callbacks=[DeviceTransforms(forgot)]).fit(Classifier(), images())


@pytest.mark.parametrize("loops", [("validate",), ("train", "validate")])
def test_a_loop_in_which_lightning_moves_no_batch_is_a_reason(loops: tuple[str, ...]) -> None:
    class Validating(Classifier):
        def validation_step(self, dataloader_iter: Any) -> None:
            super().validation_step(*next(dataloader_iter)[:2])

    run = trainer(callbacks=[DeviceTransforms(drawn, stages=loops, strict=False)])
    run.fit(Validating(), images(), images())
    (status,) = statuses(run)
    assert not status.active
    assert status.text.startswith("Validating.validation_step takes `dataloader_iter`")
    run = trainer(callbacks=[DeviceTransforms(drawn)])
    run.fit(Validating(), images(), images())
    assert statuses(run)[0].active


def test_what_it_does_is_said() -> None:
    item = DeviceTransforms(drawn, stages=["train", "test"])
    run = trainer(callbacks=[item])
    run.fit(Classifier(), images(), images())
    assert statuses(run)[0].text == "drawn in train"
    run.validate(Classifier(), images(), verbose=False)
    assert statuses(run)[0].text == "for train and test, not in this run"
