"""One call against a server that misbehaves in every way the client has a name for."""

import asyncio
import itertools
import socket
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from replayer.replay.client import (
    HEADER_CHARS,
    Call,
    Client,
    ClientOptions,
    ReplayOutcome,
    explain,
    open_session,
)
from replayer.replay.retries import Retries
from tests.support.sse_server import Engine
from tests.support.told_engine import endless

BODY = b'{"messages":[{"role":"user","content":"a b c"}],"max_tokens":3,"stream":true}'
CALL = Call(BODY, {"X-Request-ID": "r.run", "Content-Type": "application/json"})


async def exchange(engine, call=CALL, **options):
    ticks = itertools.count()
    url = f"{engine.url}/v1/chat/completions"
    async with open_session() as session:
        client = Client(session, ClientOptions(url, **options), lambda: float(next(ticks)))
        seen = client.open_exchange()
        await client.run(call, seen)
    return seen


@pytest.mark.parametrize(
    ("behaviour", "outcome", "status", "first_byte"),
    [
        ("ok", ReplayOutcome.OK, 200, True),
        ("busy", ReplayOutcome.REJECTED, 503, False),
        ("http_error", ReplayOutcome.HTTP_ERROR, 500, False),
        ("close_before", ReplayOutcome.DISCONNECT_BEFORE_FIRST, None, False),
        ("close_mid", ReplayOutcome.DISCONNECT_MID, 200, True),
        ("truncated", ReplayOutcome.TRUNCATED, 200, True),
        ("error_event", ReplayOutcome.STREAM_ERROR, 200, True),
    ],
)
async def test_every_end_has_its_name(behaviour, outcome, status, first_byte):
    async with Engine(plan={"r": behaviour}) as engine:
        seen = await exchange(engine)
    assert (seen.outcome, seen.status) == (outcome, status)
    assert (seen.first_byte_s is not None) == first_byte
    assert (seen.error is None) == (outcome is ReplayOutcome.OK)
    assert seen.end_s > seen.sent_s


async def test_an_answer_is_timed_counted_and_hashed():
    async with Engine() as engine:
        one, other = await exchange(engine), await exchange(engine)
    stream = one.stream
    assert one.first_byte_s is not None
    assert stream.first_token_s is not None
    assert one.sent_s < one.first_byte_s <= stream.first_token_s < one.end_s
    assert (stream.completion_tokens, stream.cached_tokens, stream.chunks) == (3, 16, 3)
    assert one.digest == other.digest
    assert one.digest is not None
    assert one.headers["X-Cache-Proxy-Route"] == "WARM"


async def test_a_call_without_an_end_times_out():
    async with Engine(plan={"r": "hang"}) as engine:
        seen = await exchange(engine, timeout_s=0.05)
    assert (seen.outcome, seen.error) == (ReplayOutcome.TIMEOUT, "no end after 0.05 s")


async def test_nobody_listening_is_a_disconnect():
    seen = await exchange(Engine(port=1))
    assert seen.outcome is ReplayOutcome.DISCONNECT_BEFORE_FIRST
    assert seen.error == "cannot connect to 127.0.0.1:1: Connection refused"


async def test_a_rejected_call_is_sent_again_and_its_time_goes_on():
    async with Engine(rejections={"r": 2}) as engine:
        seen = await exchange(engine, retries=Retries(2))
    assert (seen.outcome, seen.attempts, seen.refusals) == (ReplayOutcome.OK, 3, 2)
    assert seen.sent_s == 0.0
    assert seen.retry_waits_s == [0.01, 0.01]


QUICK = 1e6  # the founding waits, in the seconds of a target this much faster


async def test_retries_end():
    async with Engine(rejections={"r": 9}) as engine:
        once = await exchange(engine, retries=Retries(1))
        five = await exchange(engine, retries=Retries.backoff(time_scale=QUICK))
    assert (once.outcome, once.attempts, once.refusals) == (ReplayOutcome.REJECTED, 2, 2)
    assert (five.outcome, five.attempts, five.refusals) == (ReplayOutcome.REJECTED, 5, 5)
    waits = [wait_s * QUICK for wait_s in five.retry_waits_s]
    assert len(waits) == 4
    assert all(2**k <= wait < 2**k + 1 for k, wait in enumerate(waits))


@pytest.mark.parametrize(
    ("behaviour", "attempts", "outcome"),
    [
        ("unavailable", 5, ReplayOutcome.HTTP_ERROR),  # a 503, though not for lack of capacity
        ("http_error", 1, ReplayOutcome.HTTP_ERROR),
        ("refuse", 1, ReplayOutcome.HTTP_ERROR),
        ("close_before", 1, ReplayOutcome.DISCONNECT_BEFORE_FIRST),
    ],
)
async def test_only_a_503_is_sent_again(behaviour, attempts, outcome):
    async with Engine(plan={"r": behaviour}) as engine:
        seen = await exchange(engine, retries=Retries.backoff(time_scale=QUICK))
    assert (seen.outcome, seen.attempts) == (outcome, attempts)
    assert seen.refusals == (attempts if attempts > 1 else 0)


