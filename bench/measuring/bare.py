"""Floors: what a proxy in Python costs that does nothing but pass on. `bare MODE PORT URL,URL,..`.

`aiohttp`: aiohttp takes the request, a bare protocol talks to the engine, its bytes go to the
client as they come. `protocol`: without aiohttp, each message cut out with `bytes.find`. Neither
decides, counts, limits, watches or logs anything, nor stands a client or an engine that errs.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import cast
from urllib.parse import urlsplit

import uvloop
from aiohttp import web

_END = b"0\r\n\r\n"


def length_of(head: bytes) -> int:
    """Bytes of the body that follows this head; -1: it is chunked."""
    at = head.lower().find(b"\r\ncontent-length:")
    return -1 if at < 0 else int(head[at + 17 : head.find(b"\r\n", at + 17)])


class Engine(asyncio.Protocol):
    """A connection to an engine: one request at a time, its answer passed on as it comes."""

    def __init__(self, idle: list[Engine]) -> None:
        self._idle = idle
        self._left = 0
        self._began = False
        self.client: asyncio.WriteTransport
        self.over: asyncio.Future[None] | None = None
        self.transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    def ask(self, request: list[bytes], client: asyncio.WriteTransport) -> None:
        """Send this; the answer goes to that client."""
        self.client, self._began = client, False
        self.transport.writelines(request)

    def data_received(self, data: bytes) -> None:
        if self.client.is_closing():
            # Else the engine would stream on to nobody, beside the next measurement.
            self.transport.abort()
            return
        self.client.write(data)
        if not self._began:
            self._began = True
            head = data.find(b"\r\n\r\n") + 4
            self._left = length_of(data[:head])
            if self._left >= 0:
                self._left += head
        if self._left > 0:
            self._left -= len(data)
        if self._left == 0 or (self._left < 0 and data.endswith(_END)):
            self._idle.append(self)
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        self._end()

    def _end(self) -> None:
        if self.over is not None and not self.over.done():
            self.over.set_result(None)


class Engines:
    """All of them, in turn, each with its idle connections."""

    def __init__(self, urls: list[str]) -> None:
        parts = [urlsplit(url) for url in urls]
        self._all = [(str(p.hostname), int(p.port or 80), list[Engine]()) for p in parts]
        self._turns: Iterator[int] = itertools.cycle(range(len(self._all)))

    def idle(self) -> Engine | int:
        """A connection to the next one; its number where there is none."""
        at = next(self._turns)
        idle = self._all[at][2]
        return idle.pop() if idle else at

    async def connect(self, at: int) -> Engine:
        """A new connection to this one."""
        host, port, idle = self._all[at]
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: Engine(idle), host, port))[1]


class Passed(web.StreamResponse):
    """The answer has gone round aiohttp."""

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing to do."""
        self._keep_alive = True

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to do."""


def relaying(engines: Engines) -> web.Server:
    """aiohttp before, bare connections behind."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        head = f"{request.method} {request.path_qs} HTTP/1.1\r\nHost: engine\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        found = engines.idle()
        engine = await engines.connect(found) if isinstance(found, int) else found
        engine.over = asyncio.get_running_loop().create_future()
        engine.ask([head.encode(), body], cast("asyncio.WriteTransport", request.transport))
        await engine.over
        return Passed()

    return web.Server(handle)


class Client(asyncio.Protocol):
    """A client's connection without aiohttp: a request is whole when its length is there."""

    def __init__(self, engines: Engines, tasks: set[asyncio.Task[None]]) -> None:
        self._engines, self._tasks = engines, tasks
        self._parts: list[bytes] = []
        self._left = 0
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        if not self._parts:
            head = data.find(b"\r\n\r\n") + 4
            self._left = head + max(0, length_of(data[:head]))
        self._parts.append(data)
        self._left -= len(data)
        if self._left > 0:
            return
        request, self._parts = self._parts, []
        found = self._engines.idle()
        if not isinstance(found, int):
            found.ask(request, self._transport)
            return
        task = asyncio.get_running_loop().create_task(self._first(request, found))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _first(self, request: list[bytes], at: int) -> None:
        (await self._engines.connect(at)).ask(request, self._transport)


async def serve(mode: str, port: int, urls: list[str]) -> None:
    """Until it is killed."""
    engines, loop = Engines(urls), asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    makers: dict[str, Callable[[], asyncio.Protocol]] = {
        "aiohttp": relaying(engines),
        "protocol": lambda: Client(engines, tasks),
    }
    server = await loop.create_server(makers[mode], "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")))
