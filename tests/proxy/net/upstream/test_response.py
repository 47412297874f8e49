"""An answer while it comes: it is read as fast as somebody takes it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from proxy.net.timeouts import Limit
from tests.support.harness import plain, stands_still
from tests.support.upstream_peer import ask, serving


async def test_an_answer_that_is_over_pauses_nobodys_connection() -> None:
    """Its client may take it slowly: the connection has been free since, or is another's."""
    long = plain(b"x" * 100_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                writer.write(long)

    async with serving(serve) as upstream:
        with Limit(10.0):
            reply = await upstream.send("POST", "/v1/x", b"", b"{}")
            while await reply.more():
                pass
            reply.pause()
            assert await ask(upstream) == (200, b"x" * 100_000)
            (connection,) = upstream._pool._open
            connection.pause()
            reply.resume()
            assert connection._is_paused
            connection.resume()


async def test_nobody_reads_so_nothing_is_read() -> None:
    """Up to a bound, then the instance is held back by its own full socket."""
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        except ConnectionError:
            pass

    async with serving(serve) as upstream:
        reply = await upstream.send("POST", "/v1/x", b"", b"{}")
        await stands_still(lambda: sent)
        assert sum(map(len, reply.body)) < 1 << 20
        assert sent < 32 << 20
        reply.close()


async def test_a_body_in_very_many_pieces_is_counted_once() -> None:
    """Of pieces that are framing alone nothing is kept."""
    head = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(head)
        for _ in range(300):
            for piece in (b"1\r", b"\n", b"x\r\n"):
                writer.write(piece)
                await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    async with serving(serve) as upstream:
        with Limit(10.0):
            reply = await upstream.send("POST", "/v1/x", b"", b"{}")
            assert await reply.read(1000) == b"x" * 300
        assert all(reply.body)
