"""`PerfDDPStrategy` without other processes: its arguments, from Python and from YAML."""

from __future__ import annotations

import os
import pickle
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from models import Classifier, images, mlp, trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_perf import NoEffectWarning
from lightning_perf.strategies import PerfDDPStrategy
from lightning_perf.strategies._ddp.unused import UnusedSearch, _longest_decreasing, name_indices

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")

CLASS_PATH = "lightning_perf.strategies.PerfDDPStrategy"

OPTIONS: dict[str, Any] = {
    "ddp_comm_hook": "powersgd",
    "matrix_approximation_rank": 4,
    "start_powerSGD_iter": 7,
    "save_hook_state": False,
    "uneven": "join",
    "process_group_backend": "gloo",
    "timeout": timedelta(minutes=3),
    "start_method": "spawn",
    "bucket_cap_mb": 4.5,
    "gradient_as_bucket_view": True,
    "broadcast_buffers": False,
    "static_graph": True,
    "find_unused_parameters": True,
}


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])


def command(*arguments: str) -> LightningCLI:
    return LightningCLI(
        Classifier,
        run=False,
        args=[
            "--trainer.accelerator=cpu",
            "--trainer.devices=2",
            "--trainer.logger=false",
            *arguments,
        ],
        trainer_defaults={"enable_checkpointing": False},
        save_config_callback=None,
        seed_everything_default=False,
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_parsed_printed_saved_and_reloaded(name: str) -> None:
    entry = {"class_path": CLASS_PATH, "init_args": {name: OPTIONS[name]}}
    if name in ("matrix_approximation_rank", "start_powerSGD_iter"):
        entry["init_args"]["ddp_comm_hook"] = "powersgd"
    if name == "timeout":
        entry["init_args"]["timeout"] = "0:03:00"
    Path("config.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": entry}}))
    cli = command("--config=config.yaml")
    Path("saved.yaml").write_text(cli.parser.dump(cli.config))
    again = command("--config=saved.yaml")
    assert again.config.trainer.strategy == cli.config.trainer.strategy
    for strategy in (cli.trainer.strategy, again.trainer.strategy):
        assert isinstance(strategy, PerfDDPStrategy)
        expected = PerfDDPStrategy(**entry["init_args"] | ({name: OPTIONS[name]}))
        for attribute in (
            *("ddp_comm_hook", "matrix_approximation_rank", "start_powerSGD_iter", "uneven"),
            *("save_hook_state", "static_graph", "_ddp_kwargs", "_timeout", "_start_method"),
            "process_group_backend",
        ):
            assert getattr(strategy, attribute) == getattr(expected, attribute)


def test_a_function_is_named_by_its_path() -> None:
    path = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook"
    entry = {"class_path": CLASS_PATH, "init_args": {"ddp_comm_hook": path}}
    Path("config.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": entry}}))
    cli = command("--config=config.yaml")
    assert path in cli.parser.dump(cli.config)
    assert cli.trainer.strategy.ddp_comm_hook.__name__ == "allreduce_hook"


