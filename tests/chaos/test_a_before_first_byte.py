"""Faults before the client's first byte: nobody notices, or one honest status."""

from __future__ import annotations

import asyncio
import gzip
import resource
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from bench.faults import black_hole
from proxy.core.fleet import health
from proxy.core.types import FailureKind
from tests.chaos import figures
from tests.chaos.client import Got, request
from tests.chaos.command import command
from tests.chaos.rig import ENGINE_SECRET, MODEL, SLOW_PROBES, Floor, Rig
from tests.support.harness import (
    ANSWER,
    DONE,
    GOOD,
    STREAM_HEAD,
    RawEngine,
    Script,
    apart,
    chat,
    chunk,
    plain,
    resets,
    says,
    stalls,
    until,
    words,
)

REFUSED = plain(
    b'{"error":{"message":"boom %s","type":"x","code":500}}' % ENGINE_SECRET.encode(),
    "500 Internal Server Error",
)
NO_MODEL = plain(
    b'{"error":{"message":"The model `sim-8b` does not exist.","type":"NotFoundError",'
    b'"param":"model","code":404}}',
    "404 Not Found",
)
MALFORMED = ["malformed"], 502
"""What is made of an answer that is none."""
REFUSES = plain(b'{"error":{"message":"no","type":"x","param":null,"code":400}}', "400 Bad Request")
BESIDE = 64 << 20
"""Most memory beside many answers that have begun."""
BODY = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"fine"}}]}'


def is_fine(got: Got) -> bool:
    return got.status == 200 and got.is_clean and got.text == "fine"


async def elsewhere(r: Rig) -> list[str]:
    """The first instance fails, the second answers, and the client cannot tell: for what cause."""
    got = await r.ask()
    assert is_fine(got), (got.status, got.body)
    record = await r.record()
    assert (record["outcome"], record["retries"]) == ("ok", 1)
    assert record["decode_instance"] == "i1"
    return [kind for kind in FailureKind if r.metric("upstream_retries_total", reason=kind)]


async def refused(r: Rig) -> Got:
    """Nobody else is there: one OpenAI-shaped answer."""
    got = await r.ask()
    assert got.error["message"]
    assert got.is_clean
    return got


async def bad_answer(rig: Floor, bad: Script) -> tuple[list[str], int]:
    """An answer that is none: why another is asked, and the status where there is none."""
    async with rig([bad, GOOD], **SLOW_PROBES) as r:
        causes = await elsewhere(r)
    async with rig([bad], **SLOW_PROBES) as r:
        return causes, (await refused(r)).status


async def test_f01_connection_refused(rig: Floor) -> None:
    async with rig([GOOD, GOOD], **SLOW_PROBES) as r:
        await r.links[0].accept("refuse")
        assert await elsewhere(r) == ["connect"]
        assert r.is_up("i0"), "one failure ejects nobody"


async def test_f02_syn_black_hole(rig: Floor) -> None:
    async with rig([GOOD, GOOD], connect_timeout=0.2, **SLOW_PROBES) as r:
        await r.links[0].accept("swallow")
        assert await elsewhere(r) == ["unreachable"]


async def test_f03_accepts_and_closes(rig: Floor) -> None:
    async with rig([GOOD, GOOD], **SLOW_PROBES) as r:
        await r.links[0].accept("close")
        assert await elsewhere(r) == ["reset"]
    async with rig([GOOD], **SLOW_PROBES) as r:
        await r.links[0].accept("close")
        assert (await refused(r)).status == 502


async def test_f04_never_answers(rig: Floor) -> None:
    async with rig([stalls()], ttft_timeout=0.2, **SLOW_PROBES) as r:
        got = await refused(r)
        assert (got.status, got.error["type"]) == (504, "upstream_timeout")
        assert (await r.record())["outcome"] == "upstream_timeout"
    async with rig([stalls(), GOOD], ttft_timeout=0.2, **SLOW_PROBES) as r:
        got = await r.ask()
        assert is_fine(got) or got.status == 504
        await until(lambda: r.engines[0].busy == 0, "the leg to the silent one is closed")


async def test_f05_reset_after_the_request(rig: Floor) -> None:
    assert await bad_answer(rig, resets()) == (["reset"], 502)


