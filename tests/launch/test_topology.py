"""Topology and placements, on the layouts of many machines."""

import dataclasses
import subprocess
import sys
from itertools import pairwise
from typing import get_args

import layouts
import pytest
from layouts import Files, big_little, hybrid, restricted, server, with_quota, without

from lightning_perf.launch.topology import (
    By,
    Placement,
    Topology,
    placements,
    read_topology,
    this_machine,
)

TWO_SOCKETS = server(2, 4, smt=2)  # CPUs 0-7, their siblings 8-15
SUB_NUMA = server(2, 8, smt=2, nodes_per_socket=2)
CHIPLETS = server(1, 8, nodes_per_socket=1, l3_per_node=4)
NO_SYSFS = {"/proc/self/status": "Cpus_allowed_list:\t0-3\n"}

MACHINES = {
    "recorded": layouts.RECORDED,
    "one socket": server(1, 4),
    "two sockets with SMT": TWO_SOCKETS,
    "sub-NUMA clusters": SUB_NUMA,
    "chiplets": CHIPLETS,
    "hybrid": hybrid(4, 4),
    "Arm server": server(2, 16),
    "Arm big.LITTLE": big_little([400, 400, 1024, 1024]),
    "offline cores": without(TWO_SOCKETS, 1, 9),
    "small cpuset": restricted(TWO_SOCKETS, "2-5,10"),
    "quota": with_quota(TWO_SOCKETS, 3.5),
    "no sysfs": NO_SYSFS,
}


def topology(files: Files) -> Topology:
    return read_topology(layouts.reader(files))


def split(files: Files, instances: int | None = None, by: By = "auto") -> list[tuple[int, ...]]:
    return [place.cpus for place in placements(topology(files), instances, by)]


def cores(files: Files) -> list[int]:
    return [cpu.id for cpu in topology(files).cores]


# --- topology ---------------------------------------------------------------------------------


def test_a_recorded_machine() -> None:
    found = topology(layouts.RECORDED)
    assert [(c.id, c.core, c.socket, c.node, c.l3, c.kind) for c in found.cpus] == [
        (0, 0, 0, 0, 0, "performance"),
        (1, 1, 0, 0, 0, "performance"),
    ]
    assert (found.memory_nodes, found.quota, found.left_out()) == ({0}, None, [])


def test_two_sockets_with_smt() -> None:
    found = topology(TWO_SOCKETS)
    assert len(found.usable) == 16
    assert cores(TWO_SOCKETS) == list(range(8))
    last = found.cpus[15]
    assert (last.core, last.socket, last.node, last.l3) == (7, 1, 1, 4)


def test_sub_numa_clusters_are_nodes_within_a_socket() -> None:
    found = topology(SUB_NUMA)
    assert [(cpu.socket, cpu.node) for cpu in found.cores[::4]] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_efficient_cores_are_left_out_beside_performance_cores_and_this_is_said() -> None:
    files = hybrid(4, 4)
    assert cores(files) == [0, 2, 4, 6]
    assert topology(files).left_out() == [
        "4 efficient cores left out: threads on them would hold up the others."
    ]


def test_efficient_cores_alone_are_used() -> None:
    files = restricted(hybrid(4, 4), "8-11")
    assert cores(files) == [8, 9, 10, 11]
    assert topology(files).left_out() == ["8 CPUs are not allowed by affinity or cpuset."]


