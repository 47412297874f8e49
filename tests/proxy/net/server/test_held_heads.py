"""Heads of requests that wait, run, are incomplete or are over: none is held beyond a room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from proxy.core.admission.largest_pays import LargestPays
from proxy.net.server.held_heads import COPIES, COPIES_IN_PARTS, UNCOUNTED_BYTES, HeldHeads
from proxy.protocol.request_framing import HEAD_BYTES, Refusal
from proxy.state.held_for_clients import Holder
from tests.proxy.net.server.test_connection import connect
from tests.support.harness import WAIT_S, RawEngine, ServedProxy, plain, says, stalls, until

KIB = 1024
CHAT = b'{"model":"sim-8b","messages":[]}'
SHORT = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"
ASKS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(CHAT), CHAT)
)
FINE = says(plain(b"{}"))


def long(request: bytes, size: int = 48 * KIB) -> bytes:
    """The request with a head of about this size."""
    line = b"X-Long: %b\r\n" % (b"y" * (6 * KIB))
    return request.replace(b"Host: a\r\n", b"Host: a\r\n" + line * (size // len(line)), 1)


def room_of(proxy: ServedProxy) -> LargestPays[Holder]:
    return proxy.server.state.heads.room


async def is_gone(reader: asyncio.StreamReader) -> bool:
    """Whether the proxy has ended the connection, without a word."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), WAIT_S) == b""
    return True


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[ServedProxy, RawEngine]]:
    """A proxy before an engine that answers nothing; nothing is held at the end."""
    async with RawEngine(stalls()) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            yield proxy, engine
            await proxy.at_rest()
            await until(lambda: not len(room_of(proxy)), "nothing is held")
            assert room_of(proxy).held_bytes == 0


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("behind", [long(SHORT), long(SHORT, HEAD_BYTES // 4)])
async def test_long_heads_behind_a_running_request_end_the_connection(
    tmp_path: Path, at_once: bool, behind: bytes
) -> None:
    async with serving(tmp_path) as (proxy, engine), connect(proxy) as (reader, writer):
        writer.write(ASKS)
        await until(lambda: engine.posts, "it is being served")
        for _ in range(6):
            if not writer.is_closing():
                writer.write(behind)
            if not at_once:
                await asyncio.sleep(0.01)
        assert await is_gone(reader)
        assert proxy.metric("client_errors_total", reason=Refusal.PIPELINED) == 1


async def test_long_heads_of_one_piece_end_the_connection(tmp_path: Path) -> None:
    async with serving(tmp_path) as (proxy, engine), connect(proxy) as (reader, writer):
        writer.write(ASKS + long(SHORT, 24 * KIB) * 4)
        assert await is_gone(reader)
        assert not engine.posts


@pytest.mark.parametrize("count", [2, 8])
async def test_bodies_behind_a_running_request_end_the_connection(
    tmp_path: Path, count: int
) -> None:
    """Of two or more: a client that has an answer may send the next before its task has ended."""
    behind = ASKS.replace(b"%d" % len(CHAT), b"%d" % (128 * KIB // count)).partition(CHAT)[0]
    async with serving(tmp_path) as (proxy, engine), connect(proxy) as (reader, writer):
        writer.write(ASKS)
        await until(lambda: engine.posts, "it is being served")
        for _ in range(count):
            if not writer.is_closing():
                writer.write(behind + b"y" * (128 * KIB // count))
        assert await is_gone(reader)
        assert proxy.metric("client_errors_total", reason=Refusal.PIPELINED) == 1


async def test_one_body_that_waits_is_counted_until_its_turn(tmp_path: Path) -> None:
    body = CHAT[:-1] + b',"x":"%b"}' % (b"y" * 60 * KIB)
    asks = ASKS.partition(CHAT)[0].replace(b"%d" % len(CHAT), b"%d" % len(body)) + body
    answers = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answers.wait()
        writer.write(plain(b"{}"))

    async with RawEngine(serve) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            async with connect(proxy) as (reader, writer):
                writer.write(ASKS)
                await until(lambda: engine.posts, "it is being served")
                writer.write(asks)
                await until(lambda: room_of(proxy).held_bytes >= 60 * KIB, "it is counted")
                answers.set()
                await asyncio.wait_for(reader.readuntil(b"{}"), WAIT_S)
                await asyncio.wait_for(reader.readuntil(b"{}"), WAIT_S)
                assert not len(room_of(proxy))


async def test_one_long_head_may_wait(tmp_path: Path) -> None:
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            async with connect(proxy) as (reader, writer):
                last = SHORT.replace(b"Host: a", b"Host: a\r\nConnection: close")
                writer.write(ASKS + long(last, 60 * KIB))
                answers = await asyncio.wait_for(reader.read(), WAIT_S)
            assert answers.count(b"HTTP/1.1 200") == 2


async def test_the_head_of_a_running_request_is_counted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (proxy, engine), connect(proxy) as (_, writer):
        head = long(ASKS)
        writer.write(head)
        await until(lambda: engine.posts, "it is being served")
        assert 0.9 < room_of(proxy).held_bytes / (COPIES * len(head)) < 1.1
        writer.write(long(SHORT, 24 * KIB))
        more = COPIES * (len(head) + 24 * KIB)
        await until(lambda: room_of(proxy).held_bytes > 0.9 * more, "both are counted")


@pytest.mark.parametrize("parts", [1, 5])
async def test_the_last_head_of_an_idle_connection_is_counted(tmp_path: Path, parts: int) -> None:
    """The parser has it until another one begins: an empty line begins none."""
    async with serving(tmp_path) as (proxy, _), connect(proxy) as (reader, writer):
        head = long(SHORT)
        for at in range(0, len(head), len(head) // parts + 1):
            writer.write(head[at : at + len(head) // parts + 1])
            await asyncio.sleep(0.01)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\r\n")
        await asyncio.sleep(0.05)
        assert 0.9 < room_of(proxy).held_bytes / (COPIES * len(head)) < 1.1
        writer.write(SHORT)
        await until(lambda: not len(room_of(proxy)), "the long one is gone")


async def test_an_incomplete_head_is_counted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (proxy, _), connect(proxy) as (_, writer):
        head = long(SHORT)[:-2]
        writer.write(head)
        least = 0.9 * COPIES_IN_PARTS * len(head)
        await until(lambda: room_of(proxy).held_bytes > least, "it is counted")


async def test_a_refused_head_is_counted_while_it_waits(tmp_path: Path) -> None:
    async with serving(tmp_path) as (proxy, engine), connect(proxy) as (_, writer):
        writer.write(ASKS)
        await until(lambda: engine.posts, "it is being served")
        refused = long(SHORT).replace(b"GET /live", b"TRACE /live")
        writer.write(refused)
        await until(lambda: room_of(proxy).held_bytes > len(refused), "it is counted")


async def test_what_is_behind_a_refused_request_is_not_parsed(tmp_path: Path) -> None:
    async with serving(tmp_path) as (proxy, engine), connect(proxy) as (_, writer):
        writer.write(ASKS)
        await until(lambda: engine.posts, "it is being served")
        writer.write(SHORT.replace(b"GET", b"TRACE"))
        (connection,) = proxy.listener.connections
        await until(lambda: connection.request_count == 2, "it is refused")
        for _ in range(8):
            writer.write(SHORT)
            await asyncio.sleep(0.01)
        assert connection.request_count == 2


@pytest.mark.parametrize("request_", [SHORT, ASKS, long(SHORT, UNCOUNTED_BYTES // 4)])
async def test_short_heads_are_not_counted(tmp_path: Path, request_: bytes) -> None:
    async with RawEngine(FINE) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            async with connect(proxy) as (reader, writer):
                for _ in range(2):
                    writer.write(request_)
                    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                    assert not len(room_of(proxy))


async def test_in_a_full_room_the_largest_goes(tmp_path: Path) -> None:
    """A connection with short heads is served all the same."""
    async with serving(tmp_path) as (proxy, _), AsyncExitStack() as stack:
        room_of(proxy).max_bytes = 2 * COPIES * 48 * KIB
        small, *rest = [await stack.enter_async_context(connect(proxy)) for _ in range(5)]
        small[1].write(long(SHORT, 12 * KIB))
        assert b" 200 " in await small[0].readuntil(b"\r\n\r\n")
        for _, writer in rest:
            writer.write(long(SHORT))
        await until(lambda: len(proxy.listener.connections) == 3, "two had to go")
        assert room_of(proxy).held_bytes <= room_of(proxy).max_bytes
        small[1].write(SHORT)
        assert await small[0].readuntil(b"\r\n\r\n")


def test_one_without_room_ends() -> None:
    class Full:
        def take(self, holder: HeldHeads, owner: str, size: int) -> bool:
            return size < 10

        def free(self, holder: HeldHeads) -> None:
            ended.append("free")

    ended: list[str] = []
    held = HeldHeads(Full(), "a", lambda: ended.append("ended"))
    held.hold(9)
    assert not ended
    held.hold(11)
    held.free()
    assert (ended, held.held_bytes) == (["ended", "free"], 11)
