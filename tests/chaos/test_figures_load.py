"""The figures that need a process of its own, or a client of somebody else's."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest

from tests.chaos import figures
from tests.chaos.client import Connection, connect, exchange, request
from tests.chaos.command import command
from tests.chaos.invariants import hits
from tests.chaos.rig import SLOW_PROBES, Floor
from tests.support.harness import (
    DONE,
    GOOD,
    STREAM_HEAD,
    RawEngine,
    Script,
    apart,
    chat,
    chunk,
    event,
    plain,
    resets,
    says,
    stands_still,
    until,
    words,
)

READERS = 200
WATCHED = 1000
"""Requests of others, each with a look: more than 6 s of them, of which there were 5 a second."""
READER_BYTES = 256 << 10
STREAMS = 500
SAID: Any = [{"role": "user", "content": "hello"}]
"""Any: the clients' own message types are of no interest here."""
BODY = orjson.dumps(chat("x"))


class Flood:
    """Events without end, as fast as they are taken."""

    def __init__(self) -> None:
        self.taken = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        piece = chunk(event("x" * 30_000))
        while True:
            writer.write(piece)
            await writer.drain()
            self.taken += 1


@pytest.mark.timeout(600)
async def test_r2_stalled_readers(rig: Floor, tmp_path: Path) -> None:
    """Once the flood stands nothing more is taken, however long it is watched: that is counted."""
    flood = Flood()
    async with RawEngine(flood) as engine, RawEngine(models=("other",)) as calm:
        async with command(tmp_path / "c", [engine.address, calm.address]) as proxy:
            await proxy.up(2)
            assert (await proxy.ask(model="other")).text == "fine"
            before = proxy.rss_bytes
            held: list[Connection] = []
            for _ in range(READERS):
                connection = await connect(proxy.url, receive_bytes=4096)
                connection.reader._limit = 4096  # type: ignore[attr-defined]
                connection.send(request(BODY, {}))
                held.append(connection)
            await until(lambda: engine.busy == READERS, "all are served")
            taken = await stands_still(lambda: flood.taken)
            highest = 0
            for _ in range(WATCHED):
                assert (await proxy.ask(model="other")).text == "fine", "others are served"
                highest = max(highest, proxy.rss_bytes)
            assert (flood.taken, engine.busy) == (taken, READERS), "all are held back"
            for connection in held:
                connection.close("RST")
            await until(lambda: not engine.busy, "all are let go")
    each = (highest - before) / READERS
    figures.say("R2", f"{READERS} stalled readers of a flood: {each / 1024:.0f} KiB of RSS each")
    assert each <= READER_BYTES
    rig.checked += 1


