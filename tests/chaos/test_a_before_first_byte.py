"""Faults before the client's first byte: nobody notices, or one honest status."""

from __future__ import annotations

import asyncio
import gzip

import orjson
import pytest

from proxy.core.types import FailureKind
from tests.chaos.client import Got, request
from tests.chaos.rig import SLOW_PROBES, Floor, Rig
from tests.chaos.scripted import ENGINE_SECRET, GOOD, Scripted
from tests.support.harness import ANSWER, Script, plain, resets, says, stalls, until

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
        assert await elsewhere(r) == ["connect"]


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
    async with rig([busy], **SLOW_PROBES) as r:
        got = await r.ask()
        assert (got.status, got.headers["retry-after"]) == (429, "7")


@pytest.mark.parametrize(
    "value", ["Wed, 21 Oct 2099 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:00 GMT", "-5", "1" + "0" * 9]
)
async def test_f14_odd_retry_after(rig: Floor, value: str) -> None:
    busy = plain(b'{"error":{"message":"busy"}}', "503 Busy", f"Retry-After: {value}\r\n")
    async with rig([says(busy)], **SLOW_PROBES) as r:
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
        assert r.posts <= 1.2 * len(answers), "retries make a bad day worse"
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
    async with rig([says(NO_MODEL), GOOD], **SLOW_PROBES) as r:
        answers = [await r.ask(f"prompt {i}") for i in range(4)]
        assert all(map(is_fine, answers))
        assert len(r.links[0].posts) == 1, "it does not serve that model"


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
    async with rig([Scripted(says(plain(b"smuggled", status)), GOOD)], **SLOW_PROBES) as r:
        got = await r.ask()
        assert (got.status, got.body) == (int(status[:3]), b"")
        assert is_fine(await r.ask()), "what followed is nobody's answer"


async def test_f22_gzip_unasked(rig: Floor) -> None:
    packed = gzip.compress(orjson.dumps({"text": "x" * 1000}))
    engine = Scripted(says(plain(packed, extra="Content-Encoding: gzip\r\n")))
    async with rig([engine], **SLOW_PROBES) as r:
        got = await r.ask(stream=False)
        assert (got.headers["content-encoding"], got.body) == ("gzip", packed)
        assert b"gzip" not in engine.heads[0], "only identity was asked for"


@pytest.mark.parametrize("is_continued", [False, True])
async def test_f116_the_holder_of_a_response_dies(rig: Floor, *, is_continued: bool) -> None:
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
