"""GPUs and their NUMA nodes, from what nvidia-smi and the kernel say."""

import subprocess
from types import SimpleNamespace

import layouts
import pytest

from lightning_perf.launch import gpus
from lightning_perf.launch.gpus import GPU, installed_gpus, parse_gpus, visible_gpus

# As a DGX H100 answers, shortened.
TABLE = """\
0, GPU-1f2e0c5a-7d1b-4a43-9f0e-3f0a1b2c3d4e, 00000000:1B:00.0
1, GPU-2a3b4c5d-0000-1111-2222-333344445555, 00000000:43:00.0
2, GPU-9d8c7b6a-5544-3322-1100-ffeeddccbbaa, 00010000:9D:00.0
"""
NODES = {
    "/sys/bus/pci/devices/0000:1b:00.0/numa_node": "0\n",
    "/sys/bus/pci/devices/0000:43:00.0/numa_node": "-1\n",
    "/sys/bus/pci/devices/0000:9d:00.0/numa_node": "1\n",
}
FOUND = parse_gpus(TABLE, layouts.reader(NODES))


def test_nodes_come_from_the_kernel() -> None:
    assert [(gpu.index, gpu.node) for gpu in FOUND] == [(0, 0), (1, -1), (2, 1)]
    assert FOUND[0].uuid == "GPU-1f2e0c5a-7d1b-4a43-9f0e-3f0a1b2c3d4e"


def test_without_the_kernels_word_the_node_is_unknown() -> None:
    assert {gpu.node for gpu in parse_gpus(TABLE, layouts.reader({}))} == {-1}


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "NVIDIA-SMI has failed, because\n"]
)
def test_an_answer_without_gpus(text: str) -> None:
    assert parse_gpus(text, layouts.reader({})) == ()


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("1, 2", [1, 2]),
        ("GPU-9d8c", [2]),
        ("0,7,1", [0]),
        ("-1", []),
        ("MIG-1f2e0c5a,0", []),
    ],
)
def test_visible_gpus(listed: str | None, expected: list[int]) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [gpu.index for gpu in visible_gpus(FOUND, environ)] == expected


def test_two_gpus_whose_names_begin_alike_are_not_told_apart() -> None:
    alike = (GPU(0, "GPU-aa11", 0), GPU(1, "GPU-aa22", 0))
    assert visible_gpus(alike, {"CUDA_VISIBLE_DEVICES": "GPU-aa"}) == ()


def test_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")

    def answer(command: list[str], **_: object) -> SimpleNamespace:
        assert command == gpus.QUERY
        return SimpleNamespace(returncode=0, stdout=TABLE)

    monkeypatch.setattr(subprocess, "run", answer)
    assert installed_gpus(layouts.reader(NODES)) == FOUND

    def hang(command: list[str], **_: object) -> SimpleNamespace:
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(subprocess, "run", hang)
    assert installed_gpus(layouts.reader(NODES)) == ()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=9))
    assert installed_gpus(layouts.reader(NODES)) == ()
    monkeypatch.setattr("shutil.which", lambda program: None)
    assert installed_gpus(layouts.reader(NODES)) == ()
