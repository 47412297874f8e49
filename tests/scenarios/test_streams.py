"""Streams that break, stall, babble or do not end: what the client gets, and what is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.core.routing import time_limits
from proxy.protocol.endpoints import Dialect
from proxy.protocol.streams.heartbeat import heartbeat
from proxy.request import relay
from tests.support.harness import (
    ANSWER,
    STREAM_HEAD,
    Answer,
    RawEngine,
    Script,
    ServedProxy,
    apart,
    chat,
    chunk,
    event,
    plain,
    resets,
    says,
    spend,
    stalls,
    until,
)

A, B = event("one"), event("two \\u00e4")
UTF8 = 'data: {"choices":[{"delta":{"content":"ä€😀"}}]}\n\n'.encode()
OPEN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
LENGTH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n"
DONE = b"data: [DONE]\n\n"
BEAT = heartbeat(Dialect.CHAT, A[6:], 0)
END = b"0\r\n\r\n"


@asynccontextmanager
async def fed(tmp_path: Path, *scripts: Script, **options: Any) -> AsyncIterator[Any]:
    settings = {"kv_connector": "none", "health_interval": 60} | options
    async with RawEngine(*scripts) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **settings) as proxy:
            yield proxy, engine
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0, "no upstream connection in use")


HEARD = bytearray()
"""What the client of `cut` has got so far."""


async def cut(proxy: ServedProxy, path: str = "/v1/chat/completions") -> bytes:
    """What a client gets of a stream that must not end cleanly."""
    HEARD.clear()
    async with proxy.http.post(path, json=chat("x")) as response:
        try:
            while piece := await response.content.readany():
                HEARD.extend(piece)
        except aiohttp.ClientPayloadError:
            return bytes(HEARD)
    raise AssertionError(f"a clean end after {bytes(HEARD)!r}")


def says_both(first: bytes, second: bytes) -> Script:
    """The second once the client has something of the first."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await until(lambda: HEARD, "heard")
        writer.write(second)

    return script


BREAKS = [
    ("killed", says(STREAM_HEAD + chunk(A), close=True), A, "engine_lost"),
    ("reset", resets(STREAM_HEAD + chunk(A) + chunk(B)), A + B, "engine_lost"),
    ("in a chunk", resets(STREAM_HEAD + chunk(A + B)[:-9]), A, "engine_lost"),
    ("in an event", resets(STREAM_HEAD + chunk(A) + chunk(B[:30])), A, "engine_lost"),
    ("in a size line", resets(STREAM_HEAD + chunk(A) + b"ff"), A, "engine_lost"),
    ("in UTF-8", resets(STREAM_HEAD + chunk(A + UTF8[:40])), A, "engine_lost"),
    ("bad chunks", says_both(STREAM_HEAD + chunk(A), b"zz\r\n"), A, "bad_upstream"),
    ("until close", says(OPEN_HEAD + A + B[:9], close=True), A, "incomplete_stream"),
    ("of a length", says(LENGTH_HEAD + A + B[:9], close=True), A, "engine_lost"),
    ("clean end", says(STREAM_HEAD + chunk(A) + END), A, "incomplete_stream"),
    (
        "half an event, clean end",
        says(STREAM_HEAD + chunk(A + B[:9]) + END),
        A,
        "incomplete_stream",
    ),
    ("silence", stalls(STREAM_HEAD + chunk(A + B[:9])), A, "stream_idle_timeout"),
    ("a role and silence", stalls(STREAM_HEAD + chunk(event(""))), event(""), "ttft_timeout"),
    (
        "an endless line",
        stalls(STREAM_HEAD + chunk(A) + chunk(b"x" * 1_100_000)),
        A,
        "bad_upstream",
    ),
]
OUTCOMES = {"stream_idle_timeout": "upstream_timeout", "ttft_timeout": "upstream_timeout"}


@pytest.mark.parametrize(("name", "script", "whole", "code"), BREAKS, ids=[b[0] for b in BREAKS])
async def test_whole_events_then_what_happened(
    tmp_path: Path, name: str, script: Script, whole: bytes, code: str
) -> None:
    # Only what is silent may take less time than a machine with much else to do needs for the rest.
    async with fed(tmp_path, script, idle_timeout=0.2 if code in OUTCOMES else 20.0) as (proxy, _):
        got = await cut(proxy)
        assert got.startswith(whole)
        last = got[len(whole) :]
        assert last.startswith(b"data: {")
        assert last.endswith(b"}\n\n")
        error = orjson.loads(last[6:])["error"]
        (record,) = await proxy.records(1)
        assert (error["code"], error["request_id"]) == (code, record["request_id"])
        outcome = OUTCOMES.get(code, "upstream_truncated")
        assert (record["outcome"], error["type"]) == (outcome, outcome)
        assert record["limit"] == ("idle" if code in OUTCOMES else None)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("how", ["lost", "silent"])