async def test_f06_closed_after_each_reply(rig: Floor) -> None:
    async def answers_then_hangs_up(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await GOOD(reader, writer)
        raise ConnectionError

    async with rig([answers_then_hangs_up], **SLOW_PROBES) as r:
        answers = [await r.ask() for _ in range(200)]
        assert all(map(is_fine, answers))
        assert {record["outcome"] for record in await r.records(200)} == {"ok"}
        assert r.is_up("i0")


async def test_f07_the_head_drips(rig: Floor) -> None:
    async with rig([GOOD], ttft_timeout=0.3, idle_timeout=5.0, **SLOW_PROBES) as r:
        r.links[0].down.slice_bytes, r.links[0].down.gap_s = 1, 0.02
        got = await refused(r)
        assert (got.status, got.error["type"]) == (504, "upstream_timeout")


async def test_f180_a_refusal_in_very_many_pieces(rig: Floor) -> None:
    head = b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\n"
    body = orjson.dumps({"error": {"message": "x" * 3000, "type": "bad"}})
    pieces = [head + b"Transfer-Encoding: chunked\r\n\r\n"]
    for letter in body:
        pieces += [b"1\r", b"\n", bytes([letter]) + b"\r\n"]

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await apart(writer, [*pieces, b"0\r\n\r\n"], 0)

    async with rig([RawEngine(drips)], **SLOW_PROBES) as r:
        got = await r.ask()
        assert (got.status, got.body) == (400, body)


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_f181_an_answer_without_end_in_chunks_of_a_byte(rig: Floor, kind: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % kind
    small = b"".join(chunk(bytes([byte])) for byte in b":\n\n" * 100_000)
    assert await bad_answer(rig, says(head + small)) == MALFORMED


@pytest.mark.parametrize("lines", ["one of 64 KiB", "10000"])
async def test_f08_a_huge_head(rig: Floor, lines: str) -> None:
    one = b"X-A: " + b"a" * 70_000 + b"\r\n"
    many = b"".join(b"X-%d: a\r\n" % i for i in range(10_000))
    head = b"HTTP/1.1 200 OK\r\n" + (many if lines == "10000" else one)
    assert await bad_answer(rig, says(head + b"Content-Length: 2\r\n\r\n{}")) == MALFORMED


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"\x16\x03\x01\x00\xa5\x01"])
async def test_f09_not_http(rig: Floor, greeting: bytes) -> None:
    assert await bad_answer(rig, says(greeting, close=True)) == MALFORMED
    async with rig([GOOD, GOOD], **SLOW_PROBES) as r:
        r.links[0].greeting = greeting
        await r.links[0].accept("greet")
        got = await r.ask()
        assert is_fine(got), "greeted before it has said a word"


async def test_f10_two_lengths(rig: Floor) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    lengths = b"Content-Length: %d\r\nContent-Length: 5\r\n\r\n" % len(BODY)
    assert await bad_answer(rig, says(head + lengths + BODY)) == MALFORMED


async def test_f11_length_and_chunked(rig: Floor) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    assert await bad_answer(rig, says(head + chunked)) == MALFORMED


async def test_f12_interim_answers(rig: Floor) -> None:
    hints = b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
    async with rig([says(hints * 10 + ANSWER)], **SLOW_PROBES) as r:
        got = await r.ask()
        assert is_fine(got)
        assert got.interim == []
    assert await bad_answer(rig, says(hints * 11 + ANSWER)) == MALFORMED


async def test_f13_429_with_retry_after(rig: Floor) -> None:
    busy = says(plain(b'{"error":{"message":"busy"}}', "429 Too Many", "Retry-After: 7\r\n"))
    async with rig([busy, GOOD], **SLOW_PROBES) as r:
        assert await elsewhere(r) == ["busy"]
        assert is_fine(await r.ask())
        assert len(r.links[0].posts) == 1, "it is left alone for its Retry-After"
        assert r.is_up("i0"), "load is no failure"
    async with rig([busy], **SLOW_PROBES, max_queue=0) as r:
        got = await r.ask()
        assert (got.status, got.headers["retry-after"]) == (429, "7")


@pytest.mark.parametrize(
    "value", ["Wed, 21 Oct 2099 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:00 GMT", "-5", "1" + "0" * 9]
)
async def test_f14_odd_retry_after(rig: Floor, value: str) -> None:
    busy = plain(b'{"error":{"message":"busy"}}', "503 Busy", f"Retry-After: {value}\r\n")
    async with rig([says(busy)], **SLOW_PROBES, max_queue=0) as r:
        for _ in range(2):
            got = await r.ask()
            assert got.status == 503
            assert 1 <= int(got.headers["retry-after"]) <= 30


