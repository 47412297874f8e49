"""Streams that go on when their instance is lost: cut at any byte, once or twice, or drained."""

from __future__ import annotations

import asyncio
import operator
import os
import random
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest

from proxy.request.moves import TEMPLATE_TOKENS
from replayer.simulator.host import SimEngine, SimFleet
from tests.support.harness import (
    STREAM_HEAD,
    WAIT_S,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    chunk,
    plain,
    proxied,
    says,
    until,
)

CUTS = int(os.environ.get("MIGRATION_CUTS", "120"))
"""Cuts at random bytes, over all forms of requests; `make migration` has 1,000."""
TOKENS = 24
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EARLY = 1500
"""Half of the cuts are at up to this byte: where the machine has much to do, an engine writes many
tokens in one event, and the answer is short."""
INSIDE = 1000
"""Behind the first event, and before the last token of a hundred, all in one event or not."""
SLOW = {"speed": 2.0}
"""A token or two per event, also on a machine with much else to do."""
FAST = {"speed": 20.0}
PAST_END = 1.2
"""Cuts are at up to this part of an uncut answer's bytes: an engine's wire has the head as well."""


class Told(NamedTuple):
    """What a client got of a stream."""

    text: str
    ids: set[tuple[str, int, str]]
    roles: int
    reasons: list[str]
    usage: list[Any]
    error: str | None
    is_done: bool


def told(body: bytes) -> Told:
    """The parts of a stream that was read to its end."""
    events = [e[6:] for e in body.split(b"\n\n") if e.startswith(b"data: ")]
    objects = [orjson.loads(e) for e in events if e != b"[DONE]"]
    errors = [o["error"]["code"] for o in objects if "error" in o]
    chunks = [o for o in objects if "error" not in o]
    choices = [c for o in chunks for c in o["choices"]]
    deltas = [c["delta"] if "delta" in c else {"content": c["text"]} for c in choices]
    return Told(
        text="".join(d.get("content") or "" for d in deltas),
        ids={(o["id"], o["created"], o["object"]) for o in chunks},
        roles=sum("role" in d for d in deltas),
        reasons=[c["finish_reason"] for c in choices if c["finish_reason"]],
        usage=[o["usage"] for o in chunks if o.get("usage")],
        error=errors[0] if errors else None,
        is_done=body.endswith(b"data: [DONE]\n\n"),
    )


