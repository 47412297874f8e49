"""Clients that read nothing of a flood: what waits for each is bounded, and nobody else waits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.admission.largest_pays import LargestPays
from proxy.net.upstream.connection import READ_BYTES
from proxy.request.relay import EVENT_BYTES
from tests.scenarios.test_disconnect import send
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
    spend,
    until,
)

READERS = 6
MOST = 256 << 10
HIGH_WATER = 64 << 10
EVENT = len(event("x" * 60_000))
"""The longest one here: what is held of it is written together with the read that ends it."""


def floods(piece: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(piece)
            await writer.drain()

    return script


@pytest.mark.parametrize(
    "piece", [chunk(event("x" * 200)) * 100, chunk(event("x" * 60_000)), chunk(event("x") * 9999)]
)
async def test_what_waits_for_a_stalled_reader(tmp_path: Path, piece: bytes) -> None:
    settings: dict[str, Any] = {"kv_connector": "none", "health_interval": 60}
    async with RawEngine(*[floods(piece)] * READERS, says(ANSWER)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **settings) as proxy:
            writers = [await send(proxy, chat("x")) for _ in range(READERS)]
            for writer in writers:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
            pool = proxy.server.state.instances.by_name[proxy.settings.instances[0].name]._pool

            def all_held() -> bool:
                return sum(c._is_paused for c in pool._open) == READERS

            await until(all_held, "every instance's connection is paused")
            replies = [c._reply for c in pool._open if c._is_paused and c._reply is not None]
            relays: list[Any] = [getattr(reply.sink, "__self__", None) for reply in replies]
            assert len(relays) == READERS
            for relay in relays:
                buffered = relay.transport.get_write_buffer_size()
                kept = len(relay._held) + sum(map(len, relay.reply.body))
                assert buffered <= HIGH_WATER + READ_BYTES + EVENT + 1024
                assert buffered + kept <= MOST
            assert (await proxy.post(chat("x"))).text == "fine"
            for writer in writers:
                writer.transport.abort()
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0, "no upstream connection in use")


def test_the_bounds_fit() -> None:
    """A buffer that is full but for a byte, a read, and what a piece costs in chunks."""
    assert HIGH_WATER + 2 * READ_BYTES < MOST < EVENT_BYTES


@contextlib.asynccontextmanager
async def narrow(
    proxy: ServedProxy,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A kept connection on which little is under way: a client that reads nothing is felt soon."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    host, port = proxy.server.url.removeprefix("http://").split(":")
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    try:
        writer.write(b"GET /live HTTP/1.1\r\nHost: p\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        served = proxy.listener
        assert served is not None
        (connection,) = served.connections
        assert connection.transport is not None
        peer = connection.transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield reader, writer
    finally:
        writer.transport.abort()


def ask(path: str) -> bytes:
    raw = orjson.dumps(chat("x"))
    head = f"POST {path} HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


TEXT = chunk(event("x" * 1000))
NAMED = chunk(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
END = b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("path", "pieces"),
    [
        ("/v1/chat/completions", [TEXT * 80 + chunk(b"data: [DONE]\n\n") + END]),
        ("/v1/messages", [*[TEXT * 11] * 5, TEXT * 30 + NAMED, END]),
        ("/v1/messages", [*[TEXT * 11] * 5, TEXT * 30 + NAMED + END]),
    ],
)
async def test_a_slow_client_has_its_time_for_a_streams_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, pieces: list[bytes]
) -> None:
    """The moment that an instance is given to end its answer is not the client's."""
    monkeypatch.setattr("proxy.request.relay.GRACE_S", 0.1)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(1 << 20)  # more is written than is taken
        await apart(writer, [STREAM_HEAD, *pieces], 0.02)

    async with RawEngine(script) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            async with narrow(proxy) as (reader, writer):
                writer.write(ask(path))
                await spend(0.7)  # the time is what is tested: longer than GRACE_S
                async with asyncio.timeout(WAIT_S):
                    answer = await reader.readuntil(b"\r\n\r\n") + await until_end(reader)
            assert answer.count(b"x" * 1000) == b"".join(pieces).count(b"x" * 1000)
            (record,) = await proxy.records(1)
            assert record["outcome"] == "ok"
            await proxy.at_rest()


async def until_end(reader: asyncio.StreamReader) -> bytes:
    """What comes, up to the last chunk."""
    seen = b""
    while not seen.endswith(END):
        piece = await reader.read(65536)
        assert piece, "cut"
        seen += piece
    return seen