async def test_f15_500_always_on_one_of_three(rig: Floor) -> None:
    async with rig([says(REFUSED), GOOD, GOOD], **SLOW_PROBES) as r:
        answers = [await r.ask(f"prompt {i}") for i in range(60)]
        assert all(map(is_fine, answers))
        assert len(r.links[0].posts) <= 5, "it is left alone"


async def test_f16_500_always_on_all(rig: Floor) -> None:
    async with rig([says(REFUSED), says(REFUSED)], health_interval=0.05) as r:
        answers = [await r.ask(f"prompt {i}") for i in range(50)]
        assert {got.status for got in answers} <= {500, 502, 503}
        assert r.attempts <= 1.2 * len(answers), "retries make a bad day worse"
        probes = len(r.links[0].asked)
        await until(lambda: len(r.links[0].asked) > probes, "probing goes on")


@pytest.mark.parametrize("status", ["400 Bad Request", "413 Too Large", "422 Unprocessable"])
async def test_f17_the_clients_fault(rig: Floor, status: str) -> None:
    body = b'{"error":{"message":"max_tokens is %s","code":400}}' % ENGINE_SECRET.encode()
    async with rig([says(plain(body, status)), GOOD], **SLOW_PROBES) as r:
        for _ in range(6):
            got = await r.ask(headers={"X-Session-ID": "s"})
            assert (got.status, got.body) == (int(status[:3]), body)
        assert len(r.links[0].posts) == 6
        assert len(r.links[1].posts) == 0
        assert {record["retries"] for record in await r.records(6)} == {0}


async def test_f18_a_model_is_missing_on_one(rig: Floor) -> None:
    lost = RawEngine(says(NO_MODEL))
    async with rig([lost, GOOD]) as r:
        lost.gets["/v1/models"] = plain(b'{"data":[{"id":"other"}]}')
        assert is_fine(await r.ask())
        await until(lambda: r.router.known.fleet.get("i0").models == {"other"}, "its list was read")
        asked = len(r.links[0].posts)
        answers = [await r.ask(f"prompt {i}") for i in range(4)]
        assert all(map(is_fine, answers))
        assert len(r.links[0].posts) == asked, "it does not serve that model"


async def test_f19_redirect_to_a_metadata_address(rig: Floor) -> None:
    script = says(plain(b"", "301 Moved", "Location: http://169.254.169.254/latest\r\n"))
    async with rig([script], **SLOW_PROBES) as r:
        got = await refused(r)
        assert got.status == 502
        assert "location" not in got.headers


async def test_f20_switches_protocols(rig: Floor) -> None:
    head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    assert await bad_answer(rig, says(head)) == MALFORMED


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_f21_a_body_where_none_may_be(rig: Floor, status: str) -> None:
    async with rig([RawEngine(says(plain(b"smuggled", status)), GOOD)], **SLOW_PROBES) as r:
        got = await r.ask()
        assert (got.status, got.body) == (int(status[:3]), b"")
        assert is_fine(await r.ask()), "what followed is nobody's answer"


async def test_f22_gzip_unasked(rig: Floor) -> None:
    packed = gzip.compress(orjson.dumps({"text": "x" * 1000}))
    engine = RawEngine(says(plain(packed, extra="Content-Encoding: gzip\r\n")))
    async with rig([engine], **SLOW_PROBES) as r:
        got = await r.ask(stream=False)
        assert (got.headers["content-encoding"], got.body) == ("gzip", packed)
        assert b"gzip" not in engine.post_heads[0], "only identity was asked for"


def poisoned(answer: bytes | Script) -> RawEngine:
    """An engine that gives this answer to requests with a certain word, and serves all others."""
    engine = RawEngine(models=(MODEL,))
    bad = says(answer) if isinstance(answer, bytes) else answer

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_poison = b"belladonna" in engine.posts[-1]
        await (bad if is_poison else says(ANSWER))(reader, writer)

    engine.scripts = [script]
    return engine


def all_up(r: Rig) -> bool:
    return all(member.health.is_up for member in r.router.known.fleet.members())


