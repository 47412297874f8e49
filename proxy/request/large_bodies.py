"""Large bodies, parsed in their own process, so that no client's body delays the others.

The process (`process/body_worker.py`) is started for the first large body and stays. It examines
one body at a time, up to half a second each. A body whose client has left is not examined; one
that is being examined is finished, and nobody hears of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

from proxy.core.admission.turns import Turns
from proxy.net.timeouts import Limit
from proxy.protocol.body import Unfit
from proxy.protocol.errors import DEFECTS, NoRoomError, ProxyError, StoppingError
from proxy.protocol.examined import LENGTHS, Examined, Task, packed_task, unpacked
from proxy.protocol.prompt.facts import SEED_BYTES, hash_seed
from proxy.request.content_coding import Unpacking
from proxy.state.detached import DetachedTasks
from proxy.state.uploads import Uploads

EXAMINE_S = 30.0
"""Longest time for one body, which takes half a second of CPU time at most. The process, which runs
when nobody else does, is then replaced.
"""
STEP_BYTES = 1 << 18
"""Given to the socket in one turn of the event loop."""
_PACKAGES = Path(__file__).parents[2]
_log = logging.getLogger(__name__)


class _Worker:
    """One running process and the socket to it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> _Worker:
        """Raises OSError where no process or socket can be had."""
        # In a thread: until the new program has begun, the caller stands still.
        process, ours = await asyncio.to_thread(_spawn)
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    async def ask(self, task: Task) -> Examined | Unfit:
        """Raises EOFError or OSError where the process has ended."""
        head = packed_task(task)
        self._writer.writelines(
            (
                len(head).to_bytes(LENGTHS, "big"),
                head,
                len(task.raw).to_bytes(LENGTHS, "big"),
            )
        )
        body = memoryview(task.raw)
        for at in range(0, len(body), STEP_BYTES):
            self._writer.write(body[at : at + STEP_BYTES])
            await self._writer.drain()
        size = int.from_bytes(await self._reader.readexactly(LENGTHS), "big")
        return unpacked(await self._reader.readexactly(size))

    async def end(self) -> None:
        """Close the socket and end the process, whatever it does."""
        self._writer.transport.abort()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the same Python with the same packages; it inherits one socket.

    It ends when the socket is closed, as it also is where nobody takes it.
    """
    path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "proxy.process.body_worker", str(descriptor)],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )
        except OSError:
            ours.close()
            raise
    ours.sendall(hash_seed().to_bytes(SEED_BYTES, "big"))
    return process, ours


class _Job:
    """A body that waits, and the result for its request."""

    __slots__ = ("found", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.found: asyncio.Future[Examined | Unfit] = asyncio.get_running_loop().create_future()


class LargeBodies:
    """The bodies that wait for the process, and the process."""

    def __init__(self, detached: DetachedTasks) -> None:
        self._detached = detached
        self._jobs: Turns[_Job] = Turns()
        self._worker: _Worker | None = None
        self._is_serving = False
        self.unpacking = Unpacking()
        self.uploads = Uploads()
        """All bodies that are not admitted yet, those that wait here among them."""

    async def examine(self, task: Task, owner: str) -> Examined | Unfit:
        """Examine one body when it is its owner's turn; raises ProxyError.

        The caller has a place for it among `uploads`, which bounds what waits here.
        """
        job = _Job(task)
        self._jobs.add(owner, job)
        try:
            if not self._is_serving:
                if self._detached.spawn(self._serve(), is_waited_for=True) is None:
                    raise StoppingError("the proxy is stopping")
                self._is_serving = True
            return await job.found
        finally:
            self._jobs.remove(owner, job)  # where its client has left before its turn
            if not job.found.done():
                job.found.cancel()
            del job  # it keeps the error, which keeps this frame: a cycle with the body in it

    async def close(self) -> None:
        """End the process, if there is one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.end()

    async def _serve(self) -> None:
        """Examine bodies until none waits."""
        try:
            while self._jobs:
                job = self._jobs.next()
                if job.found.done():
                    continue
                try:
                    found = await self._ask(job.task)
                except ProxyError as error:
                    if not job.found.done():
                        job.found.set_exception(error)
                else:
                    if not job.found.done():
                        job.found.set_result(found)
        finally:
            self._is_serving = False

    async def _ask(self, task: Task) -> Examined | Unfit:
        """Ask the process, or a new one if it has ended since the last body."""
        for is_last in (False, True):
            try:
                with Limit(EXAMINE_S):
                    if self._worker is None:
                        self._worker = await _Worker.start()
                    return await self._worker.ask(task)
            except TimeoutError as error:
                await self.close()
                # Not the body's fault, which takes half a second of CPU time whatever is in it.
                late = f"the body was not parsed in {EXAMINE_S:g} s"
                _log.warning("%s: the process for large bodies is replaced", late)
                raise NoRoomError(late) from error
            except (OSError, EOFError, RuntimeError, MemoryError) as error:
                # RuntimeError: no thread can be started.
                _log.warning("the process that parses large bodies has ended: %s", error)
                await self.close()
                if is_last:
                    raise NoRoomError("the body could not be parsed") from error
            except asyncio.CancelledError:
                await self.close()
                raise
            except DEFECTS as error:
                _log.error("a large body could not be parsed", exc_info=error)
                await self.close()
                raise NoRoomError("the body could not be parsed") from error
        raise AssertionError("not reached")
