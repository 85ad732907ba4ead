"""Compile: odd last batches, stages, and ever new shapes."""

from __future__ import annotations

import pytest
import torch
import torchvision
from compiling import (
    Block,
    Noting,
    calls_of,
    deep,
    fit,
    graphs,
    lengths,
    lines,
    odd,
)
from models import Classifier, images, trainer
from torch import nn
from torch._dynamo import eval_frame
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf._item import statuses
from lightning_perf.callbacks._loaders import short_last_batch
from lightning_perf.callbacks._regions import find_regions, staged
from lightning_perf.callbacks.compile import Compile

pytestmark = pytest.mark.usefixtures("no_compiled_code")


class Counting(Classifier):
    """Notes the number of graphs after each epoch."""

    def on_fit_start(self) -> None:
        self.seen: list[int] = []

    def on_train_epoch_end(self) -> None:
        self.seen.append(graphs())


# --- The odd last batch -------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("regions", ["auto", "whole"])
def test_an_odd_last_batch_compiles_nothing_of_its_own(dynamic, regions, said) -> None:
    plain, module = Counting(deep()), Counting(deep())
    module.load_state_dict(plain.state_dict())
    fit(plain, data=odd(), max_epochs=3)
    fit(module, Compile(regions, backend="aot_eager", dynamic=dynamic), data=odd(), max_epochs=3)
    assert module.seen == [2, 2, 2], "one for training, one for validation"
    assert not [line for line in lines(said) if "again" in line]
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)


def test_full_batches_keep_the_code_made_for_their_size(monkeypatch) -> None:
    noting = Noting(monkeypatch)
    fit(Classifier(deep(1)), Compile("whole", backend="noting"), data=odd(), max_epochs=2)
    assert not noting.made_for_any_size
    # Two full batches of three, in the sanity check, training, and validation.
    assert noting.calls == [0] * 2 + [1] * 2 + [0] * 2 + [1] * 2 + [0] * 2


def test_it_is_said_once_for_each_loader_and_not_where_every_size_is_compiled(said) -> None:
    fit(Classifier(deep()), Compile(backend="eager"), data=odd(), max_epochs=2)
    val, train = [line for line in lines(said) if "samples" in line]
    assert val.startswith("the last batch (validate) has 2 samples, the others 4: it runs uncom")
    assert train.startswith("the last batch (train) has 2 samples, the others 4: it runs uncomp")
    assert "drop_last=True" in train
    assert "dynamic=True" in train
    said.clear()
    fit(Classifier(deep()), Compile(backend="eager", dynamic=True), data=odd())
    fit(Classifier(deep()), Compile(backend="eager"), data=images())
    assert not [line for line in lines(said) if "samples" in line]


def test_the_only_batch_is_compiled_however_short(monkeypatch) -> None:
    noting = Noting(monkeypatch)
    fit(Classifier(deep(1)), Compile("whole", backend="noting"), data=images(3, batch_size=4))
    assert len(noting.graphs) == 2
    assert len(noting.calls) == 3


def test_full_batches_of_a_validation_may_be_as_short_as_the_last_of_training(monkeypatch) -> None:
    noting = Noting(monkeypatch)
    run = trainer(callbacks=[Compile("whole", backend="noting")], num_sanity_val_steps=0)
    run.fit(Classifier(deep(1)), odd(), images(8, batch_size=2))
    assert len(noting.graphs) == 2
    assert noting.calls == [0] * 2 + [1] * 4


def test_of_several_loaders_each_may_end_with_an_odd_batch(monkeypatch) -> None:
    class Two(Classifier):
        def loss(self, batch):
            return sum(super(Two, self).loss(part) for part in batch.values())

        def validation_step(self, batch, batch_idx) -> None:
            pass

    noting = Noting(monkeypatch)
    run = trainer(callbacks=[Compile("whole", backend="noting")], max_epochs=2)
    run.fit(Two(deep(1)), {"a": odd(), "b": images(11, batch_size=4)})
    assert len(noting.graphs) == 1
    assert noting.calls == [0] * 8


@pytest.mark.parametrize("end", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.usefixtures("signal_handlers")
def test_the_compiler_is_as_before_when_a_run_ends_in_an_odd_batch(end) -> None:
    class Ending(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                assert eval_frame._stance.stance == "eager_on_recompile"
                if end is not None:
                    raise end
            return super().training_step(batch, batch_idx)

    run = trainer(callbacks=[Compile(backend="eager")])
    if end is None:
        run.fit(Ending(deep()), odd())
    else:
        with pytest.raises(SystemExit if end is KeyboardInterrupt else end):
            run.fit(Ending(deep()), odd())
    assert eval_frame._stance.stance == "default"


def test_batches_that_nobody_sees_compile_as_ever() -> None:
    class Iterating(Classifier):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    with pytest.warns(UserWarning, match="experimental"):
        trainer(callbacks=[Compile(backend="eager")], max_epochs=2).fit(Iterating(deep()), odd())
    assert graphs() == 2


def test_a_short_last_batch_is_known_from_the_loader() -> None:
    data = TensorDataset(torch.arange(10))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(10))

    assert short_last_batch(DataLoader(data, batch_size=4)) == 2
    assert short_last_batch(DataLoader(data, batch_size=4, shuffle=True)) == 2
    assert short_last_batch(DataLoader(data, batch_size=5)) == 0
    assert short_last_batch(DataLoader(data, batch_size=4, drop_last=True)) == 0
    assert short_last_batch(DataLoader(data, batch_size=None)) == 0
    assert short_last_batch(DataLoader(Stream(), batch_size=4)) == 0
    assert short_last_batch(DataLoader(data, batch_sampler=[[0, 1], [2]])) == 0


# --- Stages -------------------------------------------------------------------------------------


class Stages(nn.Sequential):
    """Four stages of blocks, as in a residual network: each halves the image."""

    def __init__(self) -> None:
        bottleneck = torchvision.models.resnet.Bottleneck
        super().__init__(
            torchvision.models.ResNet(bottleneck, [2, 3, 3, 2], num_classes=4, width_per_group=8)
        )


def large(samples: int = 6, size: int = 64) -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(samples, 3, size, size, generator=generator)
    return DataLoader(TensorDataset(data, torch.arange(samples) % 4), batch_size=4)


def test_stages_compile_fewer_graphs_than_blocks_for_fixed_sizes(monkeypatch) -> None:
    noting = Noting(monkeypatch)
    run = trainer(callbacks=[Compile(backend="noting")], max_epochs=3)
    run.fit(Classifier(Stages()), large())
    assert statuses(run)[0].text.startswith("10 regions (net.0.layer1.0 ... net.0.layer4.1)")
    assert len(noting.graphs) == 8, "the first of each stage, and the others of it"
    assert not noting.made_for_any_size
    assert len(noting.calls) == 3 * 10, "ten blocks, one full batch in each epoch"


def test_only_what_differs_between_stages_is_fixed() -> None:
    net = nn.ModuleDict(
        {
            "stages": nn.Sequential(
                *(nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, w)) for w in (4, 8))
            ),
            "blocks": nn.ModuleList([Block(), Block()]),
        }
    )
    assert list(staged(find_regions(net))) == ["stages.0", "stages.1"]
    assert not staged(find_regions(torchvision.models.vit_b_16()))


