"""Clients that leave, stall, drip or crowd: nothing of theirs outlives them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from proxy.core.kvcache.engine_cache import EngineCache
from proxy.core.kvcache.sessions import Sessions
from proxy.net import tcp
from tests.chaos.client import Connection, Got, connect, exchange, request
from tests.chaos.command import command
from tests.chaos.rig import SLOW_PROBES, Floor, Rig
from tests.support.harness import (
    DONE,
    GOOD,
    STREAM_HEAD,
    WAIT_S,
    RawEngine,
    Script,
    apart,
    chat,
    chunk,
    event,
    plain,
    says,
    stalls,
    stands_still,
    until,
    words,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BODY = orjson.dumps(chat("leaver"))
BIG = orjson.dumps(chat(words(80_000)))
HALF = STREAM_HEAD + chunk(event("half"))
ALL = HALF + chunk(b"data: [DONE]\n\n")
_SO_ATTACH_FILTER = 26
"""Of Linux; the module `socket` does not know it."""


def is_fine(got: Got) -> bool:
    return got.status == 200 and got.is_clean and got.text == "fine"


def begun(r: Rig) -> int:
    """Requests of the caller's that are in flight; the healthy flow's come and go."""
    return sum(len(link.posts) for link in r.links)


async def phase_header(r: Rig) -> Connection:
    connection = await r.connection()
    connection.send(request(BODY, {})[:60])
    await connection.writer.drain()
    return connection


async def phase_upload(r: Rig) -> Connection:
    connection = await r.connection()
    connection.send(request(BIG, {})[: len(BIG) // 2])
    await connection.writer.drain()
    return connection


async def phase_admission(r: Rig) -> Connection:
    """The body is there, and its facts are worked out beside the loop."""
    connection = await r.connection()
    connection.send(request(BIG, {}))
    await connection.writer.drain()
    return connection


async def phase_first_byte(r: Rig) -> Connection:
    connection = await r.connection()
    connection.send(request(BODY, {}))
    await until(lambda: begun(r), "an instance was asked")
    return connection


async def phase_mid_stream(r: Rig) -> Connection:
    connection = await phase_first_byte(r)
    await connection.reader.readuntil(b"half")
    return connection


async def phase_last_byte(r: Rig) -> Connection:
    connection = await phase_first_byte(r)
    await connection.reader.readuntil(b"[DONE]")
    return connection


async def phase_queued(r: Rig) -> Connection:
    """The only instance is busy with somebody else."""
    other = await r.connection()
    other.send(request(BODY, {}))
    await until(lambda: begun(r), "it is busy")
    connection = await r.connection()
    connection.send(request(BODY, {}))
    await until(lambda: r.metric("queued_requests"), "in the queue")
    return connection


Phase = Callable[[Rig], Awaitable[Connection]]
PHASES: dict[str, tuple[Phase, Script]] = {
    "queued": (phase_queued, stalls()),
    "header": (phase_header, stalls()),
    "upload": (phase_upload, stalls()),
    "admission": (phase_admission, stalls()),
    "first_byte": (phase_first_byte, stalls()),
    "mid_stream": (phase_mid_stream, stalls(HALF)),
    "last_byte": (phase_last_byte, stalls(ALL)),
}


class Left(NamedTuple):
    """What a client that left has cost."""

    forwarded: int | None
    """Requests that reached the instance; None where it may be one or none."""
    outcome: str | None
    """As logged; None where that is not looked at."""


FORWARDED = {"first_byte", "mid_stream", "last_byte", "queued"}
"""Phases in which one request has reached the instance: when queued, that of another client."""
UNLOGGED = {"header", "last_byte"}
"""Before the first there is no request, after the last it was served whole."""


def given_up(phase: str) -> Left:
    """What is to be expected."""
    forwarded = None if phase == "admission" else int(phase in FORWARDED)
    return Left(forwarded, None if phase in UNLOGGED else "client_gone")


async def left(rig: Floor, phase: str, how: str) -> Left:
    """The client leaves in this phase; whatever was begun for it ends."""
    reach, script = PHASES[phase]
    options: dict[str, Any] = SLOW_PROBES | {"total_timeout": 600.0}
    if phase == "queued":
        options["active_prefill_tokens_threshold"] = 0
    async with rig([script], **options) as r:
        connection = await reach(r)
        connection.close(how)
        if phase == "queued":
            await until(lambda: not r.metric("queued_requests"), "its place is free")
        forwarded = None if phase == "admission" else len(r.links[0].posts)
        if phase == "queued":
            r.connections[0].close(how)
        outcome = None if phase in UNLOGGED else (await r.records(1))[0]["outcome"]
        await until(lambda: not r.engines[0].busy, "the instance's work ends")
        return Left(forwarded, outcome)


async def test_f69_leaves_while_queued(rig: Floor) -> None:
    assert await left(rig, "queued", "FIN") == given_up("queued")


async def test_f70_leaves_within_the_head(rig: Floor) -> None:
    assert await left(rig, "header", "FIN") == given_up("header")


async def test_f71_leaves_during_the_upload(rig: Floor) -> None:
    assert await left(rig, "upload", "FIN") == given_up("upload")


async def test_f72_leaves_before_it_is_placed(rig: Floor) -> None:
    assert await left(rig, "admission", "FIN") == given_up("admission")


async def test_f73_leaves_before_the_first_byte(rig: Floor) -> None:
    assert await left(rig, "first_byte", "FIN") == given_up("first_byte")


async def test_f74_leaves_in_mid_stream(rig: Floor) -> None:
    assert await left(rig, "mid_stream", "FIN") == given_up("mid_stream")


async def test_f75_leaves_after_the_last_byte(rig: Floor) -> None:
    assert await left(rig, "last_byte", "FIN") == given_up("last_byte")


@pytest.mark.parametrize("phase", PHASES)
async def test_f76_reset_at_each_of_these_moments(rig: Floor, phase: str) -> None:
    assert await left(rig, phase, "RST") == given_up(phase)


async def test_f77_half_close(rig: Floor) -> None:
    async with rig([stalls(HALF)], **SLOW_PROBES) as r:
        connection = await phase_mid_stream(r)
        connection.writer.write_eof()
        assert (await r.record())["outcome"] == "client_gone"


async def test_f78_client_reads_nothing(rig: Floor) -> None:
    async def much_then_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(10_000):  # more than any kernel buffers: never all of it
            writer.write(chunk(event("x" * 60_000)))
            await writer.drain()

    async with rig([much_then_nothing], idle_timeout=0.5, **SLOW_PROBES) as r:
        connection = await r.connection(receive_bytes=4096)
        connection.send(request(BODY, {}))
        assert (await r.record())["outcome"] == "client_gone"
        await until(lambda: not r.engines[0].busy, "its instance is let go")


@pytest.mark.parametrize("what", ["head", "body"])
async def test_f79_drips(rig: Floor, what: str) -> None:
    async def drip(connection: Connection) -> bytes:
        """One byte now and then; what the proxy says to that."""
        data = request(BODY, {})
        at = 20 if what == "head" else data.index(b"\r\n\r\n") + 10
        connection.send(data[:at])

        def bytes_left() -> Iterator[bytes]:
            for i in range(at, len(data) - 1):
                if connection.reader.at_eof() or connection.reader._buffer:  # type: ignore[attr-defined]
                    return
                yield data[i : i + 1]

        with contextlib.suppress(ConnectionError):
            await apart(connection.writer, bytes_left(), 0.05)
        try:
            return await connection.reader.read()
        except ConnectionResetError:  # a byte of ours met a connection that was closed already
            return b""

    options: dict[str, Any] = {"header_timeout": 0.4, "body_timeout": 0.4}
    async with rig([GOOD], **options, **SLOW_PROBES) as r:
        dripping = [await r.connection() for _ in range(50)]
        tasks = [asyncio.create_task(drip(connection)) for connection in dripping]
        assert all([is_fine(await r.ask()) for _ in range(20)]), "others are served"
        async with asyncio.timeout(60):
            said = await asyncio.gather(*tasks)
        assert all(not text or b" 408 " in text.split(b"\r\n")[0] for text in said)
        assert len(r.links[0].posts) == 20


@pytest.mark.parametrize("count", [40, 3000])
async def test_f80_pipelined_then_gone(rig: Floor, count: int) -> None:
    async with rig([stalls()], **SLOW_PROBES) as r:
        connection = await phase_first_byte(r)
        connection.send(request(BODY, {}) * count)
        await stands_still(connection.writer.transport.get_write_buffer_size)
        connection.close()
        await until(lambda: not r.engines[0].busy, "noticed")
        assert {record["outcome"] for record in await r.records(1)} == {"client_gone"}


def vanish(connection: Connection) -> None:
    """From now on the kernel drops whatever comes for it, and acknowledges nothing."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    sock = connection.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Half of an answer, then more of it until the peer closes."""
    writer.write(HALF)
    more = itertools.takewhile(
        lambda _: not reader.at_eof(), itertools.repeat(chunk(event("more")))
    )
    await apart(writer, more, 0.02)


