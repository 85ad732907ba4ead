"""`CPUDDPStrategy` without other processes: arguments, and who computes where."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from layouts import Files, hybrid, reader, restricted, server, with_quota
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from models import Classifier, images, mlp, trainer
from torch.utils.data import DataLoader

from lightning_perf._item import statuses
from lightning_perf._knobs import KNOBS, knobs
from lightning_perf.callbacks import Threads
from lightning_perf.launch.topology import Topology, read_topology
from lightning_perf.strategies import CPUDDPStrategy, PerfDDPStrategy
from lightning_perf.strategies._cpu import memory_policy
from lightning_perf.strategies._cpu.places import Place, limited, place
from lightning_perf.strategies._cpu.workers import bound_workers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")

linux = pytest.mark.skipif(sys.platform != "linux", reason="binds threads on Linux only")


def topology(files: Files) -> Topology:
    return read_topology(reader(files))


def places(files: Files, ranks: int, **kwargs) -> list[Place]:
    """What ranks that share all CPUs of a machine get."""
    machine = topology(files)
    all_ = frozenset(cpu.id for cpu in machine.usable)
    return [place(machine, [all_] * ranks, index, **kwargs) for index in range(ranks)]


@pytest.mark.parametrize(
    ("files", "ranks", "expected"),
    [
        (server(1, 4), 1, [("0-3", 4, None)]),
        (server(2, 4), 2, [("0-3", 4, 0), ("4-7", 4, 1)]),
        (server(2, 4, smt=2), 2, [("0-3", 4, 0), ("4-7", 4, 1)]),
        (server(2, 4), 4, [("0-1", 2, 0), ("2-3", 2, 0), ("4-5", 2, 1), ("6-7", 2, 1)]),
        # Three over two nodes: none crosses the border between them.
        (server(2, 4), 3, [("0-1", 2, 0), ("2-3", 2, 0), ("4-7", 4, 1)]),
        (server(2, 4, nodes_per_socket=2), 4, [(f"{i}-{i + 1}", 2, i // 2) for i in (0, 2, 4, 6)]),
        # One rank over two nodes takes its memory where it is.
        (server(2, 4), 1, [("0-7", 8, None)]),
        (restricted(server(2, 4), "2-5"), 2, [("2-3", 2, 0), ("4-5", 2, 1)]),
        (with_quota(server(1, 8), 4), 2, [("0-3", 2, None), ("4-7", 2, None)]),
        (hybrid(2, 4), 2, [("0", 1, None), ("2", 1, None)]),
    ],
)
def test_ranks_that_share_cpus_are_spread(files: Files, ranks: int, expected: list) -> None:
    found = places(files, ranks)
    assert [(p.cpus, p.threads, p.node) for p in found] == expected


def test_ranks_with_cpus_of_their_own_stay_there() -> None:
    files = server(2, 4, smt=2)
    affinities = [frozenset({4, 5, 12, 13}), frozenset({6, 7})]
    found = [
        place(topology(restricted(files, cpus)), affinities, index)
        for index, cpus in enumerate(("4-5,12-13", "6-7"))
    ]
    assert [(p.cpus, p.threads, p.node, p.note) for p in found] == [
        ("4-5", 2, 1, "bound by the launcher"),
        ("6-7", 2, 1, "bound by the launcher"),
    ]
    assert found[0].workers == affinities[0]


def test_more_ranks_than_cores_are_left_to_linux() -> None:
    for rank in places(server(1, 2), 3):
        assert (rank.compute, rank.threads, rank.cpus) == (None, 1, "0-1")
        assert rank.note == "not bound: 3 ranks share 2 cores"


def test_loader_workers_get_cores_or_share_them() -> None:
    files = server(1, 4, smt=2)
    shared, own = places(files, 2)[1], places(files, 2, loader_cores=1)[1]
    assert (shared.cpus, shared.workers, shared.threads) == ("2-3", {2, 3, 6, 7}, 2)
    assert (own.cpus, own.workers, own.threads) == ("2", {3, 6, 7}, 1)
    with pytest.raises(ValueError, match="loader_cores=2 was asked for, and a rank has 2 cores"):
        places(files, 2, loader_cores=2)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, (4, "")),
        (4, (4, "")),
        (2, (2, "OMP_NUM_THREADS=2")),
        (16, (4, "OMP_NUM_THREADS=16 would be more threads than cores")),
    ],
)
def test_no_rank_has_more_threads_than_cores(chosen: int | None, expected: tuple) -> None:
    (there,) = places(server(1, 4), 1)
    found = limited(there, chosen)
    assert (found.threads, found.note) == expected


@linux
def test_all_threads_of_a_process_are_bound_and_put_back() -> None:
    before = {thread: os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}
    cpu = min(os.sched_getaffinity(0))
    with knobs(cpu_affinity=str(cpu)):
        assert KNOBS["cpu_affinity"].read() == str(cpu)
        for thread in os.listdir("/proc/self/task"):
            assert os.sched_getaffinity(int(thread)) == {cpu}
    for thread, cpus in before.items():
        assert os.sched_getaffinity(int(thread)) == cpus


@linux
def test_memory_is_taken_from_one_node() -> None:
    try:
        before = memory_policy.policy()[0]
        with memory_policy.memory_on(0):
            assert memory_policy.preferred_node() == 0
    except PermissionError as error:
        pytest.skip(f"the kernel lets this process set no memory policy: {error}")
    assert memory_policy.policy()[0] == before
    with pytest.raises(OSError, match="Invalid argument"), memory_policy.memory_on(1000):
        pass


class _Affinity(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[int]:
        return sorted(os.sched_getaffinity(0))


@linux
def test_workers_are_bound_and_the_users_function_is_called() -> None:
    called = []
    cpu = max(os.sched_getaffinity(0))
    loader = DataLoader(_Affinity(), batch_size=None, num_workers=1, worker_init_fn=called.append)
    with bound_workers(loader, frozenset({cpu})), knobs(cpu_affinity=str(cpu)):
        assert list(loader) == [[cpu], [cpu]]
        loader.worker_init_fn(7)
        assert called == [7]
    assert loader.worker_init_fn == called.append


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"process_group_backend": "mpi"}, "'mpi' was asked for; it is 'ccl', 'gloo', or None"),
        ({"ranks": 0}, "ranks=0 was asked for; it is 'auto' or 1 and more"),
        ({"ranks": "two"}, "ranks='two' was asked for"),
        ({"by": "cpu"}, "by='cpu' was asked for; it is one of auto, socket, numa"),
        ({"loader_cores": -1}, "loader_cores=-1 was asked for; it is 0 or more"),
        ({"uneven": "drop"}, "'error', 'join' or None"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPUDDPStrategy(**arguments)


def test_two_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks=2\) was given with Trainer\(devices=3\)"):
        trainer(strategy=CPUDDPStrategy(ranks=2), devices=3)


@linux
def test_the_machine_decides_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = topology(server(2, 4, nodes_per_socket=2))
    monkeypatch.setattr("lightning_perf.strategies.cpu_ddp.this_machine", lambda: machine)
    for arguments, ranks in (
        ({}, 4),
        ({"by": "socket"}, 2),
        ({"by": "core"}, 8),
        ({"by": "machine"}, 1),
        ({"by": None}, 1),
        ({"ranks": 3}, 3),
    ):
        run = trainer(strategy=CPUDDPStrategy(**arguments))
        assert (run.world_size, run.num_devices) == (ranks, ranks), arguments
    assert trainer(strategy=CPUDDPStrategy(), devices=3).world_size == 3
    # A rank that a launcher started asks the launcher.
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert trainer(strategy=CPUDDPStrategy()).world_size == 2


@pytest.mark.parametrize(
    ("missing", "nodes", "backend", "said"),
    [
        (None, 1, "ccl", ""),
        ("no compiler", 1, "gloo", "gradients travel over gloo, not oneCCL: no compiler"),
        (None, 2, "gloo", "gradients travel over gloo, not oneCCL: the ranks are on several"),
    ],
)
def test_the_backend_is_what_is_there(
    missing, nodes, backend, said, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_perf.strategies.oneccl.why_not", lambda: missing)
    strategy = trainer(strategy=CPUDDPStrategy(ranks=2), num_nodes=nodes).strategy
    with caplog.at_level("INFO"):
        assert strategy._get_process_group_backend() == backend
    assert said in caplog.text
    assert bool(said) == ("gradients travel" in caplog.text)
    asked = trainer(strategy=CPUDDPStrategy("ccl", ranks=2), num_nodes=nodes).strategy
    assert asked._get_process_group_backend() == "ccl"


def test_sparse_gradients_travel_over_gloo(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_perf.strategies.oneccl.why_not", lambda: None)
    strategy = trainer(strategy=CPUDDPStrategy(ranks=2)).strategy
    strategy.connect(Classifier(torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4, sparse=True))))
    with caplog.at_level("INFO"):
        assert strategy._get_process_group_backend() == "gloo"
    assert "it takes no sparse gradients, which net.0 has" in caplog.text


def test_it_is_parsed_printed_and_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    options = {
        "process_group_backend": "gloo",
        "ranks": 2,
        "by": "core",
        "loader_cores": 1,
        "ddp_comm_hook": "bf16",
    }
    entry = {"class_path": "lightning_perf.strategies.CPUDDPStrategy", "init_args": options}
    Path("config.yaml").write_text(
        yaml.safe_dump({"trainer": {"accelerator": "cpu", "strategy": entry, "logger": False}})
    )

    def command(file: str) -> LightningCLI:
        return LightningCLI(
            Classifier,
            run=False,
            args=[f"--config={file}"],
            save_config_callback=None,
            seed_everything_default=False,
        )

    first = command("config.yaml")
    Path("saved.yaml").write_text(first.parser.dump(first.config))
    for cli in (first, command("saved.yaml")):
        strategy = cli.trainer.strategy
        assert isinstance(strategy, CPUDDPStrategy)
        assert {name: getattr(strategy, name, None) for name in options} == options | {
            "process_group_backend": "gloo"
        }
        assert strategy.world_size == 2


def test_the_name_is_registered() -> None:
    assert "perf_ddp_cpu" in StrategyRegistry
    run = Trainer(strategy="perf_ddp_cpu", accelerator="cpu", devices=2, logger=False)
    assert isinstance(run.strategy, CPUDDPStrategy)
    assert isinstance(run.strategy, PerfDDPStrategy)


def test_a_strategy_is_pickled() -> None:
    strategy = pickle.loads(pickle.dumps(CPUDDPStrategy(ranks=3)))
    assert strategy.ranks == 3


@pytest.fixture
def no_group_is_left() -> Iterator[None]:
    """Lightning leaves the process group, and its variables, to later runs."""
    before = {*os.environ}
    yield
    torch.distributed.destroy_process_group()
    for name in {*os.environ} - before:
        del os.environ[name]


@linux
@pytest.mark.usefixtures("no_group_is_left")
def test_one_rank_is_bound_for_the_length_of_a_run(caplog: pytest.LogCaptureFixture) -> None:
    before = KNOBS["cpu_affinity"].read()
    seen = []

    class Watched(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append((KNOBS["cpu_affinity"].read(), torch.get_num_threads()))
            if len(seen) == 3:
                raise KeyError("a bug of the user")
            return super().training_step(batch, batch_idx)

    strategy = CPUDDPStrategy("gloo", by="machine")
    # Lightning sets the threads, and leaves them.
    with knobs(cpu_affinity=before.partition("-")[0], intra_op_threads=1):
        bound = KNOBS["cpu_affinity"].read()
        with pytest.raises(KeyError, match="a bug of the user"), caplog.at_level("INFO"):
            trainer(strategy=strategy, callbacks=[Threads(strict=False)]).fit(
                Watched(mlp()), images()
            )
        assert seen == [(bound, 1)] * 3
        assert KNOBS["cpu_affinity"].read() == bound
    assert f"rank 0  CPUs {bound}  1 thread" in caplog.text


@linux
@pytest.mark.usefixtures("no_group_is_left")
def test_threads_stands_aside() -> None:
    run = trainer(strategy=CPUDDPStrategy("gloo"), callbacks=[Threads(strict=False)])
    run.fit(Classifier(mlp()), images())
    (status,) = statuses(run)
    assert (status.active, status.text) == (
        False,
        "CPUDDPStrategy has given each rank threads and cores of its own.",
    )
