"""Faults after the client's first byte: said in the stream, never hidden behind a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from proxy.core.fleet.health import State
from tests.chaos.client import Got, connect, request
from tests.chaos.command import command
from tests.chaos.invariants import samples
from tests.chaos.rig import SLOW_PROBES, Floor, Rig
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
    stalls,
    until,
)

DONE_EVENT = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def is_cut(got: Got) -> bool:
    """An error event as the last one, no [DONE], no clean end."""
    return got.status == 200 and not got.is_clean and len(got.errors) == 1 and not got.is_done


class Broken(NamedTuple):
    """A stream that its engine broke off, as its client and the log see it."""

    got: Got
    outcome: str
    retries: int
    elsewhere: int
    """Requests that reached the other instance."""

    @property
    def is_told(self) -> bool:
        """The client was told, and nothing was tried again: it has a part already."""
        ended = self.outcome, self.retries, self.elsewhere
        return is_cut(self.got) and ended == ("upstream_truncated", 0, 0)


async def cut(rig: Floor, script: Script) -> Broken:
    """What becomes of a stream that this script breaks off."""
    async with rig([script, GOOD], **SLOW_PROBES) as r:
        got = await r.ask()
        record = await r.record()
        return Broken(got, record["outcome"], record["retries"], len(r.links[1].posts))


class Passed(NamedTuple):
    """An answer as its client got it, and what the next one said."""

    status: int
    is_clean: bool
    body: bytes
    has_trailers: bool
    next: str


def undisturbed(body: bytes) -> Passed:
    """It came as it was sent, without trailers, and the next answer is as good as without it."""
    return Passed(200, is_clean=True, body=body, has_trailers=False, next="fine")


async def passed(rig: Floor, wire: bytes) -> Passed:
    """What becomes of these bytes as an answer."""
    async with rig([RawEngine(says(wire), GOOD)], **SLOW_PROBES) as r:
        got = await r.ask()
        has_trailers = "trailer-seen" in got.headers
        return Passed(got.status, got.is_clean, got.body, has_trailers, (await r.ask()).text)


async def lost_after(r: Rig, tokens: int, how: str) -> Got:
    """An answer whose engine goes away once it has generated this much."""
    assert r.sims is not None
    engine = r.sims.engines[0]
    asked = asyncio.create_task(r.ask(max_tokens=6000))
    await until(lambda: engine.stats()["generated_tokens"] >= tokens, "tokens")
    await until(
        lambda: r.router.known.ledger.load("i0").decode_requests, "the client has the first"
    )
    if how == "kill":
        await r.kill(0)
    else:
        r.links[0].cut(resets=True)
    return await asked


@pytest.mark.parametrize("tokens", [1, 10, 1000])
async def test_f23_engine_killed_after_n_tokens(rig: Floor, tokens: int) -> None:
    async with rig(sims=1, sim={"speed": 20.0}, **SLOW_PROBES) as r:
        got = await lost_after(r, tokens, "kill")
        assert is_cut(got)
        assert (await r.record())["outcome"] == "upstream_truncated"


@pytest.mark.parametrize("tokens", [1, 10, 1000])
async def test_f24_reset_after_n_tokens(rig: Floor, tokens: int) -> None:
    async with rig(sims=1, sim={"speed": 20.0}, **SLOW_PROBES) as r:
        got = await lost_after(r, tokens, "reset")
        assert is_cut(got)
        assert (await r.record())["outcome"] == "upstream_truncated"


HALVES = (b'data: {"choi', b'data: {"choices":[{"delta":{"content":"\xe2\x82')


@pytest.mark.parametrize("half", HALVES)
async def test_f25_cut_inside_an_event(rig: Floor, half: bytes) -> None:
    whole_event = event("whole")
    for script in (
        resets(STREAM_HEAD + chunk(whole_event) + chunk(half)),
        resets(STREAM_HEAD + chunk(whole_event) + b"40\r\n" + half),
        says(STREAM_HEAD + chunk(whole_event) + chunk(half) + LAST),
    ):
        seen = await cut(rig, script)
        assert seen.is_told, seen
        got = seen.got
        told = [orjson.loads(one.removeprefix(b"data: ")) for one in got.events]
        assert [list(one) for one in told] == [["choices"], ["error"]], "no half of an event"
        assert got.text == "whole"


async def test_f26_the_connection_is_the_end(rig: Floor) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    seen = await cut(rig, says(head + event("half"), close=True))
    assert seen.is_told, seen
    async with rig([says(head + event("all") + DONE_EVENT, close=True)], **SLOW_PROBES) as r:
        got = await r.ask()
        assert (got.text, got.is_clean, got.is_done) == ("all", True, True)


async def test_f27_a_clean_end_without_done(rig: Floor) -> None:
    seen = await cut(rig, says(STREAM_HEAD + chunk(event("half")) + LAST))
    assert seen.is_told, seen


async def test_f28_silence_in_mid_stream(rig: Floor) -> None:
    async with rig([stalls(STREAM_HEAD + chunk(event("half")))], idle_timeout=0.3) as r:
        got = await r.ask()
        assert is_cut(got)
        assert (await r.record())["outcome"] == "upstream_timeout"


async def test_f29_just_within_the_idle_limit(rig: Floor) -> None:
    async def now_and_then(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        await apart(writer, [chunk(event("x"))] * 5, 0.25)
        writer.write(DONE)

    async with rig([now_and_then], idle_timeout=0.6, **SLOW_PROBES) as r:
        got = await r.ask()
        assert (got.text, got.is_clean) == ("xxxxx", True)


@pytest.mark.parametrize(
    "garbage", [b"data: {not json\n\n", b"data: \x00\x01\xff\n\n", b"no field at all\n\n\n\n"]
)
async def test_f30_garbage_inside_the_stream(rig: Floor, garbage: bytes) -> None:
    body = [event("a"), garbage, event("b"), DONE_EVENT]
    wire = STREAM_HEAD + b"".join(map(chunk, body)) + LAST
    assert await passed(rig, wire) == undisturbed(b"".join(body))


async def test_f30_a_line_without_end(rig: Floor) -> None:
    endless = chunk(event("a")) + chunk(b"data: " + b"x" * (10 << 20))
    async with rig([says(STREAM_HEAD + endless + DONE)], **SLOW_PROBES) as r:
        got = await r.ask()
        assert not got.is_clean
        assert len(got.body) < 4 << 20


def with_ids(count: int) -> bytes:
    """vLLM's first event of a chat with `return_token_ids`: it repeats the prompt."""
    ids = b",".join([b"%d" % (100_000 + at % 50_000) for at in range(count)])
    choice = b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}'
    return b'data: {"choices":[%b],"prompt_token_ids":[%b]}\n\n' % (choice, ids)


