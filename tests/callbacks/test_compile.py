"""Compile: which modules, what stays as it was, what is counted, what is refused."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
import torchvision
from lightning.pytorch import LightningModule, seed_everything
from models import Classifier, LateClassifier, conv_net, images, mlp, trainer
from ranks import run_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf._knobs import read_knobs
from lightning_perf.callbacks._loaders import short_last_batch
from lightning_perf.callbacks._regions import convolution_share, find_regions, kinds
from lightning_perf.callbacks._toolchain import what_inductor_lacks
from lightning_perf.callbacks.compile import Compile, compiled


@pytest.fixture(autouse=True)
def no_compiled_code() -> None:
    """Forget what other tests compiled, so that graphs can be counted."""
    torch._dynamo.reset()
    counters.clear()


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.relu(self.linear(x)))


def deep(blocks: int = 3) -> nn.Sequential:
    """Repeated blocks between a first and a last layer, on 3x8x8 images."""
    stage = nn.Sequential(*[Block() for _ in range(blocks)])
    first = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(12, 16))
    return nn.Sequential(first, stage, nn.Linear(16, 4))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "Compile:" in r.getMessage()]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    return caplog


def fit(module: LightningModule, *callbacks, data=None, **kwargs):
    data = images() if data is None else data
    run = trainer(callbacks=list(callbacks), **kwargs)
    run.fit(module, data, data)
    return run


# --- Which modules ------------------------------------------------------------------------------


def test_repeated_blocks_are_found_in_lists_and_sequences() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(16, 16)
            self.listed = nn.ModuleList([Block(), Block()])
            self.stages = nn.Sequential(
                nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
            )

        def forward(self, x):
            return x

    assert list(find_regions(Net())) == [
        "listed.0",
        "listed.1",
        "stages.0.0",
        "stages.0.1",
        "stages.1.0",
        "stages.1.1",
    ]


@pytest.mark.parametrize(
    ("build", "regions", "different"),
    [
        (torchvision.models.resnet18, 8, 7),
        (torchvision.models.resnet50, 16, 8),
        (torchvision.models.vit_b_16, 12, 1),
    ],
)
def test_blocks_of_real_models_share_code(build, regions: int, different: int) -> None:
    with torch.device("meta"):
        found = find_regions(build())
    assert len(found) == regions
    assert kinds(found) == different


@pytest.mark.parametrize(
    "net",
    [
        pytest.param(mlp(), id="no two members alike"),
        pytest.param(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), id="single layers"),
        pytest.param(nn.Sequential(Block(), nn.Linear(16, 16)), id="one block"),
        pytest.param(
            nn.Sequential(nn.Linear(16, 500), nn.Linear(500, 16), nn.Sequential(Block(), Block())),
            id="blocks that are a small part",
        ),
    ],
)
def test_a_network_without_repeated_blocks_is_one_region(net: nn.Module) -> None:
    assert find_regions(net) == {"": net}
    assert list(find_regions(Classifier(net))) == ["net"]


def test_embeddings_do_not_make_blocks_a_small_part() -> None:
    net = nn.Sequential(nn.Embedding(10_000, 16), nn.Sequential(Block(), Block()))
    assert list(find_regions(net)) == ["1.0", "1.1"]


class Parts(LightningModule):
    """Calls its children one by one, as LightningModules do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp()
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.heads = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 2), nn.ReLU())})
        self.last = nn.Linear(2, 4)
        self.loss = nn.CrossEntropyLoss()
        self.accuracy = MulticlassAccuracy(4)
        self.metrics = MetricCollection({"accuracy": MulticlassAccuracy(4)})
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.heads["a"](self.dropout(x)))

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        x, y = batch
        scores = self(x)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy)
        return self.loss(scores, y)

    def validation_step(self, batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_of_a_lightning_module_the_called_children_with_weights_are_regions() -> None:
    auto = ["encoder", "blocks.0", "blocks.1", "heads.a"]
    assert list(find_regions(Parts())) == auto
    assert list(find_regions(Parts(), "whole")) == [*auto, "last"]


def test_names_choose_modules_and_a_list_of_modules_stands_for_its_members() -> None:
    module = Parts()
    assert list(find_regions(module, ["blocks", "last"])) == ["blocks.0", "blocks.1", "last"]
    assert list(find_regions(module, ["encoder.1"])) == ["encoder.1"]


def test_a_shared_module_is_compiled_once() -> None:
    module = Parts()
    module.again = module.encoder
    assert list(find_regions(module, ["encoder", "again"])) == ["encoder"]
    assert list(find_regions(module, "whole")).count("again") == 0


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        (["encodr"], "names 'encodr', but Parts has no such module. Did you mean 'encoder'?"),
        ([""], "names '', but Parts has no such module"),
        ("encoder", r"'auto', 'whole' or a list of module names, such as regions=\['encoder'\]"),
    ],
)
def test_unknown_regions_are_explained(regions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_regions(Parts(), regions)
    with pytest.raises(ValueError, match=message):
        fit(Parts(), Compile(regions, backend="eager"))


# --- In place, and back -------------------------------------------------------------------------


def calls_of(module: nn.Module) -> dict[str, bool]:
    return {n: m._compiled_call_impl is not None for n, m in module.named_modules()}


def test_the_context_manager_compiles_in_place_and_undoes_also_after_an_error() -> None:
    net = deep()
    x, keys, calls = torch.randn(2, 3, 8, 8), list(net.state_dict()), calls_of(net)
    expected = net(x)
    attributes = {n: set(vars(m)) for n, m in net.named_modules()}

    def use() -> None:
        with compiled(net, backend="eager") as names:
            assert names == ("1.0", "1.1", "1.2")
            assert [name for name, on in calls_of(net).items() if on] == list(names)
            assert list(net.state_dict()) == keys
            torch.testing.assert_close(net(x), expected)
            assert graphs() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert calls_of(net) == calls
    assert {n: set(vars(m)) for n, m in net.named_modules()} == attributes


@pytest.mark.parametrize("options", [{"mode": "fastest"}, {"backend": "no such"}])
def test_the_context_manager_undoes_when_torch_refuses_an_option(options: dict) -> None:
    net = deep()
    with pytest.raises(Exception, match=r"fastest|no such"), compiled(net, **options):
        pass
    assert not any(calls_of(net).values())


def test_hooks_still_run_and_copies_are_eager() -> None:
    net, seen = deep(), []
    net[1][1].register_forward_hook(lambda *_: seen.append(1))
    with compiled(net, backend="eager"):
        net(torch.randn(2, 3, 8, 8))
        assert seen == [1]
        assert not any(calls_of(copy.deepcopy(net)).values())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_training_then_every_evaluation_learns_the_same(backend: str) -> None:
    plain, module = Classifier(deep()), Classifier(deep())
    module.load_state_dict(plain.state_dict())
    fit(plain, max_epochs=2)
    run = fit(module, Compile(backend=backend), max_epochs=2)
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
    assert run.callback_metrics["val_loss"].item() == pytest.approx(
        trainer().validate(plain, images(), verbose=False)[0]["val_loss"], rel=1e-4
    )
    run.validate(module, images(), verbose=False)
    run.test(module, images(), verbose=False)
    run.predict(module, images())
    run.fit_loop.max_epochs = 3
    run.fit(module, images(), images())
    assert not any(calls_of(module).values())


def test_fit_then_evaluation_compiles_again_only_for_inference_mode() -> None:
    module = Classifier(deep())
    run = fit(module, Compile(backend="eager"), max_epochs=2)
    assert graphs() == 2, "training and validation, three blocks sharing each"
    run.validate(module, images(), verbose=False)
    assert graphs() == 3
    run.test(module, images(), verbose=False)
    run.predict(module, images())
    fit(module, Compile(backend="eager"))
    fit(Classifier(deep()), Compile(backend="eager"))
    assert graphs() == 3


def test_steps_and_logging_stay_eager() -> None:
    class Watching(Classifier):
        def training_step(self, batch, batch_idx):
            self.compiling = torch.compiler.is_dynamo_compiling()
            self.epochs = [*getattr(self, "epochs", []), self.current_epoch]
            return super().training_step(batch, batch_idx)

    module = Watching(deep())
    fit(module, Compile(backend="eager", fullgraph=True), max_epochs=3)
    assert module.compiling is False
    assert module.epochs == [0] * 4 + [1] * 4 + [2] * 4
    assert not counters["graph_break"]


@pytest.mark.parametrize("regions", ["auto", "whole", ["encoder", "last"]])
def test_a_lightning_module_that_calls_its_children_trains_the_same(regions) -> None:
    seed_everything(1, verbose=False)
    plain = Parts()
    module = copy.deepcopy(plain)
    fit(plain)
    run = fit(module, Compile(regions, backend="eager"))
    assert statuses(run)[0].active
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, msg=name)


