"""Threads: how many for which machine, who has the last word, and what is put back."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from models import Classifier, images, trainer
from ranks import TORCHRUN, run_ranks
from torch.utils.data import DataLoader

from lightning_perf import NoEffectWarning
from lightning_perf._hardware import Hardware, detect
from lightning_perf._item import statuses
from lightning_perf._knobs import knobs
from lightning_perf.callbacks import threads as threads_module
from lightning_perf.callbacks.threads import (
    Threads,
    bound_by,
    decided_elsewhere,
    intra_op_threads,
    threads,
    users_choice,
)
from lightning_perf.launch.plan import PROMISE


def machine(cores: int, *, smt: int = 1, quota: float | None = None) -> Hardware:
    return Hardware(
        device="cpu",
        device_name="a CPU",
        device_count=1,
        capability=None,
        isa=frozenset(),
        cpu_name="a CPU",
        cores=cores,
        logical_cpus=cores * smt,
        quota=quota,
        sockets=1,
        numa_nodes=1,
        memory=2**33,
        system="Linux",
    )


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the shell that runs the tests decides."""
    for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Let the tests run on another machine."""

    def pretend(hardware: Hardware) -> None:
        monkeypatch.setattr(threads_module, "detect", lambda: hardware)

    return pretend


class Observe(Callback):
    """Notes the threads of training."""

    def on_train_start(self, trainer, pl_module) -> None:
        self.threads = torch.get_num_threads()


def fit(item: Threads, workers: int = 0):
    observe = Observe()
    run = trainer(callbacks=[item, observe])
    run.fit(Classifier(), DataLoader(images().dataset, batch_size=4, num_workers=workers))
    return run, observe.threads


# --- How many -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "ranks", "threads"),
    [
        (machine(1), 1, 1),
        (machine(2), 1, 2),
        (machine(64), 1, 64),
        (machine(32, smt=2), 1, 32),
        (machine(2), 2, 1),
        (machine(2), 8, 1),
        (machine(48), 5, 9),
        (machine(64, quota=4.0), 1, 4),
        (machine(64, quota=2.5), 1, 3),
        (machine(64, quota=0.5), 1, 1),
        (machine(64, quota=8.0), 4, 2),
        (machine(4, quota=16.0), 1, 4),
        (machine(28, smt=2, quota=56.0), 2, 14),
    ],
)
def test_cores_are_divided_among_ranks(hardware: Hardware, ranks: int, threads: int) -> None:
    assert intra_op_threads(hardware, ranks) == threads


@pytest.mark.parametrize(
    ("hardware", "ranks", "workers", "threads"),
    [
        pytest.param(machine(2), 1, 4, 2, id="few cores are kept"),
        pytest.param(machine(4), 1, 1, 3, id="one for the worker"),
        pytest.param(machine(16), 1, 2, 14, id="two for two"),
        pytest.param(machine(16), 1, 12, 12, id="a quarter at most"),
        pytest.param(machine(16, smt=2), 1, 8, 16, id="workers on idle hardware threads"),
        pytest.param(machine(16, smt=2), 1, 18, 14, id="more workers than those"),
        pytest.param(machine(16, smt=2), 2, 10, 6, id="shared by two ranks"),
        pytest.param(machine(32, smt=2, quota=16.0), 1, 4, 12, id="the quota holds for all"),
        pytest.param(machine(8), 4, 16, 2, id="small shares are kept"),
    ],
)
def test_loader_workers_get_cores_only_if_they_would_compete(
    hardware: Hardware, ranks: int, workers: int, threads: int
) -> None:
    assert intra_op_threads(hardware, ranks, workers) == threads


@pytest.mark.parametrize("cores", [1, 2, 3, 7, 8, 64, 192])
@pytest.mark.parametrize("smt", [1, 2])
@pytest.mark.parametrize("quota", [None, 0.1, 1.0, 3.5, 1000.0])
def test_ranks_never_ask_for_more_than_there_is(cores: int, smt: int, quota: float | None) -> None:
    hardware = machine(cores, smt=smt, quota=quota)
    for ranks in (1, 2, 3, 8, 200):
        counts = [intra_op_threads(hardware, ranks, workers) for workers in range(0, 100, 7)]
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] >= max(1, counts[0] * 3 // 4)
        assert counts[0] * ranks <= max(hardware.usable_cores, ranks)


# --- Who has the last word ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "ranks", "choice"),
    [
        ({}, 1, None),
        ({"OMP_NUM_THREADS": "3"}, 1, 3),
        ({"OMP_NUM_THREADS": "1"}, 1, 1),
        ({"OMP_NUM_THREADS": "8"}, 1, 8),
        ({"OMP_NUM_THREADS": "4,2"}, 1, 4),
        ({"OMP_NUM_THREADS": ""}, 1, None),
        ({"OMP_NUM_THREADS": "many"}, 1, None),
        ({"OMP_NUM_THREADS": "0"}, 1, None),
        # torchrun's default, and what a user told torchrun
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 2, None),
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, 2, 2),
        # Our launcher counts for one process, unless it has found itself among ranks.
        ({"OMP_NUM_THREADS": "5", PROMISE: '{"threads":5}'}, 1, 5),
        ({"OMP_NUM_THREADS": "5", PROMISE: '{"threads":5}'}, 2, None),
        ({"OMP_NUM_THREADS": "5", PROMISE: '{"threads":5,"ranks":2}'}, 2, 5),
        ({"OMP_NUM_THREADS": "3", PROMISE: '{"threads":5}'}, 2, 3),
        # Lightning's default: the 8 logical CPUs divided among its ranks
        ({"OMP_NUM_THREADS": "4"}, 2, None),
        ({"OMP_NUM_THREADS": "1"}, 16, None),
        ({"OMP_NUM_THREADS": "3"}, 2, 3),
    ],
)
def test_the_users_number_is_told_from_a_launchers_default(
    environ: dict[str, str], ranks: int, choice: int | None
) -> None:
    hardware = machine(8)
    assert users_choice(environ, hardware, ranks) == choice
    expected = choice or intra_op_threads(hardware, ranks)
    assert intra_op_threads(hardware, ranks, environ=environ) == expected


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("KMP_AFFINITY", "granularity=fine,compact,1,0", True),
        ("KMP_AFFINITY", "disabled", False),
        ("KMP_AFFINITY", "none", False),
        ("GOMP_CPU_AFFINITY", "0-3", True),
        ("OMP_PROC_BIND", "CLOSE", True),
        ("OMP_PROC_BIND", "false", False),
        ("OMP_PROC_BIND", "", False),
    ],
)
def test_bound_threads_are_left_alone(name: str, value: str, bound: bool) -> None:
    reason = decided_elsewhere({name: value}, machine(8), 1)
    assert (bound_by({name: value}) is not None) == bound
    assert (reason == f"{name}={value} has bound the threads of this process to cores.") == bound


def test_the_launcher_is_named() -> None:
    environ = {"OMP_NUM_THREADS": "5", PROMISE: '{"threads":5}'}
    reason = decided_elsewhere(environ, machine(8), 1)
    assert reason == "lightning-perf launch has given the process 5 intra-op threads."


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "GOMP_CPU_AFFINITY"])
def test_the_environment_wins_over_auto_but_not_over_a_number(
    name: str, monkeypatch: pytest.MonkeyPatch, on
) -> None:
    on(machine(4))
    monkeypatch.setenv(name, "3")
    with knobs(intra_op_threads=1):
        with pytest.warns(NoEffectWarning, match=f"{name}=3"):
            _, threads = fit(Threads())
        assert threads == 1
        _, threads = fit(Threads(2))
        assert threads == 2
        assert torch.get_num_threads() == 1


def test_auto_sets_and_puts_back(on) -> None:
    on(machine(4))
    with knobs(intra_op_threads=1):
        run, threads = fit(Threads())
        assert threads == 4
        assert statuses(run)[0].text == "4 intra-op threads per process, 1 before"
        assert torch.get_num_threads() == 1


def test_nothing_to_do_is_said(on) -> None:
    on(machine(2))
    with knobs(intra_op_threads=2):
        with pytest.warns(NoEffectWarning, match="2 intra-op threads per process is what PyTorch"):
            fit(Threads())
        with pytest.warns(NoEffectWarning, match="already"):
            fit(Threads(2))


def test_more_threads_than_cores_are_warned_about(on) -> None:
    on(machine(2))
    with (
        knobs(intra_op_threads=1),
        pytest.warns(UserWarning, match=r"Threads\(3\) was asked for.* may use 2 cores"),
    ):
        _, threads = fit(Threads(3))
    assert threads == 3


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "many", None, "2"])
def test_wrong_numbers_are_explained(wrong) -> None:
    message = r"intra_op=.*'auto' or the number of threads"
    with pytest.raises(ValueError, match=message):
        Threads(wrong)
    with pytest.raises(ValueError, match=message), threads(wrong):
        pytest.fail("The block must not run.")


def test_loader_workers_lower_it_once_they_are_known(on, caplog: pytest.LogCaptureFixture) -> None:
    on(machine(8))
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    with knobs(intra_op_threads=8):
        _, threads = fit(Threads(), workers=1)
        assert threads == 7
        assert torch.get_num_threads() == 8
        assert "7 intra-op threads, because of 1 loader worker." in caplog.text
        _, threads = fit(Threads(8, strict=False), workers=1)
        assert threads == 8, "a number is applied as it is"


def test_inter_op_threads_are_never_touched(on) -> None:
    before = torch.get_num_interop_threads()
    on(machine(4))
    with knobs(intra_op_threads=1):
        fit(Threads())
    assert torch.get_num_interop_threads() == before


def test_it_is_small_enough_for_a_spawn() -> None:
    assert vars(pickle.loads(pickle.dumps(Threads(3)))) == vars(Threads(3))


@pytest.mark.parametrize(
    ("arguments", "number"),
    [({}, 4), ({"intra_op": 2}, 2), ({"loader_workers": 9}, 3), ({"intra_op": 8}, 8)],
)
def test_the_function_works_without_a_trainer(on, arguments: dict, number: int) -> None:
    on(machine(4))
    with knobs(intra_op_threads=1):
        with threads(**arguments) as chosen:
            assert chosen == torch.get_num_threads() == number
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OMP_PROC_BIND"])
def test_the_function_leaves_alone_what_was_decided(
    on, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(machine(4))
    monkeypatch.setenv(name, "2")
    with knobs(intra_op_threads=1), threads() as chosen:
        assert chosen == torch.get_num_threads() == 1


# --- Two ranks ----------------------------------------------------------------------------------

_TWO_RANKS = """
import sys
import torch
from lightning.fabric.utilities import distributed
from lightning.pytorch import Callback
from models import Classifier, images, trainer
from lightning_perf.callbacks import threads as threads_module
from lightning_perf.callbacks.threads import Threads
from test_threads import machine