async def test_f113_a_first_event_with_token_ids(rig: Floor) -> None:
    body = with_ids(160_000) + event("fine") + DONE_EVENT
    script = says(STREAM_HEAD + chunk(body) + LAST)
    async with rig([script], **SLOW_PROBES) as r:
        got = await r.ask()
        assert (got.is_clean, got.body == body, got.text) == (True, True, "fine")
        assert (await r.record())["outcome"] == "ok"


async def test_f113_one_over_the_cap(rig: Floor) -> None:
    script = says(STREAM_HEAD + chunk(with_ids(1_300_000)) + chunk(event("x")) + DONE)
    async with rig([script], **SLOW_PROBES) as r:
        for _ in range(6):
            got = await r.ask()
            assert is_cut(got)
            assert [error["code"] for error in got.errors] == ["event_too_long"]
        (name,) = (
            m.instance.name for m in r.router.known.fleet.members() if "calm" not in m.instance.name
        )
        assert r.is_up(name)
        assert not r.router.known.fleet.has_failed_lately(name)


ENDLESS = 7900 << 10
BESIDE = 64 << 20
"""Most memory beside events without an end."""


async def test_f132_events_without_an_end(rig: Floor, tmp_path: Path) -> None:
    """Each within the cap for one; all of them together are too much."""
    sent = STREAM_HEAD + chunk(event("a")) + b"%x\r\n" % (2 * ENDLESS) + b"data: "
    async with RawEngine(stalls(sent + b"x" * ENDLESS)) as engine:
        async with command(tmp_path, [engine.address]) as proxy:
            await proxy.up(1)
            before, most = proxy.rss_bytes, 0
            asked = [asyncio.create_task(proxy.ask(f"{n}", stream=True)) for n in range(16)]
            try:
                for _ in range(20):
                    await asyncio.sleep(0.1)
                    most = max(most, proxy.rss_bytes - before)
                cut = [task.result() for task in asked if task.done()]
            finally:
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
    assert most <= BESIDE, f"{most >> 20} MiB beside them"
    assert len(cut) >= 12
    assert {error["code"] for got in cut for error in got.errors} == {"event_too_long"}
    rig.checked += 1