@pytest.mark.parametrize("saved_with_it", [True, False])
def test_a_plain_class_loads_the_checkpoint(saved_with_it: bool, tmp_path: Path) -> None:
    module = Parts()
    items = [Compile("whole", backend="eager")] if saved_with_it else []
    fit(module, *items).save_checkpoint(tmp_path / "it.ckpt")
    loaded = Parts.load_from_checkpoint(tmp_path / "it.ckpt", weights_only=True)
    assert list(loaded.state_dict()) == list(Parts().state_dict())
    fit(loaded, Compile(backend="eager"))


def test_a_checkpoint_written_during_the_run_has_the_same_keys_and_size(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    sizes, keys = [], []
    for items in ([], [Compile(backend="eager")]):
        folder = tmp_path / str(len(items))
        checkpoint = ModelCheckpoint(folder, filename="it")
        fit(Classifier(deep()), checkpoint, *items, enable_checkpointing=True)
        saved = torch.load(folder / "it.ckpt", weights_only=True)
        sizes.append(sum(v.numel() for v in saved["state_dict"].values()))
        keys.append(list(saved["state_dict"]))
    assert keys[0] == keys[1]
    assert sizes[0] == sizes[1]


def test_layers_made_in_configure_model_are_compiled() -> None:
    run = fit(LateClassifier(), Compile(backend="eager"))
    assert statuses(run)[0].text == "1 region (net), backend eager"


def test_manual_optimization_with_two_networks_trains_the_same() -> None:
    class Two(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.one, self.two = mlp(), mlp()
            self.flags: list[bool] = []

        def training_step(self, batch, batch_idx: int) -> None:
            x, y = batch
            for optimizer, net in zip(self.optimizers(), (self.one, self.two), strict=True):
                self.toggle_optimizer(optimizer)
                self.flags.append(all(p.requires_grad for p in net.parameters()))
                self.flags.append(
                    sum(p.requires_grad for p in self.parameters())
                    == sum(1 for _ in net.parameters())
                )
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.one(x) + self.two(x), y)
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.one, self.two)]

    plain = Two()
    module = copy.deepcopy(plain)
    trainer().fit(plain, images())
    trainer(callbacks=[Compile(backend="aot_eager")]).fit(module, images())
    assert all(module.flags)
    assert len(module.flags) == 16
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, msg=name)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_precision_and_accumulation(precision: str) -> None:
    plain, module = Classifier(deep()), Classifier(deep())
    module.load_state_dict(plain.state_dict())
    fit(plain, precision=precision, accumulate_grad_batches=3)
    fit(module, Compile(backend="eager"), precision=precision, accumulate_grad_batches=3)
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)