@pytest.mark.parametrize("source", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_arm_cores_are_told_apart_by_their_speed(source: str) -> None:
    assert cores(big_little([400, 400, 1024, 1000], source)) == [2, 3]
    assert cores(big_little([1000, 1024, 980, 940], source)) == [0, 1, 2, 3]


def test_the_first_thread_of_a_core_that_is_allowed_stands_for_it() -> None:
    assert cores(restricted(TWO_SOCKETS, "2-5,9,10")) == [9, 2, 3, 4, 5]


def test_the_remaining_thread_of_a_core_stands_for_it() -> None:
    files = without(TWO_SOCKETS, 1)
    assert cores(files) == [0, 2, 3, 9, 4, 5, 6, 7]
    assert topology(files).left_out() == ["1 CPU is offline."]
    assert not topology(files).cpus[1].online


def test_a_quota_below_the_cores_limits_the_threads() -> None:
    found = topology(with_quota(TWO_SOCKETS, 3.5))
    assert found.threads == 4
    assert found.left_out() == ["4 threads on 8 cores: the control group allows 3.5 CPUs."]
    assert topology(with_quota(TWO_SOCKETS, 12)).threads == 8
    assert topology(with_quota(TWO_SOCKETS, 0.25)).threads == 1


def test_memory_is_allocated_only_on_nodes_that_have_some_and_are_allowed() -> None:
    files = SUB_NUMA | {f"{layouts.NODE}/has_memory": "0,2-3\n"}
    assert topology(files).memory_nodes == {0, 2, 3}
    assert topology(restricted(SUB_NUMA, "0-15", memory="1")).memory_nodes == {1}


def test_without_sysfs_each_allowed_cpu_is_a_core_and_there_is_one_domain() -> None:
    assert placements(topology(NO_SYSFS)) == [Placement((0, 1, 2, 3), (), (), 4)]


def test_affinity_may_be_given() -> None:
    found = read_topology(layouts.reader(TWO_SOCKETS), frozenset({3, 11}))
    assert [cpu.id for cpu in found.usable] == [3, 11]


# --- placements -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_every_usable_core_is_in_one_place(name: str) -> None:
    found = topology(MACHINES[name])
    for by in get_args(By):
        for instances in (None, *range(1, len(found.cores) + 1)):
            places = placements(found, instances, by)
            assert len(places) == (instances or len(places))
            check_places(found, places)


def check_places(found: Topology, places: list[Placement]) -> None:
    first = [cpu for place in places for cpu in place.cpus]
    assert sorted(first) == sorted(cpu.id for cpu in found.cores)
    everything = [*first, *(cpu for place in places for cpu in place.siblings)]
    assert len(everything) == len(set(everything))
    assert set(everything) <= {cpu.id for cpu in found.usable}
    for place in places:
        assert 1 <= place.threads <= len(place.cpus)
        assert set(place.nodes) <= found.memory_nodes
    assert sum(place.threads for place in places) <= max(found.threads, len(places))


def test_one_place_for_each_numa_node_by_default() -> None:
    assert split(SUB_NUMA) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    first = placements(topology(SUB_NUMA))[0]
    assert (first.siblings, first.nodes, first.threads) == ((16, 17, 18, 19), (0,), 4)


def test_sockets_stand_in_for_nodes_where_those_are_unknown() -> None:
    files = {path: text for path, text in TWO_SOCKETS.items() if layouts.NODE not in path}
    places = placements(topology(files))
    assert [(place.cpus, place.nodes) for place in places] == [
        ((0, 1, 2, 3), ()),
        ((4, 5, 6, 7), ()),
    ]


def test_other_domains() -> None:
    assert split(SUB_NUMA, by="socket") == [tuple(range(8)), tuple(range(8, 16))]
    assert split(CHIPLETS, by="l3") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert split(TWO_SOCKETS, by="core") == [(cpu,) for cpu in range(8)]
    assert split(TWO_SOCKETS, by="machine") == [tuple(range(8))]


def test_a_number_of_instances_is_split_without_crossing_a_border() -> None:
    assert split(TWO_SOCKETS, 4) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert split(TWO_SOCKETS, 3) == [(0, 1), (2, 3), (4, 5, 6, 7)]
    assert split(TWO_SOCKETS, 5) == [(0, 1), (2,), (3,), (4, 5), (6, 7)]
    assert split(SUB_NUMA, 2) == [tuple(range(8)), tuple(range(8, 16))]
    assert split(CHIPLETS, 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_unequal_domains_get_instances_by_their_cores() -> None:
    files = restricted(server(2, 8), "0-1,8-15")
    assert split(files, 5) == [(0, 1), (8, 9), (10, 11), (12, 13), (14, 15)]
    assert split(files, 2) == [(0, 1), tuple(range(8, 16))]


def test_fewer_instances_than_domains_share_all_cores_evenly() -> None:
    (place,) = placements(topology(SUB_NUMA), 1)
    assert (place.cpus, place.nodes) == (tuple(range(16)), (0, 1, 2, 3))
    assert [len(cpus) for cpus in split(SUB_NUMA, 3)] == [6, 5, 5]


def test_a_quota_is_shared_by_the_instances() -> None:
    def threads(quota: float, instances: int) -> list[int]:
        places = placements(topology(with_quota(TWO_SOCKETS, quota)), instances)
        return [place.threads for place in places]

    assert threads(3.5, 2) == [2, 2]
    assert threads(3, 2) == [2, 1]
    assert threads(1, 2) == [1, 1]  # fewer cannot be
    assert threads(8, 2) == [4, 4]


@pytest.mark.parametrize("instances", [0, -1, 9])
def test_more_instances_than_cores_are_refused(instances: int) -> None:
    files = without(server(2, 5), 0, 5)
    with pytest.raises(
        ValueError,
        match=rf"^{instances} instances were asked for; it is 1 to 8 here, the usable cores. "
        "2 CPUs are offline.$",
    ):
        placements(topology(files), instances)


def test_an_unknown_border_is_refused() -> None:
    with pytest.raises(ValueError, match="by='die' was asked for; it is one of auto, socket"):
        placements(topology(TWO_SOCKETS), by="die")  # type: ignore[arg-type] # the point of it


def test_neighbours_share_a_cache_where_cpus_are_numbered_round_robin() -> None:
    # Some firmware deals CPUs out to the sockets in turns.
    even, odd = range(0, 8, 2), range(1, 8, 2)
    files = layouts.layout([[cpu] for cpu in range(8)], [even, odd], [even, odd], [even, odd])
    assert split(files) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_the_records_are_values() -> None:
    assert topology(TWO_SOCKETS) == topology(TWO_SOCKETS)
    assert len({*placements(topology(TWO_SOCKETS)), *placements(topology(TWO_SOCKETS))}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology(TWO_SOCKETS).quota = 1.0  # type: ignore[misc] # the point of it


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and /sys")
def test_this_machine_follows_the_affinity_and_is_read_without_torch() -> None:
    code = (
        "import os, sys; from lightning_perf.launch.topology import this_machine, placements\n"
        "cpu = min(os.sched_getaffinity(0)); os.sched_setaffinity(0, [cpu])\n"
        "assert [place.cpus for place in placements(this_machine())] == [(cpu,)]\n"
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    here = this_machine()
    assert 1 <= here.threads <= len(here.cores) <= len(here.usable)
    assert all(a.id < b.id for a, b in pairwise(here.cpus))
