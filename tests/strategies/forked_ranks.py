"""Ranks that are forked from one process, which has imported everything once."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable


def start(function: Callable[..., None], ranks: int, *arguments: object) -> list:
    """Fork processes that call a function, each with the environment of a rank; return them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = []
    for rank in range(ranks):
        environ = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": ranks}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = context.Process(target=_call, args=(environ, function, arguments))
        process.start()
        processes.append(process)
    return processes


def on_ranks(function: Callable[..., None], ranks: int, *arguments: object) -> None:
    """Call a function on all ranks, and fail if one fails."""
    processes = start(function, ranks, *arguments)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks


def _call(environ: dict[str, object], function: Callable[..., None], arguments: tuple) -> None:
    os.environ |= {name: str(value) for name, value in environ.items()}
    function(*arguments)
