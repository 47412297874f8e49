"""The client's side of the proxy: time limits, broken bodies, fixed words, vanished peers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from proxy.cli import NO_PARSER
from proxy.net.server import connection as server_connection
from proxy.net.server.refusals import RefusalLog
from proxy.net.server.request_loop import SerialHandler
from proxy.protocol.request_framing import FIRST_CHUNKS, Refusal
from proxy.telemetry.log import LOG_EVERY_S
from tests.proxy.request.test_client_request import post, raw
from tests.support.harness import WAIT_S, RawEngine, ServedProxy, apart, chunk, plain, says, until

CANARY = b"sk-canary-1"
FINE = says(plain(b"{}"))
CHAT = b'{"model":"sim-8b","messages":[]}'


async def refused(proxy: ServedProxy, request: bytes, status: int, reason: Refusal) -> None:
    answer = await raw(proxy, request)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split(b" ")[1]) == status, answer
    assert len(re.findall(rb"\r\nX-Request-Id: [0-9a-f]{32}\r\n", head)) == 1, "one of ours"
    error = orjson.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", status)
    assert CANARY not in answer
    assert proxy.metric("client_errors_total", reason=reason) == 1


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (b"GET /live HTTP/1.1\r\nAuthorization: %b\x00\r\n\r\n", 400, Refusal.SYNTAX),
        (b"GET /live HTTP/1.1\r\nHost: %b b\r\n\r\n", 400, Refusal.HOST),
        (b"GET  /live HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n", 400, Refusal.LINE),
        (b"GET /live HTTP/2.0\r\nHost: a\r\nX: %b\r\n\r\n", 400, Refusal.VERSION),
        (b"TRACE /live HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n", 405, Refusal.METHOD),
        (b"GET /live#%b HTTP/1.1\r\nHost: a\r\n\r\n", 400, Refusal.TARGET),
        (b"GET /live HTTP/1.1\r\nHost: a\r\nX: %b" + b"a" * 9000, 431, Refusal.HEAD_SIZE),
        (b"GET /live HTTP/1.1\r\nHost: a\r\nX: %b\r\nExpect: b\r\n\r\n", 417, Refusal.EXPECTATION),
        (b"GET /live HTTP/1.1\r\nHost: a\r\nX: %b\r\n", 408, Refusal.HEAD_LATE),
        (b"GET /live", 408, Refusal.HEAD_LATE),
    ],
)
async def test_a_refusal_is_fixed_words(
    tmp_path: Path, request_: bytes, status: int, reason: Refusal
) -> None:
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], header_timeout=0.2) as proxy:
            await refused(proxy, request_.replace(b"%b", CANARY), status, reason)
            assert not engine.posts


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/messages/count_tokens?beta=true"])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST %b HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 9000, 431),
        (b"POST %b HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 120 + b"\r\n", 431),
        (b"POST %b HTTP/1.1\r\n\r\n", 400),
        (b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST %b HTTP/1.1\r\nHost: a\r\nno header\r\n\r\n", 400),
        (b"BREW %b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"POST %b HTTP/1.1\r\nHost: a\r\n", 408),
    ],
)
async def test_what_is_no_request_is_refused_in_its_paths_form(
    tmp_path: Path, path: bytes, head: bytes, status: int
) -> None:
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], header_timeout=0.2) as proxy:
            answer = await raw(proxy, head.replace(b"%b", path))
    assert int(answer.split()[1]) == status
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["type"] == "error"


PROBE = (
    b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: %b\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize("asked", [b"websocket", b"WebSocket", b"h2c, websocket"])
@pytest.mark.parametrize("path", [b"/v1/responses", b"/v1/realtime?model=m", b"/v1/messages"])
async def test_a_client_that_asks_for_a_websocket_is_told_to_use_http(
    tmp_path: Path, path: bytes, asked: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            with caplog.at_level(logging.WARNING):
                answer = await raw(proxy, PROBE % (path, asked))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 426 ")
            assert b"\r\nUpgrade: HTTP/1.1\r\n" in head + b"\r\n"
            assert b"\r\nConnection: Upgrade, close\r\n" in head + b"\r\n"
            assert b"websockets are not supported" in body
            assert not proxy.metric("client_errors_total", reason=Refusal.UPGRADE)
            assert "malformed" not in caplog.text
            assert not engine.posts
            assert (await proxy.post(CHAT)).status == 200


async def test_in_http_1_0_an_upgrade_means_nothing(tmp_path: Path) -> None:
    request = post("/v1/chat/completions", CHAT).replace(b"HTTP/1.1", b"HTTP/1.0")
    request = request.replace(b"Connection: close", b"Connection: Upgrade\r\nUpgrade: websocket")
    assert b"websocket" in request
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            assert b" 200 " in (await raw(proxy, request)).partition(b"\r\n")[0]
            assert engine.posts == [CHAT]


async def test_a_body_of_ten_to_the_eleven_is_refused_before_it_is_asked_for(
    tmp_path: Path,
) -> None:
    head = post("/v1/chat/completions", b"")[:-4].replace(b"Content-Length: 0", b"")
    head += b"Content-Length: 99999999999\r\n"
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            for more in (b"Expect: 100-continue\r\n\r\n", b"\r\n"):
                async with connect(proxy) as (reader, writer):
                    writer.write(head + more)
                    line = await asyncio.wait_for(reader.readuntil(b"\r\n"), WAIT_S)
                    assert b" 413 " in line
            await proxy.at_rest()
            assert not engine.posts


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connect(proxy: ServedProxy) -> AsyncIterator[Streams]:
    port = int(proxy.server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n\r\n" % CANARY
)


@pytest.mark.parametrize("broken", [b"zz\r\n", b"5\r\nhelloworld\r\n", b"-1\r\n"])
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/instances", b"/v1/embeddings"])
async def test_chunks_that_break_in_a_later_segment_are_answered(
    tmp_path: Path, broken: bytes, path: bytes
) -> None:
    """A handler is waiting for the body then, whose parser has given up."""
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            async with connect(proxy) as (reader, writer):
                writer.write(CHUNKED.replace(b"/v1/chat/completions", path) + chunk(b"{"))
                await writer.drain()
                connections = proxy.listener.connections
                await until(lambda: any(c._current_request for c in connections), "its handler")
                writer.write(broken)
                async with asyncio.timeout(WAIT_S):
                    answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 400 ")
                assert answer.count(b"HTTP/1.1") == 1
                assert proxy.metric("client_errors_total", reason=Refusal.FRAMING) == 1
                await proxy.at_rest()
                assert not engine.posts


async def test_what_breaks_behind_an_answer_is_no_defect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of a body that nobody wants is read for a while, and may be no body at all."""
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            async with connect(proxy) as (reader, writer):
                writer.write(CHUNKED.replace(b"/v1/chat/completions", b"/nope"))
                async with asyncio.timeout(WAIT_S):
                    answer = await reader.readuntil(b"\r\n\r\n")
                    writer.write(b"zz\r\n")
                    await reader.read()
                assert answer.startswith(b"HTTP/1.1 404 ")
                await proxy.at_rest()
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


