"""A server whose answers are given bytes, and the proxy's HTTP client of it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from proxy.core.types import Instance
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import Upstream
from tests.support.harness import plain

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = plain(b'{"ok":1}')


class Peer:
    """A server and a client of it; counts connections and requests."""

    def __init__(self, answers: list[bytes], *, close: bool = False) -> None:
        self.answers, self.close = answers, close
        self.connections = self.requests = 0
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [x for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")]
                if length:
                    await reader.readexactly(int(length[0].split(b":")[1]))
                self.heads.append(head)
                answer = self.answers[min(self.requests, len(self.answers) - 1)]
                self.requests += 1
                writer.write(answer)
                await writer.drain()
                if self.close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()  # what was written goes out first
            await writer.wait_closed()


@asynccontextmanager
async def serving(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[Upstream]:
    async with asyncio.TaskGroup() as group:

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.append(group.create_task(handle(reader, writer)))

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader, writer)
            except ConnectionError:
                pass
            finally:
                writer.transport.abort()

        tasks: list[asyncio.Task[None]] = []
        async with listening(accept, tls) as upstream:
            yield upstream
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def listening(
    accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
    tls: ssl.SSLContext | None,
) -> AsyncIterator[Upstream]:
    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    url = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    async with server:
        upstream = Upstream(Instance("i", url), 2.0)
        try:
            yield upstream
        finally:
            await upstream.close()


async def ask(upstream: Upstream, method: str = "POST", sent: bytes = b"{}") -> tuple[int, bytes]:
    with Limit(10.0):
        reply = await upstream.send(method, "/v1/x", b"", sent if method == "POST" else None)
        try:
            body = await reply.read(1 << 20)
            if reply.failure is not None:
                raise reply.failure
            return reply.status, body
        finally:
            reply.close()
