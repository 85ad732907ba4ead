"""Hardware detection, from texts recorded on, or written after, machines of all kinds."""

import ctypes
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_perf import _hardware
from lightning_perf._hardware import (
    Hardware,
    detect,
    linux_host,
    memory_limit,
    other_host,
    parse_cpuinfo,
)

GIB = 2**30

XEON = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
physical id\t: 0
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: something else
flags\t\t: fpu
"""
GRAVITON = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd bf16 sve
CPU implementer\t: 0x41
"""
POWER = """\
processor\t: 0
cpu\t\t: POWER9, altivec supported
"""


def machine(sockets: int, cores: int, smt: int, nodes: list[str] | None = None) -> dict[str, str]:
    """The files of a machine numbered as Linux usually does: all first threads, then the second."""
    files = {"/proc/cpuinfo": XEON}
    total = sockets * cores
    for cpu in range(total * smt):
        topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        same_core = ",".join(str(cpu % total + total * thread) for thread in range(smt))
        files[f"{topology}/thread_siblings_list"] = same_core + "\n"
        files[f"{topology}/physical_package_id"] = f"{cpu % total // cores}\n"
    nodes = nodes or [f"0-{total * smt - 1}"]
    files["/sys/devices/system/node/online"] = f"0-{len(nodes) - 1}\n"
    for index, cpus in enumerate(nodes):
        files[f"/sys/devices/system/node/node{index}/cpulist"] = cpus + "\n"
    return files


def host(files: dict[str, str], cpus: range | set[int]) -> _hardware.Host:
    return linux_host(frozenset(cpus), lambda path: files.get(path, ""))


def shape(found: _hardware.Host) -> tuple[int, int, int, int]:
    return found.cores, found.logical_cpus, found.sockets, found.numa_nodes


def test_one_socket_without_smt() -> None:
    assert shape(host(machine(1, 4, 1), range(4))) == (4, 4, 1, 1)


def test_two_sockets_with_smt() -> None:
    files = machine(2, 4, 2, nodes=["0-3,8-11", "4-7,12-15"])
    assert shape(host(files, range(16))) == (8, 16, 2, 2)


def test_a_node_without_cpus_is_not_counted() -> None:
    assert shape(host(machine(1, 4, 1, nodes=["0-3", ""]), range(4))) == (4, 4, 1, 1)


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        ({0, 1}, (2, 2, 1, 1)),
        ({0, 8}, (1, 2, 1, 1)),  # both threads of one core
        ({8}, (1, 1, 1, 1)),  # the second thread alone
        ({3, 4}, (2, 2, 2, 2)),  # one core of each socket
    ],
)
def test_cpuset_of_a_container(cpus: set[int], expected: tuple[int, int, int, int]) -> None:
    files = machine(2, 4, 2, nodes=["0-3,8-11", "4-7,12-15"])
    assert shape(host(files, cpus)) == expected


def test_without_sysfs_there_is_still_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64)
    assert shape(host({}, range(4))) == (4, 4, 1, 1)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert shape(host({}, range(4))) == (4, 4, 1, 1)


def test_cpuinfo_of_x86_describes_the_first_processor() -> None:
    name, isa = parse_cpuinfo(XEON)
    assert name == "Intel(R) Xeon(R) Platinum 8480+"
    assert isa == {"fpu", "sse2", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"}


def test_cpuinfo_of_arm_has_features_and_no_name() -> None:
    assert parse_cpuinfo(GRAVITON) == ("", {"fp", "asimd", "bf16", "sve"})
    found = host({"/proc/cpuinfo": GRAVITON}, range(2))
    assert found.cpu_name
    assert "sve" in found.isa


@pytest.mark.parametrize("text", [POWER, "", "no colon here", ":::"])
def test_cpuinfo_without_flags(text: str) -> None:
    assert parse_cpuinfo(text) == ("", frozenset())


V1_MEMORY = "/sys/fs/cgroup/memory"
V2 = "/sys/fs/cgroup"
CGROUP_V1 = "4:memory:/docker/abc\n2:cpuacct,cpu:/docker/abc\n1:name=systemd:/docker/abc\n"
CGROUP_V2 = "0::/job/step\n"


@pytest.mark.parametrize(
    ("quota", "usable"), [(None, 8), (0.5, 1), (1.0, 1), (1.5, 2), (7.2, 8), (8.0, 8), (64.0, 8)]
)
def test_usable_cores_respect_the_quota(quota: float | None, usable: int) -> None:
    assert dataclasses.replace(detect(), cores=8, quota=quota).usable_cores == usable


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        (CGROUP_V2, {f"{V2}/job/memory.max": f"{4 * GIB}\n"}, 4 * GIB),
        (CGROUP_V2, {f"{V2}/job/step/memory.max": "max\n"}, None),
        (CGROUP_V1, {f"{V1_MEMORY}/docker/abc/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ("", {}, None),
    ],
)
def test_memory_limit(membership: str, files: dict[str, str], limit: int | None) -> None:
    files = {"/proc/self/cgroup": membership, **files}
    assert memory_limit(lambda path: files.get(path, "")) == limit


@pytest.mark.parametrize(
    ("limit", "expected"), [("1073741824", GIB), ("9223372036854771712", 8 * GIB), ("max", 8 * GIB)]
)
def test_memory_is_the_smaller_of_machine_and_limit(
    monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * GIB))
    files = machine(1, 2, 1) | {"/proc/self/cgroup": "0::/\n", f"{V2}/memory.max": limit}
    assert host(files, range(2)).memory == expected


def test_windows_and_macos_take_what_the_libraries_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hardware, "_allowed_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    found = other_host()
    assert shape(found) == (4, 8, 1, 1)
    assert "avx512_bf16" in found.isa
    assert found.quota is None