def test_the_name_is_registered() -> None:
    assert "perf_ddp" in StrategyRegistry
    run = Trainer(strategy="perf_ddp", accelerator="cpu", devices=2, logger=False)
    assert isinstance(run.strategy, PerfDDPStrategy)
    assert isinstance(command("--trainer.strategy=perf_ddp").trainer.strategy, PerfDDPStrategy)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ddp_comm_hook": "fp8"}, ["ddp_comm_hook", "fp16", "bf16", "powersgd", "onebit"]),
        ({"uneven": "drop"}, ["uneven", "error", "join"]),
        ({"start_method": "thread"}, ["start_method", "popen", "spawn"]),
        ({"bucket_cap_mb": "big"}, ["bucket_cap_mb"]),
        ({"comm_hook": "fp16"}, ["comm_hook"]),
    ],
)
def test_yaml_names_the_key_and_the_choices(arguments, said, capsys) -> None:
    entry = {"class_path": CLASS_PATH, "init_args": arguments}
    Path("config.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": entry}}))
    with pytest.raises(SystemExit):
        command("--config=config.yaml")
    error = capsys.readouterr().err
    for word in said:
        assert word in error, error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ddp_comm_hook": "fp8"}, "'fp8' was asked for. Choose one of 'fp16', 'bf16'"),
        ({"ddp_comm_hook": "fp16", "matrix_approximation_rank": 2}, "It is for 'powersgd'"),
        ({"start_powerSGD_iter": 3}, "It is for the hooks 'fp16'"),
        ({"ddp_comm_hook": "onebit", "start_powerSGD_iter": -3}, "start_iter=-3"),
        ({"ddp_comm_hook": "powersgd", "matrix_approximation_rank": 0}, "1 or more"),
        ({"ddp_comm_hook": "bf16", "ddp_comm_state": 3}, "for a hook that is a function"),
        ({"bucket_cap_mb": 0}, "more than 0"),
        ({"uneven": "drop"}, "'error', 'join' or None"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerfDDPStrategy(**arguments)


def test_a_strategy_is_pickled() -> None:
    strategy = pickle.loads(pickle.dumps(PerfDDPStrategy("bf16")))
    assert strategy.ddp_comm_hook == "bf16"


def test_one_process_has_nobody_to_send_to() -> None:
    run = trainer(strategy=PerfDDPStrategy("fp16"))
    with pytest.warns(NoEffectWarning, match="'fp16' has no effect here: one process"):
        run.fit(Classifier(mlp()), images())
    torch.distributed.destroy_process_group()
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    assert run.strategy.comm_hook is None


class Branches(nn.Module):
    """Used in another order than defined, one branch never, and one now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            x = self.sometimes(x)
        return self.last(self.middle(self.first(x)))


def searched(net: nn.Module, steps: int = 12) -> tuple[str | None, list[str], int]:
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    reducer = ddp.reducer
    search = UnusedSearch(ddp)
    looked = 0
    while looked < steps:
        ddp(torch.ones(2, 4)).sum().backward()
        looked += 1
        if search.after_step():
            break
    result = search.close()
    assert ddp.reducer is reducer
    return *result, looked


@pytest.mark.usefixtures("one_rank")
def test_unused_parameters_and_the_order_are_named() -> None:
    no_effect, lines, looked = searched(Branches())
    assert no_effect is None
    assert looked == 10
    never, sometimes, order = lines
    assert "no gradient in the first 9 steps got never.weight, never.bias." in never
    assert "requires_grad_(False)" in never
    assert "ms of each step" in never
    assert "in some of the first 9 steps got sometimes.weight, sometimes.bias." in sometimes
    # Any one of the four may stay where it is defined.
    assert "another order" in order
    assert "are defined: last, middle, first. Their buckets wait." in order


@pytest.mark.usefixtures("one_rank")
def test_a_search_that_finds_nothing_is_told_with_its_cost() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        no_effect, lines, _ = searched(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert "all parameters got a gradient in each of the first 9 steps." in no_effect
    assert "ms of each step" in no_effect
    assert lines == []


@pytest.mark.usefixtures("one_rank")
def test_a_run_of_one_step_says_nothing() -> None:
    assert searched(Branches(), steps=1)[:2] == (None, [])


@pytest.mark.usefixtures("one_rank")
def test_the_indices_in_the_error_of_ddp_get_names() -> None:
    net = Branches()
    net.first.bias.requires_grad_(False)
    ddp = DistributedDataParallel(net)
    ddp(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="did not receive grad") as caught:
        ddp(torch.ones(2, 4))
    names = name_indices(str(caught.value), ddp)
    assert names == "never.weight, never.bias, sometimes.weight, sometimes.bias"
    assert name_indices("something else", ddp) is None


def test_a_longest_decreasing_subsequence() -> None:
    assert _longest_decreasing([3, 2, 1]) == {3, 2, 1}
    assert len(_longest_decreasing([1, 5, 2, 4, 3, 0])) == 4
    assert len(_longest_decreasing([1, 2, 3])) == 1
    assert _longest_decreasing([]) == set()