async def test_f97_an_engine_redirects(rig: Floor) -> None:
    moved = plain(b"", "307 Temporary Redirect", "Location: http://10.0.0.7:8000/v1/audio\r\n")
    async with rig([poisoned(moved), poisoned(moved)], **SLOW_PROBES) as r:
        for path in ("/v1/audio/translations", "/v1/chat/completions"):
            for _ in range(10):
                got = await r.ask("belladonna", path=path)
                assert (got.status, got.error["code"]) == (502, "bad_upstream")
                assert b"redirects" in got.body
                assert "location" not in got.headers
        assert r.posts == 20, "each was asked for once"
        assert all_up(r)
        assert not r.router.known.fleet.recently_failed()
        assert is_fine(await r.ask())


async def poison(rig: Floor, answer: bytes) -> None:
    async with rig([poisoned(answer) for _ in range(4)]) as r:
        for i in range(24):
            got = await r.ask(f"belladonna {i}")
            assert (got.status, got.error["code"]) == (500, 500), "the engine's own answer"
        assert r.metric("poison_requests_total") >= 1
        seen = [member.health.probes for member in r.router.known.fleet.members()]
        members = r.router.known.fleet.members()
        await until(
            lambda: all(m.health.probes > n + 4 for m, n in zip(members, seen, strict=True))
        )
        assert all_up(r), "each has answered the proxy's own request, if it had to"
        assert r.metric("upstream_retries_total", reason="server_error") <= 24
        assert r.metric("retry_budget_refused_total") == 0
        assert all([is_fine(await r.ask(f"prompt {i}")) for i in range(8)])


async def test_f98_a_request_that_every_engine_fails_on(rig: Floor) -> None:
    await poison(rig, REFUSED)


async def test_f99_the_same_as_an_error_event(rig: Floor) -> None:
    await poison(rig, STREAM_HEAD + chunk(b'data: {"error":{"message":"x","code":500}}\n\n') + DONE)


async def test_f100_a_client_words_the_404(rig: Floor) -> None:
    body = b'{"error":{"message":"response `the model does not exist` is unknown","code":404}}'
    async with rig([poisoned(plain(body, "404 Not Found")) for _ in range(2)]) as r:
        fleet = r.router.known.fleet
        looks = [_models_read(r, i) for i in range(2)]
        for _ in range(6):
            got = await r.ask("belladonna")
            assert (got.status, got.body) == (404, body)
            assert all(fleet.get(f"i{i}").models == {MODEL} for i in range(2))
        assert r.posts == 12, "elsewhere once"
        await until(lambda: all(_models_read(r, i) > looks[i] for i in range(2)), "asked for")
        assert all(fleet.get(f"i{i}").models == {MODEL} for i in range(2))
        assert is_fine(await r.ask())


def _models_read(r: Rig, i: int) -> int:
    return sum(asked.path == "/v1/models" for asked in r.links[i].asked)


async def test_f101_connections_in_time_and_not(rig: Floor) -> None:
    async with rig([GOOD, GOOD], connect_timeout=0.1, **SLOW_PROBES) as r:
        state = r.router.known.fleet.get("i0").state
        await r.links[0].accept("swallow")
        for i in range(3):
            assert is_fine(await r.ask(f"prompt {i}"))
        failed = r.metric("upstream_retries_total", reason="unreachable")
        assert failed >= 1
        assert not r.router.known.fleet.get("i0").health.is_gone
        assert r.router.known.fleet.get("i0").state is state, "what it holds is not forgotten"


async def test_f102_503_from_every_instance(rig: Floor) -> None:
    busy = says(plain(b'{"error":{"message":"busy"}}', "503 Busy", "Retry-After: 1\r\n"))
    async with rig([RawEngine(busy, GOOD), RawEngine(busy, GOOD)], **SLOW_PROBES) as r:
        assert is_fine(await r.ask())
        record = await r.record()
        assert (record["outcome"], r.posts) == ("ok", 3)
        assert record["t_queued"] <= record["t_decided"] <= record["t_decode_sent"]
    async with rig([busy, busy], **SLOW_PROBES, max_queue=0) as r:
        got = await r.ask()
        assert (got.status, got.body) == (503, b'{"error":{"message":"busy"}}')
    async with rig([busy], **SLOW_PROBES) as r:
        got = await r.ask()
        assert (got.status, got.body) == (503, b'{"error":{"message":"busy"}}')
        assert r.posts == 3, "it has waited twice"
    for_long = says(plain(b"{}", "503 Busy", "Retry-After: 9\r\n"))
    async with rig([for_long], **SLOW_PROBES) as r:
        leaves = await r.connection()
        leaves.send(request(orjson.dumps(chat("x")), {}))
        await until(lambda: r.metric("queued_requests"), "it waits")
        leaves.close("FIN")
        assert (await r.record())["outcome"] == "client_gone"
        assert r.posts == 1