# --- Counting -----------------------------------------------------------------------------------


def odd(samples: int = 10) -> DataLoader:
    return images(samples=samples, batch_size=4)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_an_odd_last_batch_compiles_nothing_after_the_first_epoch(dynamic, said) -> None:
    seen = []

    class Epoch(Classifier):
        def on_train_epoch_end(self) -> None:
            seen.append(graphs())

    fit(Epoch(deep()), Compile(backend="eager", dynamic=dynamic), data=odd(), max_epochs=4)
    assert len(set(seen)) == 1
    assert not [line for line in lines(said) if "after the first epoch" in line]


def test_an_odd_last_batch_is_foreseen_with_fixed_sizes(said) -> None:
    fit(Classifier(deep()), Compile(backend="eager", dynamic=False), data=odd())
    (line,) = [line for line in lines(said) if "(train)" in line]
    assert "has 2 samples, the others 4" in line
    assert "drop_last=True" in line
    said.clear()
    fit(Classifier(deep()), Compile(backend="eager"), data=odd())
    assert not [line for line in lines(said) if "samples" in line]


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


def test_what_was_compiled_is_said_at_the_end(said) -> None:
    fit(Classifier(deep()), Compile(backend="eager"))
    assert lines(said) == ["lightning_perf: Compile: 2 graphs compiled."]