async def test_a_million_chunks_of_one_byte_cost_little(tmp_path: Path) -> None:
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            async with connect(proxy) as (reader, writer):
                with contextlib.suppress(ConnectionError, RuntimeError):
                    writer.write(CHUNKED)
                    for _ in range(100):
                        writer.write(b"1\r\na\r\n" * 10_000)
                        await asyncio.wait_for(writer.drain(), WAIT_S)
                with contextlib.suppress(ConnectionError):
                    async with asyncio.timeout(WAIT_S):
                        await reader.read()
                assert proxy.metric("client_errors_total", reason=Refusal.CHUNKS) == 1
                await proxy.at_rest()
                assert not engine.posts


async def test_what_is_behind_many_small_chunks_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it came in the same read; nor is more of them than tells that there are too many."""
    parsed: list[int] = []
    received = web.RequestHandler.data_received

    def parse(connection: web.RequestHandler, data: bytes) -> None:
        parsed.append(len(data))
        received(connection, data)

    monkeypatch.setattr(web.RequestHandler, "data_received", parse)
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            before = sum(parsed)
            async with connect(proxy) as (reader, writer):
                writer.write((CHUNKED + b"1\r\n \r\n" * FIRST_CHUNKS * 2 + LAST) * 8)
                async with asyncio.timeout(WAIT_S):
                    assert b" 400 " in await reader.readuntil(b"\r\n")
                await proxy.at_rest()
            assert not engine.posts
    most = len(b"1\r\n \r\n") * FIRST_CHUNKS + server_connection.SLICE_BYTES + 200
    assert sum(parsed) - before <= most


@pytest.mark.long
async def test_a_giant_body_leaves_others_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what its client has sent already, a few reads in each turn of the loop."""
    reads: list[tuple[int, int]] = []
    turn, loop = 0, asyncio.get_running_loop()
    ticking: asyncio.Handle | None = None
    received = server_connection.ClientConnection.data_received

    def read(connection: server_connection.ClientConnection, data: bytes) -> None:
        reads.append((turn, len(data)))
        received(connection, data)

    def count() -> None:
        nonlocal turn, ticking
        turn += 1
        ticking = loop.call_soon(count)

    monkeypatch.setattr(server_connection.ClientConnection, "data_received", read)
    body = orjson.dumps({"model": "sim-8b", "messages": ["x" * (8 << 20)]})
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            async with connect(proxy) as (reader, writer):
                count()
                writer.write(post("/v1/chat/completions", body))
                head = await asyncio.wait_for(reader.readuntil(b"\r\n"), WAIT_S)
                assert ticking is not None
                ticking.cancel()
    assert b" 200 " in head
    assert sum(size for _, size in reads) > 8 << 20
    long = Counter(turn for turn, size in reads if size >= server_connection.LONG_READ_BYTES)
    assert max(long.values(), default=0) <= server_connection.LONG_READS


