"""What this process may use: accelerator, CPU features, cores, memory.

`detect` answers for the machine it runs on; everything that decides by hardware takes the resulting
`Hardware` as a value, so each decision can be tested on any machine.
"""

import ctypes
import math
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import psutil

from lightning_perf.launch.kernel_files import Read, cgroup_folders, cpu_quota, read_text
from lightning_perf.launch.topology import read_topology

Capability = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Hardware:
    """The hardware as this process sees it.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or ``"mps"``: the best accelerator present.
        device_name: Name of that device; among several CUDA devices of the weakest one.
        device_count: Number of such devices, 1 for a CPU.
        capability: CUDA compute capability, the lowest among the visible devices.
        isa: Features of the CPU as Linux names them, such as ``avx2`` or ``avx512_bf16``.
        cpu_name: Model name of the CPU.
        cores: Physical cores this process may run on; hardware threads of one core count once.
        logical_cpus: Logical CPUs this process may run on.
        quota: CPU time the control group allows, in CPUs, or None.
        sockets: Sockets those logical CPUs lie on.
        numa_nodes: NUMA nodes those logical CPUs lie on.
        memory: Bytes of memory, the control group's limit respected.
        system: ``"Linux"``, ``"Darwin"`` or ``"Windows"``.
    """

    device: str
    device_name: str
    device_count: int
    capability: Capability | None
    isa: frozenset[str]
    cpu_name: str
    cores: int
    logical_cpus: int
    quota: float | None
    sockets: int
    numa_nodes: int
    memory: int
    system: str

    @property
    def usable_cores(self) -> int:
        """Cores worth one compute thread each.

        A fractional quota is rounded up: rounded down, the fraction could never be used.
        """
        return self.cores if self.quota is None else max(1, min(self.cores, math.ceil(self.quota)))

    @property
    def cpu_bf16(self) -> bool:
        """Whether the CPU multiplies bfloat16 matrices natively."""
        return not self.isa.isdisjoint({"avx512_bf16", "amx_bf16"})

    @property
    def native_bf16(self) -> bool:
        """Whether `device` computes in bfloat16 natively."""
        if self.device == "cuda":
            return self.capability is not None and self.capability >= (8, 0)
        return self.device == "cpu" and self.cpu_bf16


class Host(NamedTuple):
    """The processor's half of `Hardware`."""

    isa: frozenset[str]
    cpu_name: str
    cores: int
    logical_cpus: int
    quota: float | None
    sockets: int
    numa_nodes: int
    memory: int


class Accelerator(NamedTuple):
    """The accelerator's half of `Hardware`."""

    device: str
    device_name: str
    device_count: int
    capability: Capability | None


def detect(*, accelerators: bool = True) -> Hardware:
    """Describes the hardware this process may use.

    Cheap, never raises (what cannot be found out gets a cautious value), and asks for CUDA devices
    without creating a CUDA context, so that the process can still be forked.

    Args:
        accelerators: Whether to look for accelerators, for which torch is imported.

    Example:
        >>> detect().usable_cores >= 1
        True
    """
    on_linux = platform.system() == "Linux"
    host = on_linux and _attempt(lambda: linux_host(_allowed_cpus(), read_text), None)
    host = host or other_host()
    fallback = Accelerator("cpu", host.cpu_name, 1, None)
    accelerator = (accelerators and _attempt(_accelerator, None)) or fallback
    return Hardware(**accelerator._asdict(), **host._asdict(), system=platform.system())


def _attempt(read: Callable[[], T], default: T) -> T:
    # A machine described roughly is better than a run that does not start.
    try:
        return read()
    except Exception:
        return default


# --- processor and memory ---------------------------------------------------------------------


def linux_host(cpus: frozenset[int], read: Read) -> Host:
    """Describes the processor from the text files of /proc and /sys.

    Args:
        cpus: Logical CPUs the process may run on.
        read: Returns the content of a text file, ``""`` if it cannot be read.
    """
    name, isa = parse_cpuinfo(read("/proc/cpuinfo"))
    usable = read_topology(read, cpus).usable
    # Without sysfs each hardware thread looks like a core.
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    knows_cores = any(read(siblings.format(cpu)) for cpu in cpus)
    return Host(
        isa=isa,
        cpu_name=name or _cpu_name(),
        cores=len({cpu.core for cpu in usable}) if knows_cores else _physical_cores(len(cpus)),
        logical_cpus=len(cpus),
        quota=cpu_quota(read),
        sockets=max(1, len({cpu.socket for cpu in usable})),
        numa_nodes=max(1, len({cpu.node for cpu in usable})),
        memory=min(_total_memory(), memory_limit(read) or _total_memory()),
    )