@pytest.mark.timeout(600)
async def test_r9_drain_with_live_streams(rig: Floor, tmp_path: Path) -> None:
    may_end, said = asyncio.Event(), 0

    async def long(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def events() -> Iterator[bytes]:
            nonlocal said
            while not may_end.is_set():
                yield chunk(event("more "))
                said += 1

        writer.write(STREAM_HEAD)
        await apart(writer, events(), 0.4)
        writer.write(DONE)

    async with RawEngine(long) as engine:
        async with command(tmp_path / "c", [engine.address], "--drain-seconds", "60") as proxy:
            await proxy.up(1)
            asked = [asyncio.create_task(proxy.ask(f"p{i}")) for i in range(STREAMS)]
            await until(lambda: engine.busy == STREAMS, "all stream")
            proxy.send_signal(signal.SIGTERM)
            await until(lambda: "draining" in proxy.log, "draining")
            enough = said + 5 * STREAMS  # whatever the drain does at its beginning
            await until(lambda: said >= enough, "all stream on")
            may_end.set()
            answers = await asyncio.gather(*asked)
            whole = sum(got.is_clean and got.is_done for got in answers)
            status = await proxy.ended()
    figures.say("R9", f"SIGTERM with {STREAMS} live streams: {STREAMS - whole} cut, exit {status}")
    assert (whole, status) == (STREAMS, 0)
    rig.checked += 1


SECRETS = [
    f"canary-{where}-{i:02d}-zq" for where in ("head", "query", "body", "said") for i in range(10)
]


@pytest.mark.timeout(600)
async def test_r15_canaries(rig: Floor, tmp_path: Path) -> None:
    """Forty secrets where clients and engines put theirs; every output at its most talkative."""
    heads, queries, bodies, said = (SECRETS[i : i + 10] for i in range(0, 40, 10))
    names: tuple[str, ...]
    names = ("Authorization", "X-Api-Key", "Cookie", "Proxy-Authorization", "X-Amz-Security-Token")
    names += ("X-Goog-Api-Key", "X-Secret", "X-Forwarded-Authorization", "Api-Key", "X-Auth-Token")
    headers = {name: f"Bearer {s}" for name, s in zip(names, heads, strict=True)}
    errors = plain(b'{"error":{"message":"%s"}}' % " ".join(said).encode(), "500 Oops")
    bad = plain(b'{"error":{"message":"%s"}}' % " ".join(said).encode(), "400 Bad")
    in_band = b'data: {"error":{"message":"%s","code":500}}\n\n' % " ".join(said).encode()
    scripts: tuple[Script, ...] = (
        *(says(errors), says(bad), resets(), says(said[0].encode() + b"\r\n\r\n", close=True)),
        *(says(STREAM_HEAD + chunk(event(said[1])) + chunk(in_band) + DONE), GOOD),
        resets(STREAM_HEAD + chunk(event(said[2]))),
    )
    engine = RawEngine(*scripts)
    options = ("--log-level", "debug", "--log-format", "json", "--ttft-timeout", "1")
    path = "/v1/chat/completions?" + "&".join(f"key{i}={q}" for i, q in enumerate(queries))
    ours = chat(" ".join(bodies[:5])) | {"user": bodies[5], "metadata": {"k": bodies[6]}}
    ours |= {"tools": [{"type": "function", "function": {"name": bodies[7]}}], "stop": bodies[8:]}
    raw = orjson.dumps(ours)
    answers = []
    async with engine, command(tmp_path / "c", [engine.address], *options) as proxy:
        await proxy.up(1)
        data = [request(raw, headers, p) for p in (path, path.replace("chat", "chat\x01"))]
        data += [request(raw[:-9], headers, path), request(raw, headers | {"Host": "a b"}, path)]
        data += [request(raw, headers | {"X-Bad\x00": heads[0]}, path)]
        data += [request(raw, headers | {"Content-Encoding": bodies[0]}, path)]
        data += [request(None, headers, path, "PATCH"), request(raw, headers, "/nowhere/" + path)]
        for one in data * 6:
            connection = await connect(proxy.url)
            connection.send(one)
            with contextlib.suppress(ConnectionError):
                answers.append(await connection.get())
            connection.close()
        outputs = [proxy.log, repr(proxy.records), await proxy.exposition()]
        paths = ("/health", "/instances", "/decisions", "/busy_threshold")
        outputs += [(await proxy.get(admin)).body.decode() for admin in paths]
    found = hits(SECRETS, *outputs)
    echoed = hits(heads + queries + bodies, *(repr(a.headers) + repr(a.body) for a in answers))
    figures.say(
        "R15",
        f"canaries: {len(found)} of {len(SECRETS)} in logs, metrics or admin answers, "
        f"{len(echoed)} of 30 in {len(answers)} answers to clients",
    )
    assert (found, echoed) == ([], [])
    rig.checked += 1


async def test_r22_event_loop_block(rig: Floor) -> None:
    """Large bodies, many streams, scrapes: no turn of the loop is long (`timed`, in conftest)."""
    many = [says(STREAM_HEAD + chunk(event("fine") * 500) + DONE), GOOD]
    async with rig(many, **SLOW_PROBES) as r:
        big = words(200_000)

        async def over_and_over(text: str) -> int:
            return sum([(await r.ask(f"{count}{text}")).is_done for count in range(30)])

        async def scrapes() -> int:
            scrape = request(None, {}, "/metrics", "GET")
            return sum([(await exchange(r.url, scrape)).status == 200 for _ in range(100)])

        texts = ("small", "little", big)
        done = await asyncio.gather(*map(over_and_over, texts), scrapes())
        assert done == [30, 30, 30, 100]


async def test_r4_official_openai_client(rig: Floor) -> None:
    """It raises on a stream that was cut, and waits as long as it is told."""
    cuts = (
        resets(STREAM_HEAD + chunk(event("half"))),
        says(STREAM_HEAD + chunk(event("h")) + b"0\r\n\r\n"),
    )
    for script in cuts:
        async with rig([script], **SLOW_PROBES) as r:
            async with openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="x") as client:
                stream = await client.chat.completions.create(
                    model="sim-8b", messages=SAID, stream=True
                )
                with pytest.raises(openai.APIError):
                    async for _ in stream:
                        pass
    busy = says(plain(b'{"error":{"message":"busy"}}', "503 Busy", "Retry-After: 1\r\n"))
    async with rig([RawEngine(busy, GOOD)], **SLOW_PROBES) as r:
        async with openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="x") as client:
            start_s = time.monotonic()
            again = await client.chat.completions.create(model="sim-8b", messages=SAID, stream=True)
            text = [c.choices[0].delta.content async for c in again if c.choices]
            waited_s = time.monotonic() - start_s
    assert text == ["fine"]
    assert waited_s >= 0.9, "Retry-After: 1"
    figures.say("R4", f"openai: raises on every cut stream; told 1 s, it waited {waited_s:.2f} s")