async def test_nothing_follows_the_end_of_a_stream_that_ends_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client would take that for the beginning of its next answer."""
    monkeypatch.setattr("proxy.request.relay.GRACE_S", 0.5)
    go_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b'event: response.completed\ndata: {"a":"b"}\n\n'))
        await apart(writer, [chunk(event("x"))] * 5, 0.01)
        await asyncio.wait_for(go_on.wait(), WAIT_S)
        writer.write(chunk(event("x")))
        await reader.read()

    async with RawEngine(script) as engine:
        options: dict[str, Any] = {"kv_connector": "none", "idle_timeout": 0.2}
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            async with narrow(proxy) as (reader, writer):
                writer.write(ask("/v1/responses/x"))
                async with asyncio.timeout(WAIT_S):
                    await reader.readuntil(b"\r\n\r\n")
                    await until_end(reader)
                go_on.set()
                await until(lambda: proxy.connections() == 0, "what came late was met")
                writer.write(b"GET /live HTTP/1.1\r\nHost: p\r\n\r\n")
                async with asyncio.timeout(WAIT_S):
                    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            await proxy.at_rest()


LONG = 1 << 20
LONG_ONE = STREAM_HEAD + chunk(event("a")) + chunk(event("z" * LONG)) + ANSWER[len(STREAM_HEAD) :]


@contextlib.asynccontextmanager
async def readers(
    proxy: ServedProxy, count: int
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Connections whose clients read nothing yet, and whose sockets take little."""
    host, port = proxy.server.url.removeprefix("http://").split(":")
    found = []
    try:
        for _ in range(count):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            found.append(await asyncio.open_connection(sock=sock, limit=1 << 22))
            found[-1][1].transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: len(proxy.listener.connections) >= count)
        for connection in proxy.listener.connections:
            peer = connection.transport.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield found
    finally:
        for _, writer in found:
            writer.transport.abort()


def has_more(room: LargestPays[Any], before: int) -> bool:
    return len(room) > before


async def test_while_others_leave_theirs_unread_no_more_comes(tmp_path: Path) -> None:
    """Of the same owner; once one of them reads, the rest comes, and nobody is cut."""
    async with RawEngine(says(LONG_ONE)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            await proxy.up()
            unread = proxy.server.state.unread
            unread.room.max_bytes = 3 * LONG
            async with readers(proxy, 3) as clients:
                for _, writer in clients:
                    before = len(unread.room)
                    writer.write(ask("/v1/chat/completions"))
                    await until(functools.partial(has_more, unread.room, before), "it is counted")
                assert [len(unread._waiting), unread.is_scarce("127.0.0.1")] == [1, True]
                assert unread.room.held_bytes < 2 * LONG + LONG // 2, "of the third little came"
                for reader, writer in clients:
                    writer.transport.resume_reading()  # type: ignore[attr-defined]
                    wire = await asyncio.wait_for(reader.readuntil(END), WAIT_S)
                    assert (wire.count(b"z" * LONG), wire.count(b"[DONE]")) == (1, 1)
            await proxy.at_rest()
            assert (len(unread.room), unread.room.held_bytes, unread._waiting) == (0, 0, {})
            assert {r["outcome"] for r in await proxy.records(3)} == {"ok"}


def many_models() -> bytes:
    """A list of 1 MiB."""
    cards = [{"id": f"m{at}", "x": "y" * 1000} for at in range(1000)]
    return plain(orjson.dumps({"object": "list", "data": cards}))


ASKED = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"


async def test_an_own_answer_that_nobody_reads_is_counted_and_shared(tmp_path: Path) -> None:
    async with RawEngine() as engine:
        engine.gets["/v1/models"] = many_models()
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            await proxy.up()
            room = proxy.server.state.unread.room
            async with readers(proxy, 3) as clients:
                for _, writer in clients:
                    before = len(room)
                    writer.write(ASKED * 4)
                    await until(functools.partial(has_more, room, before), "it is counted")
                assert room.held_bytes < 3 * LONG + LONG // 2, "of each the first answer alone"
                for reader, writer in clients:
                    writer.transport.resume_reading()  # type: ignore[attr-defined]
                    for _ in range(4):
                        wire = await asyncio.wait_for(reader.readuntil(b"]}"), WAIT_S)
                        assert b'"m999"' in wire
            await proxy.at_rest()
            await until(lambda: not len(room), "nothing is held any more")


async def test_own_answers_end_where_there_is_no_room(tmp_path: Path) -> None:
    async with RawEngine() as engine:
        engine.gets["/v1/models"] = many_models()
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            await proxy.up()
            room = proxy.server.state.unread.room
            room.max_bytes = LONG // 2
            async with readers(proxy, 1) as [(reader, writer)]:
                writer.write(ASKED)
                writer.transport.resume_reading()  # type: ignore[attr-defined]
                await until(lambda: not proxy.listener.connections or reader.at_eof(), "it is cut")
            assert (len(room), room.held_bytes) == (0, 0)


async def test_one_that_reads_nothing_is_cut_where_there_is_no_room(tmp_path: Path) -> None:
    async with RawEngine(says(LONG_ONE)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            await proxy.up()
            room = proxy.server.state.unread.room
            room.max_bytes = LONG // 2
            async with readers(proxy, 1) as [(_, writer)]:
                writer.write(ask("/v1/chat/completions"))
                (record,) = await proxy.records(1)
            assert (record["outcome"], record["status"]) == ("client_gone", 499)
            assert "others needed the room" in record["error"]
            await proxy.at_rest()
            assert (len(room), room.held_bytes) == (0, 0)
            assert (await proxy.post(chat("x"))).status == 200
