"""Processes that the bench starts: pinned to a CPU, asked for their memory, stopped by pid."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.measuring.build import BenchError

STOP_S, END_S = 3.0, 60.0
"""How long each signal has to stop a process, and one that was told to end by itself."""
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Cpus:
    """Where what is measured runs, and where the rest does."""

    peer: int
    load: int

    @classmethod
    def of_this_machine(cls) -> Cpus:
        """The first and the last CPU that this process may use."""
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2:
            raise BenchError("two CPUs are needed: one for the proxy, one for the load")
        return cls(usable[0], usable[-1])


@contextmanager
def pinned(cpu: int) -> Iterator[None]:
    """What is started in this block runs on that CPU, from its first instruction on."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Child(subprocess.Popen[bytes]):
    r"""A command as a process that says what it says to a file; its block's end stops it by pid.

        with Child([sys.executable, "-m", "proxy.cli", *options]) as proxy:
            url = until_true(lambda: proxy.found(r"listening on (\S+)"))[1]

    Nobody need read, so it never waits for a reader. `output`: the file's name, if it needs one.
    `more`: as of `Popen`, for another stdin, or a stream apart.
    """

    def __init__(self, args: Sequence[str], output: Path | None = None, **more: Any) -> None:
        made = tempfile.TemporaryFile() if output is None else output.open("w+b")  # noqa: SIM115
        self._output = made  # closed at the block's end
        self._log = ""
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": made}
        super().__init__(args, **(given | {"stderr": subprocess.STDOUT} | more))

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.poll() is None

    @property
    def pids(self) -> list[int]:
        """Its own pid, and those of everything it started."""
        with suppress(psutil.NoSuchProcess):
            return [self.pid, *(p.pid for p in psutil.Process(self.pid).children(recursive=True))]
        return [self.pid]

    @property
    def log(self) -> str:
        """All that it said so far."""
        if not self._output.closed:
            file = self._output.fileno()
            # `read` would move the place at which the process writes.
            self._log = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
        return self._log

    def tail(self, chars: int = 1500) -> str:
        """The end of that."""
        return self.log[-chars:]

    def found(self, pattern: str) -> re.Match[str] | None:
        """Where it said this; None as yet. EOFError when it has ended and said no such thing."""
        status = self.poll()
        found = re.search(pattern, self.log)
        if found is None and status is not None:
            raise EOFError(f"{self.args!r} ended with {status} before {pattern}:\n{self.log}")
        return found

    async def ended(self) -> int:
        """Its exit status, once it has one; the loop runs on."""
        return await asyncio.to_thread(self.wait, END_S)

    def stop(self) -> None:
        """SIGTERM to it and its children, then SIGKILL to those that do not listen."""
        pids = self.pids if self.is_alive else []
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline_s = time.monotonic() + STOP_S
            while time.monotonic() < deadline_s:
                pids = [pid for pid in pids if is_running(pid)]
                # Its own end must also be collected: between two looks it can have become a zombie.
                if not self.is_alive and not pids:
                    return
                time.sleep(0.02)

    def __exit__(self, *exc: Any) -> None:
        """Stop it; what it said can be read on."""
        self.stop()
        super().__exit__(*exc)
        with self._output:
            self._log = self.log


@dataclass(slots=True)
class Children:
    """Everything that was started; leaving the block stops it, the last one first."""

    stack: ExitStack

    def start(
        self, command: Sequence[str], cpu: int, work: Path, env: Mapping[str, str] | None = None
    ) -> Child:
        """Start a command in `work`, its output in `work`/log."""
        with pinned(cpu):
            # In a group of its own: Ctrl-C reaches the bench, which stops them in order.
            child = Child(command, work / "log", cwd=work, env=env, process_group=0)
        return self.stack.enter_context(child)


@contextmanager
def children() -> Iterator[Children]:
    """A block at whose end every process that it started is stopped."""
    with ExitStack() as stack:
        yield Children(stack)


def is_running(pid: int) -> bool:
    """Whether the process is there and has not ended; one that nobody waited for has."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def pss_bytes(pids: Sequence[int]) -> int:
    """Memory of these processes; what they share with others counts in part."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; who takes one first is checked before anything is sent."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def get(port: int, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Status and body of a GET on this machine; OSError when there is no answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer: {error!r}") from error
    finally:
        connection.close()
