"""The files of /proc and /sys of machines, as dictionaries from path to text.

`RECORDED` is what a virtual machine with two Xeon cores said; the others are built after the
numbering that Linux gives such machines.
"""

from collections.abc import Sequence

from lightning_perf.launch.kernel_files import Read, format_cpu_list, parse_cpu_list

Files = dict[str, str]
CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"
RECORDED: Files = {
    f"{CPU}/present": "0-1\n",
    f"{CPU}/online": "0-1\n",
    **{
        f"{CPU}/cpu{cpu}/{name}": text + "\n"
        for cpu in (0, 1)
        for name, text in {
            "topology/thread_siblings_list": f"{cpu}",
            "topology/physical_package_id": "0",
            "topology/die_id": "0",
            "cache/index3/level": "3",
            "cache/index3/shared_cpu_list": "0-1",
            "cpu_capacity": "1024",
        }.items()
    },
    f"{NODE}/online": "0\n",
    f"{NODE}/has_memory": "0\n",
    f"{NODE}/node0/cpulist": "0-1\n",
    "/proc/self/status": "Name:\tcat\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1\n"
    "Mems_allowed:\t00000000,00000001\nMems_allowed_list:\t0\n",
    "/proc/self/cgroup": "9:name=systemd:/\n3:cpuset:/\n2:cpuacct:/\n1:cpu:/\n0::/\n",
}


def layout(
    cores: Sequence[Sequence[int]],
    sockets: Sequence[Sequence[int]],
    nodes: Sequence[Sequence[int]] = (),
    l3: Sequence[Sequence[int]] = (),
    allowed: str = "",
    memory: str = "",
) -> Files:
    """Each argument lists groups of logical CPUs: those of a core, of a socket, and so on."""
    cpus = format_cpu_list(cpu for core in cores for cpu in core)
    nodes_online = format_cpu_list(range(len(nodes)))
    files = {
        f"{CPU}/present": cpus + "\n",
        f"{CPU}/online": cpus + "\n",
        "/proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{allowed or cpus}\n"
        f"Mems_allowed_list:\t{memory or nodes_online}\n",
    }
    for core in cores:
        for cpu in core:
            files[f"{CPU}/cpu{cpu}/topology/thread_siblings_list"] = format_cpu_list(core) + "\n"
    for index, socket in enumerate(sockets):
        for cpu in socket:
            files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = f"{index}\n"
    for group in l3:
        for cpu in group:
            files[f"{CPU}/cpu{cpu}/cache/index3/level"] = "3\n"
            files[f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list"] = format_cpu_list(group) + "\n"
    if nodes:
        files[f"{NODE}/online"] = files[f"{NODE}/has_memory"] = nodes_online + "\n"
    for index, node in enumerate(nodes):
        files[f"{NODE}/node{index}/cpulist"] = format_cpu_list(node) + "\n"
    return files


def server(
    sockets: int, cores: int, *, smt: int = 1, nodes_per_socket: int = 1, l3_per_node: int = 1
) -> Files:
    """A machine numbered as Linux usually does: all first hardware threads, then all second."""
    total = sockets * cores

    def blocks(number: int) -> list[list[int]]:
        size = total // number
        return [
            [
                first + thread * total
                for thread in range(smt)
                for first in range(start, start + size)
            ]
            for start in range(0, total, size)
        ]

    nodes = sockets * nodes_per_socket
    return layout(
        [[core + thread * total for thread in range(smt)] for core in range(total)],
        blocks(sockets),
        blocks(nodes),
        blocks(nodes * l3_per_node),
    )


def reader(files: Files) -> Read:
    return lambda path: files.get(path, "")


def hybrid(performance: int, efficient: int) -> Files:
    """An Intel hybrid: performance cores of two hardware threads, efficient cores of one."""
    fast = [[2 * core, 2 * core + 1] for core in range(performance)]
    slow = [[cpu] for cpu in range(2 * performance, 2 * performance + efficient)]
    everything = [cpu for core in (*fast, *slow) for cpu in core]
    files = layout([*fast, *slow], [everything], [everything], [everything])
    files["/sys/devices/cpu_core/cpus"] = f"0-{2 * performance - 1}\n"
    files["/sys/devices/cpu_atom/cpus"] = f"{2 * performance}-{everything[-1]}\n"
    return files


def big_little(speeds: Sequence[int], source: str = "cpu_capacity") -> Files:
    """An Arm machine without SMT, without a visible L3 cache, with a capacity for each core."""
    cpus = range(len(speeds))
    files = layout([[cpu] for cpu in cpus], [], [cpus])
    for cpu, speed in enumerate(speeds):
        # Arm firmware without a processor table gives every core this package.
        files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = "-1\n"
        files[f"{CPU}/cpu{cpu}/{source}"] = f"{speed}\n"
    return files


def without(files: Files, *cpus: int) -> Files:
    """The same machine with some CPUs offline, whose folders the kernel then empties."""
    gone = tuple(f"{CPU}/cpu{cpu}/" for cpu in cpus)
    left = {path: text for path, text in files.items() if not path.startswith(gone)}
    present = format_cpu_list(parse_cpu_list(files[f"{CPU}/present"]) - {*cpus})
    left[f"{CPU}/online"] = present + "\n"
    for path, text in left.items():
        if path.endswith(("_list", "cpulist")):
            left[path] = format_cpu_list(parse_cpu_list(text) - {*cpus}) + "\n"
    return restricted(left, present)


def restricted(files: Files, allowed: str, memory: str | None = None) -> Files:
    """The same machine from inside a cpuset."""
    lines = files["/proc/self/status"].splitlines()
    before = lines[-1].partition("\t")[2]
    status = [*lines[:-2], f"Cpus_allowed_list:\t{allowed}"]
    status.append(f"Mems_allowed_list:\t{before if memory is None else memory}")
    return files | {"/proc/self/status": "\n".join(status) + "\n"}


def with_quota(files: Files, cpus: float) -> Files:
    """The same machine from inside a control group that limits CPU time."""
    limit = f"{int(cpus * 100_000)} 100000\n"
    return files | {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": limit}
