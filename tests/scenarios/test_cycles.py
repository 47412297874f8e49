"""No request leaves a cycle behind: what is over is freed at once, whatever became of it.

The collector looks at old objects once in hours. Whatever of a request waits for it stays so long,
and memory grows as long as the process is young.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest

from proxy.core.types import FailureKind
from proxy.protocol.errors import UpstreamFailure
from proxy.state.detached import DetachedLeg, DetachedTasks
from tests.chaos.client import connect, exchange, request
from tests.support.harness import (
    ANSWER,
    STREAM_HEAD,
    RawEngine,
    ServedProxy,
    chat,
    chunk,
    event,
    plain,
    proxied,
    resets,
    says,
    stalls,
    until,
    words,
)

TIMES = 4
HALF = STREAM_HEAD + chunk(event("half"))
NO_PROBES: dict[str, Any] = {"kv_connector": "none", "health_interval": 60, "scrape_interval": 60}
OFFLOADS: dict[str, Any] = {
    "warm_threshold": 100,
    "heavy_threshold": 500,
    "offload_policy": "always",
    "health_interval": 60,
}
Once = Callable[[ServedProxy], Awaitable[None]]


async def asks(proxy: ServedProxy) -> None:
    await exchange(proxy.server.url, request(orjson.dumps(chat("x")), {}))


async def asks_much(proxy: ServedProxy) -> None:
    await exchange(proxy.server.url, request(orjson.dumps(chat(words(2000))), {}))


async def asks_for_no_stream(proxy: ServedProxy) -> None:
    await exchange(proxy.server.url, request(orjson.dumps(chat("x", stream=False)), {}))


async def talks_nonsense(proxy: ServedProxy) -> None:
    await exchange(proxy.server.url, b"GET /x y HTTP/1.1\r\n\r\n")


async def sends_no_json(proxy: ServedProxy) -> None:
    await exchange(proxy.server.url, request(b"{", {}))


async def breaks_its_chunks(proxy: ServedProxy) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nTransfer-Encoding: chunked\r\n\r\n"
    await exchange(proxy.server.url, head + b"zz\r\n")


When = Callable[[ServedProxy], Any]


def is_asked(proxy: ServedProxy) -> bool:
    return proxy.connections() > 0


def has_begun(proxy: ServedProxy) -> bool:
    state = proxy.server.state
    return bool(state.in_flight.count and state.telemetry.decisions[-1].t_first_token)


def is_in(proxy: ServedProxy) -> bool:
    return proxy.server.state.in_flight.count > 0


def is_in_head(proxy: ServedProxy) -> bool:
    return any(c._bounds.in_head for c in proxy.listener.connections)


def leaves(when: When, data: bytes = request(orjson.dumps(chat("x")), {})) -> Once:
    async def once(proxy: ServedProxy) -> None:
        connection = await connect(proxy.server.url)
        connection.send(data)
        await until(lambda: when(proxy), str(when))
        connection.close("RST")

    return once


@pytest.fixture(scope="module")
def _nothing_older() -> Iterator[None]:
    """What other tests have left is not looked at: that would take most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def garbage(_nothing_older: None) -> Iterator[Callable[[], Counter[str]]]:
    """Nothing is collected but when it is called, which gives what was found of the proxy's."""
    gc.disable()

    def find() -> Counter[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = Counter(filter(None, map(_name, gc.garbage)))
        gc.garbage.clear()
        gc.collect()
        return found

    yield find
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def _name(found: object) -> str | None:
    if isinstance(found, FrameType):
        code = found.f_code
        return code.co_qualname if "/proxy/" in code.co_filename else None
    kind = type(found)
    is_ours = str(kind.__module__).startswith("proxy.")
    return f"{kind.__module__}.{kind.__name__}" if is_ours else None


async def left_behind(
    proxy: ServedProxy, once: Once, find: Callable[[], Counter[str]]
) -> dict[str, int]:
    """What the collector finds of the proxy's at least once per repetition of `once`."""
    await once(proxy)
    await proxy.at_rest()
    find()
    for _ in range(TIMES):
        await once(proxy)
    await proxy.at_rest()
    await until(
        lambda: proxy.metric("open_connections") == 0, "every client's connection is closed"
    )
    return {name: count for name, count in find().items() if count >= TIMES}


@pytest.mark.parametrize("once", [asks, asks_for_no_stream, talks_nonsense, sends_no_json])
async def test_good_and_bad_requests(
    tmp_path: Path, once: Once, garbage: Callable[[], Counter[str]]
) -> None:
    async with RawEngine(says(ANSWER)) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **NO_PROBES) as proxy:
            await proxy.up()
            assert not await left_behind(proxy, once, garbage)