def named(name: str, body: bytes) -> bytes:
    return chunk(b"event: %s\ndata: %s\n\n" % (name.encode(), body))


MESSAGE = (
    STREAM_HEAD
    + named(
        "message_start",
        b'{"type":"message_start","message":{"id":"m","type":"message","role":"assistant",'
        b'"content":[],"model":"sim-8b","stop_reason":null,"stop_sequence":null,'
        b'"usage":{"input_tokens":1,"output_tokens":1}}}',
    )
    + named(
        "content_block_start",
        b'{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}',
    )
    + named(
        "content_block_delta",
        b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"half"}}',
    )
)
MESSAGE_END = (
    named("content_block_stop", b'{"type":"content_block_stop","index":0}')
    + named(
        "message_delta",
        b'{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        b'"usage":{"output_tokens":1}}',
    )
    + named("message_stop", b'{"type":"message_stop"}')
    + b"0\r\n\r\n"
)


async def test_r4_official_anthropic_client(rig: Floor) -> None:
    ask: dict[str, Any] = {"model": "sim-8b", "max_tokens": 8, "messages": SAID, "stream": True}
    for script in (resets(MESSAGE), says(MESSAGE + b"0\r\n\r\n"), says(MESSAGE, close=True)):
        async with rig([script], **SLOW_PROBES) as r:
            async with anthropic.AsyncAnthropic(base_url=r.url, api_key="x") as client:
                stream = await client.messages.create(**ask)
                with pytest.raises(anthropic.APIError):
                    async for _ in stream:
                        pass
    busy = says(plain(b'{"error":{"message":"busy"}}', "503 Busy", "Retry-After: 1\r\n"))
    async with rig([RawEngine(busy, says(MESSAGE + MESSAGE_END))], **SLOW_PROBES) as r:
        async with anthropic.AsyncAnthropic(base_url=r.url, api_key="x") as client:
            start_s = time.monotonic()
            kinds = [e.type async for e in await client.messages.create(**ask)]
            waited_s = time.monotonic() - start_s
    assert kinds[-1] == "message_stop"
    assert waited_s >= 0.9, "Retry-After: 1"
    figures.say(
        "R4", f"anthropic: raises on every cut stream; told 1 s, it waited {waited_s:.2f} s"
    )
