"""The variables a process gets, and who wins."""

from __future__ import annotations

from typing import Any

import pytest
from machines import machine

from lightning_perf.launch.environment import Settings, environment
from lightning_perf.launch.libraries import Choice
from lightning_perf.launch.options import Options
from lightning_perf.launch.topology import Placement

PLACE = Placement(cpus=(0, 1, 2, 3), siblings=(8, 9, 10, 11), nodes=(0,), threads=4)
THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}


def settings(
    environ: dict[str, str] | None = None,
    place: Placement | None = PLACE,
    facts: dict[str, Any] | None = None,
    required: set[str] | None = None,
    **options: Any,
) -> Settings:
    asked = Options(**{"allocator": "none", **options, "required": frozenset(required or ())})
    return environment(machine(**(facts or {})), asked, place, environ or {})


def test_threads_are_those_of_the_place() -> None:
    assert settings().variables == {"OMP_NUM_THREADS": "4", "OMP_SCHEDULE": "STATIC"}
    assert settings(place=None).variables == {}
    assert settings(threads="none").variables == {}


def test_the_users_variables_win_and_this_is_said() -> None:
    found = settings({"OMP_NUM_THREADS": "2", "OMP_SCHEDULE": "STATIC"})
    assert found.variables == {}
    assert found.notes == ["OMP_NUM_THREADS=2 in the environment wins over 4."]


def test_torchruns_one_thread_is_nobodys_wish() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    assert settings(torchrun).variables["OMP_NUM_THREADS"] == "4"
    assert settings(torchrun | {"OMP_NUM_THREADS": "3"}).variables.get("OMP_NUM_THREADS") is None


# --- binding of threads ---


@pytest.mark.parametrize("openmp", ["gnu", "intel"])
def test_threads_are_bound_to_cores_but_the_main_thread_to_none(openmp: str) -> None:
    found = settings(bind_threads=True, openmp=openmp).variables
    assert found["OMP_PROC_BIND"] == "CLOSE"
    assert found["OMP_PLACES"] == "{0:4,8:4},{1},{2},{3}"


def test_one_thread_or_fewer_than_cores_stay_unbound() -> None:
    one = Placement((5,), (), (), 1)
    assert "OMP_PLACES" not in settings(place=one, bind_threads=True).variables
    fewer = settings(place=Placement((0, 1, 2, 3), (), (), 2), bind_threads=True)
    assert "OMP_PLACES" not in fewer.variables
    assert fewer.notes == ["Threads stay unbound: there are fewer than cores."]


@pytest.mark.parametrize(
    "name", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"]
)
def test_a_binding_of_the_users_is_not_mixed_with_ours(name: str) -> None:
    found = settings({name: "x"}, bind_threads=True)
    assert found.variables.keys() == {"OMP_NUM_THREADS", "OMP_SCHEDULE"}
    assert found.notes == [f"{name} in the environment wins over our binding of threads."]


# --- allocators ---


def test_auto_is_glibc_with_all_its_thresholds() -> None:
    found = settings(allocator="auto", threads="none")
    assert found.variables.keys() == THRESHOLDS
    assert set(found.variables.values()) == {str(2**34), str(2**26)}


def test_an_older_glibc_gets_a_threshold_that_it_accepts() -> None:
    found = settings(allocator="glibc", facts={"glibc": (2, 31)}).variables
    assert found["MALLOC_MMAP_THRESHOLD_"] == str(2**25)


def test_another_c_library_gets_no_thresholds() -> None:
    assert not THRESHOLDS & settings(allocator="auto", facts={"glibc": None}).variables.keys()