def other_host() -> Host:
    """Describes the processor where there is no /proc: macOS, Windows."""
    logical = len(_allowed_cpus())
    return Host(
        isa=_attempt(_isa_from_torch, frozenset()),
        cpu_name=_cpu_name(),
        cores=_physical_cores(logical),
        logical_cpus=logical,
        quota=None,
        sockets=1,
        numa_nodes=1,
        memory=_total_memory(),
    )


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Returns model name and features of the first processor in /proc/cpuinfo."""
    first: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    flags = first.get("flags") or first.get("Features") or ""  # the second is Arm's word
    return first.get("model name", ""), frozenset(flags.split())


def memory_limit(read: Read) -> int | None:
    """Returns the memory limit of this process's control groups in bytes, None if unlimited."""
    limits = []
    for folder in cgroup_folders(read("/proc/self/cgroup"), "memory"):
        limits += [read(f"{folder}/memory.max"), read(f"{folder}/memory.limit_in_bytes")]
    return min((int(limit) for limit in limits if limit.strip().isdigit()), default=None)


def _allowed_cpus() -> frozenset[int]:
    with suppress(Exception):  # Linux
        return frozenset(os.sched_getaffinity(0))
    with suppress(Exception):  # Windows
        return frozenset(psutil.Process().cpu_affinity())
    return frozenset(range(os.cpu_count() or 1))


def _physical_cores(logical: int) -> int:
    return max(1, min(logical, _attempt(lambda: psutil.cpu_count(logical=False), None) or logical))


def _total_memory() -> int:
    return _attempt(lambda: int(psutil.virtual_memory().total), 0)


def _cpu_name() -> str:
    return platform.processor() or platform.machine() or "unknown"


def _isa_from_torch() -> frozenset[str]:
    import torch.cpu

    tests = {
        "avx2": "_is_avx2_supported",
        "avx512f": "_is_avx512_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "amx_bf16": "_is_amx_tile_supported",  # every CPU with tiles multiplies bfloat16 in them
    }
    return frozenset(
        flag for flag, test in tests.items() if getattr(torch.cpu, test, lambda: False)()
    )


# --- accelerator ------------------------------------------------------------------------------


def _accelerator() -> Accelerator | None:
    import torch

    if count := torch.cuda.device_count():
        name, capability = min(_cuda_devices(count), key=lambda device: device[1])
        return Accelerator("cuda", name, count, capability)
    if torch.backends.mps.is_available():
        return Accelerator("mps", f"Apple {platform.machine()}", 1, None)
    return None


def _cuda_devices(count: int) -> list[tuple[str, Capability]]:
    import torch

    # The management library numbers devices without regard to CUDA_VISIBLE_DEVICES, which does not
    # matter as long as all are alike.
    unknown: list[tuple[str, Capability]] = []
    devices = _attempt(_nvml_devices, unknown)
    if len(set(devices)) == 1:
        return devices
    return [
        (torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        for index in range(count)
    ]


def _nvml_devices() -> list[tuple[str, Capability]]:
    # torch has no public way to ask for the capability without initialising CUDA in this process.
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    count, major, minor = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)

    def call(function: str, *arguments: object) -> None:
        if code := getattr(nvml, function)(*arguments):
            raise RuntimeError(f"{function} returned {code}")

    call("nvmlInit_v2")
    try:
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        devices = []
        for index in range(count.value):
            call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            call("nvmlDeviceGetName", handle, name, len(name))
            call(
                "nvmlDeviceGetCudaComputeCapability",
                handle,
                ctypes.byref(major),
                ctypes.byref(minor),
            )
            devices.append((name.value.decode(), (major.value, minor.value)))
        return devices
    finally:
        nvml.nvmlShutdown()