def test_affinity_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.delattr(psutil.Process, "cpu_affinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert _hardware._allowed_cpus() == frozenset(range(6))


def broken(*_: object, **__: object) -> None:
    raise OSError("not here")


def test_detect_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hardware, "read_text", lambda path: "garbage - : , 1-x")
    monkeypatch.setattr(psutil, "cpu_count", broken)
    monkeypatch.setattr(psutil, "virtual_memory", broken)
    monkeypatch.setattr(torch.cuda, "device_count", broken)
    found = detect()
    assert (found.device, found.device_count, found.capability) == ("cpu", 1, None)
    assert found.cores >= 1


def test_detect_agrees_with_the_libraries() -> None:
    found = detect()
    assert 1 <= found.usable_cores <= found.cores <= found.logical_cpus
    assert found.memory <= psutil.virtual_memory().total
    assert ("avx2" in found.isa) == torch.backends.cpu.get_cpu_capability().startswith("AVX")
    assert (found.device == "cuda") == (torch.cuda.device_count() > 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch is asked for the CPU too")
def test_without_accelerators_torch_is_not_imported() -> None:
    code = (
        "import sys; from lightning_perf._hardware import detect\n"
        "assert detect(accelerators=False).device == 'cpu' and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="a process cannot be bound to a CPU here")
def test_detect_follows_the_affinity_of_the_process() -> None:
    code = (
        "import os, json, dataclasses; from lightning_perf._hardware import detect\n"
        "os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n"
        "hardware = detect(); print(json.dumps([hardware.cores, hardware.logical_cpus]))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(child.stdout) == [1, 1]


def fake_cuda(
    monkeypatch: pytest.MonkeyPatch,
    *devices: tuple[str, tuple[int, int]],
    visible: list[int] | None = None,
) -> list[str]:
    """Pretends there are CUDA devices; the returned list records calls that need a context."""
    visible = list(range(len(devices))) if visible is None else visible
    calls: list[str] = []

    def ask(what: int, index: int) -> object:
        calls.append("context")
        return devices[visible[index]][what]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ask(0, index))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ask(1, index))
    monkeypatch.setattr(_hardware, "_nvml_devices", lambda: list(devices))
    return calls


class FakeNVML:
    """Answers as the management library of a machine with two A100 does."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.open = False

    def __getattr__(self, function: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if function == "nvmlInit_v2":
                self.open = True
            elif function == "nvmlShutdown":
                self.open = False
            elif function == "nvmlDeviceGetCount_v2":
                arguments[0]._obj.value = 2
            elif function == "nvmlDeviceGetHandleByIndex_v2":
                arguments[1]._obj.value = 1000 + arguments[0]
            elif function == "nvmlDeviceGetName":
                assert arguments[0].value in (1000, 1001)
                arguments[1].value = A100[0].encode()
            elif function == "nvmlDeviceGetCudaComputeCapability":
                arguments[1]._obj.value, arguments[2]._obj.value = A100[1]
            return 999 if function == self.failing else 0

        return call


def test_the_management_library_is_asked_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNVML()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert _hardware._nvml_devices() == [A100, A100]
    assert not library.open


def test_an_error_of_the_management_library_is_raised_and_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = FakeNVML(failing="nvmlDeviceGetName")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    with pytest.raises(RuntimeError, match="nvmlDeviceGetName returned 999"):
        _hardware._nvml_devices()
    assert not library.open


A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))
T4 = ("Tesla T4", (7, 5))


def test_alike_cuda_devices_are_described_without_a_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = fake_cuda(monkeypatch, A100, A100, A100, visible=[2, 0])
    found = detect()
    assert (found.device, found.device_name, found.device_count) == ("cuda", A100[0], 2)
    assert found.capability == (8, 0)
    assert found.native_bf16
    assert not calls


def test_different_cuda_devices_are_described_by_the_weakest_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cuda(monkeypatch, A100, T4)
    assert detect().capability == (7, 5)
    assert not detect().native_bf16
    fake_cuda(monkeypatch, A100, T4, visible=[0])
    assert detect().capability == (8, 0)


@pytest.mark.parametrize("failure", [broken, list])
def test_without_the_management_library_torch_is_asked(
    monkeypatch: pytest.MonkeyPatch, failure: object
) -> None:
    calls = fake_cuda(monkeypatch, T4)
    monkeypatch.setattr(_hardware, "_nvml_devices", failure)
    assert detect().device_name == "Tesla T4"
    assert calls


def test_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = detect()
    assert (found.device, found.device_count, found.native_bf16) == ("mps", 1, False)


@pytest.mark.parametrize(
    ("isa", "native"),
    [({"avx512_bf16"}, True), ({"amx_bf16"}, True), ({"avx512f", "amx_int8"}, False)],
)
def test_native_bf16_of_a_cpu(isa: set[str], native: bool) -> None:
    hardware = dataclasses.replace(detect(), device="cpu", isa=frozenset(isa))
    assert (hardware.cpu_bf16, hardware.native_bf16) == (native, native)


@pytest.mark.gpu
def test_real_gpu_is_described_without_a_context() -> None:
    code = (
        "import torch; from lightning_perf._hardware import detect\n"
        "hardware = detect(); assert not torch.cuda.is_initialized()\n"
        "assert hardware.device_name == torch.cuda.get_device_name(0)\n"
        "assert hardware.capability == torch.cuda.get_device_capability(0)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_hardware_is_a_value() -> None:
    hardware = detect()
    assert hardware == detect()
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware.cores = 3  # type: ignore[misc]
    assert isinstance(hash(hardware), int)
    assert isinstance(hardware, Hardware)