def test_a_run_that_compiles_nothing_anew_says_nothing(said) -> None:
    fit(Classifier(deep()), Compile(backend="eager"))
    said.clear()
    fit(Classifier(deep()), Compile(backend="eager"))
    assert lines(said) == []


def test_later_recompilation_is_said_in_its_epoch(said) -> None:
    class Freeze(Classifier):
        def on_train_epoch_start(self) -> None:
            self.net[1][0].linear.weight.requires_grad_(self.current_epoch < 1)

    fit(Freeze(deep()), Compile(backend="eager"), max_epochs=2)
    again, summary = lines(said)
    assert "compiling again in epoch 1 (train)" in again
    assert "after the first epoch: 1 in epoch 1" in summary


def test_rare_validation_is_not_taken_for_recompilation(said) -> None:
    fit(Classifier(deep()), Compile(backend="eager"), max_epochs=2, check_val_every_n_epoch=2)
    assert lines(said) == ["lightning_perf: Compile: 2 graphs compiled."]


def test_memory_format_changed_after_compiling_is_recompiled_and_right(said) -> None:
    class Change(Classifier):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net.to(memory_format=torch.channels_last)

    plain, module = Change(conv_net()), Change(conv_net())
    module.load_state_dict(plain.state_dict())
    fit(plain, max_epochs=2)
    fit(module, Compile(backend="eager"), max_epochs=2)
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
    assert "1 in epoch 1" in lines(said)[-1]


class Breaking(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.norm(x)


def test_graph_breaks_are_counted_and_the_users_counters_kept(said) -> None:
    counters["graph_break"]["the user's own"] = 5
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), Breaking(), nn.Linear(16, 4))
    fit(Classifier(net), Compile(["net.2"], backend="eager"))
    assert counters["graph_break"]["the user's own"] == 5
    (summary,) = lines(said)
    assert "2 graph breaks: " in summary
    assert "graph_break" in summary
    assert "user's own" not in summary


def test_full_graph_raises_at_a_graph_break_and_everything_is_undone() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), Breaking(), nn.Linear(16, 4))
    module = Classifier(net)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        fit(module, Compile(["net.2"], backend="eager", fullgraph=True))
    assert not any(calls_of(module).values())