@pytest.mark.parametrize(
    "script",
    [
        resets(),
        resets(HALF),
        says(plain(b"{}", "500 X")),
        says(plain(b"{}", "429 X")),
        says(b"\x00garbage\r\n\r\n", close=True),
        says(HALF + b"0\r\n\r\n"),
        stalls(),
        stalls(HALF),
    ],
)
async def test_engines_that_fail(
    tmp_path: Path, script: Any, garbage: Callable[[], Counter[str]]
) -> None:
    limits = {"ttft_timeout": 0.1, "idle_timeout": 0.1, "max_queue_seconds": 0.1}
    async with RawEngine(script) as bad:
        instances = [f"bad={bad.address}"]
        async with ServedProxy(tmp_path / "log", instances, **(NO_PROBES | limits)) as proxy:
            await proxy.up()
            assert not await left_behind(proxy, asks, garbage)


@pytest.mark.parametrize(
    ("script", "once"),
    [
        (stalls(), leaves(is_asked)),
        (stalls(HALF), leaves(has_begun)),
        (says(ANSWER), leaves(is_in, request(b"{}", {"Content-Length": "9000"}))),
        (says(ANSWER), leaves(is_in_head, b"POST /v1/comp")),
        (says(ANSWER), breaks_its_chunks),
    ],
)
async def test_clients_that_leave_or_break_off(
    tmp_path: Path, script: Any, once: Once, garbage: Callable[[], Counter[str]]
) -> None:
    async with RawEngine(script) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], **NO_PROBES) as proxy:
            await proxy.up()
            assert not await left_behind(proxy, once, garbage)


LONG = request(orjson.dumps(chat(words(2000), max_tokens=2000)), {})


@pytest.mark.parametrize("leaving", [False, True])
async def test_a_leg_that_fails(leaving: bool, garbage: Callable[[], Counter[str]]) -> None:
    """While its request waits for it, or when that has gone."""
    detached, may_end = DetachedTasks(), asyncio.Event()

    async def fails() -> None:
        await may_end.wait()
        raise UpstreamFailure(FailureKind.RESET, "the connection was closed")

    async def once() -> None:
        leg = DetachedLeg(fails, on_left=lambda: True, unwanted=lambda _: None)
        with suppress(UpstreamFailure, asyncio.CancelledError):
            await detached.keep(leg)

    async with asyncio.TaskGroup() as group:
        garbage()
        running = group.create_task(detached.run())
        await asyncio.sleep(0)
        requests = [group.create_task(once()) for _ in range(TIMES)]
        await asyncio.sleep(0)
        if leaving:
            for task in requests:
                task.cancel()
            await asyncio.wait(requests)
        may_end.set()
        await until(lambda: detached.live == 0, "every leg is over")
        del requests
        await asyncio.sleep(0)
        left = {name: number for name, number in garbage().items() if number >= TIMES}
        running.cancel()
    assert not left


@pytest.mark.parametrize("once", [asks_much, leaves(is_asked, LONG)])
async def test_offloads(tmp_path: Path, once: Once, garbage: Callable[[], Counter[str]]) -> None:
    async with proxied(tmp_path, **OFFLOADS) as (proxy, _):
        assert not await left_behind(proxy, once, garbage)
