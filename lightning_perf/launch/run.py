"""Starts the processes of a plan."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from lightning_perf.launch.plan import Plan, Process

NOT_EXECUTABLE = 126  # as shells say it
NOT_FOUND = 127
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if os.name == "posix" else ()
_PATIENCE = 30.0  # seconds that the others have to end before they are killed


class CannotStartError(RuntimeError):
    """The program cannot be started; `status` is the exit status that shells give."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def require_program(command: Sequence[str]) -> str:
    """Return the path of the program, before anything that would not find it hides the reason.

    Raises:
        CannotStartError: There is no such program, or it may not be executed.
    """
    program = command[0]
    path = shutil.which(program)
    if path is not None:
        return path
    is_option = program.startswith("-")
    hint = ""
    if is_option or program.endswith(".py"):
        hint = f" Put the interpreter in front: python {shlex.join(command)}"
    if os.path.exists(program) and "/" in program:  # without a slash it is looked for in PATH
        raise CannotStartError(f"{program} may not be executed.{hint}", NOT_EXECUTABLE)
    what = f"{program!r} is an option, not a program." if is_option else f"No program {program!r}."
    raise CannotStartError(what + hint, NOT_FOUND)


def as_shell(plan: Plan) -> str:
    """Return a plan as lines for a shell, which start the same processes."""
    lines = []
    if plan.open_files is not None:
        lines.append(f"ulimit -S -n {plan.open_files}")
    several = len(plan.processes) > 1
    for process in plan.processes:
        if process.affinity:
            lines.append(f"# bound to CPUs {','.join(map(str, process.affinity))} by the launcher")
        words = [f"{name}={shlex.quote(value)}" for name, value in process.variables.items()]
        line = " ".join([*words, shlex.join(process.command)])
        lines.append(f"{line} &" if several else line)
    if several:
        lines.append("wait")
    return "\n".join(lines) + "\n"


def start(plan: Plan) -> int:
    """Start the processes of a plan.

    One process replaces this one, so that its signals and its exit status are nobody's business.
    Several are watched: the first that fails ends the others.

    Returns:
        The exit status, 128 and the number of the signal where a signal has ended a process.
    """
    if plan.open_files is not None:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (plan.open_files, hard))
    if len(plan.processes) == 1:
        (process,) = plan.processes
        _bind(process)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvpe(process.command[0], process.command, _environ(process))
    return _Instances(plan.processes).run()


def _environ(process: Process) -> Mapping[str, str]:
    return {**os.environ, **process.variables}


def _bind(process: Process) -> None:
    if process.affinity:
        os.sched_setaffinity(0, process.affinity)


class _Instances:
    """Several processes, each line of their output marked with its instance."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        self._running: list[subprocess.Popen[bytes]] = []
        self._signalled: int | None = None  # the last signal that came
        self._reached: set[int] = set()  # processes that it was sent to
        self._lock = threading.Lock()

    def run(self) -> int:
        readers: list[threading.Thread] = []
        with self._forwarding():
            try:
                for index, process in enumerate(self._processes):
                    child = self._start(process)
                    self._running.append(child)
                    readers += self._read(child, index)
                    if self._signalled is not None:  # it came while this one was being started
                        self._forward(self._signalled)
                        break
                return self._wait()
            finally:
                self._end_all()
                for reader in readers:
                    reader.join(timeout=5)

    def _start(self, process: Process) -> subprocess.Popen[bytes]:
        before = os.sched_getaffinity(0)
        _bind(process)  # a child inherits it; a hook between fork and exec is not safe
        try:
            return subprocess.Popen(
                process.command,
                env={"PYTHONUNBUFFERED": "1", **_environ(process)},  # lines as they come
                stdin=subprocess.DEVNULL,  # several cannot read one terminal
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A group of its own, so that Ctrl-C reaches it once, through us, with its children.
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, before)

    def _read(self, child: subprocess.Popen[bytes], index: int) -> list[threading.Thread]:
        """Copy what a process writes, until its end or that of whoever has inherited the pipe."""
        pipes = (child.stdout, sys.stdout.buffer), (child.stderr, sys.stderr.buffer)
        mark = f"[{index}] ".encode()
        threads = [
            threading.Thread(target=self._copy, args=(pipe, out, mark), daemon=True)
            for pipe, out in pipes
        ]
        for thread in threads:
            thread.start()
        return threads

    def _copy(self, pipe: IO[bytes], out: IO[bytes], mark: bytes) -> None:
        with pipe:
            for line in pipe:
                with self._lock, contextlib.suppress(BrokenPipeError):
                    out.write(mark + line)
                    out.flush()

    def _wait(self) -> int:
        """Wait until all have ended well or one has not; return the status of that one, or 0.

        After a signal all are ending, and may take the time they need.
        """
        status = 0
        left = {child.pid: child for child in self._running}
        while left:
            pid, wait_status = os.waitpid(-1, 0)
            child = left.pop(pid, None)
            if child is None:
                continue
            code = os.waitstatus_to_exitcode(wait_status)
            child.returncode = code  # it is reaped, so Popen must not wait for it
            if code and not status:
                status = code if code > 0 else 128 - code
            if code and self._signalled is None:
                index = self._running.index(child)
                others = len(left)
                ending = f"; the other {others} are ended" if others else ""
                print(
                    f"lightning-perf: instance {index} {_told(code)}{ending}.",
                    file=sys.stderr,
                )
                break
        return status

    def _end_all(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = [child for child in self._running if child.returncode is None]
            for child in left:
                self._signal(child, number)
            deadline = time.monotonic() + _PATIENCE
            for child in left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=max(0.0, deadline - time.monotonic()))

    def _forward(self, number: int) -> None:
        for child in self._running:
            if child.returncode is None and child.pid not in self._reached:
                self._reached.add(child.pid)
                self._signal(child, number)

    def _signal(self, child: subprocess.Popen[bytes], number: int) -> None:
        # To its group: a shell script, say, would keep it to itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(number: int, _: object) -> None:
            self._signalled = number
            self._reached.clear()
            self._forward(number)

        # One that is ignored, as under nohup, stays so.
        heeded = [n for n in _FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, forward) for number in heeded}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _told(code: int) -> str:
    if code > 0:
        return f"ended with status {code}"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else str(-code)
    return f"was ended by {name}"
