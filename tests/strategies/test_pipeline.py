"""How a network is cut, what a batch becomes, and that options are plain; no processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from pipelines import Transformer, convolutions
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_perf.strategies import PipelineStrategy
from lightning_perf.strategies._pipeline.exchange import Like, fingerprint, random_numbers
from lightning_perf.strategies._pipeline.micro_batches import Recorder, micro_batches
from lightning_perf.strategies._pipeline.stages import (
    find_network,
    find_points,
    module_owners,
    owners,
    sequential_part,
    traced_part,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zb"}, "schedule='zb' was asked for; it is one of 'gpipe', '1f1b'"),
        ({"start_method": "fork"}, "start_method='fork' .* one of 'popen', 'spawn'"),
        ({"chunks": 0}, "chunks=0 was asked for; it is a whole number from 1 on"),
        ({"chunks": True}, "chunks=True"),
        ({"chunks": 2.0}, "chunks=2.0"),
        ({"timeout": 0}, "timeout=0 was asked for; it is a number of seconds above 0"),
        ({"split_points": "3"}, "split_points='3' was asked for; it is a list of names, or None"),
        ({"split_points": [3]}, r"split_points=\[3\]"),
    ],
)
def test_wrong_arguments_are_named_with_the_choices(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineStrategy("net", **options)


class Holder(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_the_only_sequential_is_the_network() -> None:
    net = convolutions()
    holder = Holder(norm=nn.Sequential(nn.ReLU()), net=net, head=nn.Linear(2, 2))
    assert find_network(holder, None) == ("net", net)
    assert find_network(holder, "net.2") == ("net.2", net[2])


def test_a_network_that_is_not_there_is_named_with_the_choices() -> None:
    holder = Holder(one=convolutions(), two=convolutions())
    with pytest.raises(ValueError, match=r"network='net' .* Holder has no.*'one', 'two'"):
        find_network(holder, "net")
    with pytest.raises(ValueError, match="network='' was asked for"):
        find_network(holder, "")
    with pytest.raises(ValueError, match=r"Holder has 2 children .* one of 'one', 'two'"):
        find_network(holder, None)
    with pytest.raises(ValueError, match=r"Linear has 0 children .* one of none"):
        find_network(nn.Linear(1, 1), None)


def test_stages_of_a_sequential_have_about_equal_parameter_counts() -> None:
    layers = [nn.Linear(size, 1, bias=False) for size in (5, 1, 1, 1, 8, 3)]
    net = nn.Sequential(*layers)
    assert find_points(net, None, 2) == ["4"]
    assert find_points(net, None, 3) == ["4", "5"]
    assert find_points(net, None, 6) == ["1", "2", "3", "4", "5"]
    # Inside a Sequential as well.
    assert find_points(nn.Sequential(nn.Sequential(*layers[:5]), layers[5]), None, 2) == ["0.4"]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="has 2 layers, '0', '1', and there are 3 processes"):
        find_points(nn.Sequential(nn.ReLU(), nn.Linear(1, 1)), None, 3)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (["3", "5"], r"\['3', '5'\] makes 3 stages, and there are 2 processes. Name 1 modules"),
        ([], "makes 1 stages"),
        (["9"], "Sequential has no '9'. It has '0', '1', '2.0', "),
        (["0"], "leaves a stage empty"),
    ],
)
def test_split_points_that_do_not_fit_are_refused(points: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_points(convolutions(), points, 2)


def test_split_points_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="is not in the order of the network"):
        find_points(convolutions(), ["4", "2"], 3)


def test_a_network_that_is_no_sequential_needs_split_points() -> None:
    with pytest.raises(ValueError, match=r"Transformer is no nn.Sequential.*'embed', 'blocks'"):
        find_points(Transformer(), None, 2)
    assert find_points(Transformer(), ["blocks.2"], 2) == ["blocks.2"]


def test_weights_belong_to_the_stage_in_which_they_are_defined() -> None:
    stages = owners(Transformer(), ["blocks.1", "norm"])
    first = {name for name, stage in stages.items() if stage == 0}
    assert {"place", "scale", "embed.weight", "blocks.0.norm1.bias"} <= first
    assert stages["blocks.1.norm1.bias"] == stages["blocks.3.linear2.weight"] == 1
    assert stages["norm.weight"] == stages["head.bias"] == 2


def test_weights_in_two_stages_are_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    with pytest.raises(ValueError, match=r"'0.weight' and '2.weight' are one tensor"):
        owners(net, ["1"])
    net[2].weight = net[0].weight
    assert set(owners(nn.Sequential(net, nn.Linear(3, 3)), ["1"]).values()) == {0, 1}


def test_weights_that_are_outside_of_the_network_as_well_are_refused() -> None:
    module = Holder(net=convolutions(), head=nn.Linear(2, 2))
    stages = module_owners(module, "net", ["4"])
    assert stages["net.0.weight"] == 0
    assert stages["net.6.bias"] == 1
    assert "head.bias" not in stages
    module.encoder = module.net[0]
    with pytest.raises(ValueError, match=r"'encoder.weight' and 'net.0.weight' are one tensor"):
        module_owners(module, "net", ["4"])


def test_parts_one_after_the_other_are_the_network() -> None:
    net = convolutions()
    net.append(net[4])  # the same layer twice
    x = torch.randn(2, 3, 8, 8)
    points = find_points(net, None, 3)
    hidden = x
    for stage in range(3):
        hidden = sequential_part(net, points, stage)(hidden)
    assert torch.equal(hidden, net(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_traced_parts_one_after_the_other_are_the_network() -> None:
    net, x, mask = Transformer(), torch.randn(2, 7, 6), torch.zeros(7, 7)
    before = dict(vars(net))
    example = (x,), {"mask": mask}
    parts = [traced_part(net, ["blocks.1", "blocks.3"], stage, *example) for stage in range(3)]
    values = parts[0](x, mask=mask)
    assert [value.shape for value in values] == [mask.shape, (2, 7, 16), (2, 7, 16)]
    for part in parts[1:]:
        values = part(*(values if isinstance(values, tuple) else (values,)))
    torch.testing.assert_close(values, net(x, mask))
    assert vars(net).keys() == before.keys()
    assert not any(block._forward_pre_hooks for block in net.blocks)


def test_a_traced_network_is_called_with_tensors() -> None:
    with pytest.raises(ValueError, match="called with something that is no tensor"):
        traced_part(Transformer(), ["blocks.2"], 0, (torch.zeros(2, 7, 6), None), {})


def test_micro_batches_are_equal_parts_of_each_tensor() -> None:
    x, y = torch.arange(8), torch.arange(16).view(8, 2)
    parts, rows = micro_batches({"x": x, "more": [y, "name", torch.tensor(3)]}, 4)
    assert (len(parts), rows) == (4, 2)
    assert parts[1]["x"].tolist() == [2, 3]
    assert torch.equal(parts[3]["more"][0], y[6:])
    assert parts[2]["more"][1:] == ["name", torch.tensor(3)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(6), "6 samples, which cannot be divided into chunks=4 .* drop_last=True"),
        (
            (torch.zeros(8), torch.zeros(4)),
            r"one first dimension, the samples; this batch has \[4, 8",
        ),
        (["text"], "this batch has no tensors"),
    ],
)
def test_batches_that_cannot_be_divided_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        micro_batches(batch, 4)


def test_logged_values_are_put_together() -> None:
    recorder = Recorder(rows=2)
    for value in (1.0, 2.0):
        recorder.log("mean", torch.tensor(value, dtype=torch.double), prog_bar=True)
        recorder.log("weighted", value, batch_size=int(value))
        recorder.log("sum", int(value), reduce_fx="sum")
    found = {name: (value, options) for name, value, _, options in recorder.summary()}
    mean = torch.tensor(1.5, dtype=torch.double)
    torch.testing.assert_close(found["mean"][0], mean)
    assert found["mean"][1] == {"prog_bar": True, "batch_size": 4}
    assert found["weighted"][0].item() == pytest.approx(5 / 3)
    assert found["sum"][0].item() == 3


def test_metric_objects_and_own_reductions_are_refused_in_training_steps() -> None:
    with pytest.raises(ValueError, match=r"logs 'a' with MeanMetric.*validation_step"):
        Recorder(2).log("a", MeanMetric())
    with pytest.raises(ValueError, match="'mean', 'avg', 'sum', 'min', 'max'"):
        Recorder(2).log("a", 1, reduce_fx=torch.median)


def test_batches_are_told_apart() -> None:
    batch = {"x": torch.randn(100, 3), "y": torch.randint(5, (100,))}
    same = {name: tensor.clone() for name, tensor in batch.items()}
    assert fingerprint(batch) == fingerprint(same)
    assert fingerprint(batch) != fingerprint({**same, "y": same["y"].roll(1)})
    assert fingerprint(batch) != fingerprint({**same, "x": same["x"].double()})
    assert fingerprint(torch.zeros(2, 3)) != fingerprint(torch.zeros(3, 2))


def test_random_numbers_in_a_block_leave_the_usual_ones_alone() -> None:
    before = torch.get_rng_state()
    draws = []
    for seed in (1, 1, 2):
        with random_numbers(seed, torch.device("cpu")):
            draws.append(torch.rand(1).item())
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(before, torch.get_rng_state())


def test_masks_cross_between_stages_as_floating_point() -> None:
    mask = torch.tensor([True, False])
    like = Like.of(mask)
    wire = like.on_wire().zeros("cpu").copy_(mask)
    assert wire.dtype == torch.double
    assert torch.equal(like.off_wire(wire), mask)


_CONFIG = {
    "network": "net",
    "split_points": ["1.2", "4"],
    "schedule": "gpipe",
    "chunks": 8,
    "process_group_backend": "gloo",
    "timeout": 60.0,
    "start_method": "spawn",
}


def _cli(config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> LightningCLI:
    file = folder / "config.yaml"
    strategy = {
        "class_path": "lightning_perf.strategies.PipelineStrategy",
        "init_args": config,
    }
    trainer = {"accelerator": "cpu", "devices": 2, "logger": False, "strategy": strategy}
    file.write_text(yaml.safe_dump({"trainer": trainer}))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(file)])
    options = {"exit_on_error": False}
    return LightningCLI(
        BoringModel, run=False, seed_everything_default=False, parser_kwargs=options
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")  # LightningCLI's own
def test_all_options_from_yaml_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = _cli(_CONFIG, tmp_path, monkeypatch)
    strategy = cli.trainer.strategy
    assert {name: getattr(strategy, name) for name in _CONFIG} == _CONFIG
    saved = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))
    assert saved["trainer"]["strategy"]["init_args"] == _CONFIG
    again = _cli(saved["trainer"]["strategy"]["init_args"], tmp_path, monkeypatch)
    assert again.config["trainer"] == cli.config["trainer"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")
def test_wrong_options_in_yaml_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=r"(?s)schedule.*gpipe.*1f1b"):
        _cli({"schedule": "zb"}, tmp_path, monkeypatch)
    with pytest.raises(Exception, match="pieces"):
        _cli({"pieces": 4}, tmp_path, monkeypatch)


def test_loader_workers_draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataLoader([1, 2])
    assert PipelineStrategy().process_dataloader(data).worker_init_fn is None
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    assert PipelineStrategy().process_dataloader(data).worker_init_fn.keywords == {"rank": 0}


def test_a_distributed_sampler_would_give_all_processes_the_same() -> None:
    assert PipelineStrategy().distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