BOMB = gzip.compress(b" " * (1 << 28))
"""256 KiB that would be 256 MiB."""


async def test_f122_everything_compressed(rig: Floor) -> None:
    """What probes, scrapes and the prefill leg read is never unpacked."""
    packed = plain(BOMB, extra="Content-Encoding: gzip\r\n")
    p = RawEngine(says(packed))
    p.gets |= dict.fromkeys(("/metrics", "/query"), packed)
    options: dict[str, Any] = {"offload_policy": "always", "heavy_threshold": 100}
    options |= {"warm_threshold": 10, "kv_connector": "nixl", "health_interval": 0.05}
    async with rig([GOOD, p], scrape_interval=0.05, **options) as r:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        asked = len(r.links[1].asked)
        await until(lambda: len(r.links[1].asked) > asked + 12, "probed and scraped")
        got = await r.ask(words(600))
        assert is_fine(got)
        record = await r.record()
        assert record["decode_instance"] == "i0"
        assert record["route_class"] != "HEAVY_P2P"
        assert len(p.posts) == 1, "its leg was tried"
        p.gets |= dict.fromkeys(("/health", "/v1/models"), packed)
        asked = len(r.links[1].asked)
        await until(lambda: len(r.links[1].asked) > asked + 40, "models and all are read again")
        assert is_fine(await r.ask(words(600))), "where it is cached"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert grown < 64 << 10, "KiB: nothing was unpacked"


@pytest.mark.parametrize("is_continued", [False, True])
async def test_f114_the_holder_of_a_response_dies(rig: Floor, *, is_continued: bool) -> None:
    """Read, or continued: its process is gone, and another that comes there knows nothing."""
    path, ask = "/v1/responses", {"model": "sim-8b", "input": "x", "max_output_tokens": 2}
    async with rig(sims=3, health_interval=0.05) as r:
        made = (await r.ask(path=path, body=ask)).json["id"]
        name = (await r.record())["decode_instance"]
        at = int(name.removeprefix("i"))

        async def asked() -> Got:
            if is_continued:
                return await r.ask(path=path, body=ask | {"previous_response_id": made})
            return await r.raw(request(None, {}, f"{path}/{made}", "GET"))

        assert (await asked()).status == 200
        await r.kill(at)
        await until(lambda: not r.is_up(name), "its death is seen")
        before = r.posts
        got = await asked()
        assert (got.status, got.error["code"]) == (404, "response_not_found")
        assert "is gone" in got.error["message"]
        await r.start(at)
        await until(lambda: r.is_up(name), "it is back")
        assert (await asked()).status == 404
        assert r.posts == before, "nobody was asked"


ONE_CLIENT = ("400", "abort", "abort in one piece", "no choices", "500")
"""Ways that are tried also where all clients count as one."""


@pytest.mark.parametrize(
    ("way", "are_one"),
    [*[(way, False) for way in black_hole.WAYS], *[(way, True) for way in ONE_CLIENT]],
)
async def test_f142_one_fails_at_once(
    rig: Floor, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch, *, are_one: bool
) -> None:
    """Shortened: python -m bench.faults.black_hole has the times of the real limits."""
    for name, seconds in (("CALM_S", 0.2), ("OPEN_S", 0.3), ("TRIED_S", 0.3)):
        monkeypatch.setattr(health, name, seconds)
    found = await black_hole.run(
        tmp_path, way, seconds=1.0, work_s=0.03, slow_start=0.2, are_one=are_one
    )
    figures.say("F130", black_hole.line(way, found))
    assert found.ratio <= 0.02, black_hole.line(way, found)
    assert found.asked > 2 * black_hole.FREE, "the three others serve"
    rig.checked += 1


async def test_f143_a_clients_bad_requests(rig: Floor) -> None:
    async with rig([says(REFUSES), says(REFUSES)], **SLOW_PROBES) as r:
        for _ in range(30):
            got = await r.ask(headers={"X-Session-ID": "one"})
            assert (got.status, got.is_clean) == (400, True)
        members = [r.router.known.fleet.get(name) for name in ("i0", "i1")]
        assert [m.health.last_error for m in members] == [None, None]
        assert not any(m.health.is_suspect for m in members)
        assert r.router.known.fleet.doubts(members, "", 0.0) is None
        assert r.posts <= 30 * 10 / 9


