"""A TCP relay that misbehaves on demand, between the proxy and an instance.

Each direction has its own toxics, looked at anew with every piece of bytes, so a test switches them
by assigning to a field while bytes flow. The listener can refuse, swallow or greet connections.

    async with FaultProxy(engine.address) as link:
        link.down.limit_bytes, link.down.then = 500, "reset"
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Self
from urllib.parse import urlsplit

from tests.support.harness import (
    let_out,
    spend,
    until,
)

Way = Literal["serve", "refuse", "swallow", "close", "reset", "hang", "greet"]
"""What becomes of a new connection. `refuse`: ECONNREFUSED; `swallow`: the SYN gets no answer;
`close`, `reset`: at once after accepting; `hang`: accepted and left alone; `greet`: `greeting`."""
Then = Literal["close", "reset", "hang", "half_close"]
_RST = struct.pack("ii", 1, 0)
_PIECE_BYTES = 65536
STALL_S = 600.0
"""Longer than any test lasts."""
_ASKED = re.compile(rb"(?:^|\r\n)([A-Z]+) (/\S*) HTTP/1\.1\r\n(.*?)\r\n\r\n", re.DOTALL)
_ID = re.compile(rb"x-request-id: *([^\r]*)", re.IGNORECASE)


@dataclass
class Toxics:
    """One direction's faults; the defaults are a wire that does nothing wrong. Seconds, bytes."""

    delay_s: float = 0.0
    """Before each piece."""
    slice_bytes: int = 0
    """Pieces are cut to this size; each is a segment of its own."""
    gap_s: float = 0.0
    """Between two slices: with `slice_bytes` 1 it is a drip."""
    limit_bytes: int | None = None
    """After so many bytes of a connection `then` happens."""
    then: Then = "close"
    stalls: bool = False
    """Nothing passes, and nothing is read: the sender feels it."""
    is_black_hole: bool = False
    """Everything is read, nothing is passed on."""
    duplicates: bool = False
    """Each piece comes twice."""
    change: Callable[[bytes], bytes] | None = None
    """Garbage, truncation: any change of a piece."""

    def heal(self) -> None:
        """Do nothing wrong from now on."""
        self.__init__()  # type: ignore[misc]


@dataclass(frozen=True)
class Asked:
    """A request that passed on its way to the instance. `at_s` is the loop's time."""

    at_s: float
    method: str
    path: str
    request_id: str


@dataclass(eq=False)
class Link:
    """One relayed connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    passed: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def end(self, *, resets: bool = False) -> None:
        """Close both sides; with RST where asked."""
        for writer in (self.client, self.server):
            if writer is None:
                continue
            if resets:
                reset(writer)
            else:
                writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST."""
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
    writer.transport.abort()


