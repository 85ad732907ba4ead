"""The process group of the backend ``"ccl"``: who is in it, with which settings, and its end."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from lightning_perf.strategies.oneccl._build import load

if TYPE_CHECKING:
    # `torch.distributed` exports it only where it is built.
    from torch._C._distributed_c10d import Backend, Store

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_BYTES = 80 << 20
"""What oneCCL may use of the shared memory for each process, rounded up."""
_END_MS = 2000
"""How long a process that ends waits for collectives that it has started."""


@dataclass(frozen=True)
class Member:
    """A rank, as it tells the others about itself."""

    rank: int
    """In the whole run."""
    host: str
    processes: str
    """The same where there is one table of processes, so that its `pid` can be looked at."""
    network: str
    """The same where there is one loopback."""
    pid: int
    started: str
    """When, in ticks of the clock of `/proc`: numbers of processes are used again."""
    free_bytes: int
    """Of the shared memory."""
    idle: list[str]
    """Addresses of communicators of closed groups in which it had the same rank."""


def create(options: Any) -> Backend:
    """Make the part of this process in a group; `torch.distributed` calls it.

    Args:
        options: PyTorch's ``DistributedBackendOptions``.

    Raises:
        RuntimeError: The backend cannot be used here, or another rank does not come.
    """
    extension = load()
    remove_segments()
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group) or list(range(size))
    idle = [address.hex() for address, *place in extension.idle() if place == [rank, size]]
    _close_at_the_end(extension)
    members, prefix = meet(options.store, rank, itself(ranks[rank], idle), size, timeout)
    name = f"rank {ranks[rank]} of the ranks {', '.join(map(str, ranks))}"
    with variables(settings(members)):
        address = common(members)
        if address is None:
            if rank == 0:
                options.store.set(f"{prefix}/address", extension.open_store().hex())
            _wait(options.store, [f"{prefix}/address"], timeout, f"{name}: no address")
            address = options.store.get(f"{prefix}/address").decode()
        milliseconds = round(timeout / timedelta(milliseconds=1))
        peers = visible(members, rank)
        made = extension.create(bytes.fromhex(address), rank, size, name, milliseconds, peers)
        return cast("Backend", made)


def common(members: Sequence[Member]) -> str | None:
    """Return the address of a communicator that all have and none uses, or ``None``.

    Each one takes files and a thread until the process ends, and half a second to make.
    """
    return next((a for a in members[0].idle if all(a in member.idle for member in members)), None)


def itself(rank: int, idle: Sequence[str] = ()) -> Member:
    """Return what this process tells about itself."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Member(
        rank=rank,
        host=socket.gethostname(),
        processes=f"{boot} {os.readlink('/proc/self/ns/pid')}",
        network=f"{boot} {os.readlink('/proc/self/ns/net')}",
        pid=os.getpid(),
        started=started,
        free_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        idle=list(idle),
    )


def meet(
    store: Store, rank: int, me: Member, size: int, timeout: timedelta
) -> tuple[list[Member], str]:
    """Wait for the other ranks, and return all with the prefix of what this group keeps.

    Args:
        store: That of the group.
        rank: In the group.
        me: What this process tells.
        size: Number of ranks in the group.
        timeout: How long to wait.

    Raises:
        RuntimeError: Others do not come.
    """
    # A group that is destroyed and made again has the same store, with what the first one left.
    life = store.add(f"ccl/{rank}", 1)
    prefix = f"ccl/{life}"
    store.set(f"{prefix}/{rank}", json.dumps(asdict(me)))
    keys = [f"{prefix}/{other}" for other in range(size)]
    _wait(store, keys, timeout, f"rank {me.rank} waits for {size} ranks, and not all")
    return [Member(**json.loads(store.get(key))) for key in keys], prefix


def _wait(store: Store, keys: list[str], timeout: timedelta, who: str) -> None:
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"ccl: Timed out waiting {timeout} for a process group: {who} came ({error})."
        ) from error


def visible(members: Sequence[Member], rank: int) -> list[tuple[int, int, int, str]]:
    """Return the other ranks whose processes this one can look at."""
    return [
        (other, member.rank, member.pid, member.started)
        for other, member in enumerate(members)
        if other != rank and member.processes == members[rank].processes
    ]


def settings(members: Sequence[Member]) -> dict[str, str]:
    """Return the variables of oneCCL that make it fast here, the same on all ranks.

    Args:
        members: All ranks.
    """
    ranks = Counter(member.host for member in members)
    fits = all(member.free_bytes >= ranks[member.host] * SEGMENT_BYTES for member in members)
    # A single host needs no network, which may be closed or not there.
    is_one = len({member.network for member in members}) == 1
    loopback = {"FI_TCP_IFACE": "lo", "CCL_KVS_IFACE": "lo"} if is_one else {}
    return loopback | {
        # Shared memory within a host: its own default is slower than gloo. A small /dev/shm, as
        # containers have by default, would kill the process.
        "CCL_ATL_SHM": "1" if fits else "0",
        # The thread that asks does the work. Its own default is a thread that always spins, on a
        # core of its own, which then cannot compute.
        "CCL_WORKER_OFFLOAD": "0",
        # What it would find out by itself, with warnings.
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_LOG_LEVEL": "error",
    }


@contextmanager
def variables(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a block, but for those that the user has set.

    They are read when a group is made; child processes shall not inherit them.
    """
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        # oneCCL changes it too, past Python.
        if "FI_PROVIDER" in os.environ:
            os.putenv("FI_PROVIDER", os.environ["FI_PROVIDER"])
        else:
            os.unsetenv("FI_PROVIDER")


def remove_segments(ended: int | None = None, folder: Path = SHARED_MEMORY) -> None:
    """Delete shared memory of processes that were killed, which nobody else will do.

    Args:
        ended: A process that is to be taken for one that has ended.
        folder: Where the segments are.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        found = _SEGMENT.fullmatch(path.name)
        if found is None:
            continue
        pid = int(found[1])
        with suppress(FileNotFoundError, PermissionError):
            is_ours = path.stat().st_uid == os.getuid()
            if is_ours and (pid == ended or not Path(f"/proc/{pid}").exists()):
                path.unlink()


_SEGMENT = re.compile(r"(\d+):\d+:\d+")
_closing: set[int] = set()


def _close_at_the_end(extension: ModuleType) -> None:
    """Close all groups when this process ends, also one that was forked or spawned.

    Not by `atexit`, which processes of `multiprocessing` pass over.
    """
    pid = os.getpid()
    if pid in _closing:
        return
    _closing.add(pid)

    def close() -> None:
        extension.close_all(_END_MS)
        remove_segments(ended=pid)

    Finalize(None, close, exitpriority=0)