class Growing(torch.utils.data.Dataset):
    """Images of another size in each batch."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int):
        return torch.randn(2, 3, 8, 8 + index), torch.zeros(2, dtype=torch.long)


def test_ever_new_shapes_end_the_fixed_sizes_of_stages(monkeypatch, said) -> None:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            stages = [nn.Sequential(nn.Conv2d(w, 2 * w, 1), nn.ReLU()) for w in (3, 6)]
            head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)]
            super().__init__(nn.Sequential(*stages), *head)

    noting = Noting(monkeypatch)
    run = trainer(callbacks=[Compile(["net.0.0", "net.0.1"], backend="noting")])
    run.fit(Classifier(Net()), DataLoader(Growing(), batch_size=None))
    assert noting.made_for_any_size == [16, 17], "after eight shapes, in two stages each"
    assert len(noting.graphs) == 18
    assert not [line for line in lines(said) if "limit" in line]


# --- Ever new shapes ----------------------------------------------------------------------------


def test_the_recompile_limit_is_said_in_its_epoch(said) -> None:
    fit(
        Classifier(nn.Sequential(Block(), Block())),
        Compile(backend="eager", dynamic=False),
        data=lengths(12),
    )
    assert "recompile limit was reached" in lines(said)[0]
    assert lines(said)[0].startswith("epoch 0: ")
    assert "dynamic=True" in lines(said)[0]
    assert "collate_fn" in lines(said)[0]


@pytest.mark.parametrize("dynamic", [None, True])
def test_more_bucket_edges_than_the_limit_compile_code_for_any_size(dynamic, said) -> None:
    module = Counting(nn.Sequential(Block(), Block()))
    fit(module, Compile(backend="eager", dynamic=dynamic), data=lengths(12), max_epochs=3)
    assert module.seen[0] <= 6
    assert len(set(module.seen)) == 1
    assert not [line for line in lines(said) if "limit" in line or "again" in line]


@pytest.mark.filterwarnings("ignore:.*backend ignoring extra kwargs")
@pytest.mark.parametrize(
    ("mode", "instead"),
    [("reduce-overhead", "None"), ("max-autotune", "'max-autotune-no-cudagraphs'")],
)
def test_ever_new_shapes_end_a_recording_mode(mode: str, instead: str, said) -> None:
    module = Classifier(nn.Sequential(Block(), Block()))
    fit(module, Compile(backend="eager", mode=mode), data=lengths(12))
    (line,) = [line for line in lines(said) if "batch shapes" in line]
    assert f"going on with mode={instead}" in line
    assert "collate_fn" in line
    assert not any(calls_of(module).values())


@pytest.mark.filterwarnings("ignore:.*backend ignoring extra kwargs")
def test_few_shapes_keep_a_recording_mode(said) -> None:
    fit(Classifier(deep()), Compile(backend="eager", mode="reduce-overhead"), data=odd())
    fit(Classifier(nn.Sequential(Block())), Compile(backend="eager", mode=None), data=lengths(12))
    assert not [line for line in lines(said) if "batch shapes" in line]


# --- Real networks ------------------------------------------------------------------------------


@pytest.mark.slow
def test_resnet50_compiles_fewer_graphs_than_it_has_blocks() -> None:
    module = Classifier(torchvision.models.resnet50(num_classes=4))
    seen = []
    module.on_train_epoch_end = lambda: seen.append(graphs())
    trainer(callbacks=[Compile(backend="eager")], max_epochs=3).fit(module, large())
    assert seen == [8, 8, 8], "sixteen blocks of eight kinds"


def test_a_twelve_layer_transformer_compiles_three_graphs() -> None:
    class Text(Counting):
        def loss(self, batch):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x.flatten(2)).mean(1)[:, :4], y)

    layer = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True, dropout=0.0)
    module = Text(nn.TransformerEncoder(layer, 12, enable_nested_tensor=False))
    run = trainer(callbacks=[Compile(backend="eager")], max_epochs=3)
    run.fit(module, odd(), odd())
    # The first block has no gradient to hand on; validation has its own.
    assert module.seen == [3, 3, 3]
