"""Hot restart: on SIGUSR2 a new process takes over the listening sockets, then this one leaves.

The new one has the same command line, so it is the version and the configuration that are on the
disk by then. Both accept from the same sockets until it says that it serves; only then this one
stops to accept. No connection is refused, none that is queued is lost. A new process that does not
come up changes nothing here but a line in the log.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import BinaryIO

from proxy.heritage import ESTATE, FDS, FIRST_FD, NAMES, PID, READY, TAKEN_OVER
from proxy.telemetry.log import printable

START_S = 60.0
"""A new process that has not said anything by then is stopped."""
STOP_S = 5.0
"""One that is stopped has this long to go by itself."""
_LOOK_S = 0.02
_LINE_BYTES = 4096
_log = logging.getLogger(__name__)


class HeirError(Exception):
    """The new process did not come up; the text says why."""


class Succession:
    """One per process; it is replaced once."""

    def __init__(
        self,
        listeners: Callable[[], list[tuple[str, int]]],
        estate: Callable[[], Awaitable[BinaryIO]],
    ) -> None:
        """`listeners`: name and descriptor of what is handed down, see `heritage`; `estate` too."""
        self._listeners = listeners
        self._estate = estate
        self._asked = asyncio.Event()
        self._is_under_way = self._is_over = False
        self._heir: int | None = None
        self.is_done = asyncio.Event()

    def ask(self) -> None:
        """SIGUSR2. Refused while one is under way, and where it cannot work."""
        if self._heir is not None:
            _log.warning("hot restart refused: process %d has taken over already", self._heir)
        elif self._is_under_way or self._asked.is_set():
            _log.warning("hot restart refused: one is under way")
        elif self._is_over:
            _log.warning("hot restart refused: this process is stopping")
        elif os.getpid() == 1:
            _log.error(
                "hot restart refused: a container ends with its process 1, which this is; "
                "start an init in it, or replace the container"
            )
        else:
            self._asked.set()

    async def watch(self, on_heir: Callable[[int], None]) -> None:
        """Start a new process whenever asked to, until one has taken over; `on_heir` has its id."""
        try:
            while not self.is_done.is_set():
                await self._asked.wait()
                self._asked.clear()
                await self._try(on_heir)
        finally:
            self._is_over = True

    async def _try(self, on_heir: Callable[[int], None]) -> None:
        self._is_under_way = True
        try:
            with await self._estate() as file:
                self._heir = await _start([*self._listeners(), (ESTATE, file.fileno())])
        except (HeirError, OSError) as error:
            _log.error("hot restart failed, this process carries on: %s", error)
        else:
            on_heir(self._heir)
            self.is_done.set()
        finally:
            self._is_under_way = False


async def _start(listeners: Sequence[tuple[str, int]]) -> int:
    """A new process that serves, its id; raises HeirError. Cancelled: it is stopped."""
    hears, tells = os.pipe()
    try:
        try:
            pid = _spawn([*listeners, (READY, tells)])
        except OSError as error:
            raise HeirError(f"{sys.executable}: {error.strerror}") from None
        finally:
            os.close(tells)
        _log.info("hot restart: process %d starts", pid)
        try:
            said = await _hear(hears)
        except asyncio.CancelledError:
            _signal(pid, signal.SIGTERM)
            raise
    finally:
        os.close(hears)
    if said == TAKEN_OVER:
        _log.info("hot restart: process %d has taken over", pid)
        return pid
    status = await asyncio.to_thread(_stop, pid)
    why = printable(said.decode(errors="replace").strip()) or _unsaid(status)
    raise HeirError(f"process {pid}: {why}")


def _spawn(handed: Sequence[tuple[str, int]]) -> int:
    """This command again, with these descriptors, and no other of ours, from the third on."""
    end = FIRST_FD + len(handed)
    environ = {key: value for key, value in os.environ.items() if key not in (FDS, NAMES, PID)}
    environ |= {FDS: str(len(handed)), NAMES: ":".join(name for name, _ in handed)}
    # Copies above the targets: none is overwritten before it is copied, all close on exec.
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, end) for _, fd in handed]
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, *sys.orig_argv[1:]],
            environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, FIRST_FD + i) for i, fd in enumerate(copies)],
        )
    finally:
        for fd in copies:
            os.close(fd)


async def _hear(pipe: int) -> bytes:
    """The line that the new process says; nothing when it ends without one."""
    said, loop, readable = b"", asyncio.get_running_loop(), asyncio.Event()
    os.set_blocking(pipe, False)
    loop.add_reader(pipe, readable.set)
    try:
        async with asyncio.timeout(START_S):
            while not said.endswith(b"\n"):
                await readable.wait()
                readable.clear()
                with suppress(BlockingIOError):
                    piece = os.read(pipe, _LINE_BYTES)
                    if not piece:
                        break
                    said += piece
    except TimeoutError:
        return b"not ready in %d s" % START_S
    finally:
        loop.remove_reader(pipe)
    return said


def _stop(pid: int) -> int:
    """End a process that is of no use; its exit status. Waits, so not for the event loop."""
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


def _unsaid(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
