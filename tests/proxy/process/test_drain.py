"""How a proxy ends, drained or replaced: what becomes of kept connections and of who waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from proxy.app import Proxy
from proxy.process import drain
from tests.proxy.state.test_queue import held, queued
from tests.support.harness import ServedProxy, chat, proxied, until


def leaving(server: Proxy) -> drain.Drain:
    """What `run` uses, without a process that takes over."""
    return server._drain


async def test_a_drain_waits_for_one_more_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "KEPT_S", 30.0)
    monkeypatch.setattr(drain, "ACCEPT_WHILE_DRAINING_S", 30.0)
    async with proxied(tmp_path, 1, drain_seconds=60.0) as (proxy, _), asyncio.TaskGroup() as group:
        assert (await proxy.post(chat("x"))).status == 200
        draining = group.create_task(proxy.server.drain())
        await until(lambda: proxy.server.state.in_flight.is_draining, "draining")
        late = await proxy.post(chat("x"))
        assert (late.status, late.headers["Connection"]) == (200, "close")
        await draining


async def test_a_kept_connection_that_nobody_uses_ends_a_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "KEPT_S", 0.05)
    async with proxied(tmp_path, 1) as (proxy, _):
        assert (await proxy.post(chat("x"))).status == 200
        await proxy.server.drain()
        assert proxy.server._runners[0].server
        assert len(proxy.server._runners[0].server.connections) == 1


async def test_who_waits_when_another_process_takes_over_is_served(tmp_path: Path) -> None:
    async with held(tmp_path) as (proxy, engine), asyncio.TaskGroup() as group:
        waiting = group.create_task(proxy.post(chat("x")))
        await queued(proxy)
        handing = group.create_task(leaving(proxy.server).hand_over())
        await until(lambda: not proxy.server._runners[0].sites, "accepts no more")
        engine.answer(2)
        answer = await waiting
        assert (answer.status, answer.headers["Connection"]) == (200, "close")
        connector = proxy.http.connector
        assert connector is not None
        await until(lambda: not connector._acquired, "the first has its answer too")
        await proxy.http.close()  # and its connection is kept
        await handing


async def stopped(proxy: ServedProxy) -> None:
    """A stream that the proxy ends, and says so."""
    with pytest.raises(aiohttp.ClientPayloadError):
        await proxy.post(chat("x", max_tokens=9999))
    (record,) = await proxy.records(1)
    assert record["outcome"] == "proxy_stopped"


def streams(proxy: ServedProxy) -> int:
    """Answers that have begun."""
    (member,) = proxy.router.known.fleet.members()
    return int(proxy.router.known.ledger.load(member.instance.name).decode_requests)


async def test_a_hand_over_ends_at_its_limit(tmp_path: Path) -> None:
    sim = {"speed": 1.0}
    async with proxied(tmp_path, 1, sim=sim, handover_seconds=0.3) as (proxy, _):
        async with asyncio.TaskGroup() as group:
            group.create_task(stopped(proxy))
            await until(lambda: streams(proxy), "it streams")
            await leaving(proxy.server).hand_over()


@pytest.mark.long
async def test_a_signal_turns_a_hand_over_into_a_drain(tmp_path: Path) -> None:
    sim = {"speed": 1.0}
    async with proxied(tmp_path, 1, sim=sim, drain_seconds=0.2) as (proxy, _):
        state = proxy.server.state
        async with asyncio.TaskGroup() as group:
            group.create_task(stopped(proxy))
            await until(lambda: streams(proxy), "it streams")
            handing = group.create_task(leaving(proxy.server).hand_over())
            await until(lambda: not proxy.server._runners[0].sites, "accepts no more")
            assert not state.in_flight.is_draining
            proxy.server._stop.set()
            await handing
        assert state.waiting.waiting.is_closed
