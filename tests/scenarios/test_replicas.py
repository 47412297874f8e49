"""Two proxies before one fleet that share over a real server: what one has, the other sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import redis.asyncio as redis_py

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.types import RouterConfig
from proxy.net.bus import BUSES
from proxy.net.bus.form import BatchForm
from proxy.net.timeouts import Clock
from proxy.state.replicas import Replicas, State
from replayer.simulator.host import SimFleet
from tests.support.harness import WAIT_S, ServedProxy, addresses, chat, proxied, until, words
from tests.support.redis_server import NEEDED, RedisServer

pytestmark = NEEDED


def state(proxy: ServedProxy) -> State:
    replicas = proxy.server.state.replicas
    assert replicas is not None
    return replicas.state


async def warnings(proxy: ServedProxy) -> list[str]:
    """What /health and /ui warn of alike."""
    async with proxy.http.get("/health") as response:
        health = [warning["text"] for warning in (await response.json())["warnings"]]
    async with proxy.http.get("/ui", headers={"Accept": "application/json"}) as response:
        page = (await response.json())["verdict"]["warnings"]
    assert health == page
    return health


def foreign(proxy: ServedProxy) -> float:
    names = [m.instance.name for m in proxy.router.known.fleet.members()]
    return sum(proxy.metric("foreign_tokens", upstream=name) for name in names)


async def shared(*proxies: ServedProxy) -> None:
    """Wait until each hears the others."""
    count = len(proxies) - 1

    def all_hear() -> bool:
        return all(
            state(proxy) is State.SHARED and proxy.metric("share_replicas") == count
            for proxy in proxies
        )

    await until(all_hear, "shared")


@asynccontextmanager
async def replicas(
    tmp_path: Path, server: RedisServer, count: int = 2, **options: Any
) -> AsyncIterator[list[ServedProxy]]:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(SimFleet(2, speed=1.0, tick=0.0))
        proxies = []
        for number in range(count):
            log = tmp_path / f"log-{number}.jsonl"
            proxy = ServedProxy(log, addresses(fleet), share=server.url, **options)
            proxies.append(await stack.enter_async_context(proxy))
            await proxy.up()
        yield proxies


async def test_what_one_has_reserved_is_seen_by_the_other_and_goes_with_its_end(
    tmp_path: Path,
) -> None:
    async with RedisServer() as server, replicas(tmp_path, server) as (one, other):
        await shared(one, other)
        names = [m.instance.name for m in one.router.known.fleet.members()]
        asked = asyncio.create_task(one.post(chat(words(2000), max_tokens=200)))
        await until(lambda: foreign(other) > 1000, "the other sees it")
        assert foreign(one) == 0
        own = [other.metric("ongoing_tokens", upstream=name) for name in names]
        assert own == [0.0, 0.0], "gauges are of this process alone"
        loads = [other.router.known.ledger.load(name) for name in names]
        assert max(load.ongoing_tokens for load in loads) > 1000
        assert (await asked).status == 200
        await until(lambda: foreign(other) == 0, "nothing is left")
        await one.at_rest()


async def test_a_session_and_its_prefix_are_known_to_the_other(tmp_path: Path) -> None:
    async with (
        RedisServer() as server,
        replicas(tmp_path, server, share_key="k" * 16) as (one, other),
    ):
        await shared(one, other)
        text, named = words(3000), {"X-Session-ID": "secret-session"}
        first = await one.post(chat(text, max_tokens=2), headers=named)
        home = first.headers["X-Cache-Proxy-Instance"]
        known = other.router.known
        await until(lambda: known.sessions.home("secret-session", 0.0) == home, "home is known")
        await until(lambda: known.prefixes.total_blocks > 5, "its prefix is known")
        second = await other.post(chat(text + " and on", max_tokens=2), headers=named)
        assert second.headers["X-Cache-Proxy-Instance"] == home
        (record,) = await other.records(1)
        assert record["hit_tokens"] > 1000
        async with redis_py.Redis.from_url(server.url, protocol=2) as client:
            kept = repr(await client.xrange("cache-proxy:{fleet}:1:log"))
        assert "secret-session" not in kept


async def test_a_lost_server_costs_no_request_and_is_found_again(tmp_path: Path) -> None:
    async with RedisServer() as server, replicas(tmp_path, server) as (one, other):
        await shared(one, other)
        asked = asyncio.create_task(one.post(chat(words(500), max_tokens=300)))
        await until(lambda: foreign(other) > 0, "the other sees it")
        server.kill()
        await until(lambda: state(one) is state(other) is State.ALONE, "both are alone")
        assert foreign(other) == 0
        answers = await asyncio.gather(*(p.post(chat("while alone")) for p in (one, other) * 4))
        assert [a.status for a in answers] == [200] * 8
        await server.start()
        await shared(one, other)
        assert (await asked).status == 200
        await until(lambda: foreign(other) == foreign(one) == 0, "nothing is left")


async def test_an_emptied_server_heals(tmp_path: Path) -> None:
    async with RedisServer() as server, replicas(tmp_path, server) as (one, other):
        await shared(one, other)
        async with redis_py.Redis.from_url(server.url, protocol=2) as client:
            # Its next ids would be far ahead of those that are known, then behind them.
            stream = "cache-proxy:{fleet}:1:log"
            await client.xadd(stream, {"x": "y"}, id=f"{2**52}-1")
            await until(lambda: one.metric("share_batches_total", result="torn") > 0, "it is read")
            await client.flushall()
        await until(lambda: one.metric("share_resets_total") > 0, "position is set anew")
        asked = asyncio.create_task(one.post(chat(words(500), max_tokens=100)))
        await until(lambda: foreign(other) > 0, "the other sees it")
        assert (await asked).status == 200
        await until(lambda: foreign(other) == 0, "nothing is left")
        assert state(one) is state(other) is State.SHARED


async def test_a_proxy_starts_alone_and_joins_once_there_is_a_server(tmp_path: Path) -> None:
    server = RedisServer()
    async with replicas(tmp_path, server, 1) as (one,):
        assert (await one.post(chat("nobody is there"))).status == 200
        await until(lambda: state(one) is State.ALONE, "alone")
        assert [text for text in await warnings(one) if text.startswith("share: alone: Error")]
        async with server:
            await shared(one)
            assert not await warnings(one)
            async with one.http.get("/replicas") as response:
                told = await response.json()
        assert (told["state"], told["others"]) == ("shared", [])


async def test_each_names_the_others_until_they_end(tmp_path: Path) -> None:
    async with RedisServer() as server, replicas(tmp_path, server, 1) as (one,):
        instances = [m.instance.url for m in one.router.known.fleet.members()]
        async with ServedProxy(tmp_path / "other.jsonl", instances, share=server.url) as other:
            await shared(one, other)
            async with one.http.get("/replicas") as response:
                (heard,) = (await response.json())["others"]
            assert heard["about"].startswith("cache-proxy ")
            assert heard["requests"] == 0
        await until(lambda: one.metric("share_replicas") == 0, "it is gone")


async def test_the_exchange_ends_whenever_it_is_cancelled() -> None:
    """redis-py loses a cancellation now and then: the task would go on, and the proxy with it."""
    async with RedisServer() as server:
        for turns in range(120):
            router = Router(FleetState(RouterConfig(prefill_throughput=20_000)))
            bus = BUSES["redis"](server.url, "s")
            exchange = Replicas(bus, BatchForm(), router, Clock())
            task = asyncio.create_task(exchange.run())
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns % 3 == 0:
                server.kill()
            task.cancel()
            _, going = await asyncio.wait({task}, timeout=WAIT_S)
            assert not going
            await exchange.close()
            if turns % 3 == 0:
                await server.start()


async def test_replicas_are_unknown_without_the_option(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _), proxy.http.get("/replicas") as response:
        assert response.status == 404
        assert "--share" in await response.text()
