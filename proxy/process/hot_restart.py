"""Hot restart: on SIGUSR2 a new process takes over the listening sockets, then this one ends.

The new process has the same command line, so it runs the version and the configuration that are on
the disk by then. Both processes accept from the same sockets until the new one reports that it
serves; only then the old one stops accepting. No connection is refused, and none in the queue is
lost. If the new process does not come up, the old one logs that and carries on.

Sockets are handed down by systemd's protocol: descriptors 3, 4, ... (`LISTEN_FDS` is their number),
their names in `LISTEN_FDNAMES`, for process `LISTEN_PID` where that is set. The names here:

    admin                    a socket for the admin listener
    own-public, own-admin    a socket that a predecessor bound by its options; used if ours agree
    ready                    a pipe to a predecessor that waits for a report
    estate                   the predecessor's snapshot file
    any other                a socket for clients

An inherited socket is the same one in the kernel, so its queue of connections is kept.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, BinaryIO

from proxy.config.sources import ConfigError
from proxy.process import signals
from proxy.protocol.errors import DEFECTS
from proxy.telemetry.log import printable

FIRST_FD = 3
FDS, NAMES, PID = "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"
READY = "ready"
SNAPSHOT = "estate"
"""The snapshot's name is also the one that older versions use, as predecessor or successor."""
OWN = "own-"
TAKEN_OVER = b"ready\n"
"""Line that tells the predecessor to stop accepting; any other text is the reason of a failure."""
_MOST = 64
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass
class InheritedSockets:
    """The sockets that another process handed down; each is taken once."""

    sockets: list[tuple[str, socket.socket]] = field(default_factory=list)
    _pipe: int | None = None
    snapshot: BinaryIO | None = None

    @classmethod
    def read(cls, environ: MutableMapping[str, str]) -> InheritedSockets:
        """Take over the descriptors that the environment names, and remove the variables.

        They are for one process only. Raises ConfigError for anything but a listening TCP
        socket.
        """
        count, names, pid = (environ.pop(key, None) for key in (FDS, NAMES, PID))
        if count is None or (pid is not None and pid != str(os.getpid())):
            return cls()
        if not count.isdecimal() or len(count) > len(str(_MOST)) or int(count) > _MOST:
            raise ConfigError(f"{FDS}: a whole number, 0 to {_MOST}, not {count[:40]!r}")
        name_list = (names or "").split(":")
        inherited = cls()
        for i in range(int(count)):
            inherited._add(name_list[i] if i < len(name_list) else "", FIRST_FD + i)
        return inherited

    def _add(self, name: str, fd: int) -> None:
        if name == READY:
            os.set_inheritable(fd, False)  # noqa: FBT003 - has no keyword
            self._pipe = fd
            return
        if name == SNAPSHOT:
            os.set_inheritable(fd, False)  # noqa: FBT003 - has no keyword
            self.snapshot = open(fd, "rb")  # noqa: SIM115 - its reader closes it
            return
        try:
            sock = socket.socket(fileno=fd)
        except OSError as error:
            raise ConfigError(f"{FDS}: descriptor {fd} ({name}): {error.strerror}") from None
        is_tcp = sock.type == socket.SOCK_STREAM and sock.family in _FAMILIES
        if not is_tcp or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.close()
            raise ConfigError(f"{FDS}: descriptor {fd} ({name}) is not a listening TCP socket")
        sock.set_inheritable(False)
        self.sockets.append((name, sock))

    @property
    def has_predecessor(self) -> bool:
        """Whether another process serves until this one is ready."""
        return self._pipe is not None

    async def take(self, listener: str, host: str, port: int) -> tuple[str, list[socket.socket]]:
        """The sockets for `public` or `admin`, and the name under which they are handed on.

        If there is none, the caller must bind. Sockets that a predecessor bound elsewhere than at
        `host` and `port` are closed.
        """
        given = self._of(listener)
        if given:
            return listener, given
        own = self._of(OWN + listener)
        if own and not await _is_at(own, host, port):
            for sock in own:
                sock.close()
            own = []
        return OWN + listener, own

    def _of(self, listener: str) -> list[socket.socket]:
        taken = [(n, s) for n, s in self.sockets if _listener_of(n) == listener]
        self.sockets = [pair for pair in self.sockets if pair not in taken]
        return [sock for _, sock in taken]

    def drop(self) -> None:
        """Close the sockets that were not taken: the options have no listener for them."""
        for _, sock in self.sockets:
            sock.close()
        self.sockets.clear()

    def tell_ready(self) -> None:
        """Tell the predecessor, if there is one, to stop accepting."""
        self._tell(TAKEN_OVER)

    def tell_failure(self, why: str) -> bool:
        """Tell the predecessor to carry on and log `why`; False if there is no predecessor."""
        is_told = self.has_predecessor
        self._tell(why.encode(errors="backslashreplace") + b"\n")
        return is_told

    def _tell(self, words: bytes) -> None:
        if self._pipe is not None:
            with suppress(OSError):  # the predecessor has ended; this process serves anyway
                os.write(self._pipe, words)
            os.close(self._pipe)
            self._pipe = None


def _listener_of(name: str) -> str:
    return name if name in ("admin", OWN + "admin", OWN + "public") else "public"


