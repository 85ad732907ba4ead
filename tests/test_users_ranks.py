"""What users do with several processes: a notebook's forks, torchrun, SLURM, mixed machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pages import DOCS, blocks
from ranks import SLURM, TORCHRUN, run_ranks

pytestmark = pytest.mark.slow

ACTIVE = "SGD: fused"

_NOTEBOOK = """
from models import Classifier, images, trainer
from lightning_perf.presets import trainer_kwargs

class Mine(Classifier):
    def on_train_end(self):
        print(f"rank {self.global_rank}: {self.losses[-1]:.4f}", flush=True)

if __name__ == "__main__":
    module = Mine()
    for _ in range(2):
        kwargs = trainer_kwargs("cpu", devices=2, strategy="ddp_fork")
        trainer(**kwargs).fit(module, images())
    print("finished", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_notebook_forks_processes_with_a_class_of_main(tmp_path: Path) -> None:
    output = run_ranks(_NOTEBOOK, tmp_path)
    assert output.count("rank 0: ") == output.count("rank 1: ") == 2
    assert output.count(ACTIVE) == 2
    assert "finished" in output


def script_of(page: str) -> str:
    """The script that a page shows, which then says on every rank that it has ended."""
    (script,) = blocks(DOCS / "use" / page, "python")
    return script + '    print(f"rank {trainer.global_rank} trained\\n", end="", flush=True)\n'


def test_the_script_of_the_page_about_torchrun(tmp_path: Path) -> None:
    output = run_ranks(script_of("torchrun.md"), tmp_path, launcher=TORCHRUN)
    assert "rank 0 trained" in output
    assert "rank 1 trained" in output
    assert output.count(ACTIVE) == 1


_SRUN = """
import os, subprocess, sys
from pathlib import Path

def start(rank):
    mine = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    return subprocess.Popen([sys.executable, "train.py"], env={**os.environ, **mine}, cwd=folder)

folder = Path(__file__).parent
tasks = [start(rank) for rank in (0, 1)]
sys.exit(any([task.wait() for task in tasks]))
"""


def test_the_script_of_the_page_about_slurm(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script_of("slurm.md"))
    output = run_ranks(_SRUN, tmp_path, environ=SLURM)
    assert "rank 0 trained" in output
    assert "rank 1 trained" in output
    assert output.count(ACTIVE) == 1


_MIXED = """
import os
from models import Classifier, images, trainer
from lightning_perf.presets import Preset, trainer_kwargs

if __name__ == "__main__":
    kwargs = trainer_kwargs("cpu", devices=2, strategy="ddp")
    if os.environ.get("LOCAL_RANK") == "1":
        kwargs["callbacks"] = [Preset("cpu_bf16"), *kwargs["callbacks"][1:]]
    trainer(**kwargs).fit(Classifier(), images())
"""


def test_ranks_with_different_presets_are_refused(tmp_path: Path) -> None:
    output = run_ranks(_MIXED, tmp_path, fails=True)
    assert "The ranks disagree" in output
    assert "rank 0: [('preset cpu', True)" in output
    assert "rank 1: [('preset cpu_bf16', True)" in output
