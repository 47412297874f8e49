"""One connection to an instance: every kind of end of an answer, and of a request's body."""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import suppress

import pytest

from bench.measuring.processes import Child
from proxy.core.types import FailureKind, Instance
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import Upstream
from proxy.net.upstream.connection import HEAD_BYTES, HEAD_LINES, SLICE_BYTES
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.framing import SMALL_CHUNKS
from tests.support.harness import (
    WAIT_S,
    let_out,
    plain,
    until,
)
from tests.support.upstream_peer import OK, Peer, ask, serving


def chunked(*bodies: bytes, end: bytes = b"0\r\n\r\n", extra: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\n{extra}Transfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(b), b) for b in bodies) + end


@pytest.mark.parametrize(
    ("answer", "close", "status", "body", "is_kept"),
    [
        (OK, False, 200, b'{"ok":1}', True),
        (chunked(b"ab", b"c"), False, 200, b"abc", True),
        (chunked(b"ab", end=b"0\r\nX-T: 1\r\n\r\n"), False, 200, b"ab", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, 204, b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", False, 304, b"", False),
        (plain(b"", "404 Not Found"), False, 404, b"", True),
        (b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" * 2 + OK, False, 200, b'{"ok":1}', True),
        (plain(b"x", extra="Connection: close\r\n"), True, 200, b"x", False),
        (plain(b"x", extra="Connection: close\r\n"), False, 200, b"x", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", True, 200, b"x", False),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", True, 200, b"until the end", False),
        (b"HTTP/1.0 200 OK\r\n\r\n", True, 200, b"", False),
        (OK + b"HTTP/1.1 200 OK\r\n", False, 200, b'{"ok":1}', False),
        (chunked(b"ab") + b"\r\n", False, 200, b"ab", False),
    ],
)
async def test_every_kind_of_end(
    answer: bytes, close: bool, status: int, body: bytes, is_kept: bool
) -> None:
    """Read whole, and the connection used again exactly when it may be; in one piece or many."""
    peer = Peer([answer], close=close)
    async with serving(peer.serve) as upstream:
        for _ in range(3):
            assert await ask(upstream) == (status, body)
            await until(lambda: upstream.in_use == 0)
    assert (peer.requests, peer.connections) == (3, 1 if is_kept else 3)


async def test_an_answer_byte_by_byte() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        for byte in b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(b"hello", b"!"):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        await writer.drain()
        await reader.read()
        writer.close()

    async with serving(serve) as upstream:
        assert await ask(upstream) == (200, b"hello!")


async def test_head_has_no_body_and_no_second_use() -> None:
    peer = Peer([b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"])
    async with serving(peer.serve) as upstream:
        assert [await ask(upstream, "HEAD") for _ in range(2)] == [(200, b"")] * 2
    assert peer.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nxy",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\rSet-Cookie: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * HEAD_BYTES + b"\r\n\r\n",
        b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" * 5000,
        b"HTTP/1.1 200 OK\r\n" + b"b:\r\n" * HEAD_LINES + b"Content-Length: 0\r\n\r\n",
        chunked(end=b"zz\r\n"),
        chunked(*[b" "] * 2 * SMALL_CHUNKS),
    ],
)
async def test_garbage_is_malformed(answer: bytes) -> None:
    peer = Peer([answer])
    async with serving(peer.serve) as upstream:
        with pytest.raises(UpstreamFailure) as caught:
            await ask(upstream)
        await until(lambda: upstream.in_use == 0)
    assert caught.value.kind is FailureKind.MALFORMED
    assert peer.requests == 1, "an answer of any kind is never asked for twice"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nCont",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
        chunked(b"x", end=b""),
        chunked(b"x", end=b"5\r\nab"),
        chunked(b"x", end=b"0\r\n"),
    ],
)
async def test_a_cut_answer_is_a_reset(answer: bytes) -> None:
    peer = Peer([answer], close=True)
    async with serving(peer.serve) as upstream:
        with pytest.raises(UpstreamFailure) as caught:
            await ask(upstream)
    assert (caught.value.kind, peer.requests) == (FailureKind.RESET, 1)