async def test_other_apis_have_their_own_error_event(tmp_path: Path, path: str, how: str) -> None:
    said = b'event: ping\ndata: {"type":"ping"}\n\n'
    script = (resets if how == "lost" else stalls)(STREAM_HEAD + chunk(said + said[:9]))
    async with fed(tmp_path, script, idle_timeout=20.0 if how == "lost" else 0.2) as (proxy, _):
        got = await cut(proxy, path)
        head, _, data = got.removeprefix(said).partition(b"data: ")
        assert head == b"event: error\n"
        body = orjson.loads(data)
        assert body["type"] == "error"
        code = "engine_lost" if how == "lost" else "ttft_timeout"
        assert body["error"]["code"] == code
        if path == "/v1/responses":
            assert (body["code"], body["sequence_number"]) == (code, 1)


MESSAGE = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@pytest.mark.parametrize(
    ("path", "script", "said"),
    [
        ("/v1/chat/completions", stalls(STREAM_HEAD + chunk(A) + chunk(DONE)), A + DONE),
        ("/v1/chat/completions", stalls(STREAM_HEAD + chunk(A + DONE)[:-2]), A + DONE),
        ("/v1/chat/completions", stalls(OPEN_HEAD + A + DONE), A + DONE),
        ("/v1/chat/completions", says(STREAM_HEAD + chunk(A + DONE + B) + END), A + DONE),
        ("/v1/chat/completions", stalls(STREAM_HEAD + chunk(A + DONE) + chunk(B)), A + DONE),
        ("/v1/chat/completions", says(STREAM_HEAD + chunk(A + DONE[:-1]) + END), A + DONE[:-1]),
        ("/v1/messages", stalls(STREAM_HEAD + chunk(A) + chunk(MESSAGE)), A + MESSAGE),
        ("/v1/messages", stalls(STREAM_HEAD + chunk(A + MESSAGE)), A + MESSAGE),
        (
            "/v1/messages",
            stalls(STREAM_HEAD + chunk(A + MESSAGE) + chunk(DONE)),
            A + MESSAGE + DONE,
        ),
    ],
)
async def test_a_stream_ends_when_it_says_so(
    tmp_path: Path, path: str, script: Script, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its instance does then: that has a moment to end, and is not asked again on it."""
    monkeypatch.setattr(relay, "GRACE_S", 0.1)
    async with fed(tmp_path, script) as (proxy, engine):
        for _ in range(2):
            answer = await proxy.post(chat("x"), path)
            assert answer.body == said
        assert {r["outcome"] for r in await proxy.records(2)} == {"ok"}
        assert len(engine.posts) == 2


async def test_an_end_that_follows_at_once_keeps_the_connection(tmp_path: Path) -> None:
    connections = set()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        await apart(writer, [STREAM_HEAD + chunk(A) + chunk(DONE), END], 0.02)

    async with fed(tmp_path, script) as (proxy, _):
        for _ in range(3):
            assert (await proxy.post(chat("x"))).body == A + DONE
            await until(lambda: proxy.connections() == 0)
        assert len(connections) == 1


async def test_heartbeats_between_events_only(tmp_path: Path) -> None:
    """Not before the first event, when nothing is promised yet; never inside of one."""
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await apart(writer, [STREAM_HEAD], 0.25)
        writer.write(chunk(A + B[:20]))
        await go.wait()
        writer.write(chunk(B[20:]) + chunk(DONE) + END)

    async with fed(tmp_path, script, heartbeat_interval=0.1) as (proxy, _):
        got = b""
        async with proxy.http.post("/v1/chat/completions", json=chat("x")) as response:
            while piece := await response.content.readany():
                got += piece
                if got.count(BEAT) == 3:
                    go.set()
        beats = got.count(BEAT)
        assert beats >= 3
        assert got == A + BEAT * beats + B + DONE


async def test_comments_are_no_progress(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(A))
        await apart(writer, repeat(chunk(b": keep-alive\n\n")), 0.02)

    async with fed(tmp_path, script, idle_timeout=0.3) as (proxy, _):
        got = await cut(proxy)
        assert b"stream_idle_timeout" in got
        assert got.count(b": keep-alive\n\n") >= 3


@pytest.mark.parametrize(("code", "is_blamed"), [(500, True), (400, False)])
async def test_an_error_event_of_the_engine_is_no_success(
    tmp_path: Path, code: int, is_blamed: bool
) -> None:
    error = b'data: {"error":{"message":"KV load failed","code":%d}}\n\n' % code
    async with fed(tmp_path, says(STREAM_HEAD + chunk(A) + chunk(error + DONE) + END)) as (p, _):
        assert (await p.post(chat("x"))).body == A + error + DONE
        (record,) = await p.records(1)
        assert (record["outcome"], str(code) in record["error"]) == ("upstream_error", True)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_segments_do_not_matter(tmp_path: Path, size: int, newline: bytes) -> None:
    said = (A + UTF8 + B).replace(b"\n", newline) * 3 + DONE.replace(b"\n", newline)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = STREAM_HEAD + chunk(said[:100]) + chunk(said[100:]) + END
        for at in range(0, len(wire), size):
            writer.write(wire[at : at + size])
            await asyncio.sleep(0)

    async with fed(tmp_path, script) as (proxy, _):
        assert (await proxy.post(chat("x"))).body == said


LIES = (
    b'{"prompt_tokens":-1,"completion_tokens":-9}',
    b'{"prompt_tokens":1e18,"completion_tokens":1000000000000000000}',
    b'{"prompt_tokens":NaN,"completion_tokens":NaN}',
    b'{"prompt_tokens":"7","completion_tokens":true,"prompt_tokens_details":[]}',
    b'{"prompt_tokens":null}',
)


async def test_usage_that_lies_counts_nothing(tmp_path: Path) -> None:
    said = [A + b'data: {"choices":[],"usage":%s}\n\n' % usage + DONE for usage in LIES]
    async with fed(tmp_path, *[says(STREAM_HEAD + chunk(one) + END) for one in said]) as (proxy, _):
        for one in said:
            assert (await proxy.post(chat("x"))).body == one
        for record, usage in zip(await proxy.records(len(LIES)), LIES, strict=True):
            counts = [record[f"{what}_tokens"] for what in ("prompt", "osl", "cached")]
            assert (counts, record["outcome"]) == ([None, None, None], "ok"), usage


WHOLE = b'{"choices":[{}]}'
SHORT = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"


@pytest.mark.parametrize(
    ("first", "body", "retries"),
    [
        (says(SHORT, close=True), b"{}", 1),
        (resets(SHORT), b"{}", 1),
        (says(plain(WHOLE) + b"extra"), WHOLE, 0),
        (says(STREAM_HEAD.replace(b"text/event-stream", b"x/y") + chunk(b"[]") + b"z\n"), b"{}", 1),
    ],
)
async def test_a_whole_answer_of_wrong_length(
    tmp_path: Path, first: Script, body: bytes, retries: int
) -> None:
    """Nothing was promised yet: one that breaks off is had from another; excess is dropped."""
    settings: dict[str, Any] = {"kv_connector": "none", "health_interval": 60}
    async with RawEngine(first) as bad, RawEngine(says(plain(b"{}"))) as good:
        instances = [f"bad={bad.address}", f"good={good.address}"]
        async with ServedProxy(tmp_path / "log", instances, **settings) as proxy:
            answer = await proxy.post(chat("x", stream=False))
            assert (answer.status, answer.body) == (200, body)
            (record,) = await proxy.records(1)
            assert (record["retries"], record["outcome"]) == (retries, "ok")
            await until(lambda: proxy.connections() == 0)


async def test_a_giant_answer_passes_unbuffered(tmp_path: Path) -> None:
    """What waits here is a read or two; row 40 of the faults has 200 MB and looks at the memory."""
    pieces, piece, most = 32, b"x" * (1 << 20), 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % (pieces << 20))
        for _ in range(pieces):
            writer.write(piece)
            await writer.drain()

    async with fed(tmp_path, script) as (proxy, _):
        size = 0
        async with proxy.http.post("/v1/chat/completions", json=chat("x", stream=False)) as got:
            async for data in got.content.iter_any():
                size += len(data)
                for protocol in proxy.listener.connections:
                    if protocol.transport is not None:
                        most = max(most, protocol.transport.get_write_buffer_size())
        assert (size, most < 1 << 20) == (pieces << 20, True)


async def test_a_late_instance_is_left_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scaled limit leads elsewhere; the last one that can be asked has all the time."""
    monkeypatch.setattr(time_limits, "FIRST_TOKEN_FIXED_S", 0.2)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await spend(1.0)  # the time is what is tested: longer than the scaled limit
        await says(ANSWER)(reader, writer)

    settings: dict[str, Any] = {"kv_connector": "none", "health_interval": 60}
    async with RawEngine(stalls()) as bad, RawEngine(slow) as good:
        instances = [f"bad={bad.address}", f"good={good.address}"]
        async with ServedProxy(tmp_path / "log", instances, **settings) as proxy:
            assert (await proxy.post(chat("x"))).text == "fine"
            (record,) = await proxy.records(1)
            assert (record["retries"], record["limit"]) == (1, "ttft")
            assert 0.2 <= record["limit_s"] < 1.0
            assert proxy.metric("upstream_retries_total", reason="late") == 1
            await proxy.at_rest()


def test_answers_are_compared() -> None:
    assert Answer(200, {}, A + B).text == "onetwo ä"


@pytest.mark.parametrize("size", [100, 50_000])
async def test_an_answer_in_one_piece_for_a_stream_has_no_first_token(
    tmp_path: Path, size: int
) -> None:
    """When that was there nobody knows: its time would teach wrong."""
    body = orjson.dumps({"choices": [{"message": {"content": "x" * size}}]})
    async with fed(tmp_path, says(plain(body))) as (proxy, _):
        assert (await proxy.post(chat("x"))).body == body
        (record,) = await proxy.records(1)
        assert (record["t_first_token"], record["outcome"]) == (None, "ok")