@pytest.mark.parametrize("script", [stalls(HALF), streams], ids=["silence", "bytes on their way"])
async def test_f81_a_host_that_vanishes(
    rig: Floor, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    """No packet says so: it is the kernel that gives up, here after a second or two."""
    soon = [(name, 1000 if name == "TCP_USER_TIMEOUT" else 1) for name, _ in tcp._OPTIONS]
    monkeypatch.setattr(tcp, "_OPTIONS", soon)
    async with rig([script], **SLOW_PROBES) as r:
        connection = await phase_mid_stream(r)
        vanish(connection)
        async with asyncio.timeout(WAIT_S):
            (record,) = await r.records(1)
        assert record["outcome"] == "client_gone"
        await until(lambda: not r.engines[0].busy, "the instance is let go")


async def test_f81_how_long_it_takes(rig: Floor) -> None:
    """The kernel's probes, and its limit on unanswered bytes."""
    async with rig([stalls(HALF)], **SLOW_PROBES) as r:
        connection = await phase_mid_stream(r)
        (runner, *_) = r.proxy.server._runners
        assert runner.server is not None
        transports = [c.transport for c in runner.server.connections]
        assert transports
        for transport in transports:
            assert transport is not None
            sock = transport.get_extra_info("socket")
            read = sock.getsockopt
            assert read(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle_s = read(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            probes = read(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            every_s = read(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            assert idle_s + probes * every_s <= 60
            assert 0 < read(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
        connection.close()


async def thousand(rig: Floor, policy: str) -> set[str]:
    """A thousand requests of one session, fifty at a time; the instances that served them."""
    async with rig([GOOD, GOOD], offload_policy=policy, **SLOW_PROBES) as r:

        async def client() -> list[Got]:
            return [await r.ask(headers={"X-Session-ID": "one"}) for _ in range(20)]

        answers = await asyncio.gather(*(client() for _ in range(50)))
        assert all(is_fine(got) for part in answers for got in part)
        assert len(r.router.known.sessions) == 1
        return {record["decode_instance"] for record in await r.records(1000)}


async def test_f82_a_thousand_clients_one_session(rig: Floor) -> None:
    assert len(await thousand(rig, "never")) == 1, "its home, whatever waits there"
    # By cost it may move, where so many at a time make home dearer than another instance.
    assert await thousand(rig, "cost") <= {"i0", "i1"}


async def test_f83_a_million_session_ids(rig: Floor) -> None:
    table, cache = Sessions(3600.0, 100_000), EngineCache("a")
    full = 0
    for i in range(1_000_000):
        table.assign(f"session-{i:07}", cache, i * 1e-3)
        if i == 200_000:
            full = sys.getallocatedblocks()
    grown = sys.getallocatedblocks() - full
    assert abs(grown) < 1000, "a full table takes no more memory, whoever comes"
    assert len(table) == 100_000
    assert cache.sessions == 100_000
    async with rig([GOOD], max_sessions=100, **SLOW_PROBES) as r:
        for i in range(300):
            assert is_fine(await r.ask(headers={"X-Session-ID": f"s{i}"}))
        assert len(r.router.known.sessions) == 100


FLOODS: dict[str, dict[str, Any]] = {
    "many": {"text": "x"},
    "large": {"text": words(40_000)},
    "high": {"text": "x", "priority": -1},
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_f120_a_tenant_floods_the_queue(rig: Floor, kind: str) -> None:
    """Of two tenants one sends hundreds; the other's few come in turn, and none is refused."""
    may_answer = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await GOOD(reader, writer)

    keys = {"hog": "sk-hog-0123456789abcdef", "few": "sk-few-0123456789abcdef"}
    options: dict[str, Any] = {
        "api_key": ",".join(f"{tenant}:{key}" for tenant, key in keys.items()),
        "active_prefill_tokens_threshold": 0,
        "max_queue": 50,
        "max_queue_bytes": 8 << 20,
        "max_queue_seconds": 60.0,
    }

    def asked(tenant: str, text: str, **fields: Any) -> asyncio.Task[Got]:
        head = {"Authorization": f"Bearer {keys[tenant]}"}
        return asyncio.create_task(r.ask(text, headers=head, user=tenant, **fields))

    engine = RawEngine(waits)
    async with rig([engine], flow=False, **options, **SLOW_PROBES) as r:
        first = asked("hog", "x")
        await until(lambda: engine.busy == 1, "the only one is busy")
        flood = [asked("hog", **FLOODS[kind]) for _ in range(200)]
        queue = r.state.waiting.queue
        await until(lambda: sum(t.done() for t in flood) + len(queue) == 200, "it is full")
        few = [asked("few", words(600)) for _ in range(5)]
        await until(lambda: any(t.done() for t in few) or len(_of(queue, "few")) == 5, "waiting")
        may_answer.set()
        answers = await asyncio.gather(*few)
        assert [got.status for got in answers] == [200] * 5
        order = [orjson.loads(body)["user"] for body in engine.posts]
        places = [i for i, tenant in enumerate(order) if tenant == "few"]
        assert places[-1] < 50, "none waits for all of the flood"
        await asyncio.gather(first, *flood)


def _of(queue: Any, tenant: str) -> list[Any]:
    return [entry for entry in queue.entries() if entry.tenant == tenant]


async def test_f116_silent_connections_take_every_place(rig: Floor) -> None:
    """Three times as many as there are places; those who speak are served beside them."""
    async with rig([GOOD], max_connections=8, header_timeout=0.5, **SLOW_PROBES) as r:
        silent = [await r.connection() for _ in range(24)]
        for _ in range(4):
            got = await r.ask()
            assert (got.status, got.text) == (200, "fine")
        for connection in silent:
            assert await asyncio.wait_for(connection.reader.read(), WAIT_S) == b""
        await until(lambda: r.metric("client_errors_total", reason="silent") == len(silent))
        assert r.metric("connections_refused_total") == 0


UNFINISHED = 31 << 20
KIB = 1 << 10
BESIDE = 64 << 20
"""Most memory beside bodies of others that never end."""


def unfinished(how: str, size: int = UNFINISHED) -> bytes:
    """A request whose last byte never comes."""
    body = b'{"model":"m","messages":[{"role":"user","content":"' + b"a" * (size - 52)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\nContent-Type: %b\r\n%b\r\n\r\n"
    if how == "chunked":
        pieces = (body[at : at + 65536] for at in range(0, len(body), 65536))
        return head % (b"application/json", b"Transfer-Encoding: chunked") + b"".join(
            b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces
        )
    kind = b"multipart/form-data; boundary=x" if how == "form" else b"application/json"
    path = b"/v1/audio/transcriptions" if how == "form" else b"/v1/chat/completions"
    length = b"Content-Length: %d" % (len(body) + 1)
    return (head % (kind, length) + body).replace(b"/v1/chat/completions", path)


@contextlib.asynccontextmanager
async def never_ending(url: str, data: bytes, count: int) -> AsyncIterator[list[Connection]]:
    """So many connections that send this and wait."""
    sent = [await connect(url) for _ in range(count)]
    try:
        for connection in sent:
            connection.send(data)
        yield sent
    finally:
        for connection in sent:
            connection.writer.transport.abort()


@pytest.mark.parametrize(
    ("how", "size", "count"),
    [
        ("length", UNFINISHED, 12),
        ("chunked", UNFINISHED, 12),
        ("length", 700 * KIB, 300),
    ],
)
async def test_f130_bodies_that_never_end(
    rig: Floor, tmp_path: Path, how: str, size: int, count: int
) -> None:
    async with RawEngine(GOOD) as engine, command(tmp_path, [engine.address]) as proxy:
        await proxy.up(1)
        assert is_fine(await proxy.ask(words(400_000)))
        before, most = proxy.rss_bytes, 0
        async with never_ending(proxy.url, unfinished(how, size), count):
            for number in range(8):
                got = await proxy.ask(words(400_000, str(number)) if number % 4 == 3 else "hi")
                assert is_fine(got), got.body[:300]
                most = max(most, proxy.rss_bytes - before)
                await asyncio.sleep(0.1)
        assert most <= BESIDE, f"{most >> 20} MiB beside them"
    rig.checked += 1


@pytest.mark.parametrize("size", [1 << 20, 3 << 20])
async def test_f169_bodies_wait_for_room_by_the_hundred(rig: Floor, size: int) -> None:
    """Of each a few bytes come, and hardly any of them has room for the rest."""
    sent = b"POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n"
    sent += b"Content-Length: %d\r\n\r\n{" % size
    async with rig([GOOD], **SLOW_PROBES) as r:
        bodies = r.proxy.server._large_bodies
        assert bodies is not None
        room = bodies.uploads.room
        async with never_ending(r.url, sent, 600) as held:
            await until(lambda: len(room.waiting) > 400, "they wait")
            for number, connection in enumerate(held[::2]):
                connection.writer.transport.abort()
                if number % 60 == 0:
                    assert is_fine(await r.ask())
        await until(lambda: not len(room), "all are gone")
        assert room.held_bytes == 0


async def test_f170_a_tenant_names_many_models(rig: Floor) -> None:
    """The instance serves all of them, and is the only one."""
    may_answer, models = asyncio.Event(), tuple(f"m{i}" for i in range(20))

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await GOOD(reader, writer)

    options: dict[str, Any] = {
        "api_key": f"hog:{HOG},few:{FEW}",
        "active_prefill_tokens_threshold": 0,
        "max_queue": 200,
        "max_queue_seconds": 60.0,
    }

    def asked(key: str, user: str, model: str) -> asyncio.Task[Got]:
        headers = {"Authorization": f"Bearer {key}"}
        return asyncio.create_task(r.ask(headers=headers, user=user, model=model))

    engine = RawEngine(waits, models=models)
    async with rig([engine], flow=False, **options, **SLOW_PROBES) as r:
        first = asked(HOG, "hog", "m0")
        await until(lambda: engine.busy == 1, "the only one is busy")
        queue = r.state.waiting.queue
        flood = [asked(HOG, "hog", model) for model in models * 2]
        await until(lambda: len(queue) == 40, "they wait")
        few = [asked(FEW, "few", "m0") for _ in range(5)]
        await until(lambda: len(queue) == 45, "all wait")
        may_answer.set()
        assert all(map(is_fine, await asyncio.gather(first, *flood, *few)))
        order = [orjson.loads(body)["user"] for body in engine.posts]
        last = [i for i, tenant in enumerate(order) if tenant == "few"][-1]
        assert last <= 14, "they take turns"


async def test_f177_an_urgent_request_seems_endless(rig: Floor) -> None:
    """Its engine would refuse it at once."""
    may_answer = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await GOOD(reader, writer)

    options: dict[str, Any] = {"active_prefill_tokens_threshold": 0, "max_queue_seconds": 10.0}
    part = {"type": "video_url", "video_url": {"url": "http://a/b"}}
    endless = chat("x") | {"messages": [{"role": "user", "content": [part] * 1000}]}
    engine = RawEngine(waits)
    engine.gets["/v1/models"] = plain(b'{"data":[{"id":"sim-8b","max_model_len":32768}]}')
    async with rig([engine], flow=False, **options, **SLOW_PROBES) as r:
        queue = r.state.waiting.queue
        first = asyncio.create_task(r.ask())
        await until(lambda: engine.busy == 1, "the only one is busy")
        urgent = asyncio.create_task(r.ask(body=endless, headers={"X-Request-Priority": "high"}))
        await until(lambda: len(queue) == 1, "it waits")
        others = [asyncio.create_task(r.ask(f"prompt {i}")) for i in range(10)]
        await until(lambda: len(queue) + sum(t.done() for t in others) == 11, "all wait")
        may_answer.set()
        assert all(map(is_fine, await asyncio.gather(first, urgent, *others)))


HOG, FEW = "sk-hog-0123456789abcdef", "sk-few-0123456789abcdef"
TWO_TENANTS = ("--api-key", f"hog:{HOG},few:{FEW}")
UNANSWERED, LATE_COUNT = 6 << 20, 24


def of(key: str, body: bytes) -> bytes:
    """A tenant's request."""
    return request(body, {"Authorization": f"Bearer {key}"})


def junk(size: int, **fields: Any) -> bytes:
    """A body of this size and of hardly any token."""
    return orjson.dumps(chat("x", **fields) | {"junk": "A" * size})


async def is_served(url: str) -> bool:
    return is_fine(await exchange(url, of(FEW, BODY)))


async def reads_nothing(url: str, key: str) -> Connection:
    """A client that asks for a long stream, and does not read."""
    connection = await connect(url, receive_bytes=4096)
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    connection.send(of(key, orjson.dumps(chat("long", stream=True))))
    return connection


class Late(RawEngine):
    """Answers short bodies; long ones when it may."""

    def __init__(self) -> None:
        super().__init__(self._late)
        self.may_answer = asyncio.Event()
        self.late = 0

    async def _late(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self.posts.pop()) > 1 << 16:
            self.late += 1
            await self.may_answer.wait()
        await GOOD(reader, writer)


async def test_f152_large_bodies_without_an_answer(rig: Floor, tmp_path: Path) -> None:
    """They cost no tokens, so all are admitted; the other tenant is served all along."""
    options = (*TWO_TENANTS, "--max-memory-bytes", "256MiB")
    async with Late() as engine, command(tmp_path, [engine.address], *options) as proxy:
        await until(lambda: is_served(proxy.url), "it serves")
        before, most, body = proxy.rss_bytes, 0, of(HOG, junk(UNANSWERED))
        hogs = []
        for _ in range(LATE_COUNT):
            hogs.append(asyncio.create_task(exchange(proxy.url, body)))
            got = await exchange(proxy.url, of(FEW, BODY))
            assert is_fine(got), got.body[:300]
            await asyncio.sleep(0.05)
            most = max(most, proxy.rss_bytes - before)
        await until(lambda: sum(t.done() for t in hogs) + engine.late >= LATE_COUNT, "all came")
        most = max(most, proxy.rss_bytes - before)
        engine.may_answer.set()
        refused = [got for got in await asyncio.gather(*hogs) if not is_fine(got)]
        assert most <= (64 << 20) + 3 * BESIDE // 4, f"{most >> 20} MiB beside them"
        assert {got.status for got in refused} == {503}
        assert len(refused) >= LATE_COUNT - (64 << 20) // UNANSWERED
    rig.checked += 1


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
MANY_PARTS = {
    "members": BODY[:-1] + b',"data_parallel_rank":0' + b',"k":0' * 490 + b"}",
    "media": orjson.dumps(chat("x") | {"messages": [{"role": "user", "content": [IMAGE] * 1024}]}),
}


@pytest.mark.parametrize("parts", MANY_PARTS)
@pytest.mark.parametrize("begun", [b"", HALF], ids=["waits", "streams"])
async def test_f185_bodies_of_many_parts_while_they_are_answered(
    rig: Floor, tmp_path: Path, parts: str, begun: bytes
) -> None:
    """Of a body of 24 KB 470 KiB were kept until its answer, of another 215 KiB for its stream."""
    count, most_each = 200, 100 * KIB
    async with RawEngine(stalls(begun)) as engine, command(tmp_path, [engine.address]) as proxy:
        await proxy.up(1)
        before, most = proxy.rss_bytes, 0
        sent = [await connect(proxy.url) for _ in range(count)]
        try:
            for connection in sent:
                connection.send(request(MANY_PARTS[parts], {}))
            await until(lambda: len(engine.posts) == count, "all are asked")
            for _ in range(5):
                await asyncio.sleep(0.1)
                most = max(most, proxy.rss_bytes - before)
        finally:
            for connection in sent:
                connection.writer.transport.abort()
        assert most <= count * most_each, f"{most // count // KIB} KiB beside each"
    rig.checked += 1


PACKED = zstd.compress(orjson.dumps(chat("a" * (4 << 20))))


async def test_f186_small_bodies_that_unpack_to_much(rig: Floor, tmp_path: Path) -> None:
    """They wait for a thread, packed: of those that were begun each had its window."""
    async with (
        RawEngine(GOOD) as engine,
        command(tmp_path, [engine.address], *TWO_TENANTS) as proxy,
    ):
        await until(lambda: is_served(proxy.url), "it serves")
        before, most = proxy.rss_bytes, 0
        body = request(PACKED, {"Authorization": f"Bearer {HOG}", "Content-Encoding": "zstd"})
        hogs = [asyncio.create_task(exchange(proxy.url, body)) for _ in range(400)]
        while not all(task.done() for task in hogs):
            assert is_fine(await exchange(proxy.url, of(FEW, BODY)))
            most = max(most, proxy.rss_bytes - before)
            await asyncio.sleep(0.05)
        answers = [await task for task in hogs]
        assert {got.status for got in answers} <= {200, 503}
        assert all(got.status == 503 or is_fine(got) for got in answers)
        assert most <= 2 * BESIDE, f"{most >> 20} MiB beside them"
    rig.checked += 1


async def test_f153_events_for_clients_that_read_nothing(rig: Floor, tmp_path: Path) -> None:
    """Whole events of megabytes wait for them; the other tenant's slow reader is not cut."""
    size, count = 4 << 20, 64
    wire = STREAM_HEAD + chunk(event("a")) + chunk(event("z" * size)) + chunk(event("fine"))

    async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_long = b"long" in engine.posts.pop()
        await (says(wire + DONE) if is_long else GOOD)(reader, writer)

    async with RawEngine(streams) as engine:
        async with command(tmp_path, [engine.address], *TWO_TENANTS) as proxy:
            await until(lambda: is_served(proxy.url), "it serves")
            before, most = proxy.rss_bytes, 0
            slow = await reads_nothing(proxy.url, FEW)
            stalled = []
            for _ in range(count):
                stalled.append(await reads_nothing(proxy.url, HOG))
                assert is_fine(await exchange(proxy.url, of(FEW, BODY)))
                most = max(most, proxy.rss_bytes - before)
            for _ in range(10):
                await asyncio.sleep(0.1)
                most = max(most, proxy.rss_bytes - before)
            slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
            got = await slow.get()
            for connection in (slow, *stalled):
                connection.writer.transport.abort()
        assert most <= 3 * BESIDE, f"{most >> 20} MiB beside them"
        assert (got.is_clean, len(got.body) > size) == (True, True)
    rig.checked += 1