async def test_f132_costs_the_engine_that_has_most(rig: Floor, tmp_path: Path) -> None:
    """Another engine's long event, which is as long as any of them, passes."""
    sent = STREAM_HEAD + chunk(event("a")) + b"%x\r\n" % (2 * ENDLESS) + b"data: "
    body = event("b") + with_ids(1_000_000) + event("fine") + DONE_EVENT

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await apart(writer, [STREAM_HEAD, chunk(body)[: len(body) // 2]], 0)
        await may_end.wait()
        writer.write(chunk(body)[len(body) // 2 :] + LAST)

    may_end = asyncio.Event()
    async with (
        RawEngine(stalls(sent + b"x" * ENDLESS)) as bad,
        RawEngine(slowly, models=("b",)) as good,
    ):
        async with command(tmp_path, [bad.address, good.address]) as proxy:
            await proxy.up(2)
            honest = asyncio.create_task(proxy.ask("long", model="b", stream=True))
            asked = [asyncio.create_task(proxy.ask(f"{n}", stream=True)) for n in range(8)]
            await until(lambda: any(task.done() for task in asked), "some are cut")
            may_end.set()
            got = await honest
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
    assert (got.is_clean, len(got.body), got.errors) == (True, len(body), [])
    rig.checked += 1


async def test_f31_one_byte_per_segment(rig: Floor) -> None:
    body = [event("a€ü"), b": comment\n\n", event("b\\n"), DONE_EVENT]
    wire = STREAM_HEAD + b"".join(map(chunk, body)) + LAST
    async with rig([says(wire)], **SLOW_PROBES) as r:
        r.links[0].down.slice_bytes = 1
        got = await r.ask()
        assert (got.is_clean, got.body) == (True, b"".join(body))


async def test_f32_a_thousand_events_in_one_segment(rig: Floor) -> None:
    body = b"".join(event(f"{i} ") for i in range(1000)) + DONE_EVENT
    assert await passed(rig, STREAM_HEAD + chunk(body) + LAST) == undisturbed(body)


MIGRATES: dict[str, Any] = {"migration_limit": 1, "kv_connector": "none"}


@pytest.mark.parametrize(
    "unit", [b'"usage":{', b'"content"', b"\\n:", b'"finish_reason":"abor', b"{"]
)
@pytest.mark.parametrize("options", [{}, MIGRATES], ids=["stays", "may-move"])
async def test_f171_an_event_made_of_what_is_searched_for(
    rig: Floor, unit: bytes, options: dict[str, Any]
) -> None:
    """As a client can have one made: engines repeat its tools in a Responses stream."""
    long = b'data: {"a":"' + unit.replace(b'"', b'\\"') * ((3 << 20) // len(unit)) + b'"}\n\n'
    body = event("a") + long + event("b") + DONE_EVENT
    wire = STREAM_HEAD + chunk(body) + LAST
    async with rig([RawEngine(says(wire), GOOD)], **options, **SLOW_PROBES) as r:
        got = await r.ask()
        assert (got.is_clean, got.body) == (True, body)


async def test_f172_comments_before_the_first_event(rig: Floor) -> None:
    comments = [b": %d\n" % at for at in range(3000)]

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await apart(writer, [STREAM_HEAD, *map(chunk, comments)], 0)
        writer.write(chunk(b"\n" + event("fine") + DONE_EVENT) + LAST)

    async with rig([RawEngine(drips)], **SLOW_PROBES) as r:
        got = await r.ask()
        assert (got.status, got.is_clean, got.text) == (200, True, "fine")
        assert got.body == b"".join(comments) + b"\n" + event("fine") + DONE_EVENT


@pytest.mark.parametrize("tiny", [b"data:{}\n\n", b":\n\n", b"data:\n\n", b"event:x\n\n"])
@pytest.mark.parametrize("options", [{}, MIGRATES], ids=["stays", "may-move"])
async def test_f173_a_flood_of_tiny_events(
    rig: Floor, tiny: bytes, options: dict[str, Any]
) -> None:
    begin = first("a", [1], prompt_token_ids=[7])
    body = begin + tiny * 100_000 + event("b") + DONE_EVENT
    wire = STREAM_HEAD + chunk(body) + LAST
    async with rig([RawEngine(says(wire), GOOD)], **options, **SLOW_PROBES) as r:
        got = await r.ask(max_tokens=1_000_000)
        assert got.is_clean
        assert (got.text, got.body.count(b"\n\n")) == ("ab", 100_003)


async def test_f175_events_without_text_behind_very_many_ids(rig: Floor) -> None:
    begin = first("", [1], prompt_token_ids=[7])
    many = first("", [1] * 1_000_000)
    body = begin + many + first("", [1]) * 3000 + first("fine", [2]) + DONE_EVENT
    wire = STREAM_HEAD + b"".join(map(chunk, [begin, body[len(begin) :]])) + LAST
    async with rig([RawEngine(says(wire), GOOD)], **MIGRATES, **SLOW_PROBES) as r:
        got = await r.ask(max_tokens=1_000_000)
        assert (got.is_clean, got.text) == (True, "fine")


async def test_f178_an_engine_counts_a_few_words_as_millions(rig: Floor) -> None:
    usage = {"prompt_tokens": 100_000_000, "completion_tokens": 1, "total_tokens": 100_000_001}
    told = b"data: %b\n\n" % orjson.dumps({"choices": [], "usage": usage})
    wire = STREAM_HEAD + chunk(event("a") + told + DONE_EVENT) + LAST
    may_end = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if r.attempts > 1:
            writer.write(STREAM_HEAD + chunk(event("b")))
            await may_end.wait()
            writer.write(chunk(DONE_EVENT) + LAST)
        else:
            writer.write(wire)

    async with rig([RawEngine(waits)], **SLOW_PROBES) as r:
        mine = {"X-Session-ID": "s"}
        assert (await r.ask("few words", headers=mine)).is_clean
        again = asyncio.create_task(r.ask("few words, and more", headers=mine))
        try:
            await until(lambda: r.router.known.ledger.load("i0").decode_requests, "it runs")
            assert r.router.known.ledger.load("i0").ongoing_tokens < 5000
        finally:
            may_end.set()
        assert (await again).is_clean


async def test_f179_what_a_stream_that_may_move_keeps(rig: Floor) -> None:
    size = 15_000
    begin = first("a", [1], prompt_token_ids=[7])
    texts = [first("\N{GRINNING FACE}" + "a" * size, [2]) for _ in range(50)]
    may_end = asyncio.Event()

    async def says_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await apart(writer, [STREAM_HEAD, chunk(begin), *map(chunk, texts)], 0)
        await may_end.wait()
        writer.write(chunk(DONE_EVENT) + LAST)

    async with rig([RawEngine(says_much)], **MIGRATES, **SLOW_PROBES) as r:
        memory = r.proxy.server.state.in_flight.trails
        asked = asyncio.create_task(r.ask(stop=["\nUser:"]))
        try:
            await until(lambda: memory.taken_bytes > 25 * size, "it is counted")
        finally:
            may_end.set()
        got = await asked
        assert (got.is_clean, got.body.count(b"\n\n")) == (True, 52)
        assert not memory.taken_bytes


@pytest.mark.parametrize("behind", [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nfoo", b"\r\n"])
async def test_f33_data_after_the_end(rig: Floor, behind: bytes) -> None:
    body = event("a") + DONE_EVENT
    assert await passed(rig, STREAM_HEAD + chunk(body) + LAST + behind) == undisturbed(body)


async def test_f34_done_but_never_the_end(rig: Floor) -> None:
    async with rig(
        [stalls(STREAM_HEAD + chunk(event("a")) + chunk(DONE_EVENT))], idle_timeout=3.0
    ) as r:
        got = await r.ask()
        assert (got.is_clean, got.is_done) == (True, True)
        assert (await r.record())["outcome"] == "ok"


def lengthy(length: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % length + body


async def test_f35_wrong_length(rig: Floor) -> None:
    body = b'{"choices":[]}'
    long = lengthy(100, body)
    for script in (says(long, close=True), resets(long), stalls(long)):
        options: dict[str, Any] = {"idle_timeout": 0.3, "ttft_timeout": 0.5}
        async with rig([script], **options, **SLOW_PROBES) as r:
            got = await r.ask(stream=False)
            assert got.status in (502, 504) or not got.is_clean
            assert (await r.record())["outcome"] != "ok"
    async with rig([RawEngine(says(lengthy(len(body), body + body)), GOOD)], **SLOW_PROBES) as r:
        assert (await r.ask(stream=False)).body == body
        assert (await r.ask()).text == "fine"


async def test_f36_trailers(rig: Floor) -> None:
    body = event("a") + DONE_EVENT
    wire = STREAM_HEAD + chunk(body) + b"0\r\nX-Trailer: evil\r\n\r\n"
    assert await passed(rig, wire) == undisturbed(body)


async def test_f37_an_error_event_of_the_engine(rig: Floor) -> None:
    error = b'data: {"error":{"message":"out of memory","type":"x","code":500}}\n\n'
    wire = STREAM_HEAD + chunk(event("a")) + chunk(error) + chunk(DONE_EVENT) + LAST
    async with rig([says(wire), GOOD], **SLOW_PROBES) as r:
        got = await r.ask()
        assert got.errors == [{"message": "out of memory", "type": "x", "code": 500}]
        record = await r.record()
        assert record["outcome"] not in ("ok", None)
        assert record["retries"] == 0


LIES: Sequence[bytes] = (
    b'{"prompt_tokens":-5,"completion_tokens":-7,"total_tokens":-12}',
    b'{"prompt_tokens":1e18,"completion_tokens":1e308}',
    b'{"prompt_tokens":1000000000000000000,"completion_tokens":1000000000000000000}',
    b'{"prompt_tokens":NaN,"completion_tokens":Infinity}',
    b'{"prompt_tokens":"9","completion_tokens":[],"prompt_tokens_details":7}',
    b'{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":-1}}',
    b'{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":99999999}}',
    b'{"prompt_tokens":true,"completion_tokens":null}',
    b"null",
    b"[]",
)


async def test_f38_usage_lies(rig: Floor) -> None:
    def streamed(usage: bytes) -> bytes:
        last = b'data: {"choices":[],"usage":%s}\n\n' % usage
        return STREAM_HEAD + chunk(event("fine")) + chunk(last) + DONE

    def at_once(usage: bytes) -> bytes:
        message = b'{"choices":[{"index":0,"message":{"content":"fine"}}],"usage":%s}'
        return plain(message % usage)

    scripts = [says(make(usage)) for usage in LIES for make in (streamed, at_once)]
    async with rig([RawEngine(*scripts)], **SLOW_PROBES) as r:
        for i in range(len(scripts)):
            got = await r.ask(f"prompt {i}", stream=i % 2 == 0)
            assert (got.status, got.is_clean) == (200, True), LIES[i // 2]
        for record in await r.records(len(scripts)):
            told = [record[k] for k in ("prompt_tokens", "cached_tokens", "osl_tokens")]
            assert all(n is None or 0 <= n < 10**12 for n in told), told
        values = samples(r.exposition)
        names = ("hit_tokens_total", "new_tokens_total", "osl_tokens_sum", "cached_tokens_total")
        assert all(0 <= value < 10**12 for name, _, value in values if name in names)


async def test_f39_flood_to_a_slow_client(rig: Floor) -> None:
    sent = 0

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(event("x" * 60_000)))
            await writer.drain()
            sent += 60_000

    async with rig([floods], idle_timeout=0.5, **SLOW_PROBES) as r:
        connection = await r.connection(receive_bytes=4096)
        connection.send(request(orjson.dumps(chat("x")), {}))
        await until(lambda: r.engines[0].busy, "it is being served")
        await until(
            lambda: r.state.in_flight.count - len(r.flow.bad) <= 1 and not r.engines[0].busy
        )
        assert sent < 96 << 20, "the kernels' buffers, not ours"
        assert (await r.record())["outcome"] == "client_gone"
        connection.close("RST")


async def test_f40_two_hundred_megabytes(rig: Floor, tmp_path: Path) -> None:
    size = 200 << 20

    async def huge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(lengthy(size, b""))
        piece = b"x" * (1 << 20)
        for _ in range(200):
            writer.write(piece)
            await writer.drain()

    async with RawEngine(huge) as engine, command(tmp_path / "c", [engine.address]) as proxy:
        await proxy.up(1)
        before = proxy.rss_bytes
        connection = await connect(proxy.url)
        connection.send(request(orjson.dumps(chat("x", stream=False)), {}))
        await connection.reader.readuntil(b"\r\n\r\n")
        got = 0
        highest = 0
        while got < size:
            got += len(await connection.reader.read(1 << 20))
            highest = max(highest, proxy.rss_bytes)
        connection.close()
        assert highest - before < 32 << 20
        rig.checked += 1


@pytest.mark.parametrize("how", ["kill", "reset"])
async def test_f125_the_stream_goes_on_elsewhere(rig: Floor, how: str) -> None:
    async with rig(sims=2, sim={"speed": 20.0}, migration_limit=1, **SLOW_PROBES) as r:
        whole = await r.ask(max_tokens=1500)
        asked = asyncio.create_task(r.ask(max_tokens=1500))

        def runs() -> list[int]:
            return [i for i in range(2) if r.router.known.ledger.load(f"i{i}").decode_requests]

        await until(runs, "the client has its first token")
        (engine,) = runs()
        if how == "kill":
            await r.kill(engine)
        else:
            r.links[engine].cut(resets=True)
        got = await asked
        assert (got.is_clean, got.is_done, got.errors) == (True, True, [])
        assert got.text == whole.text
        _, record = await r.records(2)
        assert [row["ended"] for row in record["migrations"]] == ["moved"]
        assert record["outcome"] == "ok"


def first(text: str, ids: list[int], **more: Any) -> bytes:
    """An event of a chat with its token ids."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "token_ids": ids}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "sim-8b"}
    return b"data: %b\n\n" % orjson.dumps(head | {"choices": [choice]} | more)


async def test_f138_who_is_to_go_on_with_a_drained_stream_hangs(rig: Floor) -> None:
    """Its client does not stand still for longer than a second; the stream stays."""
    words = [f" {n}" for n in range(80)]
    posts = 0

    async def runs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal posts
        posts += 1
        if posts > 1:
            await reader.read()  # hangs
            return
        writer.write(STREAM_HEAD + chunk(first("a", [1], prompt_token_ids=[7, 8])))
        for n, word in enumerate(words):
            writer.write(chunk(first(word, [n])))
            await asyncio.sleep(0.02)
        writer.write(chunk(DONE_EVENT) + LAST)

    async with rig([runs, runs], flow=False, migration_limit=1, **SLOW_PROBES) as r:
        asked = asyncio.create_task(r.ask())
        flying = r.state.in_flight
        await until(lambda: flying.movable, "it streams")

        def runs_on() -> list[str]:
            loads = {f"i{n}": r.router.known.ledger.load(f"i{n}") for n in range(2)}
            return [name for name, load in loads.items() if load.decode_tokens]

        await until(runs_on, "its first token")
        (name,) = runs_on()
        path = f"/instances/{name}?drain=true&mode=migrate"
        assert (await r.raw(request(None, {}, path, "DELETE"))).status == 202
        got = await asked
        assert (got.text, got.is_clean, got.is_done) == ("a" + "".join(words), True, True)
        assert posts == 3
        (record,) = await r.records(1)
        assert [row["ended"] for row in record["migrations"]] == ["finished"]
        others = [m for m in r.router.known.fleet.members() if m.instance.name != name]
        assert not any(m.health.has_failed_lately for m in others), "it had no time to speak of"


async def test_f139_a_stop_string_begins_before_a_move(rig: Floor) -> None:
    """What an engine holds back for it is 5 characters; the other one says the rest of it."""
    posts = 0

    async def says_a_part(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal posts
        posts += 1
        if posts == 1:
            parts = [
                first("Hello", [1], prompt_token_ids=[7]),
                first(" you", [2]),
                first("\nU", [3]),
            ]
            writer.write(STREAM_HEAD + b"".join(map(chunk, parts)))
            await writer.drain()
            writer.transport.abort()
            return
        choice = {"index": 0, "text": "User: go away then", "finish_reason": None}
        told = {"id": "cmpl-1", "choices": [choice | {"token_ids": [5, 6]}]}
        end = {"id": "cmpl-1", "choices": [choice | {"text": "", "finish_reason": "length"}]}
        events = [b"data: %b\n\n" % orjson.dumps(one) for one in (told, end)]
        await says(STREAM_HEAD + b"".join(map(chunk, [*events, DONE_EVENT])) + LAST)(reader, writer)

    async with rig([says_a_part] * 2, flow=False, migration_limit=1, **SLOW_PROBES) as r:
        got = await r.ask(stop=["\nUser:"], temperature=1)
        assert (got.text, got.is_clean, got.is_done) == ("Hello you\nU", True, True)
        assert b'"finish_reason":"stop"' in got.body
        assert posts == 2


@pytest.mark.parametrize("limit", [0, 1])
async def test_f140_an_engine_hangs_in_mid_stream(
    rig: Floor, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Its streams end, or go on elsewhere, once it is out for certain; the words say why."""
    monkeypatch.setattr("proxy.fleet.instances.MUTE_S", 0.5)

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(first_asked) == 1:
            writer.write(STREAM_HEAD + chunk(first("half", [1], prompt_token_ids=[7, 8])))
            (engines[0] if engines[0].posts else engines[1]).gets["/health"] = never
            await reader.read()
        else:
            choice = {"index": 0, "text": " and half", "finish_reason": "stop", "token_ids": [5]}
            told = b"data: %b\n\n" % orjson.dumps({"id": "cmpl-1", "choices": [choice]})
            await says(STREAM_HEAD + chunk(told) + chunk(DONE_EVENT) + LAST)(reader, writer)

    async def in_turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first_asked.append(1)
        await half(reader, writer)

    first_asked: list[int] = []
    engines = [RawEngine(in_turn), RawEngine(in_turn)]
    options: dict[str, Any] = {"health_timeout": 0.2, "migration_limit": limit}
    async with rig(engines, **options) as r:
        got = await r.ask()
        (record,) = await r.records(1)
        said = [
            line for line in r.log.lines if "answers no health check, and has sent nothing" in line
        ]
        assert any("1 answers ended" in line for line in said)
        if limit:
            assert (got.text, got.is_clean, got.is_done) == ("half and half", True, True)
            assert [row["ended"] for row in record["migrations"]] == ["moved"]
        else:
            assert is_cut(got)
            assert (
                "answers no health check, and has sent nothing for 0.5 s"
                in got.errors[0]["message"]
            )
            assert record["outcome"] == "upstream_truncated"
            assert any("with --migration-limit 1 it could have migrated" in line for line in said)


async def test_f140_one_that_goes_on_speaking_keeps_its_streams(
    rig: Floor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its probes fail, and it is ejected; but its streams flow, so they are not ended."""
    monkeypatch.setattr("proxy.fleet.instances.MUTE_S", 2.0)
    may_end = asyncio.Event()

    async def speaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        engine.gets["/health"] = plain(b"", "500 Internal Server Error")
        while not may_end.is_set():
            writer.write(chunk(event("x")))
            await asyncio.sleep(0.05)
        writer.write(chunk(DONE_EVENT) + LAST)

    engine = RawEngine(speaks)
    async with rig([engine, GOOD], health_timeout=0.2) as r:
        asked = asyncio.create_task(r.ask())
        await until(lambda: engine.busy or asked.done(), "it streams")
        if not engine.busy:  # the other one was asked
            await asked
            return
        member = r.router.known.fleet.get("i0")
        assert member is not None
        await until(lambda: member.health.is_out_for_certain, "out for certain")
        await asyncio.sleep(2.5)
        assert member.health.is_out_for_certain
        may_end.set()
        got = await asked
        assert (got.is_clean, got.is_done) == (True, True)


def token(text: str, ids: list[int], reason: str | None = None, **more: object) -> bytes:
    """A chunk of a chat that says its token ids."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason, "token_ids": ids}
    return b"data: %b\n\n" % orjson.dumps({"id": "x", "choices": [choice]} | more)


@pytest.mark.parametrize("moves", [0, 1])
@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_f146_ends_broken(rig: Floor, reason: str, moves: int) -> None:
    """Each event is a piece of its own, so the client has the first token before the end comes."""
    pieces = [token("fi", [1], prompt_token_ids=[7, 8]), token("", [], reason)]

    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await apart(writer, [STREAM_HEAD, *map(chunk, pieces), DONE], 0.01)

    async def good(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b'"prompt":[7,8,1]' in r.engines[1].posts[-1]:
            rest = {"index": 0, "text": "ne", "finish_reason": "stop", "token_ids": [2]}
            event = b"data: %b\n\n" % orjson.dumps({"id": "y", "choices": [rest]})
            writer.write(STREAM_HEAD + chunk(event) + DONE)
        else:
            await GOOD(reader, writer)

    async with rig([breaks, good], migration_limit=moves, **SLOW_PROBES) as r:
        first = await r.ask()
        assert first.is_clean
        assert first.text == ("fine" if moves else "fi")
        await until(lambda: not r.is_up("i0"), "its trial fails")
        later = [await r.ask() for _ in range(6)]
        assert [got.text for got in later] == ["fine"] * 6
        record, *others = await r.records(7)
        assert record["outcome"] == ("ok" if moves else "upstream_error")
        assert {other["decode_instance"] for other in others} == {"i1"}


@pytest.mark.parametrize("member", ["id", "created"])
async def test_f155_a_member_too_deep_to_be_written(rig: Floor, member: str) -> None:
    """A heartbeat repeats the members that all events of a stream share."""
    deep = b'data: {"%b":%b,' % (member.encode(), b"[" * 300 + b"]" * 300)
    evil = event("fi").replace(b"data: {", deep)
    silent = stalls(STREAM_HEAD + chunk(evil)), stalls(STREAM_HEAD + chunk(event("fi")))
    limits: dict[str, Any] = {"idle_timeout": 0.6, "heartbeat_interval": 0.1}
    async with rig(silent, **limits, **SLOW_PROBES) as r:
        ended = await asyncio.gather(*(r.ask(f"{n}") for n in range(12)))
        assert {got.errors[0]["code"] for got in ended} == {"stream_idle_timeout"}
        assert all(is_cut(got) for got in ended)
        beats = [got.body.count(b": keepalive") for got in ended]
        assert min(beats) >= 2
        outcomes = {record["decode_instance"] for record in await r.records(12)}
        assert outcomes == {"i0", "i1"}


async def cuts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A token, then the connection ends, once the client has had time to get it."""
    await apart(writer, [STREAM_HEAD, chunk(event("half"))], 0.02)
    raise ConnectionError


async def test_f150_engines_cut_one_clients_streams(rig: Floor) -> None:
    def picky() -> RawEngine:
        engine = RawEngine()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await (cuts if b"belladonna" in engine.posts[-1] else GOOD)(reader, writer)

        engine.scripts = [script]
        return engine

    async with rig([picky() for _ in range(3)], **SLOW_PROBES) as r:
        for i in range(3):
            asked = [
                r.ask(f"belladonna {i} {n}", headers={"X-Session-ID": "mallory"}) for n in range(8)
            ]
            assert all(map(is_cut, await asyncio.gather(*asked)))
        fleet = r.router.known.fleet
        assert [r.is_up(f"i{i}") for i in range(3)] == [True] * 3
        await until(lambda: not fleet.doubted(), "each has served the proxy's own stream")
        assert (await r.ask()).text == "fine"
        assert [r.is_up(f"i{i}") for i in range(3)] == [True] * 3
    async with rig([cuts, GOOD], **SLOW_PROBES) as r:
        for _ in range(2):
            assert is_cut(await r.ask(headers={"X-Session-ID": "s"}))
        await until(lambda: not r.is_up("i0"), "its trial is cut")
        assert (await r.ask(headers={"X-Session-ID": "s"})).text == "fine"


def passes_trials(bad: Script) -> RawEngine:
    """An engine that fails all clients' requests in one way, and serves the proxy's own."""
    engine = RawEngine()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (bad if b'"messages"' in engine.posts[-1] else GOOD)(reader, writer)

    engine.scripts = [script]
    return engine


MUTE = stalls(STREAM_HEAD + chunk(event("half")))


@pytest.mark.parametrize("name", [{}, {"X-Session-ID": "s"}], ids=["nobody", "session"])
@pytest.mark.parametrize("way", [cuts, MUTE], ids=["cuts", "mute"])
async def test_f160_all_streams_of_the_only_client(
    rig: Floor, way: Script, name: dict[str, str]
) -> None:
    async with rig([passes_trials(way), GOOD], idle_timeout=0.3, **SLOW_PROBES) as r:
        answers = [await r.ask(f"prompt {i}", headers=name) for i in range(12)]
        assert sum(map(is_cut, answers)) <= 2
        assert {got.text for got in answers if not is_cut(got)} == {"fine"}
        await until(lambda: not r.router.known.fleet.doubted(), "its trial was answered")
        now_s = r.state.clock.now_s()
        assert r.router.known.fleet.get("i0").health.state(now_s) is State.SUSPECT
        assert r.is_up("i0")


TWO_KEYS = {who: {"Authorization": f"Bearer {who * 5}"} for who in ("alice", "bob")}


async def test_f162_all_streams_of_one_of_two_clients(rig: Floor) -> None:
    keys = ",".join(f"{who}:{who * 5}" for who in TWO_KEYS)
    engines = [passes_trials(cuts), RawEngine(GOOD)]
    async with rig(engines, flow=False, api_key=keys, **SLOW_PROBES) as r:

        async def ask(who: str, i: int) -> Got:
            return await r.ask(f"prompt {i}", headers=TWO_KEYS[who] | {"X-Session-ID": f"{who}{i}"})

        bobs = [await ask("bob", i % 3) for i in range(12)]
        assert sum(map(is_cut, bobs)) <= 2
        alices = [await ask("alice", i) for i in range(12)]
        assert sum(map(is_cut, alices)) <= 2
        assert not any(map(is_cut, [await ask(who, 3) for who in TWO_KEYS]))


TOOLS = b'[{"name":"f","parameters":{"finish_reason":"abort","status":"failed","choices":[]}}]'


def told(status: bytes, tools: bytes = TOOLS) -> bytes:
    """A Responses answer that repeats its request's tools."""
    said = b'[{"type":"message","content":[{"type":"output_text","text":"hi"}]}]'
    return b'{"id":"resp_1","object":"response","output":%b,"tools":%b,"status":"%b"}' % (
        said if status == b"completed" else b"[]",
        tools,
        status,
    )


@pytest.mark.parametrize("size", [0, 70_000])
async def test_f151_tools_that_speak_of_abort(rig: Floor, size: int) -> None:
    """With long tools the first event is not looked at, only the end is."""
    tools = b'[{"description":"%b"},' % (b"d" * size) + TOOLS[1:]

    def named(name: bytes, data: bytes) -> bytes:
        return chunk(b'event: %b\ndata: {"type":"%b",%b}\n\n' % (name, name, data))

    events = [
        named(b"response.created", b'"response":' + told(b"in_progress", tools)),
        named(b"response.output_text.delta", b'"delta":"hi"'),
        named(b"response.completed", b'"response":' + told(b"completed", tools)),
    ]

    async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await apart(writer, [STREAM_HEAD, *events, DONE], 0.01)

    whole = says(plain(told(b"completed", tools)))
    for script, stream in ((streams, True), (whole, False)):
        body = {"model": "sim-8b", "input": "x", "stream": stream}
        async with rig([script] * 2, **SLOW_PROBES) as r:
            for _ in range(4):
                got = await r.ask(path="/v1/responses", body=body)
                assert (got.status, got.is_clean) == (200, True)
            records = await r.records(4)
            assert {record["outcome"] for record in records} == {"ok"}
            assert r.posts == 4, "one request each, and no trial"
            assert not r.router.known.fleet.doubted()
