"""Processes that the bench starts: pinned to a CPU, asked for their memory, stopped by pid."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.measuring.build import BenchError

STOP_S = 3.0
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


@dataclass(slots=True)
class Child:
    """One started process."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    @property
    def pids(self) -> list[int]:
        """Its own pid, and those of everything it started."""
        return descendants(self.process.pid)

    def tail(self, chars: int = 1500) -> str:
        """The end of what it said."""
        return self.output.read_text(errors="replace")[-chars:] if self.output else ""

    def stop(self) -> None:
        """SIGTERM to it and its children, then SIGKILL to those that do not listen."""
        pids = self.pids
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline_s = time.monotonic() + STOP_S
            while time.monotonic() < deadline_s:
                pids = [pid for pid in pids if is_running(pid)]
                # Its own end must also be collected: between two looks it can have become a zombie.
                if self.process.poll() is not None and not pids:
                    return
                time.sleep(0.02)


@dataclass(slots=True)
class Children:
    """Everything that was started; leaving the block stops it, the last one first."""

    stack: ExitStack

    def start(
        self,
        name: str,
        command: Sequence[str],
        cpu: int,
        work: Path,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a command in `work`, its output in `work`/log."""
        output = work / "log"
        with output.open("wb") as sink, pinned(cpu):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=work,
                env=env,
                process_group=0,  # Ctrl-C reaches the bench, which stops them in order
            )
        child = Child(name, process, output)
        self.stack.callback(child.stop)
        return child


@contextmanager
def children() -> Iterator[Children]:
    """A block at whose end every process that it started is stopped."""
    with ExitStack() as stack:
        yield Children(stack)


def is_running(pid: int) -> bool:
    """Whether the process is there and has not ended; one that nobody waited for has."""
    status = _status(pid)
    return status is not None and status[0] not in "ZX"


def _status(pid: int) -> list[str] | None:
    """State, parent and so on, as proc(5) has them behind the name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


def descendants(root: int) -> list[int]:
    """A process and everything below it."""
    children_of: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (status := _status(int(entry.name))):
            children_of.setdefault(int(status[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += children_of.get(found[-1], [])
    return found


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