class Show(Callback):
    def on_train_start(self, trainer, pl_module):
        sys.stdout.write(f"rank {trainer.global_rank} threads {torch.get_num_threads()}\\n")

if __name__ == "__main__":
    strategy = sys.argv[1]
    if strategy == "ddp":
        threads_module.detect = lambda: machine(8)
        distributed._num_cpus_available = lambda: 8  # Lightning then presets 4
    torch.set_num_threads(3)
    run = trainer(devices=2, strategy=strategy, callbacks=[Threads(strict=False), Show()])
    run.fit(Classifier(), images())
"""


@pytest.mark.parametrize(
    ("launcher", "environ", "threads"),
    [
        # Half of the 8 cores, whatever the launcher has preset: 4 and 1.
        ((), {}, 4),
        (TORCHRUN, {}, 4),
        # The user's number is left alone, and so is what the script sets.
        pytest.param((), {"OMP_NUM_THREADS": "2"}, 3, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_share_the_cores(
    launcher: tuple[str, ...], environ: dict[str, str], threads: int, tmp_path: Path
) -> None:
    text = run_ranks(_TWO_RANKS, tmp_path, "ddp", launcher=launcher, environ=environ)
    assert f"rank 0 threads {threads}" in text
    assert f"rank 1 threads {threads}" in text


@pytest.mark.slow
def test_spawned_ranks_share_the_cores(tmp_path: Path) -> None:
    text = run_ranks(_TWO_RANKS, tmp_path, "ddp_spawn")
    threads = max(1, detect().usable_cores // 2)
    assert f"rank 0 threads {threads}" in text
    assert f"rank 1 threads {threads}" in text


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="ranks cannot be bound to CPUs of their own here",
)
def test_ranks_bound_to_cpus_of_their_own_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = threads_module.socket.gethostname()
    mine = frozenset(os.sched_getaffinity(0))

    def ranks(*places):
        monkeypatch.setattr(threads_module, "_on_all_ranks", lambda value: list(places))
        return threads_module.sharing_ranks()

    assert ranks((host, mine), (host, mine)) == 2
    assert ranks((host, mine), (host, frozenset({10_001})), ("another", mine)) == 1
    assert ranks((host, mine), (host, mine | {10_001}), ("another", mine)) == 2
