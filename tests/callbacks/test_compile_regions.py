"""Compile: which modules."""

from __future__ import annotations

import pytest
import torch
import torchvision
from compiling import (
    Block,
    Parts,
    fit,
)
from models import Classifier, mlp
from torch import nn

from lightning_perf.callbacks._regions import find_regions, kinds
from lightning_perf.callbacks.compile import Compile


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