def asked(path: str, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    """The body of a request of one session."""
    body = chat("tell me of it", max_tokens=tokens, session_id="s", **more)
    if path == TEXT:
        del body["messages"]
        body["prompt"] = "tell me of it"
    return body


async def stream(proxy: ServedProxy, path: str, body: dict[str, Any]) -> bytes:
    """What a client gets, also of a stream without a clean end."""
    got = bytearray()
    async with proxy.http.post(path, json=body) as response:
        assert response.status == 200
        with suppress(aiohttp.ClientPayloadError):
            while piece := await response.content.readany():
                got += piece
    return bytes(got)


def home_first(proxy: ServedProxy, fleet: SimFleet) -> list[SimEngine]:
    """The engines, that of the session first."""
    home = proxy.router.known.sessions.home("s", proxy.server.state.clock.now_s())
    return sorted(fleet.engines, key=lambda engine: not engine.url.endswith(home))


def cut(proxy: ServedProxy, fleet: SimFleet, at: int, losses: int) -> None:
    """Have the session's next streams end after so many bytes on the wire.

    No breaker opens: between two of them there is much that goes well.
    """
    for member in proxy.router.known.fleet.members():
        member.health.renew(proxy.server.state.clock.now_s())
    for number, engine in enumerate(home_first(proxy, fleet)):
        engine.faults.change(cut_bytes=at, cuts=int(number < losses))


async def all_at_rest(proxy: ServedProxy, fleet: SimFleet) -> None:
    """Nothing is charged, kept, or runs."""
    await proxy.at_rest()
    await until(lambda: proxy.connections() == 0, "no upstream connection in use")
    assert proxy.server.state.in_flight.trails.taken_bytes == 0
    assert not proxy.server.state.in_flight.movable
    for engine in fleet.engines:
        running = engine.driver.engine.running
        await until(partial(operator.not_, running), "nothing runs")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("losses", [1, 2])
async def test_cut_anywhere_the_client_has_one_whole_stream(
    tmp_path: Path, path: str, losses: int
) -> None:
    choose, ended = random.Random(f"{path}{losses}"), Counter[str]()
    async with proxied(tmp_path, losses + 1, sim=FAST, migration_limit=3) as (proxy, fleet):
        body = asked(path)
        raw = await stream(proxy, path, body)
        whole = told(raw)
        assert (whole.reasons, whole.is_done) == (["length"], True)
        for _ in range(CUTS // 4):
            at = choose.choice([round(PAST_END * len(raw)), EARLY])
            cut(proxy, fleet, choose.randrange(at), losses)
            sent = await stream(proxy, path, body)
            got = told(sent)
            assert got.text == whole.text, sent
            assert (len(got.ids), got.roles, got.reasons) == (1, whole.roles, ["length"])
            assert b'token_ids":[' not in sent
            if got.error is None:
                assert got.is_done
                (usage,), (once,) = got.usage, whole.usage
                for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                    assert usage[name] == once[name]
            else:  # what was lost comes after the finish reason
                assert (got.error, got.is_done) == ("engine_lost", False)
        for record in await proxy.records(CUTS // 4 + 1):
            rows = record["migrations"] or []
            ended.update(row["ended"] for row in rows)
            assert len([row for row in rows if row["ended"] == "moved"]) <= losses
            assert record["outcome"] == ("upstream_truncated" if is_ended(rows) else "ok")
        assert set(ended) <= {"moved", "finished"}
        assert ended["moved"] > CUTS / 40
        assert proxy.metric("migrations_total", reason="lost", outcome="moved") == ended["moved"]
        assert proxy.metric("migration_seconds_count", evicted="false") == ended["moved"]
        await all_at_rest(proxy, fleet)


def is_ended(rows: list[Any]) -> bool:
    """Whether the last of a stream's losses was not made good."""
    return bool(rows) and rows[-1]["ended"] != "moved"


async def test_a_limit_of_none_is_as_before(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2, sim=SLOW) as (proxy, fleet):
        await stream(proxy, CHAT, asked(CHAT))
        cut(proxy, fleet, INSIDE, 2)
        sent = await stream(proxy, CHAT, asked(CHAT, 100))
        got = told(sent)
        assert (got.error, got.is_done, got.reasons) == ("engine_lost", False, [])
        _, record = await proxy.records(2)
        assert (record["outcome"], record["migrations"]) == ("upstream_truncated", None)
        await all_at_rest(proxy, fleet)


async def test_the_limit_counts_and_ends_in_words(tmp_path: Path) -> None:
    async with proxied(tmp_path, 3, sim=SLOW, migration_limit=1) as (proxy, fleet):
        await stream(proxy, CHAT, asked(CHAT))
        cut(proxy, fleet, INSIDE, 3)
        got = told(await stream(proxy, CHAT, asked(CHAT, 400)))
        assert (got.error, got.is_done) == ("engine_lost", False)
        _, record = await proxy.records(2)
        first, second = record["migrations"]
        assert (first["ended"], second["ended"]) == ("moved", "limit")
        assert first["to_instance"] == second["from_instance"]
        assert second["tokens_kept"] > first["tokens_kept"]
        await all_at_rest(proxy, fleet)


@pytest.mark.parametrize(
    ("more", "options", "why"),
    [
        ({"n": 2}, {}, "choices"),
        ({"response_format": {"type": "json_object"}}, {}, "structured"),
        ({"seed": 5, "temperature": 1}, {}, "seed"),
        ({}, {"migration_max_seq_len": 9}, "too_long"),
    ],
)
async def test_what_may_not_move_ends_as_before(
    tmp_path: Path, more: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    async with proxied(tmp_path, 2, sim=SLOW, migration_limit=3, **options) as (proxy, fleet):
        await stream(proxy, CHAT, asked(CHAT, **more))
        cut(proxy, fleet, INSIDE, 2)
        sent = await stream(proxy, CHAT, asked(CHAT, 100, **more))
        assert told(sent).error == "engine_lost"
        assert b'token_ids":[' not in sent
        _, record = await proxy.records(2)
        assert [row["ended"] for row in record["migrations"]] == [why]
        assert proxy.metric("migrations_total", reason="lost", outcome=why) == 1
        await all_at_rest(proxy, fleet)


async def test_ids_are_shown_to_those_who_ask(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2, sim=SLOW, migration_limit=2) as (proxy, fleet):
        body = asked(TEXT, 400, return_token_ids=True)
        whole = ids_of(await stream(proxy, TEXT, body))
        assert len(whole) == 400
        cut(proxy, fleet, INSIDE, 2)
        assert ids_of(await stream(proxy, TEXT, body)) == whole
        _, record = await proxy.records(2)
        assert {row["ended"] for row in record["migrations"]} == {"moved"}


def ids_of(sent: bytes) -> list[int]:
    objects = [orjson.loads(e[6:]) for e in sent.split(b"\n\n") if e.startswith(b"data: {")]
    return [i for o in objects for c in o["choices"] for i in c["token_ids"] or ()]


async def test_streams_leave_an_instance_that_drains(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2, sim=SLOW, migration_limit=1) as (proxy, fleet):
        whole = told(await stream(proxy, CHAT, asked(CHAT, 100)))
        home = home_first(proxy, fleet)[0]
        name = home.url.removeprefix("http://")
        running = asyncio.create_task(stream(proxy, CHAT, asked(CHAT, 100)))
        flying = proxy.server.state.in_flight
        await until(lambda: flying.movable, "it streams")
        await until(
            lambda: proxy.router.known.ledger.load(name).decode_tokens > 0, "its first token"
        )
        path = f"/instances/{name}?drain=true&mode=migrate"
        async with proxy.http.delete(path) as response:
            assert response.status == 202
        got = told(await running)
        assert (got.text, got.error, got.roles, len(got.ids)) == (whole.text, None, 1, 1)
        _, record = await proxy.records(2)
        (row,) = record["migrations"]
        assert (row["cause"], row["ended"], row["from_instance"]) == ("drain", "moved", name)
        assert 0 < row["tokens_kept"] < 100
        assert record["decode_instance"] != name
        await proxy.at_rest()


async def test_one_that_nobody_takes_stays_while_its_instance_drains(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, sim=SLOW, migration_limit=1) as (proxy, fleet):
        whole = told(await stream(proxy, CHAT, asked(CHAT, 60)))
        name = fleet.engines[0].url.removeprefix("http://")
        running = asyncio.create_task(stream(proxy, CHAT, asked(CHAT, 60)))
        await until(
            lambda: proxy.router.known.ledger.load(name).decode_tokens > 0, "its first token"
        )
        async with proxy.http.delete(f"/instances/{name}?drain=true&mode=migrate") as response:
            assert response.status == 202
        assert told(await running) == whole._replace(ids=told(await running).ids)
        _, record = await proxy.records(2)
        (row,) = record["migrations"]
        assert (row["cause"], row["ended"], row["to_instance"]) == ("drain", "no_instance", None)
        assert record["outcome"] == "ok"


@pytest.mark.parametrize(
    ("query", "limit", "words"),
    [
        ("mode=migrate", 1, "only beside drain=true"),
        ("drain=true&mode=x", 1, "mode: migrate"),
        ("drain=true&mode=migrate", 0, "--migration-limit"),
        ("drain=1", 0, "drain: true or false"),
        ("drain=", 0, "drain: true or false"),
    ],
)
async def test_what_is_wrong_with_a_drain(
    tmp_path: Path, query: str, limit: int, words: str
) -> None:
    async with proxied(tmp_path, 1, migration_limit=limit) as (proxy, fleet):
        name = fleet.engines[0].url.removeprefix("http://")
        async with proxy.http.delete(f"/instances/{name}?{query}") as response:
            assert response.status == 400
            assert words in await response.text()


HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "sim-8b"}


def said(text: str, ids: list[int], reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
    return b"data: %b\n\n" % orjson.dumps(HEAD | {"choices": [choice | {"token_ids": ids}]} | more)


def text(words: str, ids: list[int], reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": words, "logprobs": None, "finish_reason": reason}
    chunk_of = {"id": "cmpl-9", "object": "text_completion", "created": 9, "model": "sim-8b"}
    return b"data: %b\n\n" % orjson.dumps(chunk_of | {"choices": [choice | {"token_ids": ids}]})


DONE = b"data: [DONE]\n\n"
FIRST = said("a", [1], prompt_token_ids=[7, 8])
ABORT = said("", [], "abort")
ERROR = b'data: {"error":{"message":"x","code":500}}\n\n'


def streams(*events: bytes) -> Script:
    """A whole answer of these events."""
    return says(STREAM_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n")


@pytest.mark.parametrize(("lost", "cause"), [(ABORT, "abort"), (ERROR, "error")])
async def test_an_engine_that_ends_its_own_streams_is_lost(
    tmp_path: Path, lost: bytes, cause: str
) -> None:
    first, second = (
        streams(FIRST, lost, DONE),
        streams(text("b", [2]), text("c", [3], "stop"), DONE),
    )

    async def in_turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (first if len(a.posts) + len(b.posts) == 1 else second)(reader, writer)

    async with RawEngine(in_turn) as a, RawEngine(in_turn) as b:
        options = {"kv_connector": "none", "health_interval": 60, "migration_limit": 1}
        addresses = [a.address, b.address]
        async with ServedProxy(tmp_path / "log", addresses, **options) as proxy:
            got = told(await stream(proxy, CHAT, asked(CHAT)))
            assert (got.text, got.error, got.reasons) == ("abc", None, ["stop"])
            (record,) = await proxy.records(1)
            assert [row["cause"] for row in record["migrations"]] == [cause]
            body = next(o for o in map(orjson.loads, a.posts + b.posts) if "prompt" in o)
            assert (body["prompt"], body["max_tokens"]) == ([7, 8, 1], TOKENS - 1)
            await proxy.at_rest()


@pytest.mark.parametrize("lost", [ABORT, ERROR])
async def test_where_nobody_goes_on_the_engines_own_end_is_passed_on(
    tmp_path: Path, lost: bytes
) -> None:
    async with RawEngine(streams(FIRST, lost, DONE)) as engine:
        options = {"kv_connector": "none", "health_interval": 60, "migration_limit": 1}
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            sent = await stream(proxy, CHAT, asked(CHAT))
            assert sent.endswith(lost.replace(b"[]}", b"null}") + DONE)
            (record,) = await proxy.records(1)
            assert [row["ended"] for row in record["migrations"]] == ["no_instance"]
            await proxy.at_rest()


@pytest.mark.parametrize("ends", [True, False])
async def test_who_could_not_go_on_is_not_blamed_for_who_failed(tmp_path: Path, ends: bool) -> None:
    """The engine's own end is passed on, whole or not; its full neighbour is no part of that."""
    end = b"0\r\n\r\n" if ends else b""
    failing = says(
        STREAM_HEAD + b"".join(map(chunk, (FIRST, ERROR, *[DONE] * ends))) + end, close=not ends
    )
    full = says(plain(b'{"error":{}}', "429 Too Many Requests"))

    async def in_turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (failing if len(a.posts) + len(b.posts) == 1 else full)(reader, writer)

    async with RawEngine(in_turn) as a, RawEngine(in_turn) as b:
        options = {"kv_connector": "none", "health_interval": 60, "migration_limit": 1}
        addresses = [f"a={a.address}", f"b={b.address}"]
        async with ServedProxy(tmp_path / "log", addresses, **options) as proxy:
            sent = await stream(proxy, CHAT, asked(CHAT))
            assert ERROR in sent
            (record,) = await proxy.records(1)
            assert record["outcome"].startswith("upstream_")
            (row,) = record["migrations"]
            assert proxy.router.known.fleet.doubted() == {row["from_instance"]}
            assert record["decode_instance"] == row["from_instance"], "it is the one that failed"
            await proxy.at_rest()


@pytest.mark.parametrize("more", ["prompt", "output"])
async def test_ids_of_more_than_was_asked_for_are_not_had_elsewhere(
    tmp_path: Path, more: str
) -> None:
    """Others would compute what one engine invents: a prompt has a body, an output takes time."""
    ids = list(range(3 * TEMPLATE_TOKENS))
    first = said("a", [1], prompt_token_ids=ids if more == "prompt" else [7, 8])
    second = said("b", ids if more == "output" else [2])
    breaks = says(STREAM_HEAD + chunk(first) + chunk(second), close=True)
    async with RawEngine(breaks) as a, RawEngine(breaks) as b:
        options = {"kv_connector": "none", "health_interval": 60, "migration_limit": 1}
        async with ServedProxy(tmp_path / "log", [a.address, b.address], **options) as proxy:
            body = asked(CHAT, tokens=2 * len(ids))
            got = told(await stream(proxy, CHAT, body))
            assert (got.text, got.error) == ("ab", "engine_lost")
            (record,) = await proxy.records(1)
            assert [row["ended"] for row in record["migrations"]] == ["no_ids"]
            assert len(a.posts) + len(b.posts) == 1
            await proxy.at_rest()


async def test_a_client_that_leaves_while_its_stream_moves_leaves_nothing(tmp_path: Path) -> None:
    breaks = says(STREAM_HEAD + chunk(FIRST), close=True)

    async def first_breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(a.posts) + len(b.posts) == 1:
            await breaks(reader, writer)
        else:
            await reader.read()

    async with RawEngine(first_breaks) as a, RawEngine(first_breaks) as b:
        options = {"kv_connector": "none", "health_interval": 60, "migration_limit": 2}
        addresses = [a.address, b.address]
        async with ServedProxy(tmp_path / "log", addresses, **options) as proxy:
            response = await proxy.http.post(CHAT, json=asked(CHAT))
            await until(lambda: len(a.posts) + len(b.posts) >= 2, "another one was asked")
            response.close()
            (record,) = await proxy.records(1)
            assert record["outcome"] == "client_gone"
            assert [row["ended"] for row in record["migrations"]] == ["left"]
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0, "no upstream connection in use")
            assert proxy.server.state.in_flight.trails.taken_bytes == 0


async def test_a_silent_instance_that_speaks_again_is_not_heard(tmp_path: Path) -> None:
    async def in_turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_first = len(a.posts) + len(b.posts) == 1
        if is_first:
            writer.write(STREAM_HEAD + chunk(FIRST))
            await until(lambda: len(a.posts) + len(b.posts) == 2, "another one was asked")
            writer.write(chunk(said("twice", [2])))
            heard.set()
            await reader.read()
        else:
            await heard.wait()
            await streams(text("b", [2], "stop"), DONE)(reader, writer)

    heard = asyncio.Event()
    async with RawEngine(in_turn) as a, RawEngine(in_turn) as b:
        options = {"kv_connector": "none", "health_interval": 60, "migration_limit": 1}
        addresses = [a.address, b.address]
        async with ServedProxy(tmp_path / "log", addresses, idle_timeout=0.3, **options) as proxy:
            got = told(await stream(proxy, CHAT, asked(CHAT)))
            assert (got.text, got.error) == ("ab", None)
            (record,) = await proxy.records(1)
            assert [row["cause"] for row in record["migrations"]] == ["silent"]
            await proxy.at_rest()


async def test_the_client_hears_comments_while_nobody_goes_on_yet(tmp_path: Path) -> None:
    breaks = says(STREAM_HEAD + chunk(FIRST), close=True)

    async def in_turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(a.posts) + len(b.posts) == 1:
            await breaks(reader, writer)
        else:
            await until(lambda: b": keepalive" in got, "a comment")
            await streams(text("b", [2], "stop"), DONE)(reader, writer)

    got = bytearray()
    async with RawEngine(in_turn) as a, RawEngine(in_turn) as b:
        options = {"kv_connector": "none", "health_interval": 60, "migration_limit": 1}
        addresses = [a.address, b.address]
        async with (
            ServedProxy(tmp_path / "log", addresses, heartbeat_interval=0.1, **options) as proxy,
            proxy.http.post(CHAT, json=asked(CHAT)) as response,
        ):
            while piece := await response.content.readany():
                got += piece
            assert told(bytes(got)).text == "ab"


class Leaving(NamedTuple):
    """A stream that is to leave its engine: what became of it, and what the other one was asked."""

    got: Told
    rows: list[Any]
    outcome: str
    asked: list[dict[str, Any]]


WORDS = [f" w{n}" for n in range(60)]
SLOW_PREFILL: dict[str, Any] = {"prefill_throughput": 1.0}
"""Of any prompt it is expected that it takes long."""


async def leaving(
    tmp_path: Path,
    *others: Script,
    drains_at: int = 10,
    lost_at: int | None = None,
    gone: asyncio.Event | None = None,
    heard: list[int] | None = None,
    **options: Any,
) -> Leaving:
    """A stream of WORDS whose engine is drained in it; `others`: what the other one answers.

    `lost_at`: word at which its engine ends. `gone`: its client leaves when it is set. `heard` is
    how many pieces the client has.
    """
    heard = [0] if heard is None else heard

    async def runs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(FIRST))
        for n, word in enumerate(WORDS[:lost_at]):
            writer.write(chunk(said(word, [10 + n])))
            await asyncio.sleep(0.02)
        if lost_at is not None:
            writer.close()
            return
        writer.write(chunk(said("", [], "stop")) + chunk(DONE) + b"0\r\n\r\n")
        await writer.drain()

    async def in_turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = len(a.posts) + len(b.posts) - 2
        await (runs if at < 0 else others[min(at, len(others) - 1)])(reader, writer)

    body = bytearray()
    async with RawEngine(in_turn) as a, RawEngine(in_turn) as b:
        given = {"kv_connector": "none", "health_interval": 60, "migration_limit": 1} | options
        addresses = [f"a={a.address}", f"b={b.address}"]
        async with ServedProxy(tmp_path / "log", addresses, **given) as proxy:
            async with proxy.http.post(CHAT, json=asked(CHAT, 400)) as response:
                name = response.headers["X-Cache-Proxy-Instance"]
                drained = False
                async with asyncio.timeout(WAIT_S):
                    with suppress(aiohttp.ClientPayloadError):
                        while piece := await response.content.readany():
                            body += piece
                            heard[0] += 1
                            if heard[0] >= drains_at and not drained:
                                drained = True
                                path = f"/instances/{name}?drain=true&mode=migrate"
                                async with proxy.http.delete(path) as order:
                                    assert order.status == 202
                            if gone is not None and gone.is_set():
                                response.close()
                                break
            (record,) = await proxy.records(1)
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0, "no upstream connection in use")
            assert proxy.server.state.in_flight.trails.taken_bytes == 0
            posts = (b if name == "a" else a).posts
    rows, outcome = record["migrations"] or [], record["outcome"]
    return Leaving(told(bytes(body)), rows, outcome, [orjson.loads(post) for post in posts])


async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine that hangs."""
    await reader.read()


@pytest.mark.parametrize("options", [{}, SLOW_PREFILL])
async def test_a_stream_that_is_to_leave_does_not_wait_for_one_that_hangs(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """It runs on, at once or after a second; the one that hangs is not blamed."""
    seen = await leaving(tmp_path, never, **options)
    assert seen.got.text == "a" + "".join(WORDS)
    assert (seen.got.reasons, seen.got.is_done, seen.outcome) == (["stop"], True, "ok")
    (row,) = seen.rows
    assert (row["ended"], row["to_instance"]) == ("finished", None)
    assert len(seen.asked) == (1 if options else 2)


async def test_one_whose_prompt_takes_long_elsewhere_runs_on_until_it_is_computed(
    tmp_path: Path,
) -> None:
    heard = [0]

    async def computes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until(lambda: heard[0] >= 20, "its client has more meanwhile")
        writer.write(STREAM_HEAD + chunk(text(" no", [99])))
        await reader.read()

    rest = streams(text(" rest", [7]), text("", [], "stop"), DONE)
    seen = await leaving(tmp_path, computes, rest, heard=heard, **SLOW_PREFILL)
    (row,) = seen.rows
    assert (row["ended"], row["cause"], seen.outcome) == ("moved", "drain", "ok")
    first, second = (body["prompt"] for body in seen.asked)
    assert first[:3] == second[:3] == [7, 8, 1]
    assert len(first) < len(second) < len(WORDS)
    assert row["tokens_kept"] == len(second) - 2
    assert seen.got.text == "a" + "".join(WORDS[: len(second) - 3]) + " rest"
    assert (len(seen.got.ids), seen.got.is_done) == (1, True)


async def test_its_engine_may_be_lost_while_another_one_computes(tmp_path: Path) -> None:
    rest = streams(text(" rest", [7]), text("", [], "stop"), DONE)
    seen = await leaving(tmp_path, never, rest, lost_at=30, **SLOW_PREFILL)
    assert (seen.got.text, seen.outcome) == ("a" + "".join(WORDS[:30]) + " rest", "ok")
    assert [row["ended"] for row in seen.rows] == ["moved"]
    assert len(seen.asked[1]["prompt"]) == 2 + 1 + 30


async def test_its_client_may_leave_while_another_one_computes(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def computes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone.set()
        await reader.read()

    seen = await leaving(tmp_path, computes, gone=gone, **SLOW_PREFILL)
    assert seen.outcome == "client_gone"
    assert [row["ended"] for row in seen.rows] == ["left"]


async def test_one_that_refuses_while_a_stream_runs_on_changes_nothing(tmp_path: Path) -> None:
    refuses = says(plain(b'{"error":{}}', "400 Bad Request"))
    seen = await leaving(tmp_path, refuses, **SLOW_PREFILL)
    assert (seen.got.text, seen.outcome) == ("a" + "".join(WORDS), "ok")
    assert [row["ended"] for row in seen.rows] == ["limit"]