async def test_an_attempt_is_judged_by_its_own_answer():
    async with Engine(rejections={"r": 1}, plan={"r": "close_before"}) as engine:
        seen = await exchange(engine, retries=Retries(1))
    assert (seen.outcome, seen.status) == (ReplayOutcome.DISCONNECT_BEFORE_FIRST, None)
    assert seen.refusals == 1


async def test_cancelling_leaves_an_interrupted_exchange():
    async with Engine(plan={"r": "hang"}) as engine, open_session() as session:
        ticks = itertools.count()
        options = ClientOptions(f"{engine.url}/v1/chat/completions")
        client = Client(session, options, lambda: float(next(ticks)))
        seen = client.open_exchange()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(client.run(CALL, seen))
            await engine.arrived.wait()
            task.cancel()
    assert seen.outcome is ReplayOutcome.INTERRUPTED
    assert seen.end_s > seen.sent_s


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('::1', 1)"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (OSError("Multiple exceptions: ..."), "Multiple exceptions: ..."),
    ],
)
def test_a_failed_connection_is_told_without_internals(cause, said):
    key: Any = SimpleNamespace(host="h", port=1, ssl=True)
    assert explain(aiohttp.ClientConnectorError(key, cause)) == f"cannot connect to h:1: {said}"
    assert explain(aiohttp.ConnectionTimeoutError("x")) == "no connection within 10 s"
    assert explain(aiohttp.ClientPayloadError("x")) == "the answer broke off before its end"
    assert explain(aiohttp.ServerDisconnectedError("gone")) == "ServerDisconnectedError: gone"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error":{"message":"no such model","type":"x"}}', "no such model"),
        (b'{"object":"error","message":"no such model"}', "no such model"),
        (b'{"error":"no such model"}', "no such model"),
        (b'{"detail":"no such model"}', "no such model"),
        (b'{"detail":[1]}', '{"detail":[1]}'),
        (b"<html>no</html>", "<html>no</html>"),
        (b"", "no text with it"),
    ],
)
async def test_a_refusal_keeps_what_the_server_said(body, said):
    engine = Engine(plan={"r": "refuse"}, refusal=body)
    async with engine:
        seen = await exchange(engine)
    assert (seen.outcome, seen.status, seen.error) == (ReplayOutcome.HTTP_ERROR, 404, said)


async def test_a_body_beyond_a_mebibyte_is_sent_whole():
    text = b"word " * 300_000
    body = BODY.replace(b"a b c", text)
    async with Engine() as engine:
        seen = await exchange(engine, Call(body, CALL.headers))
    assert seen.outcome is ReplayOutcome.OK
    assert engine.seen[0][1]["messages"][0]["content"] == text.decode()


COMPLETIONS = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("route", "outcome", "said"),
    [
        (endless(b"x" * 1000), ReplayOutcome.STREAM_ERROR, "an event has over 1048576 bytes"),
        (
            endless(b'data: {"choices":[{"text":"%b"}]}\n' % (b"y" * 100_000)),
            ReplayOutcome.STREAM_ERROR,
            "the text has over 8388608 bytes",
        ),
        (endless(b"x" * 1000, 500), ReplayOutcome.HTTP_ERROR, "x" * 300),
    ],
)
async def test_an_answer_without_an_end_is_ended(route, outcome, said):
    engine = Engine()
    engine.routes[COMPLETIONS] = route
    async with engine:
        seen = await exchange(engine)
    assert (seen.outcome, seen.error) == (outcome, said)


async def test_of_the_text_the_hash_is_left():
    async with Engine() as engine:
        seen = await exchange(engine)
    digest = seen.digest
    seen.forget_text()
    assert digest is not None
    assert (seen.digest, seen.stream.text) == (digest, b"")


def answers(status, headers):
    """A route without a body."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(status=status, headers=headers)

    return answer


async def test_headers_are_kept_in_part():
    told = {"X-Cache-Proxy-Reason": "a\udcff" * 3000, "X-Other": "y", "Retry-After": "inf"}
    engine = Engine()
    engine.routes[COMPLETIONS] = answers(503, told | {"Set-Cookie": "a=b"})
    async with engine:
        seen = await exchange(engine)
    assert seen.headers.keys() == {"X-Cache-Proxy-Reason", "Retry-After"}
    assert len(seen.headers["X-Cache-Proxy-Reason"]) == HEADER_CHARS
    orjson.dumps(dict(seen.headers))


@pytest.mark.parametrize("place", [f"http://{'a' * 64}.test/", "http://[", "ftp://x/", "/other"])
async def test_a_redirect_is_a_failure_of_its_request(place):
    """Its address is the target's word, and what runs there is not what is measured."""
    engine = Engine()
    engine.routes[COMPLETIONS] = answers(307, {"Location": place})
    async with engine:
        seen = await exchange(engine)
    assert (seen.outcome, seen.status) == (ReplayOutcome.HTTP_ERROR, 307)
