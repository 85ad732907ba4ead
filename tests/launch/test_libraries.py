"""Libraries to preload: where they are, and which they are."""

from pathlib import Path

import pytest

from lightning_perf.launch.libraries import (
    AUTO_ALLOCATOR,
    AUTO_OPENMP,
    LIBRARIES,
    allocator_among,
    find_libraries,
    library_folders,
    openmp_among,
    preloaded,
)


def test_preloaded_libraries_are_separated_by_colons_or_spaces() -> None:
    assert preloaded("/a.so:/b.so /c.so: ") == ["/a.so", "/b.so", "/c.so"]
    assert preloaded("") == []


@pytest.mark.parametrize(
    ("path", "allocator"),
    [
        ("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "jemalloc"),
        ("/usr/lib/libtcmalloc_minimal.so.4.5.16", "tcmalloc"),
        ("libmimalloc-secure.so", "mimalloc"),
        ("/opt/jemalloc/lib/libfoo.so", None),
        ("/usr/lib/libgomp.so.1", None),
    ],
)
def test_an_allocator_is_known_by_its_file(path: str, allocator: str | None) -> None:
    assert allocator_among(["/lib/libc.so.6", path]) == allocator


def test_openmp_runtimes_are_known_by_their_files() -> None:
    assert openmp_among(["/torch/lib/libgomp-a34b3233.so.1", "/x/libgomp.so.1"]) == ["gnu"]
    assert openmp_among(["libomp.so.5", "libiomp5.so", "libc.so.6"]) == ["llvm", "intel"]


def test_the_environment_of_the_python_that_is_started_comes_first() -> None:
    environ = {"VIRTUAL_ENV": "/venv", "CONDA_PREFIX": "/conda", "LD_LIBRARY_PATH": "/mine:rel:"}
    folders = library_folders(environ, "/opt/other/bin/python")
    assert folders[:3] == ["/opt/other/lib", "/venv/lib", "/conda/lib"]
    assert folders.index("/mine") < folders.index("/usr/lib")
    assert "rel" not in folders


def test_the_preferred_file_in_the_first_folder_is_found() -> None:
    files = {
        "/b/libjemalloc.so.2",
        "/a/libjemalloc.so",
        "/b/libtcmalloc.so.4",
        "/b/libtcmalloc_minimal.so.4",
        "/c/libtcmalloc_minimal.so.4",
    }
    assert find_libraries(["/a", "/b", "/c"], files.__contains__) == {
        "jemalloc": "/b/libjemalloc.so.2",
        "tcmalloc": "/b/libtcmalloc_minimal.so.4",
    }
    assert find_libraries([], files.__contains__) == {}


def test_auto_is_what_is_installed_anyway_and_says_what_was_measured() -> None:
    for choice in (AUTO_ALLOCATOR, AUTO_OPENMP):
        assert choice.reason
        assert (Path(__file__).parents[2] / choice.measured).is_file()
        assert choice.use not in LIBRARIES


def test_jemalloc_never_comes_without_its_configuration() -> None:
    assert "MALLOC_CONF" in dict(LIBRARIES["jemalloc"].environment)
