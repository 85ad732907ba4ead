"""Whether the backend `ccl` can be used, what it sets, and who builds it: without building it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_perf.strategies import oneccl
from lightning_perf.strategies.oneccl import _build
from lightning_perf.strategies.oneccl._backend import (
    SEGMENT_BYTES,
    Member,
    common,
    itself,
    meet,
    remove_segments,
    settings,
    variables,
    visible,
)
from lightning_perf.strategies.oneccl._build import Tools, build, extension_path, load, missing

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="oneCCL is there for Linux, and this looks at /proc"
)

HERE = Path("/somewhere")
ALL = Tools("Linux x86_64", _build.VERSION, HERE, HERE, HERE, "/usr/bin/c++")


def member(rank: int, **changes: object) -> Member:
    one = Member(rank, "host", "table", "net", 100 + rank, "7", 10 * SEGMENT_BYTES, idle=[])
    return replace(one, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"system": "Darwin arm64"}, "this is Darwin arm64"),
        ({"version": None}, r"library of oneCCL is not installed: pip install 'lightning-perf\["),
        ({"library": None}, "library of oneCCL is not installed"),
        ({"version": "2022.2.0"}, rf"oneccl-cpu 2022.2.0 is installed, and {_build.VERSION} is"),
        ({"headers": None}, r"oneccl-cpu-devel\) are not installed: pip install"),
        ({"compiler": None}, "no C\\+\\+ compiler 'c\\+\\+': apt-get install g\\+\\+"),
        ({"python_headers": None}, "no Python.h: apt-get install python3-dev"),
    ],
)
def test_what_is_missing_is_named_with_the_way_to_get_it(
    changes: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    tools = replace(ALL, **changes)
    assert missing(ALL, is_built=False) is None
    reason = missing(tools, is_built=False)
    assert reason is not None
    with pytest.raises(RuntimeError, match=words):
        raise RuntimeError(reason)
    # What is only needed to build is not needed later.
    only_to_build = changes.keys() <= {"headers", "compiler", "python_headers"}
    assert (missing(tools, is_built=True) is None) == only_to_build

    monkeypatch.setattr(_build, "find_tools", lambda: tools)
    monkeypatch.setattr(oneccl, "find_tools", lambda: tools)
    monkeypatch.setattr(_build, "MODULE", "nothing_of_this_name")
    assert oneccl.why_not() == reason
    assert not oneccl.available()
    with pytest.raises(RuntimeError, match=f"'ccl' was asked for, but .*{words}.* choose 'gloo'"):
        load()


@pytest.mark.slow
def test_the_name_is_known_and_nothing_is_loaded_for_it() -> None:
    script = """
import sys
import torch.distributed as dist
import lightning_perf.strategies
assert dist.is_backend_available("ccl")
assert "lightning_perf.strategies.oneccl._backend" not in sys.modules
assert "lightning_perf_oneccl" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)
    assert dist.is_backend_available("ccl")


def test_a_group_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "find_tools", lambda: replace(ALL, version=None))
    monkeypatch.setattr(_build, "MODULE", "nothing_of_this_name")
    with pytest.raises(RuntimeError, match="is not installed: pip install"):
        dist.init_process_group("ccl", store=dist.HashStore(), rank=0, world_size=1)


def test_each_version_has_an_extension_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    path = extension_path(ALL)
    assert extension_path(ALL) == path
    assert extension_path(replace(ALL, version="1")) != path
    assert extension_path(replace(ALL, library=Path("/elsewhere"))) != path
    monkeypatch.setattr("torch.__version__", "2.0.0")
    assert extension_path(ALL) != path
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/chosen")
    assert extension_path(ALL).is_relative_to("/chosen")


