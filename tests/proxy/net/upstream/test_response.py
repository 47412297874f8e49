"""An answer while it comes: it is read as fast as somebody takes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from proxy.core.admission.largest_pays import LargestPays
from proxy.core.types import FailureKind, Instance
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import Upstream
from proxy.net.upstream.response import COUNTED_BYTES, Holder, Share, UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from tests.support.harness import plain, stands_still, until
from tests.support.upstream_peer import Serve, ask, serving


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


def of(size: int, *, is_whole: bool = False) -> Serve:
    """Answers with so many bytes; `is_whole`: that is all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n{}")
        rest = 0 if is_whole else 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (size + rest))
        writer.write(b"x" * size)
        await reader.read()

    return serve


@asynccontextmanager
async def sharing(
    serve: Serve, room: LargestPays[Holder], name: str = "i"
) -> AsyncIterator[Upstream]:
    """A client of this server, whose answers count in a room."""
    async with serving(serve) as peer:
        instance = Instance(name, peer.instance.url)
        upstream = Upstream(instance, 2.0, share=Share(room, name))
        try:
            yield upstream
        finally:
            await upstream.close()


async def read(upstream: Upstream, replies: list[UpstreamResponse], limit: int = 1 << 20) -> bytes:
    reply = await upstream.send("POST", "/v1/x", b"", b"{}")
    replies.append(reply)
    try:
        with Limit(10.0):
            return await reply.read(limit)
    finally:
        reply.close()


@pytest.mark.parametrize("size", [COUNTED_BYTES, COUNTED_BYTES + 1, 300_000])
async def test_what_is_waited_for_counts_beyond_what_is_held_anyway(size: int) -> None:
    room: LargestPays[Holder] = LargestPays(1 << 20)
    async with sharing(of(size), room) as upstream:
        replies: list[UpstreamResponse] = []
        reading = asyncio.create_task(read(upstream, replies))
        await until(lambda: bool(replies) and sum(map(len, replies[0].body)) == size)
        assert room.held_bytes == (size if size > COUNTED_BYTES else 0)
        reading.cancel()
        await asyncio.wait([reading])
        assert not len(room)


async def test_an_answer_that_is_over_or_lost_counts_no_more() -> None:
    room: LargestPays[Holder] = LargestPays(1 << 20)
    async with sharing(of(300_000, is_whole=True), room) as upstream:
        assert await read(upstream, []) == b"x" * 300_000
        assert not len(room)
    async with sharing(of(300_000), room) as upstream:
        reply = await upstream.send("POST", "/v1/x", b"", b"{}")
        while room.held_bytes < 300_000:
            assert await reply.more()
        upstream.abort()
        await until(lambda: reply.is_over, "it broke")
        assert not len(room)


async def test_an_answer_that_is_passed_on_counts_no_more() -> None:
    room: LargestPays[Holder] = LargestPays(1 << 20)
    async with sharing(of(300_000), room) as upstream:
        reply = await upstream.send("POST", "/v1/x", b"", b"{}")
        while room.held_bytes < 300_000:
            assert await reply.more()
        assert reply.pour(lambda data: None) == b"x" * 300_000
        assert not len(room)
        reply.close()


async def test_the_largest_of_whoever_has_most_pays() -> None:
    room: LargestPays[Holder] = LargestPays(1_000_000)
    async with (
        sharing(of(400_000), room, "most") as most,
        sharing(of(450_000), room, "other") as other,
    ):
        replies: list[UpstreamResponse] = []
        kept = asyncio.create_task(read(other, replies))
        await until(lambda: room.held_bytes == 450_000)
        asked = [asyncio.create_task(read(most, [])) for _ in range(2)]
        paid, others = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(UpstreamFailure, match="no buffer is left") as why:
            await paid.pop()
        assert why.value.kind is FailureKind.MALFORMED
        await until(lambda: room.owned_bytes("most") == 400_000, "the other one has its room")
        assert room.owned_bytes("other") == 450_000
        assert not replies[0].is_over
        others.pop().cancel()
        kept.cancel()
        await asyncio.wait([kept])
        assert not len(room)
