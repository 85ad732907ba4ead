"""Processes that take turns: started, frozen while they wait, and never left behind.

Commands go to a worker's standard input and reports come from its standard output, one JSON line
each. A worker leads a session of its own, so signals reach its loader workers and ranks too.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import psutil

Message = dict[str, Any]

CAN_FREEZE = os.name == "posix"
_GOODBYE = 5.0  # seconds a worker gets to end by itself
_TAIL = 20  # lines of its output that an error shows


class VariantFailed(RuntimeError):  # noqa: N818  (it says what happened)
    """A variant could not be measured.

    Attributes:
        variant: Its name.
        phase: What it was doing.
        details: Its own traceback, or the last lines of its output.
    """

    def __init__(self, variant: str, phase: str, reason: str, details: str = "") -> None:
        self.variant, self.phase, self.reason, self.details = variant, phase, reason, details
        text = f"Variant {variant!r} failed while {phase}: {reason}"
        super().__init__(f"{text}\n\n{details.rstrip()}\n" if details else text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.variant, self.phase, self.reason, self.details)


class Worker:
    """One child process.

    Args:
        command: Program and arguments.
        name: What errors call it.
        env: Its whole environment.
        log: File for what it and its children print.
    """

    def __init__(
        self, command: Sequence[str], *, name: str, env: dict[str, str], log: Path
    ) -> None:
        self.name, self.log = name, log
        self.phase = "starting"
        self.can_freeze = CAN_FREEZE
        self._frozen = False
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        self._guardian = _guardian(self._process.pid)
        self._commands = cast("IO[bytes]", self._process.stdin)
        self._output = cast("IO[bytes]", self._process.stdout)
        self._reports: queue.Queue[Message] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, command: Message) -> None:
        """Give it a command; that it has died is left to `receive` to find out."""
        with suppress(BrokenPipeError):
            self._commands.write(json.dumps(command).encode() + b"\n")
            self._commands.flush()

    def receive(self, timeout: float) -> Message:
        """Return its next report.

        Raises:
            VariantFailed: It reported an error, died, or said nothing for ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            # The end of the pipe would not do: forked loader workers hold it open for seconds.
            ended = self._process.poll() is not None
            try:
                report = self._reports.get(timeout=0.1)
            except queue.Empty:
                if ended:
                    raise self._died() from None
                if time.monotonic() > deadline:
                    raise self._hangs(timeout) from None
                continue
            if report["event"] == "failed":
                raise VariantFailed(self.name, self.phase, report["reason"], report["traceback"])
            return report

    def ask(self, command: Message, *, timeout: float, phase: str) -> Message:
        """Give it a command and return the answer; it runs only meanwhile."""
        self.phase = phase
        with self.awake():
            self.send(command)
            return self.receive(timeout)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run for a block and freeze it, with all its children, afterwards."""
        self._thaw()
        try:
            yield
        finally:
            self.freeze()

    def freeze(self) -> None:
        """Stop it, with all its children, until it is next asked something."""
        if self.can_freeze and self._process.poll() is None:
            self._signal(signal.SIGSTOP)
            self._frozen = True

    def cpu_seconds(self, *, children: bool) -> float:
        """Return the CPU time it has used, with that of its living children if asked."""
        total = 0.0
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self._process.pid)
            for process in (leader, *(leader.children(recursive=True) if children else ())):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    total += sum(process.cpu_times()[:4])  # user, system, those of ended children
        return total

    def stop(self) -> None:
        """End it and everything it has started."""
        self._thaw()
        self.send({"do": "stop"})
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE if self.phase != "failed" else 0)
        self._kill()
        self._process.wait()
        self._reader.join(_GOODBYE)
        for pipe in (self._commands, self._output):
            with suppress(BrokenPipeError):
                pipe.close()
        if self._guardian is not None:
            self._guardian.kill()
            self._guardian.wait()
            if self._guardian.stdin is not None:
                self._guardian.stdin.close()

    def tail(self) -> str:
        """Return the last lines of what it printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL:])

    def _read(self) -> None:
        for line in self._output:
            with suppress(ValueError, TypeError):  # something in Python's start-up may have printed
                self._reports.put(json.loads(line) | {"received": time.monotonic()})

    def _thaw(self) -> None:
        if self._frozen:
            self._signal(signal.SIGCONT)
            self._frozen = False

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        if os.name == "posix":
            self._signal(signal.SIGKILL)
            return
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self._process.pid)
            for process in (*leader.children(recursive=True), leader):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def _died(self) -> VariantFailed:
        code = self._process.returncode
        reason = f"its process ended with exit status {code}."
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            reason = f"its process was killed by {name}."
            if name == "SIGKILL":
                reason += " Nobody here did that: the machine probably ran out of memory."
        self.phase, phase = "failed", self.phase
        return VariantFailed(self.name, phase, reason, self.tail())

    def _hangs(self, timeout: float) -> VariantFailed:
        if hasattr(signal, "SIGUSR1"):
            # The worker's faulthandler writes where each thread is to the log.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        self.phase, phase = "failed", self.phase
        return VariantFailed(self.name, phase, f"no answer for {timeout:.0f} seconds.", self.tail())


def _guardian(leader: int) -> subprocess.Popen[bytes] | None:
    """Start a process that kills the worker's group when this process dies, however it dies.

    Its standard input ends then, and only then. Death signals of the parent would not do: they
    reach neither spawned loader workers nor, on macOS, anything.
    """
    if os.name != "posix":
        return None
    script = 'read -r _; kill -s KILL -- "-$1"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", str(leader)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def cpus() -> list[int]:
    """Return the CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


def busy_seconds() -> float:
    """Return the time those CPUs have spent working, for anybody, since the machine started."""
    times = psutil.cpu_times(percpu=True)
    return sum(_busy(times[cpu]._asdict()) for cpu in cpus() if cpu < len(times))


def _busy(times: dict[str, float]) -> float:
    # Guest time is contained in user and nice time.
    idle = ("idle", "iowait", "guest", "guest_nice", "steal")
    return sum(seconds for name, seconds in times.items() if name not in idle)
