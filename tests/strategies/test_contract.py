"""What every exported strategy promises, one row each."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import Strategy
from ranks import run_ranks

from lightning_perf import strategies

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")

ROOT = Path(__file__).parents[2]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "CPUDDPStrategy": {"process_group_backend": "gloo", "ranks": 2},
    "PerfDDPStrategy": {"ddp_comm_hook": "bf16", "start_powerSGD_iter": 1},
    "PipelineStrategy": {"schedule": "gpipe", "chunks": 2},
}
every_strategy = pytest.mark.parametrize("name", strategies.__all__)


def stem(name: str) -> str:
    return getattr(strategies, name).__module__.rpartition(".")[2]


@every_strategy
def test_it_is_tested_and_documented(name: str) -> None:
    strategy = getattr(strategies, name)
    assert issubclass(strategy, Strategy)
    assert (ROOT / "docs" / "items" / f"{stem(name)}.md").read_text("utf-8").startswith(f"# {name}")
    assert (ROOT / "tests" / "strategies" / f"test_{stem(name)}.py").exists()
    assert re.match(r"[TKL] ", strategy.guide)
    for heading in ("Args:", "Raises:", "Example:", "Source:"):
        assert heading in strategy.__doc__
    _, *rest = list(inspect.signature(strategy).parameters.values())
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in rest)


@every_strategy
def test_it_is_pickled_and_built_from_a_class_path(name: str) -> None:
    arguments = ARGUMENTS[name]
    parser = LightningArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--strategy", type=Strategy)
    entry = {"class_path": f"lightning_perf.strategies.{name}", "init_args": arguments}
    config = parser.parse_args(["--strategy", json.dumps(entry)])
    Path("saved.yaml").write_text(parser.dump(config))
    assert parser.parse_args(["--config", "saved.yaml"]).strategy == config.strategy
    built = parser.instantiate(config).strategy
    for strategy in (built, pickle.loads(pickle.dumps(built))):
        assert type(strategy).__name__ == name
        given = {key: getattr(strategy, key) for key in arguments}
        assert given == arguments


@every_strategy
def test_an_unknown_argument_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="bucket_size"):
        getattr(strategies, name)(bucket_size=3)


@pytest.mark.slow
@every_strategy
def test_it_fits_twice_then_evaluates_and_leaves_no_trace(name: str, tmp_path: Path) -> None:
    output = run_ranks(
        f"""
import torch
from lightning.pytorch import Trainer
from pipelines import Classifier, convolutions, images, loader, make_trainer
from lightning_perf import strategies
from lightning_perf._knobs import read_knobs

torch.set_num_threads(1)
before = read_knobs()

class Failing(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise KeyError("a bug of the user")
        return super().training_step(batch, batch_idx)

def strategy():
    return strategies.{name}(**{ARGUMENTS[name]!r})

module, data = Classifier(convolutions()), images(8)
keys = list(module.state_dict())
run = make_trainer(strategy=strategy(), devices=2, max_epochs=1)
run.fit(module, loader(data), loader(data))
first = module.losses[0]
run.fit_loop.max_epochs = 2
run.fit(module, loader(data), loader(data))
assert run.current_epoch == 2
run.validate(module, loader(data), verbose=False)
run.predict(module, loader(data))
assert list(module.state_dict()) == keys
assert read_knobs() == before, (read_knobs(), before)
run.save_checkpoint("run.ckpt")
run.strategy.barrier()
alone = Classifier(convolutions()).double()
alone.load_state_dict(torch.load("run.ckpt", weights_only=False)["state_dict"])

try:
    make_trainer(strategy=strategy(), devices=2).fit(Failing(convolutions()), loader(data))
except KeyError as error:
    assert "a bug of the user" in str(error)
else:
    raise AssertionError
assert read_knobs() == before
print("held", flush=True)
""",
        tmp_path,
    )
    assert output.count("held") == 2