async def test_a_body_that_drips_is_given_up_before_its_time(tmp_path: Path) -> None:
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], body_timeout=9.0) as proxy:
            async with connect(proxy) as (reader, writer):
                writer.write(post("/v1/chat/completions", CHAT).replace(b"%d" % len(CHAT), b"5000"))
                began_s = asyncio.get_running_loop().time()
                drip = asyncio.get_running_loop().call_soon(writer.write, b" ")
                head = await asyncio.wait_for(reader.readuntil(b"\r\n"), WAIT_S)
                drip.cancel()
                assert b" 408 " in head
                assert asyncio.get_running_loop().time() - began_s < 9.0, "a third of it is enough"


async def test_a_hundred_drips_are_closed_and_others_served(tmp_path: Path) -> None:
    async with RawEngine(FINE) as engine, contextlib.AsyncExitStack() as stack:
        async with ServedProxy(tmp_path / "log", [engine.address], header_timeout=0.3) as proxy:
            drips = []
            for _ in range(100):  # each begins at once: the first one's time runs already
                drips.append(await stack.enter_async_context(connect(proxy)))
                drips[-1][1].write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
            for _ in range(3):
                assert (await proxy.post(CHAT)).status == 200
            for reader, _ in drips:
                assert (await asyncio.wait_for(reader.read(), WAIT_S)).startswith(b"HTTP/1.1 408 ")
            assert proxy.metric("client_errors_total", reason=Refusal.HEAD_LATE) == 100


async def test_a_late_head_does_not_end_what_is_served_before_it(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(plain(b"{}"))

    async with RawEngine(waits) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], header_timeout=0.1) as proxy:
            async with connect(proxy) as (reader, writer):
                whole = post("/v1/chat/completions", CHAT).replace(b"Connection: close\r\n", b"")
                writer.write(whole + b"GET /li")
                errors = "client_errors_total"
                await until(lambda: proxy.metric(errors, reason=Refusal.HEAD_LATE) == 1, "too late")
                release.set()
                answer = await asyncio.wait_for(reader.read(), WAIT_S)
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert answer.count(b"HTTP/1.1 408 ") == 1


async def test_a_line_end_behind_a_body_is_no_head(tmp_path: Path) -> None:
    """Old clients send one; an answer to it would be taken for that of the next request."""
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], header_timeout=0.1) as proxy:
            async with connect(proxy) as (reader, writer):
                whole = post("/v1/chat/completions", CHAT)
                writer.write(whole.replace(b"Connection: close\r\n", b"") + b"\r\n")
                assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"{}"), WAIT_S)
                async with connect(proxy) as (late_reader, late_writer):
                    late_writer.write(b"GET /li")  # by its end the first has been longer at rest
                    assert b" 408 " in await asyncio.wait_for(late_reader.read(), WAIT_S)
                writer.write(whole)
                answer = await asyncio.wait_for(reader.read(), WAIT_S)
                assert answer.startswith(b"HTTP/1.1 200 ")
                errors = proxy.metric("client_errors_total", reason=Refusal.HEAD_LATE)
                assert errors == 1, "the other one's"