async def test_f144_another_key(rig: Floor) -> None:
    other = black_hole.refuses(401)
    async with rig([other, GOOD], instance_api_key="canary-sk-4d11-0123456789") as r:
        r.engines[0].gets["/v1/models"] = plain(b"{}", "401 Unauthorized")
        answers = [await r.ask() for _ in range(6)]
        assert all(map(is_fine, answers))
        await until(lambda: not r.is_up("i0"), "its trial fails")
        told = r.state.instances.warnings["i0"]
        assert told["answers"] == "its answers are hollow: status 401 to the proxy's own key"
        await until(lambda: "401" in told.get("models", "401"), "its models are asked for")


@pytest.mark.parametrize("engines", [1, 3])
async def test_f145_all_answer_with_nothing(rig: Floor, engines: int) -> None:
    for way in ("{}", "html", "abort in one piece"):
        async with rig([black_hole.WAYS[way]] * engines, **SLOW_PROBES) as r:
            answers = [await r.ask() for _ in range(8)]
            assert {got.status for got in answers} == {200}
            assert len({got.body for got in answers}) == 1
            assert engines == 1 or all(r.is_up(f"i{i}") for i in range(engines))


BUSY_WAYS = {
    "429": plain(b"{}", "429 Too Many", "Retry-After: 9\r\n"),
    "503": plain(b"{}", "503 Busy"),
    "in band": STREAM_HEAD + chunk(b'data: {"error":{"message":"x","code":503}}\n\n') + DONE,
}


@pytest.mark.parametrize("way", list(BUSY_WAYS))
async def test_f148_busy_to_one_clients_request(rig: Floor, way: str) -> None:
    answer = BUSY_WAYS[way]
    async with rig([poisoned(answer) for _ in range(4)], **SLOW_PROBES, max_queue=0) as r:
        for i in range(4):
            got = await r.ask("belladonna", headers={"X-Session-ID": "mallory"})
            assert got.status in (429, 503)
            others = [await r.ask(f"{i} {n}", headers={"X-Session-ID": f"s{n}"}) for n in range(4)]
            assert all(map(is_fine, others)), "they are served at once"
    async with rig([poisoned(answer) for _ in range(2)], **SLOW_PROBES) as r:
        waits = await r.connection()
        waits.send(request(orjson.dumps(chat("belladonna")), {}))
        await until(lambda: r.metric("queued_requests"), "it waits alone")
        assert all([is_fine(await r.ask(f"prompt {i}")) for i in range(6)])
        waits.close("FIN")


async def test_f164_wide_requests_of_one_client(rig: Floor) -> None:
    busy = plain(b"{}", "503 Busy", "Retry-After: 30\r\n")
    async with rig([poisoned(busy), GOOD], **SLOW_PROBES) as r:
        gate, engine = r.router.known.gate, r.engines[0]
        while not engine.posts or b"belladonna" not in engine.posts[-1]:
            assert is_fine(await r.ask("belladonna", headers={"X-Session-ID": "wide"}))
        assert gate.is_own("i0", "wide", r.state.clock.now_s())
        asked = len(engine.posts)
        for i in range(20):
            assert is_fine(await r.ask(f"prompt {i}", headers={"X-Session-ID": f"s{i % 2}"}))
        assert len(engine.posts) > asked, "others are served there"
        assert gate.is_open(MODEL, r.state.clock.now_s()), "which opens it to all"
        now_s = r.state.clock.now_s()
        for session in ("s0", "s1"):
            gate.refused("i0", session, 30.0, now_s)
        for session in ("s0", "s2", "wide"):
            closed = [
                r.router.known.busy("i0", MODEL, now_s + later_s, client=session) is not None
                for later_s in (0.0, 0.9, 1.1)
            ]
            assert closed == [True, True, False], "two were told that it is full; then it is tried"
        assert r.router.known.busy("i0", MODEL, now_s + 29.0) is not None


BROKEN_WAYS: dict[str, Script] = {
    "closes": says(b"", close=True),
    "resets": resets(),
    "truncated": says(
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"id',
        close=True,
    ),
    "garbage": says(b"hello\r\n\r\n", close=True),
    "no event": says(STREAM_HEAD + b"0\r\n\r\n"),
}


