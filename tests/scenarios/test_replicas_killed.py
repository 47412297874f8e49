"""Replicas as processes: one that is killed leaves no load at the others, one that ends says so."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from replayer.simulator.host import SimFleet
from tests.chaos import invariants as inv
from tests.support.harness import addresses, chat, until, words
from tests.support.proxy_process import ProxyProcess, running
from tests.support.redis_server import NEEDED, RedisServer

pytestmark = NEEDED


async def metric(http: aiohttp.ClientSession, proxy: ProxyProcess, name: str) -> float:
    async with http.get(f"{proxy.url}/metrics") as response:
        found = inv.samples(await response.text())
    return sum(value for sample, _, value in found if sample == name)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_one_of_two_ends_under_load(tmp_path: Path, how: signal.Signals) -> None:
    async with RedisServer() as server, AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(SimFleet(2, speed=1.0, tick=0.0))
        instances = ",".join(addresses(fleet))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        proxies = [
            await stack.enter_async_context(
                running("--instances", instances, "--share", server.url, "--drain-seconds", "0.2")
            )
            for _ in range(2)
        ]
        ends, stays = proxies

        async def is_seen(name: str, value: float) -> bool:
            return await metric(http, stays, name) == value

        async def has_foreign() -> bool:
            return await metric(http, stays, "foreign_tokens") > 500

        await until(lambda: is_seen("share_replicas", 1), "each hears the other")
        body = chat(words(300), max_tokens=5000)

        async def ask(proxy: ProxyProcess) -> bytes:
            async with http.post(f"{proxy.url}/v1/chat/completions", json=body) as response:
                return await response.content.read(1)

        async with http.post(f"{ends.url}/v1/chat/completions", json=body) as response:
            assert await response.content.read(1)
            await until(has_foreign, "its load is seen")
            os.kill(ends.pid, how)
            await until(lambda: is_seen("foreign_tokens", 0), "nothing of it is left")
            await until(lambda: is_seen("share_replicas", 0), "it is not heard any more")
        assert await ask(stays)
        await until(lambda: is_seen("live_leases", 0), "no lease is left")
        assert await metric(http, stays, "accounting_drift") == 0
        await asyncio.to_thread(ends.wait)