def options(sock: socket.socket) -> list[int]:
    tcp, wanted = socket.IPPROTO_TCP, ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    values = [sock.getsockopt(tcp, getattr(socket, name)) for name in wanted]
    return [
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        *values,
        sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the options' names are Linux's")
async def test_both_sides_notice_a_peer_that_has_vanished(tmp_path: Path) -> None:
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            assert (await proxy.post(CHAT)).status == 200
            server = proxy.listener
            assert server is not None
            (client, *_) = server.connections
            assert client.transport is not None
            ours = client.transport.get_extra_info("socket")
            (upstream,) = proxy.server.state.instances.all()
            connection, *_ = upstream._pool._open
            theirs = connection._transport.get_extra_info("socket")
            for sock in (ours, theirs):
                assert options(sock) == [1, 30, 10, 3, 60_000]


def test_refusals_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[Refusal] = []
    log = RefusalLog(counted.append)
    with caplog.at_level(logging.WARNING):
        for i in range(1000):
            log.note(Refusal.HOST if i % 2 else Refusal.LINE, i * 0.001)
        log.note(Refusal.HOST, LOG_EVERY_S)
    assert len(counted) == 1001
    assert [record.getMessage() for record in caplog.records] == [
        "malformed requests refused: request_line 1",
        "malformed requests refused: host 501, request_line 499",
    ]


@pytest.mark.long
def test_without_the_compiled_parser_it_does_not_start() -> None:
    command = [sys.executable, "-m", "proxy.cli", "--instances", "127.0.0.1:1"]
    env = os.environ | {"AIOHTTP_NO_EXTENSIONS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=90)
    assert run.returncode == 78
    assert run.stderr == f"cache-proxy: {NO_PARSER}\n"


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
LIVE = b"GET /live HTTP/1.1\r\nHost: a\r\n"
ASKS = post("/v1/chat/completions", CHAT).replace(b"Connection: close\r\n", H2C)
CHUNKS = CHUNKED.replace(b"Host: a\r\n", b"Host: a\r\n" + H2C) + chunk(CHAT)
LAST = b"0\r\n\r\n"
INNER = b"GET /instances HTTP/1.1\r\nHost: a\r\n\r\n"
OUTER = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
LAST_ONES: list[tuple[list[bytes], int]] = [
    ([LIVE + H2C + b"\r\n"], 0),
    ([LIVE + H2C + b"\r\n" + LIVE + b"\r\n"], 0),
    ([LIVE + H2C + b"\r\n", LIVE + b"\r\n"], 0),
    ([LIVE + H2C + b"\r\n" + OUTER % len(INNER), INNER], 0),
    ([LIVE + H2C + b"\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], 0),
    ([ASKS], 1),
    ([ASKS[:-9], ASKS[-9:]], 1),
    ([ASKS + LIVE + b"\r\n"], 1),
    ([ASKS + OUTER % len(INNER), INNER], 1),
    ([ASKS[:-9], ASKS[-9:] + OUTER % len(INNER), INNER], 1),
    ([CHUNKS + LAST], 1),
    ([CHUNKS, LAST], 1),
    ([CHUNKS, LAST + OUTER % len(INNER), INNER], 1),
    ([CHUNKS + LAST + LIVE + b"\r\n", LIVE + b"\r\n"], 1),
]


async def received(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection is closed, or reset."""
    got = bytearray()
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(ConnectionResetError):
            while piece := await reader.read(65536):
                got += piece
    return bytes(got)


async def test_a_wish_for_another_protocol_is_answered_in_this_one_and_is_the_last(
    tmp_path: Path,
) -> None:
    """What comes behind it the parser loses, in part: none of it is taken for a request."""
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            served = proxy.listener
            assert served is not None
            for pieces, posts in LAST_ONES:
                engine.posts.clear()
                before = served.requests_count
                async with connect(proxy) as (reader, writer), asyncio.TaskGroup() as group:
                    # Read all the time: what comes too late resets the connection.
                    reading = group.create_task(received(reader))
                    writer.write(pieces[0])
                    await until(lambda: served.requests_count > before, "a request")  # noqa: B023
                    await apart(writer, pieces[1:], 0.01)
                head, _, body = reading.result().partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 "), pieces
                assert b"\r\nconnection: close" in head.lower(), pieces
                assert b"HTTP/1" not in body, pieces
                assert len(engine.posts) == posts, pieces
            await proxy.at_rest()


@pytest.mark.parametrize("broken", [b"zz\r\n", b"-1\r\n"])
async def test_of_its_chunks_those_that_break_are_refused(tmp_path: Path, broken: bytes) -> None:
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            async with connect(proxy) as (reader, writer):
                writer.write(CHUNKS)
                await until(lambda: proxy.server.state.in_flight.count, "it waits for more")
                writer.write(broken)
                answer = await asyncio.wait_for(reader.read(), WAIT_S)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.count(b"HTTP/1.1") == 1
            await proxy.at_rest()
            assert not engine.posts


async def test_too_many_at_once_on_an_idle_connection_is_no_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = []
    start = SerialHandler.start

    async def watched(handler: SerialHandler) -> None:
        try:
            await start(handler)
        except Exception as error:
            errors.append(error)
            raise

    monkeypatch.setattr(SerialHandler, "start", watched)
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            async with connect(proxy) as (reader, writer):
                writer.write((LIVE + b"\r\n") * 12)
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), WAIT_S)
            assert proxy.metric("client_errors_total", reason=Refusal.PIPELINED) == 1
            await proxy.at_rest()
    assert not errors


async def test_a_client_that_has_to_go_does_not_keep_its_connection(tmp_path: Path) -> None:
    """What it has not read is dropped with it."""
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            async with connect(proxy) as (reader, writer):
                writer.write(LIVE + b"\r\n")
                await reader.readuntil(b"\r\n\r\n")
                (connection,) = proxy.listener.connections
                reader._transport.pause_reading()  # type: ignore[attr-defined]
                connection.transport.write(b"x" * (16 << 20))
                connection.give_way()
                await until(lambda: not proxy.listener.connections, "it is gone")