async def _is_at(sockets: list[socket.socket], host: str, port: int) -> bool:
    """Whether the sockets have the addresses of `host` and `port`; port 0 matches any port."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    wanted = {at[:2] for *_, at in found}
    have = {sock.getsockname()[:2] for sock in sockets}
    return {(at[0], at[1] if port else 0) for at in have} == wanted


START_S = 60.0
"""A new process that has not reported after this time is stopped."""
STOP_S = 5.0
"""Time between SIGTERM and SIGKILL for a new process that is stopped."""
_LOOK_S = 0.02
_LINE_BYTES = 4096
_log = logging.getLogger(__name__)


class SuccessorError(Exception):
    """The new process did not come up; the text is the reason."""


class HotRestart:
    """Starts a successor on request; a process is replaced at most once."""

    def __init__(
        self,
        listeners: Callable[[], list[tuple[str, int]]],
        write_snapshot: Callable[[], Awaitable[BinaryIO]],
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`listeners`: names and descriptors of sockets; `write_snapshot`: makes the snapshot.

        `check` raises ConfigError if no process may take over with the options as they are now.
        """
        self._listeners = listeners
        self._check = check
        self._write_snapshot = write_snapshot
        self._asked = asyncio.Event()
        self._is_under_way = self._is_over = False
        self._successor: int | None = None
        self.is_done = asyncio.Event()

    @property
    def is_replacing(self) -> bool:
        """Whether another process takes over, or has: it does not see what is changed here now."""
        return self._is_under_way or self.is_done.is_set()

    def ask(self) -> None:
        """Start a hot restart; refused while one runs and where it cannot work."""
        if self._successor is not None:
            _log.warning("hot restart refused: process %d has taken over already", self._successor)
        elif self._is_under_way or self._asked.is_set():
            _log.warning("hot restart refused: one is under way")
        elif self._is_over:
            _log.warning("hot restart refused: this process is stopping")
        elif os.getpid() == 1:
            _log.error(
                "hot restart refused: this is process 1, and a container ends with its process 1; "
                "start an init in it, or replace the container"
            )
        else:
            self._asked.set()

    async def watch(
        self, on_successor: Callable[[int], None], on_failure: Callable[[], None]
    ) -> None:
        """Start a new process on each request, until one takes over; `on_successor` gets its id.

        `on_failure` is called in a thread when one did not come up and this process carries on.
        """
        try:
            while not self.is_done.is_set():
                await self._asked.wait()
                self._asked.clear()
                await self._try(on_successor, on_failure)
        finally:
            self._is_over = True

    async def _try(
        self, on_successor: Callable[[int], None], on_failure: Callable[[], None]
    ) -> None:
        self._is_under_way = True
        try:
            if self._check is not None:
                await self._check()
            with await self._write_snapshot() as file:
                self._successor = await _start([*self._listeners(), (SNAPSHOT, file.fileno())])
        except (SuccessorError, ConfigError, OSError, *DEFECTS) as error:
            await asyncio.to_thread(on_failure)
            # Before it is said: whoever reads it may ask again at once.
            self._is_under_way = False
            _log.error("hot restart failed, this process carries on: %s", error)
        else:
            on_successor(self._successor)
            self.is_done.set()
        finally:
            self._is_under_way = False


async def _start(listeners: Sequence[tuple[str, int]]) -> int:
    """Start a process and return its id when it serves; raises SuccessorError.

    If cancelled, the new process is stopped.
    """
    read_end, write_end = os.pipe()
    try:
        try:
            pid = spawn([*listeners, (READY, write_end)])
        except OSError as error:
            raise SuccessorError(f"{sys.executable}: {error.strerror}") from None
        finally:
            os.close(write_end)
        _log.info("hot restart: process %d starts", pid)
        try:
            line = await _reported(read_end)
        except asyncio.CancelledError:
            _signal(pid, signal.SIGTERM)
            raise
    finally:
        os.close(read_end)
    if line == TAKEN_OVER:
        _log.info("hot restart: process %d has taken over", pid)
        return pid
    status = await asyncio.to_thread(_stop, pid)
    why = printable(line.decode(errors="replace").strip()) or exit_text(status)
    raise SuccessorError(f"process {pid}: {why}")


def spawn(
    handed: Sequence[tuple[str, int]],
    words: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    **how: Any,
) -> int:
    """Run this command again with these descriptors from 3 on, and no others of this process.

    `words` come after the command's own, `variables` over those of this process; `how` is for
    `posix_spawn`. Signals that a start keeps are blocked from the first instruction on.
    """
    end = FIRST_FD + len(handed)
    environ = {key: value for key, value in os.environ.items() if key not in (FDS, NAMES, PID)}
    environ |= {FDS: str(len(handed)), NAMES: ":".join(name for name, _ in handed), **variables}
    # Copies get numbers above the targets, so that no descriptor is overwritten before it is
    # copied; all copies close on exec.
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, end) for _, fd in handed]
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, *sys.orig_argv[1:], *words],
            environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, FIRST_FD + i) for i, fd in enumerate(copies)],
            setsigmask=signals.KEPT,
            **how,
        )
    finally:
        for fd in copies:
            os.close(fd)


async def _reported(pipe: int) -> bytes:
    """The line that the new process writes; empty if it ends without one."""
    line, loop, readable = b"", asyncio.get_running_loop(), asyncio.Event()
    os.set_blocking(pipe, False)
    loop.add_reader(pipe, readable.set)
    try:
        async with asyncio.timeout(START_S):
            while not line.endswith(b"\n"):
                await readable.wait()
                readable.clear()
                with suppress(BlockingIOError):
                    piece = os.read(pipe, _LINE_BYTES)
                    if not piece:
                        break
                    line += piece
    except TimeoutError:
        return b"not ready in %d s" % START_S
    finally:
        loop.remove_reader(pipe)
    return line


def _stop(pid: int) -> int:
    """End a process and return its exit status. This blocks, so call it in a thread."""
    _signal(pid, signal.SIGTERM)
    end_s = time.monotonic() + STOP_S
    while time.monotonic() < end_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_LOOK_S)
    _signal(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def exit_text(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
