"""Compile: reasons not to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from compiling import (
    Parts,
    calls_of,
    deep,
    fit,
)
from lightning.pytorch import LightningModule
from models import Classifier, conv_net
from torch import nn

from lightning_perf import NoEffectWarning
from lightning_perf._item import statuses
from lightning_perf.callbacks._regions import convolution_share
from lightning_perf.callbacks._toolchain import what_inductor_lacks
from lightning_perf.callbacks.compile import Compile

pytestmark = pytest.mark.usefixtures("no_compiled_code")


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


def test_naming_regions_is_a_way_out_on_mps() -> None:
    mps = torch.device("mps")
    assert "Name `regions`" in (Compile()._not_worth_it(mps, {}) or "")
    assert Compile(["net"])._not_worth_it(mps, {}) is None
    assert what_inductor_lacks(mps) is None
