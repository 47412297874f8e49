"""A client that leaves, at every await: no lease, no upstream connection, no work left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from replayer.simulator.host import SimFleet
from tests.support.harness import (
    STREAM_HEAD,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    chunk,
    event,
    proxied,
    spend,
    stalls,
    until,
    words,
)


async def send(
    proxy: ServedProxy, body: dict[str, Any], *, upload: float = 1.0
) -> asyncio.StreamWriter:
    """Send a request on a raw connection, or only a part of it; the answer is not read."""
    host, port = proxy.server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    raw = orjson.dumps(body)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode())
    writer.write(raw[: int(len(raw) * upload)])
    await writer.drain()
    return writer


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "RST":
        writer.transport.abort()
    else:
        writer.close()


def quiet(fleet: SimFleet) -> bool:
    """No engine has anything running, waiting or pinned."""
    engines = [host.driver.engine for host in fleet.engines]
    return all(not e.running and not e.waiting and not e.sender.pinned for e in engines)


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_during_the_upload(tmp_path: Path, how: str) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        writer = await send(proxy, chat(words(2000)), upload=0.5)
        await until(lambda: proxy.server.state.in_flight.count == 1)
        leave(writer, how)
        await proxy.at_rest()
        (record,) = await proxy.records(1)
        assert record["outcome"] == "client_gone"
        assert proxy.metric("client_disconnects_total", phase="upload") == 1
        assert proxy.metric("issued_total") == 0


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize(
    ("phase", "reached"),
    [
        ("prefill", lambda proxy, p, d: p.posts),
        ("first_token", lambda proxy, p, d: d.posts),
    ],
)
async def test_while_an_instance_is_silent(
    tmp_path: Path, phase: str, how: str, reached: Callable[..., Any]
) -> None:
    """In the prefill leg, and while D has not said anything: the connection to it closes."""
    policy = "always" if phase == "prefill" else "never"
    options = {"offload_policy": policy, "warm_threshold": 10, "heavy_threshold": 100}
    async with RawEngine(stalls()) as d, RawEngine(stalls()) as p:
        instances = [f"d={d.address}", f"p={p.address};bootstrap={p.port}"]
        async with ServedProxy(tmp_path / "log", instances, health_interval=60, **options) as proxy:
            writer = await send(proxy, chat(words(500)))
            await until(lambda: reached(proxy, p, d), phase)
            leave(writer, how)
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0, "the upstream connection is closed")
            (record,) = await proxy.records(1)
            assert record["outcome"] == "client_gone"
            assert proxy.metric("client_disconnects_total", phase=phase) == 1


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_in_mid_stream(tmp_path: Path, how: str) -> None:
    async with RawEngine(stalls(STREAM_HEAD + chunk(event("a")))) as engine:
        instances = [engine.address]
        async with ServedProxy(tmp_path / "log", instances, health_interval=60) as proxy:
            writer = await send(proxy, chat("x"))
            name = proxy.settings.instances[0].name
            await until(lambda: proxy.router.known.ledger.load(name).decode_requests, "decoding")
            leave(writer, how)
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0, "the upstream connection is closed")
            (record,) = await proxy.records(1)
            assert record["outcome"] == "client_gone"
            assert proxy.metric("client_disconnects_total", phase="decode") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_engine_stops_working(tmp_path: Path, stream: bool) -> None:
    async with proxied(tmp_path, 1, sim={"speed": 1.0}) as (proxy, fleet):
        writer = await send(proxy, chat(words(50), stream=stream, max_tokens=5000))
        engine = fleet.engines[0].driver.engine
        await until(lambda: engine.running, "running")
        leave(writer, "FIN")
        await until(lambda: quiet(fleet), "the engine is idle")
        await proxy.at_rest()
        assert proxy.connections() == 0


async def test_many_leave_at_random_moments_of_an_offload(tmp_path: Path) -> None:
    """Wherever in the two legs it strikes; whatever stays pinned on P goes with its timeout."""
    options = {"offload_policy": "always", "warm_threshold": 10, "heavy_threshold": 100}
    sim = {"speed": 20.0, "abort_timeout": 10.0}
    async with proxied(tmp_path, 2, sim=sim, **options) as (proxy, fleet):
        for i in range(24):
            writer = await send(proxy, chat(words(3000, f"r{i}")))
            await spend(i * 0.002)  # at another moment each: that is the input
            leave(writer, "RST" if i % 2 else "FIN")
        await proxy.at_rest()
        await until(lambda: proxy.connections() == 0)
        await until(lambda: quiet(fleet), "engines idle, nothing pinned for ever")
        assert len(await proxy.records(24)) == 24


def floods() -> Script:
    """Events without end, as fast as they are taken."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(event("x" * 60_000)))
            await writer.drain()

    return script


@pytest.mark.parametrize("limit", ["idle_timeout", "total_timeout"])
async def test_a_client_that_reads_nothing_holds_nothing(tmp_path: Path, limit: str) -> None:
    """Back-pressure stops the instance; a timeout ends what would wait for ever."""
    async with RawEngine(floods()) as engine:
        options: dict[str, Any] = {limit: 0.3, "health_interval": 60}
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            writer = await send(proxy, chat("x"))
            await until(lambda: engine.posts, "it is being served")
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0)
            (record,) = await proxy.records(1)
            expected = "client_gone" if limit == "idle_timeout" else "upstream_timeout"
            assert record["outcome"] == expected
            writer.close()
