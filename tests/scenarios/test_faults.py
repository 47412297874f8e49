"""Instances that misbehave: before the first byte nobody notices, after it the client is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.harness import (
    GOOD,
    STREAM_HEAD,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    chunk,
    event,
    plain,
    resets,
    says,
    stalls,
    until,
)

ERROR_EVENT = chunk(b'data: {"error":{"message":"KV load failed","code":500}}\n\n')
CRASHED = STREAM_HEAD + ERROR_EVENT + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
BUSY = plain(b'{"error":{"message":"The engine is currently busy"}}', "503 Service Unavailable")
REFUSED = plain(b'{"error":{"message":"boom","code":500}}', "500 Internal Server Error")
NO_FRAMING = b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: gzip\r\n\r\n{}"
NO_MODEL = plain(b'{"error":{"message":"The model `sim-8b` does not exist."}}', "404 Not Found")
BUSY_EVENT = STREAM_HEAD + chunk(b'data: {"error":{"message":"full","code":503}}\n\n')


@contextlib.contextmanager
def dead_address() -> Iterator[str]:
    """A port on which nobody listens, and which nobody else is given meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


class Pair:
    """A bad instance, which is asked first, and a good one."""

    def __init__(self, tmp_path: Path, bad: Script, **options: Any) -> None:
        self.bad, self.good = RawEngine(bad), RawEngine(GOOD)
        self._log = tmp_path / "log"
        self._options: dict[str, Any] = {"kv_connector": "none", "health_interval": 60} | options
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ServedProxy:
        enter = self._stack.enter_async_context
        bad, good = await enter(self.bad), await enter(self.good)
        instances = [f"bad={bad.address}", f"good={good.address}"]
        return await enter(ServedProxy(self._log, instances, **self._options))

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.__aexit__(*exc)


@pytest.mark.parametrize(
    ("name", "bad", "kind"),
    [
        ("head, then reset", resets(STREAM_HEAD), "reset"),
        ("head, then clean end", says(STREAM_HEAD + b"0\r\n\r\n"), "reset"),
        ("only a comment, then reset", resets(STREAM_HEAD + chunk(b": hi\n\n")), "reset"),
        ("half an event, then reset", resets(STREAM_HEAD + chunk(b'data: {"ch')), "reset"),
        ("error event first", says(CRASHED), "server_error"),
        ("status 500", says(REFUSED), "server_error"),
        ("no first event in time", stalls(STREAM_HEAD), "timeout"),
        ("no head in time", stalls(), "timeout"),
        ("no such model", says(NO_MODEL), "no_model"),
        ("busy, said in the stream", says(BUSY_EVENT), "busy"),
    ],
)
async def test_before_the_first_byte_another_instance_answers(
    tmp_path: Path, name: str, bad: Script, kind: str
) -> None:
    """And the session goes there. tests/chaos/test_a_before_first_byte.py has more ways to fail."""
    async with Pair(tmp_path, bad, ttft_timeout=0.3 if kind == "timeout" else 10) as proxy:
        await until(lambda: proxy.router.known.fleet.get("bad").health.probes, "the first probe")
        answer = await proxy.post(chat("x"), headers={"X-Session-ID": "s"})
        assert (answer.status, answer.text) == (200, "fine"), name
        assert answer.headers["X-Cache-Proxy-Instance"] == "good"
        (record,) = await proxy.records(1)
        assert (record["outcome"], record["retries"]) == ("ok", 1)
        assert record["decode_instance"] == "good"
        assert proxy.metric("upstream_retries_total", reason=kind) == 1
        assert proxy.router.known.sessions.home("s", 0.0) == "good"
        await proxy.at_rest()


async def read_until_cut(response: aiohttp.ClientResponse) -> bytes:
    got = b""
    try:
        while piece := await response.content.readany():
            got += piece
    except aiohttp.ClientPayloadError:
        return got
    raise AssertionError(f"a clean end after {got!r}")


async def test_the_first_token_timeout_is_repeated_once(tmp_path: Path) -> None:
    late = stalls(STREAM_HEAD)
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(RawEngine(late)) for _ in range(3)]
        options = {"kv_connector": "none", "ttft_timeout": 0.1, "health_interval": 60}
        urls = [e.address for e in engines]
        proxy = await stack.enter_async_context(ServedProxy(tmp_path / "log", urls, **options))
        answer = await proxy.post(chat("x"))
        assert (answer.status, answer.json["error"]["type"]) == (504, "upstream_timeout")
        (record,) = await proxy.records(1)
        assert (record["outcome"], record["retries"]) == ("upstream_timeout", 1)
        assert sum(len(e.posts) for e in engines) == 2
        await proxy.at_rest()


