"""The client's side of the relay on raw sockets: framing, keep-alive, pipelining, back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.measuring.processes import Child
from proxy.protocol.framing import Chunked
from proxy.protocol.streams.sse import Scanner
from tests.support.harness import (
    ANSWER,
    STREAM_HEAD,
    WAIT_S,
    RawEngine,
    Script,
    ServedProxy,
    apart,
    chat,
    chunk,
    event,
    plain,
    says,
    stalls,
    stands_still,
    until,
)

BODY = orjson.dumps(chat("x"))
SAID = event("fine") + b"data: [DONE]\n\n"
OPEN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def post(*lines: str, body: bytes = BODY, version: str = "1.1", method: str = "POST") -> bytes:
    head = [f"{method} /v1/chat/completions HTTP/{version}", "Host: p", *lines]
    if not any(line.startswith("Transfer") for line in lines):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


CLOSE = "Connection: close"


class Client:
    """A raw connection to the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Head and body of one answer on a connection that is kept."""
        self.writer.write(request)
        return await self.answer()

    async def answer(self) -> tuple[bytes, bytes]:
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            lower = head.lower()
            if b"transfer-encoding: chunked" in lower:
                body = b""
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    body += (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readuntil(b"\r\n")
                return head, body
            found = [x for x in lower.split(b"\r\n") if x.startswith(b"content-length")]
            length = int(found[0].split(b":")[1]) if found else 0
            return head, await self.reader.readexactly(length)

    async def rest(self, request: bytes = b"") -> bytes:
        """Everything until the proxy closes."""
        self.writer.write(request)
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()


@asynccontextmanager
async def client(proxy: ServedProxy) -> AsyncIterator[Client]:
    host, port = proxy.server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def between(tmp_path: Path, *scripts: Script, **options: Any) -> AsyncIterator[Any]:
    settings = {"kv_connector": "none", "health_interval": 60} | options
    async with RawEngine(*scripts) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **settings) as proxy:
            async with client(proxy) as raw:
                yield proxy, raw, engine
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0, "no upstream connection in use")


async def test_a_stream_comes_in_whole_events_and_chunks(tmp_path: Path) -> None:
    """Extensions, trailers and what follows [DONE] are gone; of the head only ours differs."""
    wire = b"4;a=b\r\nda" + b"ta\r\n" + b"0b\r\n: [DONE]\n\nx\r\n" + b"00\r\nX-Sum: 1\r\n\r\n"
    head = STREAM_HEAD[:-2] + b"X-Mine: 1\r\nTrailer: X-Sum\r\nConnection: x-hop\r\nX-Hop: 2\r\n"
    head += b"Keep-Alive: timeout=5\r\nX-Request-Id: theirs\r\nX-Cache-Proxy-Route: theirs\r\n\r\n"
    async with between(tmp_path, says(head + chunk(b"data: 1\n\n") + wire)) as (_, raw, _):
        got = await raw.rest(post(CLOSE, "X-Request-Id: ours"))
        lines, _, body = got.partition(b"\r\n\r\n")
        assert body == chunk(b"data: 1\n\ndata: [DONE]\n\n") + b"0\r\n\r\n"
        assert lines.split(b"\r\n") == [
            b"HTTP/1.1 200 OK",
            b"content-type: text/event-stream",
            b"x-mine: 1",
            b"Transfer-Encoding: chunked",
            b"Connection: close",
            b"X-Request-Id: ours",
            b"X-Cache-Proxy-Instance: " + lines.split(b"Instance: ")[1].split(b"\r\n")[0],
            b"X-Cache-Proxy-Route: WARM",
            b"X-Cache-Proxy-Reason: only 0 of 7 cached; below_threshold",
        ]


@pytest.mark.parametrize(
    ("answer", "close", "body"),
    [
        (ANSWER, False, SAID),
        (OPEN_HEAD + SAID, True, SAID),
        (plain(b"{}"), False, b"{}"),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", True, b"to the end"),
        (b"HTTP/1.1 200 OK\r\n\r\n", True, b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, b""),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", False, b""),
        (plain(b"no", "404 Not Found"), False, b"no"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER, False, SAID),
        (plain(b"{}") + b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nstolen it", False, b"{}"),
        (ANSWER + plain(b"stolen"), False, SAID),
    ],
)
async def test_the_clients_connection_is_kept(
    tmp_path: Path, answer: bytes, close: bool, body: bytes
) -> None:
    """After every kind of answer, and the next one on it is whole again."""
    async with between(tmp_path, says(answer, close=close)) as (proxy, raw, engine):
        for _ in range(3):
            head, got = await raw.ask(post())
            assert (got, b"Connection:" in head) == (body, False)
        assert len(engine.posts) == 3
        assert {r["outcome"] for r in await proxy.records(3)} <= {"ok", "bad_request"}


@pytest.mark.parametrize("answer", [ANSWER, OPEN_HEAD + SAID])
async def test_http_1_0_gets_a_body_that_ends_with_the_connection(
    tmp_path: Path, answer: bytes
) -> None:
    async with between(tmp_path, says(answer, close=True)) as (_, raw, _):
        got = await raw.rest(post("Connection: keep-alive", version="1.0"))
        head, _, body = got.partition(b"\r\n\r\n")
        assert (body, head[:15]) == (SAID, b"HTTP/1.0 200 OK")
        assert not {b"transfer-encoding", b"keep-alive"} & set(head.lower().split(b": "))


async def test_http_1_0_with_a_length_can_be_kept(tmp_path: Path) -> None:
    async with between(tmp_path, says(plain(b"{}"))) as (_, raw, _):
        for _ in range(2):
            head, body = await raw.ask(post("Connection: keep-alive", version="1.0"))
            assert (body, b"Connection: keep-alive\r\n" in head) == (b"{}", True)
        assert (await raw.rest(post(version="1.0"))).endswith(b"{}")


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with between(tmp_path, *(says(plain(b'{"n":%d}' % i)) for i in range(9))) as (_, raw, _):
        raw.writer.write(post() * 8 + post(CLOSE))
        got = [(await raw.answer())[1] for _ in range(9)]
        assert got == [b'{"n":%d}' % i for i in range(9)]
        assert await raw.rest() == b""


@pytest.mark.parametrize("leaves", [True, False])
async def test_forty_pipelined(tmp_path: Path, leaves: bool) -> None:
    """The first one's instance is silent; so many behind it end it, whether the client stays."""
    async with between(tmp_path, stalls(STREAM_HEAD + chunk(event("a")))) as (proxy, raw, engine):
        raw.writer.write(post())
        await until(lambda: engine.posts, "the first is being served")
        raw.writer.write(post() * 39)
        if leaves:
            raw.writer.close()
        else:
            with contextlib.suppress(ConnectionResetError):
                await raw.reader.read()
        await proxy.at_rest()
        await until(lambda: proxy.connections() == 0, "the upstream connection is closed")
        assert {r["outcome"] for r in await proxy.records(1)} == {"client_gone"}
        assert proxy.metric("client_errors_total", reason="pipelined") == 1
        assert len(engine.posts) == 1