async def test_an_answer_before_the_request_was_taken() -> None:
    """Passed on; the connection, which still has to carry the rest, is not used again."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(plain(b"too large", "413 Too Large"))
        await writer.drain()
        await asyncio.Event().wait()

    async with serving(serve) as upstream:
        with Limit(10.0):
            for _ in range(2):
                reply = await upstream.send("POST", "/v1/x", b"", b"x" * (16 << 20))
                assert (reply.status, await reply.read(100)) == (413, b"too large")
                reply.close()
                await until(lambda: upstream.in_use == 0)
    assert connections == 2


@pytest.mark.parametrize("read", [0, 1, 64])
async def test_a_success_before_the_request_was_taken_is_none(read: int) -> None:
    """It would hold the request's body for as long as its stream lasts, in no room."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(read << 10)
        writer.write(chunked(b"data: {}\n\n", end=b""))
        await writer.drain()
        await asyncio.Event().wait()

    async with serving(serve) as upstream:
        with Limit(10.0), pytest.raises(UpstreamFailure, match="before it has read") as caught:
            await upstream.send("POST", "/v1/x", b"", b"x" * (16 << 20))
        assert caught.value.kind is FailureKind.MALFORMED
        await until(lambda: upstream.in_use == 0)
    assert connections == 1


EARLY = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    peer, _ = server.accept()
    left = 300_000
    while left > 0 and (data := peer.recv(65536)):
        left -= len(data)
    peer.sendall(b"HTTP/1.1 401 No\\r\\nContent-Length: 2\\r\\n\\r\\nno")
    peer.close()
"""


async def test_an_answer_that_comes_before_the_request_was_taken_and_closes() -> None:
    """From another process, so that it comes between two slices, while the loop has work to do."""

    def work() -> None:
        end_s = loop.time() + 0.001
        while loop.time() < end_s:
            pass
        if is_busy:
            loop.call_soon(work)

    loop, is_busy = asyncio.get_running_loop(), True
    statuses: list[int | None] = []
    with Child([sys.executable, "-c", EARLY]) as server:
        port = (await until(lambda: server.found(r"\d+\n")))[0].strip()
        upstream = Upstream(Instance("i", f"http://127.0.0.1:{port}"), 2.0)
        work()
        try:
            for _ in range(20):
                try:
                    with Limit(10.0):
                        statuses.append((await ask(upstream, sent=bytes(8 << 20)))[0])
                except UpstreamFailure:
                    statuses.append(None)
        finally:
            is_busy = False
            await upstream.close()
    # A reset can still come just between the look and the write.
    assert statuses.count(401) > 15


@pytest.mark.parametrize("more", [-SLICE_BYTES + 1, -1, 0, 1, SLICE_BYTES, 9 * SLICE_BYTES + 7])
@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_long_body_arrives_whole(more: int, is_slow: bool) -> None:
    """It is sent in slices, as the instance takes them, and its connection is used again."""
    body = random.Random(more).randbytes(SLICE_BYTES + more)
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                if is_slow:
                    got.append(await reader.readexactly(len(body) // 2))
                    await let_out()  # its sender fills what the kernel holds
                got.append(await reader.readexactly(len(body) - sum(map(len, got))))
                writer.write(OK)

    async with serving(serve) as upstream:
        with Limit(10.0):
            for _ in range(2):
                assert await ask(upstream, sent=body) == (200, b'{"ok":1}')
                assert b"".join(got) == body
                got.clear()
        assert len(upstream._pool._open) == 1


async def test_of_a_body_that_is_given_up_nothing_more_is_sent() -> None:
    """Hung up on amid its body: the instance reads an end, not the rest."""
    read: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait_for(go_on.wait(), WAIT_S)
        read.append(len(await reader.read(-1)))

    go_on = asyncio.Event()
    async with serving(serve) as upstream, asyncio.TaskGroup() as group:
        sent: list[UpstreamResponse] = []

        async def send() -> None:
            body = b"x" * (32 << 20)
            with pytest.raises(UpstreamFailure):
                await upstream.send("POST", "/v1/x", b"", body, sent.append)

        group.create_task(send())
        await until(lambda: sent, "sent")
        assert sent[0].hang_up()
        go_on.set()
        await until(lambda: read, "the end")
        await until(lambda: not upstream._pool._open, "closed")
    assert read[0] < 32 << 20