async def test_a_framing_that_nobody_knows_is_502(tmp_path: Path) -> None:
    async with RawEngine(says(NO_FRAMING, close=True)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            got = await proxy.post(chat("x"))
            assert (got.status, got.json["error"]["code"]) == (502, "bad_upstream")
            await proxy.at_rest()


async def test_the_record_of_a_repeated_request_is_that_of_the_instance_that_answered(
    tmp_path: Path,
) -> None:
    """The first choice had the whole prompt cached, the second one nothing of it."""
    body, headers = chat("x" * 120_000), {"X-Session-ID": "s"}
    async with RawEngine(GOOD, resets()) as first, RawEngine(GOOD) as other:
        instances = [f"first={first.address}", f"other={other.address}"]
        options = {"kv_connector": "none", "health_interval": 60}
        async with ServedProxy(tmp_path / "log", instances, **options) as proxy:
            await proxy.up()
            home = (await proxy.post(body, headers=headers)).headers["X-Cache-Proxy-Instance"]
            if home == "other":  # the first request goes to either: have them change places
                first.scripts, other.scripts = other.scripts, [GOOD, resets()]
            answer = await proxy.post(body, headers=headers)
            fresh, repeated = await proxy.records(2)
        assert (answer.status, repeated["retries"], repeated["rehomed"]) == (200, 1, True)
        assert answer.headers["X-Cache-Proxy-Route"] == repeated["route_class"] == "HEAVY_COLO"
        assert (repeated["hit_tokens"], repeated["new_tokens"]) == (0, repeated["isl_tokens"])
        for what in ("predicted_ttft_s", "predicted_prefill_s"):
            assert repeated[what] > 0.5 * fresh[what], "of a prompt without a hit"
        assert [one["instance"] for one in repeated["candidates"]] == [repeated["decode_instance"]]


async def test_the_total_timeout_cuts_a_running_stream(tmp_path: Path) -> None:
    bad = stalls(STREAM_HEAD + chunk(event("half")))
    async with Pair(tmp_path, bad, total_timeout=1.0) as proxy:
        async with proxy.http.post("/v1/chat/completions", json=chat("x")) as response:
            assert b"--total-timeout" in await read_until_cut(response)
        (record,) = await proxy.records(1)
        assert record["outcome"] == "upstream_timeout"
        assert (record["limit"], record["limit_s"]) == ("total", 1.0)
        await proxy.at_rest()


async def test_when_nobody_can_the_last_refusal_is_passed_on(tmp_path: Path) -> None:
    async with RawEngine(says(REFUSED)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            answer = await proxy.post(chat("x"))
            assert (answer.status, answer.json["error"]["message"]) == (500, "boom")
            (record,) = await proxy.records(1)
            assert record["outcome"] == "upstream_error"
            await proxy.at_rest()


async def test_busy_everywhere_is_503_with_retry_after(tmp_path: Path) -> None:
    async with RawEngine(says(BUSY)) as engine:
        options: dict[str, Any] = {"kv_connector": "none", "max_queue": 0}
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            first = await proxy.post(chat("x"))
            assert (first.status, first.headers["Retry-After"]) == (503, "1")
            second = await proxy.post(chat("x"))
            assert (second.status, second.headers["Retry-After"]) == (503, "1")
            third = await proxy.post(chat("x"))
            assert len(engine.posts) == 2, "after two in a row it is left alone for a second"
            assert third.json["type"] == "service_unavailable"
            assert proxy.rejected("upstream_busy") == 1


async def test_nobody_there_is_502_and_then_503(tmp_path: Path) -> None:
    with dead_address() as nobody:
        async with ServedProxy(tmp_path / "log", [nobody], health_interval=60) as proxy:
            assert (await proxy.post(chat("x"))).status in (502, 503)
            await proxy.post(chat("x"))
            down = await proxy.post(chat("x"))
            assert (down.status, down.json["message"][-17:]) == (503, "no instance is up")
            assert int(down.headers["Retry-After"]) >= 1
            async with proxy.http.get("/ready") as ready:
                assert ready.status == 503
            await proxy.at_rest()


async def test_an_instance_goes_down_and_comes_back(tmp_path: Path) -> None:
    engine = RawEngine(GOOD)
    async with engine:
        port = engine.port
        async with ServedProxy(
            tmp_path / "log", [f"e={engine.address}"], kv_connector="none"
        ) as proxy:
            await proxy.up()
            await engine.__aexit__()
            await until(lambda: not proxy.router.known.fleet.is_up("e"), "down")
            again = RawEngine(GOOD)
            again.port = port
            async with again:
                await until(lambda: proxy.router.known.fleet.is_up("e"), "up")
                assert (await proxy.post(chat("x"))).text == "fine"
                assert proxy.router.known.fleet.get("e").incarnation == 1


async def test_a_frozen_instance_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Before the first byte: the probes notice, and who waits runs elsewhere."""
    bad = RawEngine(stalls())
    options = {"kv_connector": "none", "health_timeout": 0.5, "ttft_timeout": 60}
    async with bad, RawEngine(GOOD) as good:
        instances = [f"bad={bad.address}", f"good={good.address}"]
        async with ServedProxy(tmp_path / "log", instances, **options) as proxy:
            await proxy.up()
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(proxy.post(chat("x")))
                await until(lambda: bad.posts, "the request is there")
                bad.is_frozen = True
                answer = await asked
            assert (answer.text, answer.headers["X-Cache-Proxy-Instance"]) == ("fine", "good")
            assert proxy.metric("upstream_retries_total", reason="went_down") == 1
            await proxy.at_rest()


@pytest.mark.parametrize("is_first_byte_out", [True, False])
async def test_the_proxys_own_cut_is_not_the_clients(
    tmp_path: Path, is_first_byte_out: bool
) -> None:
    script = stalls(STREAM_HEAD + (chunk(event("half")) if is_first_byte_out else b""))
    async with RawEngine(script) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], kv_connector="none") as proxy:
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(cut_or_refused(proxy))
                await until(lambda: engine.posts)
                if is_first_byte_out:
                    await until(lambda: _decoding(proxy))
                proxy.server.state.in_flight.cut()
                got = await asked
            assert b"the proxy is stopping" in got
            (record,) = await proxy.records(1)
            assert record["outcome"] == "proxy_stopped"
            assert proxy.metric("client_disconnects_total", phase="decode") == 0
            await proxy.at_rest()


def _decoding(proxy: ServedProxy) -> bool:
    names = [m.instance.name for m in proxy.router.known.fleet.members()]
    return any(proxy.router.known.ledger.load(name).decode_requests for name in names)


async def cut_or_refused(proxy: ServedProxy) -> bytes:
    async with proxy.http.post("/v1/chat/completions", json=chat("x")) as response:
        if response.status != 200:
            assert response.status == 503
            return await response.read()
        return await read_until_cut(response)