async def stays_silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Answer nothing until the proxy hangs up."""
    await reader.read()


def _has_more(r: Rig, posts: int) -> bool:
    return r.posts > posts


@pytest.mark.parametrize("way", ["refused", "left"])
async def test_f166_prompts_that_nobody_computes(rig: Floor, way: str) -> None:
    """Each is predicted to take minutes wherever it goes: that is nobody's busy time."""
    refused = plain(b'{"error":{"message":"too long"}}', "400 Bad Request")
    answers: bytes | Script = refused if way == "refused" else stays_silent
    giant = {"model": MODEL, "prompt": [1] * 100_000, "max_tokens": 1, "user": "belladonna"}
    async with rig([poisoned(answers) for _ in range(2)], **SLOW_PROBES) as r:
        for _ in range(12):
            if way == "refused":
                assert (await r.ask(body=giant, path="/v1/completions")).status == 400
            else:
                gone, before = await r.connection(), r.posts
                gone.send(request(orjson.dumps(giant), {}, "/v1/completions"))
                await until(partial(_has_more, r, before), "an engine has it")
                gone.close("FIN")
                await r.quiet()
        assert is_fine(await r.ask("a short one"))
        priced = (await r.records(13))[-1]["candidates"]
        assert max(one["next_s"] for one in priced) < 0.5


@pytest.mark.parametrize("way", list(BROKEN_WAYS))
async def test_f149_engines_break_one_clients_request(rig: Floor, way: str) -> None:
    engines = [poisoned(BROKEN_WAYS[way]) for _ in range(4)]
    async with rig(engines, **SLOW_PROBES) as r:
        for i in range(4):
            asked = [r.ask(f"belladonna {i} {n}", stream=way != "truncated") for n in range(6)]
            for got in await asyncio.gather(*asked):
                assert got.status == 502 or not got.is_clean
        assert all_up(r), "each has answered the proxy's own request, if it had to"
        assert all([is_fine(await r.ask(f"prompt {i}")) for i in range(8)])
        assert all_up(r)


FAILS_WAYS = {"resets": resets(), "500": says(REFUSED), "truncated": BROKEN_WAYS["truncated"]}
THREE_KEYS = {who: {"Authorization": f"Bearer {who * 5}"} for who in ("alice", "bob", "mallory")}
KEYS = ",".join(f"{who}:{who * 5}" for who in THREE_KEYS)


@pytest.mark.parametrize("way", ["resets", "500"])
async def test_f161_some_engines_fail_one_clients_requests(rig: Floor, way: str) -> None:
    engines = [poisoned(FAILS_WAYS[way]), RawEngine(GOOD), RawEngine(GOOD), RawEngine(GOOD)]
    async with rig(engines, flow=False, api_key=KEYS, **SLOW_PROBES) as r:
        for i in range(12):
            assert is_fine(await r.ask(f"belladonna {i}", headers=THREE_KEYS["mallory"]))
            assert all_up(r), "whatever its requests say"
        seen = sum(b"belladonna" in body for body in r.engines[0].posts)
        assert seen <= 4, "two requests, each perhaps sent twice on a connection that was kept"
        before = len(r.engines[0].posts)
        asked = [
            r.ask(f"prompt {i}", headers=THREE_KEYS["alice" if i % 2 else "bob"]) for i in range(12)
        ]
        assert all(map(is_fine, await asyncio.gather(*asked)))
        assert len(r.engines[0].posts) - before >= 3, "others have their part of it"
        assert all_up(r)


@pytest.mark.parametrize("way", ["resets", "500", "garbage"])
async def test_f167_one_clients_poison_beside_anothers_flake(rig: Floor, way: str) -> None:
    """Every engine is in doubt, and its trial is slow: it decides nothing for a while."""
    tried, flaked, engines = asyncio.Event(), dict[bytes, RawEngine](), list[RawEngine]()

    def engine() -> RawEngine:
        made = RawEngine()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            body = made.posts[-1]
            if b'"prompt":"1"' in body:
                await tried.wait()
            is_bad = b"belladonna" in body
            is_bad |= b"flake" in body and flaked.setdefault(body[:120], made) is made
            await ((FAILS_WAYS | BROKEN_WAYS)[way] if is_bad else says(ANSWER))(reader, writer)

        made.scripts = [script]
        return made

    engines += [engine() for _ in range(4)]
    async with rig(engines, flow=False, api_key=KEYS, **SLOW_PROBES) as r:
        for i in range(6):
            asked = [r.ask(f"belladonna {i} {n}", headers=THREE_KEYS["mallory"]) for n in range(4)]
            for got in await asyncio.gather(*asked):
                assert got.status in (500, 502)
        statuses = []
        for i in range(6):
            who = THREE_KEYS["alice" if i % 2 else "bob"]
            statuses.append((await r.ask(f"flake {i}", headers=who)).status)
            again = [r.ask(f"belladonna {i} {n}", headers=THREE_KEYS["mallory"]) for n in range(4)]
            await asyncio.gather(*again)
        tried.set()
        assert (statuses, len(flaked)) == ([200] * 6, 6)
        assert all_up(r)


