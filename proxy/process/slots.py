"""Slots of workers: sockets that each keeps, what its process reports, and flags of its own."""

from __future__ import annotations

import ctypes
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from proxy.config.load import load
from proxy.config.options import WORKER, Settings
from proxy.config.sources import ConfigError, flag_of
from proxy.process.hot_restart import InheritedSockets, spawn
from proxy.process.memory import cgroup_limit

DIVIDED = ("max_connections", "max_memory_bytes", "max_queue", "max_queue_bytes")
"""Limits of the machine: the workers have them together."""
BACKLOG = 4096
"""As the listeners of a worker have it, which it sets again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Between the end of a worker and its next start."""
_HEARD_BYTES = 4096
_LONGEST_FOLDER = 100
"""The kernel takes names of sockets up to 107 bytes."""
_SUBREAPER = 36
_SENDER = struct.Struct("3i")
"""Process, user and group of who sent a datagram, by the kernel."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Worker:
    """One slot: its sockets stay, its main process changes."""

    number: int
    words: list[str]
    handed: list[tuple[str, int]]
    hears: socket.socket
    pid: int | None = None
    """Its main process, while that lives."""
    serves: bool = False
    due_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S

    def told(self) -> Iterator[tuple[str, str]]:
        """Names and values that its main process reports; what others send is dropped."""
        with suppress(BlockingIOError):
            while True:
                room = socket.CMSG_SPACE(_SENDER.size)
                said, notes, *_ = self.hears.recvmsg(_HEARD_BYTES, room)
                if self.pid in [_SENDER.unpack(note)[0] for *_, note in notes]:
                    for line in said.decode(errors="replace").splitlines():
                        name, _, value = line.partition("=")
                        yield name, value


def flags(settings: Settings, number: int) -> list[str]:
    """What a worker's command line has behind the launcher's, where it wins."""
    own: dict[str, object] = {"workers": 1, "pid_file": "none"}
    if settings.admin_port:
        own["admin_port"] = settings.admin_port + number
    for name in ("request_log", "access_log_file"):
        if (path := getattr(settings, name)) is not None:
            own[name] = str(path).replace(WORKER, str(number))
    memory = settings.max_memory_bytes or cgroup_limit()
    limits = {name: getattr(settings, name) for name in DIVIDED} | {"max_memory_bytes": memory}
    for name, limit in limits.items():
        if limit is not None:
            own[name] = -(-limit // settings.workers)
    return [f"{flag_of(name)}={value}" for name, value in own.items()]


def check(settings: Settings, given: Sequence[str], inherited: InheritedSockets) -> None:
    """Raise ConfigError where no workers can be, or a share of the options is out of range."""
    if sys.platform != "linux":
        raise ConfigError("workers: more than 1 need Linux")
    if inherited.sockets:
        raise ConfigError("workers: more than 1, and sockets are inherited (LISTEN_FDS)")
    try:
        load([*given, *flags(settings, settings.workers - 1)], os.environ)
    except ConfigError as error:
        raise ConfigError(f"the last of {settings.workers} workers: {error}") from error


def adopt() -> None:
    """Become the parent of what workers leave behind: a hot restart's new process."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


class Processes:
    """The workers' processes: each is watched from its start, or its report, to its end."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.alive: dict[int, int] = {}
        """Ids with descriptors, which say when one ends even if it is no child yet."""
        self._statuses: dict[int, int] = {}

    def start(self, worker: Worker, on_end: Callable[[int], None]) -> int | None:
        """Start a worker's process; its id, or None where the kernel has no room for one now."""
        name = worker.hears.getsockname()
        told = {"NOTIFY_SOCKET": name if isinstance(name, str) else "@" + name[1:].decode()}
        # In a group of its own: Ctrl-C reaches the launcher, which passes it on once.
        try:
            pid = spawn(worker.handed, worker.words, told, setpgroup=0)
        except OSError as error:
            _log.error("worker %d does not start: %s", worker.number, error.strerror)
            worker.due_s = time.monotonic() + LONGEST_PAUSE_S
            return None
        return self.watch(pid, on_end)

    def watch(self, pid: int, on_end: Callable[[int], None]) -> int | None:
        """Have `on_end` called with the id when it has ended; None if it is gone by now."""
        try:
            self.alive[pid] = fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        self._selector.register(fd, selectors.EVENT_READ, lambda: on_end(pid))
        return pid

    def reap(self) -> None:
        """Collect what has ended, also orphans that were never watched."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in self.alive:
                    self._statuses[found[0]] = os.waitstatus_to_exitcode(found[1])

    def end_orphans(self) -> None:
        """End what a worker has left behind: its successor, if it had not named that yet."""
        for pid in _children():
            if pid not in self.alive and self.watch(pid, self._forgotten) is not None:
                self.send(signal.SIGTERM, [pid])

    def _forgotten(self, pid: int) -> None:
        self.forget(pid)

    def forget(self, pid: int) -> int:
        """Watch one no longer; its exit status, 0 if its parent has taken that."""
        fd = self.alive.pop(pid)
        self._selector.unregister(fd)
        os.close(fd)
        return self._statuses.pop(pid, 0)

    def send(self, number: signal.Signals, pids: Iterable[int]) -> None:
        """A signal to these, if they have not ended."""
        for pid in pids:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.alive[pid], number)


def _children() -> list[int]:
    """The ids of this process's children; none where the kernel does not tell them."""
    try:
        return [
            int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        ]
    except OSError:
        return []


@contextmanager
def opened(settings: Settings) -> Iterator[list[Worker]]:
    """The workers with their sockets, which are closed at the end; raises OSError."""
    with ExitStack() as held:
        workers = []
        folder = _folder(held)
        public = _bound(held, settings.host, settings.port, settings.workers)
        for number, sockets in enumerate(public):
            handed = [("public", sock.fileno()) for sock in sockets]
            if settings.admin_port is not None:
                port = settings.admin_port and settings.admin_port + number
                (admin,) = _bound(held, settings.admin_host, port, 1)
                handed += [("admin", sock.fileno()) for sock in admin]
            hears = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            hears.settimeout(0.0)
            hears.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            hears.bind(f"{folder}/{number}" if folder else "")
            workers.append(Worker(number, flags(settings, number), handed, hears))
        yield workers


def _folder(held: ExitStack) -> str:
    """A folder of this user's alone, removed at the end; none where there is no room for one.

    Without it the kernel chooses a name, to which any user of the machine may send.
    """
    try:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="cache-proxy-"))
    except OSError:
        return ""
    return folder if len(os.fsencode(folder)) < _LONGEST_FOLDER else ""


def _bound(held: ExitStack, host: str, port: int, count: int) -> list[list[socket.socket]]:
    """`count` times the sockets of a host and port, which share the connections that come."""
    slots: list[list[socket.socket]] = [[] for _ in range(count)]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, at in dict.fromkeys((family, at) for family, *_, at in found):
            # One that is not shared finds who has the port already, also another launcher.
            with socket.create_server((at[0], port, *at[2:]), family=family) as first:
                port = first.getsockname()[1]
            for sockets in slots:
                shared = socket.create_server(
                    (at[0], port, *at[2:]), family=family, backlog=BACKLOG, reuse_port=True
                )
                sockets.append(held.enter_context(shared))
    except OSError as error:
        why = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise OSError(error.errno, why) from error
    return slots