@pytest.mark.parametrize(
    "theirs", [{"MALLOC_TRIM_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}]
)
def test_one_threshold_of_the_users_means_none_of_ours(theirs: dict[str, str]) -> None:
    found = settings(theirs, allocator="glibc")
    assert not THRESHOLDS & found.variables.keys()
    assert found.notes == ["The malloc settings in the environment win over ours."]


def test_jemalloc_is_preloaded_with_its_configuration() -> None:
    found = settings(allocator="jemalloc", threads="none").variables
    assert found["LD_PRELOAD"] == "/lib/libjemalloc.so.2"
    assert "dirty_decay_ms:-1" in found["MALLOC_CONF"]
    assert len(found) == 2


def test_a_configuration_of_the_users_wins() -> None:
    found = settings({"MALLOC_CONF": "narenas:1"}, allocator="jemalloc")
    assert "MALLOC_CONF" not in found.variables
    assert found.notes[0].startswith("MALLOC_CONF=narenas:1 in the environment wins over")


def test_what_is_preloaded_already_stays_in_front() -> None:
    found = settings({"LD_PRELOAD": "/x/libasan.so.8 /y/libz.so"}, allocator="tcmalloc")
    assert found.variables["LD_PRELOAD"] == (
        "/x/libasan.so.8:/y/libz.so:/lib/libtcmalloc_minimal.so.4"
    )


def test_an_allocator_that_is_preloaded_already_wins() -> None:
    theirs = {"LD_PRELOAD": "/x/libmimalloc.so"}
    found = settings(theirs, allocator="tcmalloc")
    assert "LD_PRELOAD" not in found.variables
    assert found.notes == [
        "LD_PRELOAD in the environment brings mimalloc, which wins over tcmalloc."
    ]
    assert settings(theirs, allocator="auto", threads="none").variables == {}


@pytest.mark.parametrize(
    ("allocator", "package"), [("jemalloc", "libjemalloc2"), ("tcmalloc", "libtcmalloc-minimal4")]
)
def test_a_missing_allocator_is_an_error_only_if_asked_for_by_name(
    allocator: str, package: str
) -> None:
    with pytest.raises(RuntimeError, match=f"allocator {allocator} was asked for.*{package}"):
        settings(allocator=allocator, facts={"libraries": {}}, required={"allocator"})
    found = settings(allocator=allocator, facts={"libraries": {}})
    assert "LD_PRELOAD" not in found.variables
    assert found.notes == [f"No {allocator}: apt-get install {package}."]


def test_auto_is_never_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    better = Choice("tcmalloc", "faster", measured="docs/results/")
    monkeypatch.setattr("lightning_perf.launch.environment.AUTO_ALLOCATOR", better)
    found = settings(allocator="auto", required={"allocator"})
    assert "LD_PRELOAD" in found.variables
    found = settings(allocator="auto", required={"allocator"}, facts={"libraries": {}})
    assert found.variables.keys() >= THRESHOLDS
    assert found.notes == ["No tcmalloc: apt-get install libtcmalloc-minimal4."]


# --- OpenMP ---


def test_intels_openmp_is_preloaded_with_its_block_time() -> None:
    found = settings(openmp="intel", allocator="tcmalloc").variables
    assert found["LD_PRELOAD"] == "/venv/lib/libiomp5.so:/lib/libtcmalloc_minimal.so.4"
    assert found["KMP_BLOCKTIME"] == "1"
    assert "KMP_BLOCKTIME" not in settings(openmp="auto").variables


def test_intels_openmp_that_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"libiomp5.so is not installed: pip install 'light"):
        settings(openmp="intel", facts={"libraries": {}}, required={"openmp"})
    found = settings(openmp="intel", facts={"libraries": {}})
    assert "KMP_BLOCKTIME" not in found.variables
    assert found.notes == ["No Intel OpenMP: pip install 'lightning-perf[openmp]'."]


def test_an_openmp_runtime_that_is_preloaded_already_wins() -> None:
    found = settings({"LD_PRELOAD": "/x/libiomp5.so"}, openmp="gnu", bind_threads=True)
    assert found.variables["KMP_BLOCKTIME"] == "1"
    assert found.notes == ["LD_PRELOAD in the environment brings intel OpenMP, not gnu."]
    same = settings({"LD_PRELOAD": "/x/libiomp5.so"}, openmp="intel")
    assert same.notes == []
    assert "LD_PRELOAD" not in same.variables


# --- huge pages ---


def test_huge_pages_for_tensors_and_for_glibcs_memory() -> None:
    found = settings(huge_pages=True, threads="none").variables
    assert found == {
        "THP_MEM_ALLOC_ENABLE": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    assert "GLIBC_TUNABLES" not in settings(huge_pages=True, facts={"glibc": (2, 31)}).variables
    assert "GLIBC_TUNABLES" not in settings(huge_pages=True, allocator="jemalloc").variables


def test_tunables_of_the_users_are_kept() -> None:
    theirs = {"GLIBC_TUNABLES": "glibc.malloc.perturb=1"}
    found = settings(theirs, huge_pages=True).variables
    assert found["GLIBC_TUNABLES"] == "glibc.malloc.perturb=1:glibc.malloc.hugetlb=1"
    own = settings({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=2"}, huge_pages=True)
    assert "GLIBC_TUNABLES" not in own.variables


def test_huge_pages_that_are_switched_off() -> None:
    off = {"huge_pages": False}
    assert settings(huge_pages=True, facts=off, threads="none").variables == {}
    assert "says never" in settings(huge_pages=True, facts=off).notes[0]
    with pytest.raises(
        RuntimeError, match=r"huge_pages was asked for\. Huge pages are switched off"
    ):
        settings(huge_pages=True, facts=off, required={"huge_pages"})


# --- other variables ---


def test_a_variable_may_have_a_newer_name() -> None:
    asked = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert settings(env=asked).variables.keys() >= asked.keys()
    found = settings({"PYTORCH_ALLOC_CONF": "backend:native"}, env=asked)
    assert not found.variables.keys() & asked.keys()
    assert found.notes[0].startswith("PYTORCH_ALLOC_CONF=backend:native in the environment wins")


def test_other_variables_come_from_the_preset_or_from_the_command_line() -> None:
    theirs = {"NCCL_ALGO": "Tree"}
    assert "NCCL_ALGO" not in settings(theirs, env={"NCCL_ALGO": "Ring"}).variables
    named = settings(theirs, named_env={"NCCL_ALGO": "Ring"})
    assert named.variables["NCCL_ALGO"] == "Ring"
    both = settings(theirs | {"B": "0"}, env={"B": "1"}, named_env={"NCCL_ALGO": "Ring"})
    assert "B" not in both.variables


def test_a_variable_that_is_named_for_this_run_is_the_users() -> None:
    found = settings(named_env={"OMP_NUM_THREADS": "2"})
    assert found.variables["OMP_NUM_THREADS"] == "2"
    preload = settings(named_env={"LD_PRELOAD": "/x/libmimalloc.so"}, allocator="tcmalloc")
    assert preload.variables["LD_PRELOAD"] == "/x/libmimalloc.so"