@pytest.fixture
def compiler(tmp_path: Path) -> Callable[[str], Tools]:
    """A program in the place of the compiler, which counts its calls in a file."""

    def make(last: str) -> Tools:
        path = tmp_path / "compiler"
        # The output is what follows `-o`.
        lines = [
            "#!/bin/sh",
            f"echo called >> {tmp_path}/calls",
            'while [ "$1" != -o ]; do shift; done',
            last,
        ]
        path.write_text("\n".join(lines))
        path.chmod(0o755)
        return replace(ALL, compiler=str(path))

    return make


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_one_builds_and_the_others_wait_for_it(
    compiler: Callable[[str], Tools], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tools, path = compiler('sleep 0.3; echo built > "$2"'), tmp_path / "cache" / "extension.so"
    ranks = [threading.Thread(target=build, args=(tools, path)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert path.read_text() == "built\n"
    assert calls(tmp_path) == 1
    assert capfd.readouterr().err.count("building the oneCCL backend, once") == 1


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    compiler: Callable[[str], Tools], tmp_path: Path
) -> None:
    tools, path = compiler("echo no such header >&2; exit 1"), tmp_path / "extension.so"
    with pytest.raises(RuntimeError, match=r"(?s)could not be built.*failed: .*no such header"):
        build(tools, path)
    assert not path.exists()
    build(compiler('echo built > "$2"'), path)
    assert path.exists()


HOLD = """
import fcntl, sys, time
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_builder_that_is_killed_holds_up_nobody(
    compiler: Callable[[str], Tools], tmp_path: Path
) -> None:
    tools, path = compiler('echo built > "$2"'), tmp_path / "extension.so"
    lock = path.with_suffix(".lock")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RuntimeError, match=f"building the backend 'ccl' for 0.2 sec.*{lock}"):
            build(tools, path, wait_seconds=0.2)
        holder.send_signal(signal.SIGKILL)
        build(tools, path, wait_seconds=10)
    finally:
        holder.kill()
        holder.communicate()
    assert path.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot be written.*TORCH_EXTENSIONS_DIR"):
        build(ALL, tmp_path / "file" / "extension.so")


def test_what_is_no_extension_is_named(tmp_path: Path) -> None:
    path = tmp_path / "extension.so"
    path.write_text("not one")
    with pytest.raises(RuntimeError, match=r"cannot be loaded: .*Delete it"):
        _build._imported(path)


def test_settings_are_for_the_block_and_the_users_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCL_ATL_SHM", "0")
    monkeypatch.delenv("CCL_WORKER_OFFLOAD", raising=False)
    monkeypatch.delenv("FI_PROVIDER", raising=False)
    before = dict(os.environ)
    see = [sys.executable, "-c", "import os; print(os.getenv('FI_PROVIDER'))"]
    with variables(settings([member(0), member(1)])):
        assert os.environ["CCL_ATL_SHM"] == "0"
        assert os.environ["CCL_WORKER_OFFLOAD"] == "0"
        os.putenv("FI_PROVIDER", "shm")  # as oneCCL does
        assert subprocess.check_output(see, text=True) == "shm\n"
    assert dict(os.environ) == before
    assert subprocess.check_output(see, text=True) == "None\n"
    assert not any("LOCAL_RANK" in name for name in settings([member(0)]))


def test_a_small_shared_memory_is_not_used() -> None:
    roomy = [member(0), member(1), member(2, host="other", free_bytes=SEGMENT_BYTES)]
    assert settings(roomy)["CCL_ATL_SHM"] == "1"
    # Two ranks of one host share what one of them reports.
    tight = [member(0), member(1, free_bytes=2 * SEGMENT_BYTES - 1)]
    assert settings(tight)["CCL_ATL_SHM"] == "0"
    # All ranks must do the same.
    assert settings([*tight, member(2, host="other")])["CCL_ATL_SHM"] == "0"


def test_only_a_single_host_uses_the_loopback() -> None:
    alone = settings([member(0), member(1)])
    assert alone["FI_TCP_IFACE"] == alone["CCL_KVS_IFACE"] == "lo"
    # Two containers of one host have one each.
    assert not any("IFACE" in name for name in settings([member(0), member(1, network="other")]))


def test_only_processes_of_the_same_table_are_looked_at() -> None:
    members = [member(4), member(5), member(6, processes="another container"), member(7)]
    assert visible(members, 1) == [(0, 4, 104, "7"), (3, 7, 107, "7")]
    me = itself(3)
    assert (me.rank, me.pid) == (3, os.getpid())
    assert int(me.started) > 0


def test_a_communicator_serves_again_where_all_ranks_have_it_to_spare() -> None:
    assert common([member(0, idle=["a", "b"]), member(1, idle=["b", "c"])]) == "b"
    assert common([member(0, idle=["a"]), member(1, idle=["b"])]) is None
    assert common([member(0), member(1, idle=["a"])]) is None


def test_ranks_meet_again_in_the_same_store() -> None:
    store = dist.HashStore()
    for life in (1, 2):
        others = threading.Thread(target=meet, args=(store, 1, member(1), 2, timedelta(seconds=5)))
        others.start()
        members, prefix = meet(store, 0, member(0), 2, timedelta(seconds=5))
        others.join()
        assert members == [member(0), member(1)]
        assert prefix == f"ccl/{life}"


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    store = dist.HashStore()
    store.set("ccl/1/2", json.dumps(asdict(member(2))))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Timed out .*rank 0 waits for 3 ranks.*not all came"):
        meet(store, 0, member(0), 3, timedelta(seconds=0.5))
    assert time.monotonic() - start < 30


def test_only_what_the_dead_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"{ended.pid}:0:0", f"{os.getpid()}:0:0", "sem.mp-1", f"{ended.pid}:0:0.bak", "1:2"]
    for name in names:
        (tmp_path / name).write_text("")
    remove_segments(folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])
    remove_segments(ended=os.getpid(), folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names[2:])