@pytest.mark.parametrize("way", ["400", "{}", "abort in one piece"])
async def test_f168_some_engines_are_hollow_to_one_client(rig: Floor, way: str) -> None:
    engines = [poisoned(black_hole.WAYS[way]) for _ in range(2)]
    async with rig([*engines, GOOD, GOOD], flow=False, api_key=KEYS, **SLOW_PROBES) as r:
        priced: list[Any] = []
        for i in range(24):
            await r.ask(f"belladonna {i}", headers=THREE_KEYS["mallory"])
            who, now_s = "alice" if i % 2 else "bob", r.state.clock.now_s()
            priced += r.router.known.fleet.doubts(r.router.known.fleet.members(), who, now_s) or []
            priced += r.router.known.fleet.recently_failed(who)
            assert is_fine(await r.ask(f"alone {i}", headers=THREE_KEYS[who]))
        assert not any(priced), "for nobody else"
        seen = [sum(b"belladonna" in body for body in engine.posts) for engine in engines]
        assert 1 <= max(seen) <= 12, "mallory's are soon asked elsewhere"
        asked = [
            r.ask(f"prompt {i}", headers=THREE_KEYS["alice" if i % 2 else "bob"]) for i in range(24)
        ]
        assert all(map(is_fine, await asyncio.gather(*asked)))
        assert all(sum(b"prompt " in body for body in e.posts) >= 3 for e in engines)
        assert all_up(r)


@pytest.mark.parametrize("way", ["resets", "truncated"])
async def test_f163_bad_requests_beside_a_failure(rig: Floor, way: str) -> None:
    engine = RawEngine()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_bad = b"belladonna" in engine.posts[-1]
        await (says(REFUSES) if is_bad else FAILS_WAYS[way])(reader, writer)

    engine.scripts = [script]
    async with rig([engine], **SLOW_PROBES) as r:
        for i in range(5):
            bad = await r.ask(f"belladonna {i}", headers={"X-Session-ID": "mallory"})
            assert bad.status == 400
            await r.ask(f"prompt {i}", headers={"X-Session-ID": f"s{i}"}, stream=True)
        await until(lambda: not r.is_up("i0"), "its trial fails")


def begins(size: int) -> bytes:
    """A stream whose first event begins with so many bytes, and has as many to come."""
    return STREAM_HEAD + b"%x\r\n" % (2 * size) + b"data: " + b"x" * size


async def test_f183_a_first_event_without_an_end(rig: Floor) -> None:
    async with rig([stalls(begins(400_000)), GOOD], migration_limit=1, **SLOW_PROBES) as r:
        room = r.state.instances.pending
        room.max_bytes = 200_000
        assert await elsewhere(r) == ["malformed"]
        assert not len(room)


async def test_f183_many_of_them(rig: Floor, tmp_path: Path) -> None:
    """Each is shorter than what is kept of one."""
    async with (
        RawEngine(stalls(begins(1_000_000))) as engine,
        command(tmp_path, [engine.address], "--migration-limit", "1") as proxy,
    ):
        await proxy.up(1)
        before, most = proxy.rss_bytes, 0
        asked = [asyncio.create_task(proxy.ask(f"{n}", stream=True)) for n in range(128)]
        try:
            for _ in range(30):
                await asyncio.sleep(0.1)
                most = max(most, proxy.rss_bytes - before)
            ended = [task.result().status for task in asked if task.done()]
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
    assert most <= BESIDE, f"{most >> 20} MiB beside them"
    assert len(ended) >= 90
    assert set(ended) <= {502, 503}
    rig.checked += 1