class FaultProxy:
    """The relay; `up` is towards the instance, `down` towards the proxy."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.up, self.down = Toxics(), Toxics()
        self.way: Way = "serve"
        self.greeting = b""
        self.links: set[Link] = set()
        self.asked: list[Asked] = []
        self.accepted = 0
        self.port = 0
        self._listening: asyncio.Server | None = None
        self._held: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._deafen()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        """URL of the misbehaving side."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def posts(self) -> list[Asked]:
        """What was asked beside probes."""
        return [asked for asked in self.asked if asked.method == "POST"]

    async def accept(self, way: Way) -> None:
        """From now on new connections are met in this way; those that are open are cut."""
        await self._deafen()
        self.cut()
        self.way = way
        if way == "refuse":
            self._hold(None)
        elif way == "swallow":
            self._fill(self._hold(0))
        else:
            await self._listen()

    def cut(self, *, resets: bool = False) -> None:
        """End every open connection."""
        for link in list(self.links):
            link.end(resets=resets)

    def heal(self) -> None:
        """Both directions do nothing wrong from now on."""
        self.up.heal()
        self.down.heal()

    async def _listen(self) -> None:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def _deafen(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
            await asyncio.sleep(0)
        while self._held:
            self._held.pop().close()

    def _hold(self, backlog: int | None) -> socket.socket:
        """Keep the port without serving it: unlistened it refuses, with a backlog it fills."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", self.port))
        if backlog is not None:
            held.listen(backlog)
        self._held.append(held)
        return held

    def _fill(self, held: socket.socket) -> None:
        """Take the backlog's only places, so that the next SYN is dropped."""
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(held.getsockname())
            self._held.append(filler)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        link = Link(writer)
        self.links.add(link)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._met(link, reader, writer)
        except OSError:
            link.end(resets=True)  # the instance is not there
        except asyncio.CancelledError:
            pass  # by `__aexit__`; asyncio's streams would log it
        finally:
            self._tasks.discard(task)
            self.links.discard(link)
            link.end()

    async def _met(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.way in ("close", "reset"):
            link.end(resets=self.way == "reset")
        elif self.way == "hang":
            await reader.read()
        elif self.way == "greet":
            writer.write(self.greeting)
            await writer.drain()
            await reader.read(_PIECE_BYTES)
        else:
            await self._relay(link, reader, writer)

    async def _relay(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        parts = urlsplit(self.target)
        there, back = await asyncio.open_connection(parts.hostname, parts.port)
        link.server = back
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(link, "up", reader, back))
            group.create_task(self._pump(link, "down", there, writer))

    async def _pump(
        self, link: Link, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass one direction on until either side closes."""
        toxics = self.up if name == "up" else self.down
        try:
            while data := await self._read(toxics, reader):
                if name == "up":
                    self._note(data)
                if toxics.is_black_hole:
                    continue
                if not await self._pass(toxics, link, name, data, writer):
                    return
        except (ConnectionError, RuntimeError):  # uvloop's word for a closed one
            link.end(resets=True)
            return
        with contextlib.suppress(OSError, RuntimeError):
            if name == "up" and not writer.is_closing():
                # The proxy closed: so does its connection to the instance, whole.
                link.end()
            elif writer.can_write_eof():
                writer.write_eof()
                link.end()

    async def _read(self, toxics: Toxics, reader: asyncio.StreamReader) -> bytes:
        """The next piece, once it may pass."""
        data = b"" if toxics.stalls else await reader.read(_PIECE_BYTES)
        if toxics.stalls:
            await until(lambda: not toxics.stalls or reader.at_eof(), limit_s=STALL_S)
            if toxics.stalls:
                return b""
        return data or await reader.read(_PIECE_BYTES)

    def _note(self, data: bytes) -> None:
        now_s = asyncio.get_running_loop().time()
        for method, path, lines in _ASKED.findall(data):
            found = _ID.search(lines)
            name = found[1].decode("latin-1") if found else ""
            self.asked.append(Asked(now_s, method.decode(), path.decode("latin-1"), name))

    async def _pass(
        self, toxics: Toxics, link: Link, name: str, data: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """Write a piece as the toxics have it; false when they ended the connection."""
        if toxics.delay_s:
            await spend(toxics.delay_s)  # the fault
        if toxics.change is not None:
            data = toxics.change(data)
        if toxics.duplicates:
            data += data
        for piece in _sliced(data, toxics.slice_bytes):
            room = len(piece)
            if toxics.limit_bytes is not None:
                room = max(0, toxics.limit_bytes - link.passed[name])
            writer.write(piece[:room])
            await writer.drain()
            link.passed[name] += min(room, len(piece))
            if room < len(piece):
                await _ended(toxics.then, link, writer)
                return False
            if toxics.gap_s:
                await spend(toxics.gap_s)  # the fault
        return True


def _sliced(data: bytes, size: int) -> Iterator[bytes]:
    size = size or max(1, len(data))
    return (data[at : at + size] for at in range(0, len(data), size))


async def _ended(then: Then, link: Link, writer: asyncio.StreamWriter) -> None:
    """What follows on the last byte that a toxic lets through."""
    if then == "hang":
        await asyncio.Event().wait()
    elif then == "half_close":
        writer.write_eof()
        await asyncio.Event().wait()
    else:
        # An RST throws away what the other side has not read: let it read first.
        await (let_out() if then == "reset" else asyncio.sleep(0))
        link.end(resets=then == "reset")
