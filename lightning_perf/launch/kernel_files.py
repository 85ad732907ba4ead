"""The text files in which Linux describes CPUs, NUMA nodes and control groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Read = Callable[[str], str]  # path of a text file -> its content, "" where there is none

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"
UNKNOWN = -1
# Cores of one kind differ by a few per cent in clock (the one that boosts best), cores of two kinds
# by more: 0.74 on Core i9-13900K, 0.65 between Zen 5 and Zen 5c, 0.3 to 0.6 on Arm's big.LITTLE.
_SAME_KIND = 0.8


def read_text(path: str) -> str:
    """Return the content of a text file, ``""`` if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's list format, such as ``0-3,8,10-11``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Write CPUs in the kernel's list format.

    Example:
        >>> format_cpu_list([8, 0, 1, 2])
        '0-2,8'
    """
    ranges: list[tuple[int, int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1] = (ranges[-1][0], cpu)
        else:
            ranges.append((cpu, cpu))
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


def cgroup_folders(membership: str, controller: str) -> Iterator[str]:
    """Yield the folders whose limits hold for a process: its control group and all its parents.

    Args:
        membership: Content of /proc/self/cgroup.
        controller: ``"cpu"`` or ``"memory"``.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):  # version 1
            root = f"/sys/fs/cgroup/{controller}"
        elif not controllers:  # version 2
            root = "/sys/fs/cgroup"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        # In a container the path may be the host's, unknown here; the root then holds the limit.
        for depth in range(len(parts), -1, -1):
            yield "/".join([root, *parts[:depth]])


def parse_quota(text: str) -> float | None:
    """Parse ``<microseconds of CPU time> <period>``; ``max`` and -1 mean unlimited."""
    fields = text.split()
    if len(fields) != 2 or fields[0] in ("max", "-1"):
        return None
    return int(fields[0]) / int(fields[1])


def cpu_quota(read: Read) -> float | None:
    """Return the CPU quota of this process's control groups in CPUs, None if unlimited."""
    quotas = []
    for folder in cgroup_folders(read("/proc/self/cgroup"), "cpu"):
        first_version = [read(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period")]
        quotas += [parse_quota(read(f"{folder}/cpu.max")), parse_quota(" ".join(first_version))]
    return min((quota for quota in quotas if quota), default=None)


def efficient_cores(read: Read, cpus: Iterable[int]) -> frozenset[int]:
    """Return the slower cores of a hybrid CPU, from the first source that knows of them."""
    if parse_cpu_list(read("/sys/devices/cpu_core/cpus")):  # Intel's hybrids have both lists
        return parse_cpu_list(read("/sys/devices/cpu_atom/cpus")) | parse_cpu_list(
            read("/sys/devices/cpu_lowpower/cpus")
        )
    for source in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speed = {cpu: parse_number(read(f"{CPU}/cpu{cpu}/{source}")) for cpu in cpus}
        fastest = max(speed.values(), default=UNKNOWN)
        slow = frozenset(c for c, value in speed.items() if 0 < value < fastest * _SAME_KIND)
        if slow:
            return slow
    return frozenset()


def l3_sharers(read: Read, cpu: int) -> frozenset[int]:
    """Return the logical CPUs that share this one's L3 cache, none where the kernel has no word."""
    for index in (3, 2, 4, 1, 0):  # 3 on nearly all machines: one look instead of five
        folder = f"{CPU}/cpu{cpu}/cache/index{index}"
        if parse_number(read(f"{folder}/level")) == 3:
            return parse_cpu_list(read(f"{folder}/shared_cpu_list"))
    return frozenset()


def parse_fields(text: str) -> dict[str, str]:
    """Parse lines of ``name: value``."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def parse_number(text: str) -> int:
    """Parse a file that holds one number, `UNKNOWN` if it does not."""
    text = text.strip()
    return int(text) if text.removeprefix("-").isdecimal() else UNKNOWN