class Lengths(torch.utils.data.Dataset):
    """One sequence of 16 features per batch, each of another length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return torch.randn(index + 2, 16), torch.zeros(index + 2, dtype=torch.long)


def lengths(count: int) -> DataLoader:
    return DataLoader(Lengths(count), batch_size=None)


def test_the_recompile_limit_is_said(said) -> None:
    fit(
        Classifier(nn.Sequential(Block(), Block())),
        Compile(backend="eager", dynamic=False),
        data=lengths(12),
    )
    assert "recompile limit was reached" in lines(said)[-1]
    assert "collate_fn" in lines(said)[-1]


def test_many_different_blocks_do_not_reach_the_limit(said) -> None:
    widths = [nn.Sequential(nn.Linear(w, w + 1), nn.ReLU()) for w in range(4, 16)]
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Sequential(*widths))
    fit(Classifier(net), Compile([f"net.2.{i}" for i in range(12)], backend="eager"))
    assert lines(said) == ["lightning_perf: Compile: 24 graphs compiled."]


def test_a_reset_of_dynamo_in_a_run_does_no_harm() -> None:
    class Reset(Classifier):
        def on_train_epoch_end(self) -> None:
            torch._dynamo.reset()

    fit(Reset(deep()), Compile(backend="eager"), max_epochs=2)


# --- Modes that record CUDA graphs --------------------------------------------------------------


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


# --- Reasons not to -----------------------------------------------------------------------------


def reason(module: LightningModule, item: Compile) -> str:
    with pytest.warns(NoEffectWarning):
        run = fit(module, item)
    (status,) = statuses(run)
    assert not status.active
    return status.text


def test_what_the_user_compiled_is_left_alone_and_said() -> None:
    module = Classifier(deep())
    module.net.compile(backend="eager")
    calls = dict(vars(module.net))
    assert "net: already compiled" in reason(module, Compile(backend="eager"))
    assert vars(module.net)["_compiled_call_impl"] is calls["_compiled_call_impl"]

    module = Classifier(torch.compile(deep(), backend="eager"))
    assert "net: already compiled" in reason(module, Compile(backend="eager"))


def test_the_rest_beside_it_is_compiled() -> None:
    module = Parts()
    module.encoder.compile(backend="eager")
    run = fit(module, Compile(backend="eager"))
    assert statuses(run)[0].text == (
        "3 regions (blocks.0, blocks.1, heads.a), backend eager; "
        "left alone, already compiled: encoder"
    )
    assert [n for n, on in calls_of(module).items() if on] == ["encoder"]


def test_a_compiled_lightning_module_is_said_with_the_way_out() -> None:
    class Silent(Classifier):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            return None

    module = Silent(deep())
    text = reason(torch.compile(module, backend="eager"), Compile(backend="eager"))
    assert "Silent itself is compiled" in text
    assert "without torch.compile" in text

    module = Silent(deep())
    module.compile(backend="eager")
    assert "itself is compiled" in reason(module, Compile(backend="eager"))


def test_single_layers_are_not_worth_it() -> None:
    class Single(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Linear(192, 4))

        def loss(self, batch):
            return nn.functional.cross_entropy(self.net(batch[0].flatten(1)), batch[1])

    assert "single layers only" in reason(Single(), Compile(backend="eager"))
    assert statuses(fit(Single(), Compile(["net"], backend="eager")))[0].active


def test_convolutions_on_a_cpu_are_skipped_unless_named() -> None:
    assert convolution_share(conv_net()) > 0.5
    assert convolution_share(torchvision.models.vgg11()) > 0.5
    assert convolution_share(torchvision.models.vit_b_16()) < 0.5
    text = reason(Classifier(conv_net()), Compile())
    assert "of the layers are convolutions" in text
    assert "Name `regions`" in text
    assert statuses(fit(Classifier(conv_net()), Compile(backend="eager")))[0].active


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "inductr"}, "no backend 'inductr'. Did you mean 'inductor'?"),
        ({"mode": "reduce_overhead"}, "no mode 'reduce_overhead'. Did you mean 'reduce-overhead'?"),
    ],
)
def test_unknown_options_are_explained_even_where_it_would_be_skipped(
    arguments: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(Classifier(conv_net()), Compile(**arguments, strict=False))


@pytest.mark.parametrize(
    ("platform", "environ", "programs", "message"),
    [
        ("linux", {}, [], r"C\+\+ compiler and 'g\+\+' is not there. Install it with `apt"),
        ("linux", {"CXX": "icpx"}, ["g++"], "'icpx' is not there"),
        ("darwin", {}, [], r"'clang\+\+' is not there. Run `xcode-select --install`"),
        ("win32", {}, [], "'cl' is not there. Install the C\\+\\+ tools of Visual Studio"),
        ("linux", {}, ["g++"], None),
        ("linux", {"CXX": "ccache g++"}, ["ccache"], None),
        ("darwin", {}, ["clang++"], None),
        ("win32", {}, ["cl"], None),
    ],
)
def test_a_missing_compiler_is_said_with_what_to_install(
    platform: str, environ: dict, programs: list[str], message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").touch()
    lack = what_inductor_lacks(
        torch.device("cpu"),
        platform=platform,
        environ=environ,
        which=lambda name: name if name in programs else None,
        headers=tmp_path,
    )
    if message is None:
        assert lack is None
    else:
        assert lack is not None
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(lack)


def test_missing_headers_are_said(tmp_path: Path) -> None:
    lack = what_inductor_lacks(
        torch.device("cpu"), environ={}, platform="linux", which=str, headers=tmp_path
    )
    assert lack is not None
    assert "python3-dev" in lack


def test_without_a_compiler_the_run_goes_on_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in reason(Classifier(deep()), Compile())


def test_a_sharding_strategy_is_told_what_to_do_instead() -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    text = Compile(backend="eager").why_not(
        type("Run", (), {"strategy": FSDPStrategy()})(), Classifier(deep())
    )
    assert "FSDPStrategy wraps layers itself" in text


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_iterator_steps_cannot_be_counted_for_a_recording_mode() -> None:
    class Iterating(Classifier):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    item = Compile(backend="eager", mode="reduce-overhead")
    assert "dataloader_iter" in reason(Iterating(deep()), item)


# --- With the real compiler, and on two ranks ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("regions", ["auto", "whole"])
def test_inductor_learns_the_same(regions: str) -> None:
    plain, module = Classifier(deep()), Classifier(deep())
    module.load_state_dict(plain.state_dict())
    fit(plain, max_epochs=2, data=odd())
    run = fit(module, Compile(regions), max_epochs=2, data=odd())
    run.test(module, odd(), verbose=False)
    assert statuses(run)[0].active
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)


@pytest.mark.slow
def test_a_residual_network_compiles_fewer_graphs_than_it_has_blocks() -> None:
    class Wide(Classifier):
        def loss(self, batch):
            images, labels = batch
            return nn.functional.cross_entropy(self.net(images), labels)

    net = torchvision.models.ResNet(
        torchvision.models.resnet.Bottleneck, [3, 4, 6, 3], num_classes=4, width_per_group=8
    )
    trainer(callbacks=[Compile(backend="eager")], max_epochs=3).fit(Wide(net), images(10))
    training = graphs()
    assert training <= 16
    trainer(callbacks=[Compile(backend="eager")]).fit(Wide(net), images(10))
    assert graphs() == training


@pytest.mark.slow
def test_a_twelve_layer_transformer_compiles_two_graphs() -> None:
    class Text(Classifier):
        def loss(self, batch):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x.flatten(2)).mean(1)[:, :4], y)

    layer = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True, dropout=0.0)
    net = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    trainer(callbacks=[Compile(backend="eager")], max_epochs=3).fit(Text(net), images(16))
    assert graphs() == 2, "the first block has no gradient to hand on"


_TWO_RANKS = """
import copy, sys
import torch
from lightning.pytorch.strategies import DDPStrategy
from models import images, trainer
from torch import nn
from lightning_perf.callbacks.compile import Compile
from lightning_perf._knobs import read_knobs
from test_compile import Classifier, deep

