"""The kernel's text formats."""

import pytest

from lightning_perf.launch.kernel_files import cpu_quota, format_cpu_list, parse_cpu_list

V1 = "/sys/fs/cgroup/cpu"
V2 = "/sys/fs/cgroup"
CGROUP_V1 = "4:memory:/docker/abc\n2:cpuacct,cpu:/docker/abc\n1:name=systemd:/docker/abc\n"
CGROUP_V2 = "0::/job/step\n"
QUOTAS = {
    "version 2": (CGROUP_V2, {f"{V2}/job/step/cpu.max": "200000 100000\n"}, 2.0),
    "version 2, fraction": (CGROUP_V2, {f"{V2}/job/step/cpu.max": "150000 100000\n"}, 1.5),
    "version 2, unlimited": (CGROUP_V2, {f"{V2}/job/step/cpu.max": "max 100000\n"}, None),
    "version 2, the parent limits": (
        CGROUP_V2,
        {f"{V2}/job/step/cpu.max": "max 100000\n", f"{V2}/job/cpu.max": "300000 100000\n"},
        3.0,
    ),
    "version 2, the smallest counts": (
        CGROUP_V2,
        {f"{V2}/job/step/cpu.max": "400000 100000\n", f"{V2}/job/cpu.max": "300000 100000\n"},
        3.0,
    ),
    "version 2, namespace": ("0::/\n", {f"{V2}/cpu.max": "50000 100000\n"}, 0.5),
    "version 1": (
        CGROUP_V1,
        {
            f"{V1}/docker/abc/cpu.cfs_quota_us": "250000\n",
            f"{V1}/docker/abc/cpu.cfs_period_us": "100000\n",
        },
        2.5,
    ),
    "version 1, path of the host": (
        CGROUP_V1,
        {f"{V1}/cpu.cfs_quota_us": "400000\n", f"{V1}/cpu.cfs_period_us": "100000\n"},
        4.0,
    ),
    "version 1, unlimited": (
        CGROUP_V1,
        {f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "no control groups": ("", {}, None),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_cpu_quota(case: str) -> None:
    membership, files, quota = QUOTAS[case]
    files = {"/proc/self/cgroup": membership, **files}
    assert cpu_quota(lambda path: files.get(path, "")) == quota


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("5", {5}),
        ("0-0", {0}),
        ("\n", set()),
        ("", set()),
    ],
)
def test_cpu_list(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus


def test_a_cpu_list_is_written_as_short_as_the_kernel_does() -> None:
    assert format_cpu_list([11, 0, 3, 2, 1, 8]) == "0-3,8,11"
    assert format_cpu_list([]) == ""