async def test_forty_pipelined_at_once(tmp_path: Path) -> None:
    async with between(tmp_path, says(ANSWER)) as (proxy, raw, engine):
        raw.writer.write(post() * 40)
        with contextlib.suppress(ConnectionResetError):
            assert await raw.reader.read() == b""
        await proxy.at_rest()
        assert not engine.posts


async def test_a_large_request_behind_another_does_not_hide_the_client(tmp_path: Path) -> None:
    """aiohttp stops reading when a waiting body has filled its buffer, and hears of nothing."""
    async with between(tmp_path, stalls(STREAM_HEAD + chunk(event("a")))) as (proxy, raw, engine):
        raw.writer.write(post())
        await until(lambda: engine.posts, "the first is being served")
        raw.writer.write(post(body=b'{"prompt":"%b"}' % (b"x" * (2 << 20))))
        with contextlib.suppress(ConnectionResetError):
            await raw.reader.read()
        await proxy.at_rest()
        assert proxy.connections() == 0


async def test_expect_100_continue(tmp_path: Path) -> None:
    async with between(tmp_path, says(ANSWER)) as (_, raw, engine):
        raw.writer.write(post("Expect: 100-continue")[: -len(BODY)])
        assert (await raw.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        assert (await raw.ask(BODY))[1] == SAID
        assert engine.posts == [BODY]


async def test_a_chunked_request_body_arrives_whole(tmp_path: Path) -> None:
    cut = b"".join(chunk(BODY[i : i + 7]) for i in range(0, len(BODY), 7)) + b"0\r\n\r\n"
    async with between(tmp_path, says(ANSWER)) as (_, raw, engine):
        for _ in range(2):
            assert (await raw.ask(post("Transfer-Encoding: chunked", body=cut)))[1] == SAID
        assert engine.posts == [BODY] * 2


async def test_a_chunked_request_body_over_the_limit_is_413(tmp_path: Path) -> None:
    big = chunk(b"x" * 5000) + b"0\r\n\r\n"
    async with between(tmp_path, says(ANSWER), max_body_bytes=1024) as (_, raw, _):
        got = await raw.rest(post("Transfer-Encoding: chunked", CLOSE, body=big))
        assert got.startswith(b"HTTP/1.1 413 ")


async def test_head_passes_without_a_body(tmp_path: Path) -> None:
    own = {"kv_connector": "none", "extra_paths": "/v1/files/*"}
    engine = RawEngine(says(b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n"))
    async with engine, ServedProxy(tmp_path / "log", [engine.address], **own) as proxy:
        async with client(proxy) as raw:
            for _ in range(2):
                raw.writer.write(b"HEAD /v1/files/7 HTTP/1.1\r\nHost: p\r\n\r\n")
                head = await raw.reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                assert b"Content-Length: 77\r\n" in head


@pytest.mark.parametrize(
    "half",
    [
        chunk(event("half")),
        chunk(event("half"))[:-2],
        chunk(event("half"))[:-1],
        chunk(event("half") + b"data: cut in the middle")[:-20],
        chunk(event("half")) + b"ff0\r\n",
        chunk(event("half")) + b"0\r\n",
        chunk(event("half")) + b"0\r\n\r\n",
    ],
)
async def test_last_words_are_readable_wherever_it_broke(tmp_path: Path, half: bytes) -> None:
    """Inside a chunk, between two, or with an end that was not due."""
    async with between(tmp_path, says(STREAM_HEAD + half, close=True)) as (proxy, raw, _):
        raw.writer.write(post())
        await raw.reader.readuntil(b"\r\n\r\n")
        wire = await raw.rest()
        assert b'\n\ndata: {"error":{"message":"upstream: ' in Chunked().feed(wire)
        assert not wire.endswith(b"0\r\n\r\n")
        (record,) = await proxy.records(1)
        assert record["outcome"] == "upstream_truncated"


async def test_broken_chunks_are_a_cut(tmp_path: Path) -> None:
    passed = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("fine")))
        await passed.wait()
        writer.write(b"zz\r\n")
        await reader.read()

    async with between(tmp_path, script) as (proxy, raw, _):
        raw.writer.write(post())
        await raw.reader.readuntil(b"fine")
        passed.set()
        await raw.rest()
        (record,) = await proxy.records(1)
        assert record["outcome"] == "upstream_truncated"


@pytest.mark.long
async def test_a_slow_client_holds_back_its_own_instance_only(tmp_path: Path) -> None:
    """What waits for it is bounded; another stream of the same instance runs on; nothing lost."""
    sent = 0
    piece = chunk(event("x" * 60_000))

    async def long(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        for _ in range(400):
            writer.write(piece)
            await writer.drain()
            sent += 1
        writer.write(ANSWER[len(STREAM_HEAD) :])
        await writer.drain()

    async with between(tmp_path, long, says(ANSWER)) as (proxy, raw, _):
        raw.writer.write(post())
        await stands_still(lambda: sent)
        assert sent < 400, "the instance was held back"
        (protocol,) = proxy.listener.connections
        assert protocol.transport.get_write_buffer_size() < 1 << 20
        for _ in range(5):
            assert (await proxy.post(chat("x"))).body == SAID
        _, body = await raw.answer()
        assert body == event("x" * 60_000) * 400 + SAID


pieces = st.lists(
    st.sampled_from(
        [event("a"), event("\\n\\n"), b": ping\n\n", b"data: x", b"\n", event("long " * 3000)]
    ),
    max_size=8,
)


@pytest.mark.long
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(pieces, st.lists(st.integers(0, 40_000), max_size=10), st.data())
async def test_any_segmentation_gives_the_same(
    tmp_path: Path, said: list[bytes], cuts: list[int], data: st.DataObject
) -> None:
    """However chunks and reads cut an answer: the client's body and the scanner's events."""
    body = event("first") + b"".join(said) + b"\n\ndata: [DONE]\n\n"
    sizes = data.draw(st.lists(st.integers(1, 9000), min_size=1, max_size=5))
    wire, at, turn = b"", 0, 0
    while at < len(body):
        size = sizes[turn % len(sizes)] if turn < 50 else len(body)
        wire, at, turn = wire + chunk(body[at : at + size]), at + size, turn + 1
    wire = STREAM_HEAD + wire + b"0\r\n\r\n"
    edges = sorted({0, *(cut % len(wire) for cut in cuts), len(wire)})

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await apart(writer, (wire[a:b] for a, b in pairwise(edges)), 0.0005)

    scanned = Scanner()
    scanned.feed(body)
    async with RawEngine(script) as engine:
        (tmp_path / "log").unlink(missing_ok=True)
        async with ServedProxy(tmp_path / "log", [engine.address], health_interval=60) as proxy:
            seen = []
            feed = Scanner.feed

            def watched(self: Scanner, piece: bytes) -> None:
                feed(self, piece)
                seen.append(self)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Scanner, "feed", watched)
                answer = await proxy.post(chat("x"))
            assert answer.body == body
            last = seen[-1]
            assert (last.events, last.size, last.is_done) == (scanned.events, len(body), True)


def reached(engine: RawEngine, posts: int) -> bool:
    return len(engine.posts) >= posts


async def test_clients_vanish_amid_their_streams(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes for a connection that was closed in the same turn of the loop are nobody's error."""

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(event("x")) * 20)
            await writer.drain()
            await asyncio.sleep(0)

    async with between(tmp_path, floods) as (proxy, _, engine):
        for _ in range(5):
            async with contextlib.AsyncExitStack() as stack:
                raws = [await stack.enter_async_context(client(proxy)) for _ in range(10)]
                served = len(engine.posts) + 10
                for raw in raws:
                    raw.writer.write(post())
                await until(partial(reached, engine, served), "all are served")
                for raw in raws:
                    raw.writer.transport.abort()
        await proxy.at_rest()
        assert not [record.message for record in caplog.records if record.levelname == "ERROR"]


ASKS_AGAIN = """
import socket, sys
request = sys.stdin.buffer.read()
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as client:
    for _ in range(8):
        client.sendall(request)
        print(client.recv(65536)[:12].decode(), flush=True)
"""


@pytest.mark.long
async def test_a_body_that_fills_the_first_read_is_read_on(tmp_path: Path) -> None:
    """aiohttp pauses a client who is ahead of its reader; nobody reads before the body's end.

    The client is a process of its own: here it would wait for the proxy whenever it wants to send.
    """
    request = tmp_path / "request"
    request.write_bytes(post(body=orjson.dumps(chat("x" * 4_000_000, stream=False))))
    async with between(tmp_path, says(plain(b"{}"))) as (proxy, _, _):
        host, port = proxy.server.url.removeprefix("http://").split(":")
        command = (sys.executable, "-ISc", ASKS_AGAIN, host, port)
        with request.open("rb") as stdin, Child(command, stdin=stdin) as asks:
            assert await asks.ended() == 0
        assert asks.log.splitlines() == ["HTTP/1.1 200"] * 8