def fit(module, *items, **strategy):
    run = trainer(
        devices=2, max_epochs=2, callbacks=list(items),
        strategy=DDPStrategy(process_group_backend="gloo", **strategy),
    )
    run.fit(module, images(), images())
    return run

if __name__ == "__main__":
    torch.manual_seed(0)
    start = Classifier(deep())
    plain = copy.deepcopy(start)
    fit(plain)
    for regions, strategy in (("auto", {}), ("whole", {"bucket_cap_mb": 0.001})):
        torch._dynamo.reset()
        module = copy.deepcopy(start)
        run = fit(module, Compile(regions, backend="aot_eager"), **strategy)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value, msg=name)
        assert read_knobs()["dynamo_optimize_ddp"] is True
        sys.stdout.write(f"same {run.global_rank}\\n")
"""


def test_two_ranks_learn_the_same_also_with_small_buckets(tmp_path: Path) -> None:
    before = read_knobs()
    text = run_ranks(_TWO_RANKS, tmp_path, environ={"OMP_NUM_THREADS": "1"})
    assert text.count("same 0") == 2
    assert read_knobs() == before


def test_naming_regions_is_a_way_out_on_mps() -> None:
    mps = torch.device("mps")
    assert "Name `regions`" in (Compile()._not_worth_it(mps, {}) or "")
    assert Compile(["net"])._not_worth_it(mps, {}) is None
    assert what_inductor_lacks(mps) is None
