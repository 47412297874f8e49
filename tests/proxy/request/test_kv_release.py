"""The hand-over of KV: whatever breaks, the answer comes; whoever leaves leaves nothing pinned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.config.secrets import SecretStr
from replayer.simulator.host import SimFleet
from tests.scenarios.test_disconnect import leave, quiet, send
from tests.support.harness import (
    ANSWER,
    STREAM_HEAD,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    plain,
    proxied,
    says,
    spend,
    stalls,
    until,
    words,
)

ALWAYS: dict[str, Any] = {
    "warm_threshold": 100,
    "heavy_threshold": 500,
    "offload_policy": "always",
    "hedge": False,
}
FOREVER = {"abort_timeout": 1e9}
"""What is pinned here stays pinned, unless somebody takes or releases it."""
LENGTH = plain(b'{"choices":[{"index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":9}}')
TEXT = words(2000)


@pytest.mark.long
@pytest.mark.parametrize(
    ("faults", "sim", "fallback"),
    [
        ({"query": "hang"}, {}, "engine_id_unknown"),
        ({"query": "error"}, {}, "engine_id_unknown"),
        ({"query": "garbage"}, {}, "engine_id_unknown"),
        ({"query": "empty"}, {}, "engine_id_unknown"),
        ({"prefill": "hang"}, {}, "p_timeout"),
        ({"prefill": "error"}, {}, "p_error"),
        ({"pull": "hang"}, {}, "transfer_timeout"),
        ({"pull": "refuse"}, {}, None),
        ({"pull": "refuse"}, {"kv_load_failure_policy": "fail"}, "d_failed"),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x),
)
async def test_any_single_fault_ends_in_the_same_answer(
    tmp_path: Path, faults: dict[str, str], sim: dict[str, Any], fallback: str | None
) -> None:
    """The one of a colocated run; and when the fault is gone, offloads go on."""
    options = ALWAYS | {"prefill_timeout": 0.4, "transfer_timeout": 0.4, "connect_timeout": 0.2}
    options["hedge"] = False  # on a slow machine it would come before the timeouts
    async with SimFleet(1, speed=50.0, tick=0.0) as alone:
        async with ServedProxy(
            tmp_path / "alone", [alone.engines[0].url], health_interval=60
        ) as direct:
            expected = (await direct.post(chat(TEXT))).text
    sim = {"speed": 50.0, "tick": 0.0} | sim
    async with SimFleet(2, **sim) as fleet:
        for engine in fleet.engines:
            engine.faults.change(**faults)
        instances = [f"{e.url};bootstrap={e.bootstrap_url}" for e in fleet.engines]
        async with ServedProxy(tmp_path / "log", instances, **options) as proxy:
            answer = await proxy.post(chat(TEXT), headers={"X-Session-ID": "s"})
            assert (answer.status, answer.text) == (200, expected)
            (record,) = await proxy.records(1)
            assert (record["outcome"], record["fallback"]) == ("ok", fallback)
            assert (record["limit"] is not None) == (fallback in ("p_timeout", "transfer_timeout"))
            for engine in fleet.engines:
                engine.faults.change(query="ok", prefill="ok", pull="ok")
            now_s = asyncio.get_running_loop().time
            ids = [upstream._id for upstream in proxy.server.state.instances.all()]
            await until(lambda: all(one.known(now_s()) for one in ids), "asked again")
            other = await proxy.post(chat(words(2000, "z")), headers={"X-Session-ID": "t"})
            assert other.status == 200
            last = (await proxy.records(2))[-1]
            assert (last["outcome"], last["route_class"]) == ("ok", "HEAVY_P2P")
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0)


@pytest.mark.parametrize("params", [b'{"remote_engine_id":"other"}', b"7", b'{"remote_port":0}'])
async def test_foreign_kv_params_are_not_passed_on(tmp_path: Path, params: bytes) -> None:
    told = plain(b'{"choices":[{"finish_reason":"length"}],"kv_transfer_params":%s}' % params)
    async with legs(tmp_path, says(told), says(ANSWER)) as (proxy, _, d):
        answer = await proxy.post(chat(TEXT))
        assert answer.text == "fine"
        (record,) = await proxy.records(1)
        assert record["fallback"] == "kv_params"
        assert b"kv_transfer_params" not in d.posts[-1]
        assert proxy.metric("kv_releases_total", result="stranded") == 1


@asynccontextmanager
async def legs(
    tmp_path: Path, p: Script, d: Script, *, tls: bool = False, **options: Any
) -> AsyncIterator[tuple[ServedProxy, RawEngine, RawEngine]]:
    """A scripted P and D."""
    async with RawEngine(p) as first, RawEngine(d) as second, RawEngine(d) as third:
        address = second.address.replace("http:", "https:") if tls else second.address
        instances = [f"d={address}", f"p={first.address};bootstrap={first.port}"]
        if tls:
            instances.append(f"x={third.address}")
        given = ALWAYS | {"health_interval": 60} | options
        async with ServedProxy(tmp_path / "log", instances, **given) as proxy:
            yield proxy, first, third if tls else second
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0, "no upstream connection in use")


def released(engine: RawEngine) -> list[Any]:
    """The releases that an engine was asked for."""
    bodies = [orjson.loads(post) for post in engine.posts]
    return [b["kv_transfer_params"] for b in bodies if b["max_tokens"] == 0]


REFUSED = says(plain(b'{"error":{}}', "404 Not Found"))


async def answers_when_left(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """P had finished when it hears that its client has gone."""
    assert await reader.read() == b""
    writer.write(LENGTH)
    await writer.drain()
    raise ConnectionError


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_p_ends_as_its_client_leaves(tmp_path: Path, how: str) -> None:
    """Its KV is pinned, and nobody else will ever fetch it: it is released."""
    async with legs(tmp_path, answers_when_left, REFUSED) as (proxy, p, d):
        writer = await send(proxy, chat(TEXT))
        await until(lambda: p.posts, "P computes")
        leave(writer, how)
        await until(lambda: released(d), "D is asked to refuse")
        sent = orjson.loads(p.posts[0])["kv_transfer_params"]
        (params,) = released(d)
        assert params["transfer_id"] == sent["transfer_id"]
        assert (params["do_remote_prefill"], params["remote_engine_id"]) == (True, "e-1")
        await until(lambda: proxy.metric("kv_releases_total", result="released") == 1)
        (record,) = await proxy.records(1)
        assert record["outcome"] == "client_gone"


@pytest.mark.parametrize(
    ("status", "result"), [("404 Not Found", "released"), ("401 No", "failed")]
)
async def test_a_release_has_the_key_of_its_request(
    tmp_path: Path, status: str, result: str
) -> None:
    """An engine that wants another key answers 401 before it looks at what it is to release."""
    refuses = says(plain(b'{"error":{}}', status))
    key = SecretStr("sk-1")
    async with legs(tmp_path, answers_when_left, refuses, instance_api_key=key) as (proxy, p, d):
        writer = await send(proxy, chat(TEXT))
        await until(lambda: p.posts, "P computes")
        leave(writer, "FIN")
        await until(lambda: released(d), "D is asked to refuse")
        assert b"Authorization: Bearer sk-1\r\n" in d.post_heads[-1]
        await until(lambda: proxy.metric("kv_releases_total", result=result) == 1)


async def test_a_p_that_stops_when_left_has_nothing_to_release(tmp_path: Path) -> None:
    async with legs(tmp_path, stalls(), REFUSED) as (proxy, p, d):
        writer = await send(proxy, chat(TEXT))
        await until(lambda: p.posts, "P computes")
        leave(writer, "FIN")
        await proxy.at_rest()
        await until(lambda: proxy.connections() == 0)
        assert not d.posts
        assert proxy.metric("instance_healthy", upstream="p") == 1
        unknown = proxy.metric("kv_releases_total", result="unknown")
        now_s = proxy.server.state.clock.now_s()
        assert proxy.router.known.unreleased_kv.on("p", now_s)[0] == unknown, (
            "it may have ended just then"
        )


async def test_a_leg_that_was_left_is_not_sent_again(tmp_path: Path) -> None:
    """On a kept connection its end without an answer looks like that of a stale one.

    A second leg with the same transfer id made a real P hold the prompt's blocks for ever.
    """
    legs_of_p = [says(LENGTH), stalls(), says(LENGTH)]

    async def p_script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await legs_of_p.pop(0)(reader, writer)

    async with legs(tmp_path, p_script, says(ANSWER)) as (proxy, p, d):
        await proxy.post(chat(TEXT, session_id="s"))
        assert (len(p.posts), len(d.posts)) == (1, 1)
        writer = await send(proxy, chat(words(2000, "z"), session_id="s"))
        await until(lambda: len(p.posts) == 2, "P computes, on the connection that was kept")
        leave(writer, "FIN")
        await proxy.at_rest()
        await until(lambda: proxy.connections() == 0)
        assert (len(p.posts), len(d.posts)) == (2, 1)


async def test_a_fetch_that_was_left_is_not_sent_again(tmp_path: Path) -> None:
    """A stale connection's request is repeated, but not when nobody waits for it any more."""
    go = asyncio.Event()

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader, writer
        await go.wait()
        raise ConnectionError

    legs_of_d = [says(ANSWER), dies]

    async def d_script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await legs_of_d.pop(0)(reader, writer)

    async with legs(tmp_path, says(LENGTH), d_script) as (proxy, _, d):
        await proxy.post(chat(TEXT, session_id="s"))
        writer = await send(proxy, chat(words(2000, "z"), session_id="s"))
        await until(lambda: len(d.posts) == 2, "D fetches, on the connection that was kept")
        leave(writer, "FIN")
        await proxy.records(2)
        go.set()
        await until(lambda: proxy.router.known.ledger.live == 0, "the leg is over")
        assert len(d.posts) == 2
        assert proxy.metric("kv_releases_total", result="unknown") == 1


async def test_between_the_legs(tmp_path: Path) -> None:
    """P has answered, D was not asked yet (its TLS is still to come): released by somebody else."""
    async with legs(tmp_path, says(LENGTH), REFUSED, tls=True) as (proxy, _, other):
        writer = await send(proxy, chat(TEXT))
        load = proxy.router.known.ledger.load
        await until(lambda: load("p").pinned_requests, "P has answered")
        leave(writer, "FIN")
        await until(lambda: released(other), "released by a third")
        await until(lambda: proxy.metric("kv_releases_total", result="released") == 1)


async def test_d_is_left_once_it_has_begun(tmp_path: Path) -> None:
    """Its leg outlives the client by a moment, with its lease; then both are closed."""
    go = asyncio.Event()
    seen = []

    async def d_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(ANSWER)
        await writer.drain()
        seen.append(await reader.read())

    async with legs(tmp_path, says(LENGTH), d_answers) as (proxy, _, d):
        writer = await send(proxy, chat(TEXT))
        await until(lambda: d.posts, "D fetches")
        leave(writer, "FIN")
        (record,) = await proxy.records(1)
        assert record["outcome"] == "client_gone"
        assert proxy.router.known.ledger.live == 1
        assert proxy.connections() == 1
        go.set()
        await until(lambda: proxy.router.known.ledger.live == 0, "the lease is closed")
        assert not released(d)


async def test_a_d_that_never_begins_is_left_after_a_moment(tmp_path: Path) -> None:
    async with legs(tmp_path, says(LENGTH), stalls()) as (proxy, _, d):
        writer = await send(proxy, chat(TEXT))
        await until(lambda: d.posts, "D fetches")
        leave(writer, "RST")
        await proxy.at_rest()
        await until(lambda: proxy.connections() == 0)
        assert len(d.posts) == 1


async def test_a_d_that_cannot_be_reached_releases(tmp_path: Path) -> None:
    """The request runs elsewhere without KV; P's must not stay."""
    async with legs(tmp_path, says(LENGTH), says(ANSWER), tls=True) as (proxy, _, other):
        proxy.server.state.instances.by_name["d"]._pool._connect_timeout_s = 0.2
        answer = await proxy.post(chat(TEXT))
        assert answer.status == 200
        await until(lambda: released(other), "released")


PHASES: dict[str, Callable[[SimFleet], object]] = {
    "queued": lambda fleet: True,
    "p computes": lambda fleet: any(h.driver.engine.running for h in fleet.engines),
    "p has answered": lambda fleet: any(
        h.driver.engine.sender.pinned or h.driver.engine.sender.busy_slots for h in fleet.engines
    ),
    "d fetches": lambda fleet: any(h.driver.engine.fetching for h in fleet.engines),
    "d decodes": lambda fleet: any(
        r.output_tokens > 1 for h in fleet.engines for r in h.driver.engine.running
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("phase", PHASES)
async def test_nothing_is_left_behind_in_any_phase(tmp_path: Path, phase: str, how: str) -> None:
    """Of no counter, no connection, and on no engine; and nothing is pinned for ever."""
    slowly = phase in ("p computes", "p has answered")
    fetch_s = 5.0 if phase == "d fetches" else 0.4
    sim = {"speed": 1.0 if slowly else 5.0, "x0": fetch_s} | FOREVER
    async with proxied(tmp_path, 2, sim=sim, **ALWAYS) as (proxy, fleet):
        writer = await send(proxy, chat(words(3000), max_tokens=400))
        await until(lambda: PHASES[phase](fleet), phase)
        leave(writer, how)
        await proxy.at_rest()
        await until(lambda: proxy.connections() == 0, "no upstream connection in use")
        await until(lambda: quiet(fleet), "engines idle, nothing pinned")
        assert await proxy.records(1)


@pytest.mark.long
async def test_many_leave_at_any_moment(tmp_path: Path) -> None:
    """Also hedged ones. Only a P that ends while it learns of it keeps KV until its timeout."""
    options, sim = ALWAYS | {"hedge": True}, {"speed": 20.0, "abort_timeout": 20.0}
    async with proxied(tmp_path, 3, sim=sim, **options) as (proxy, fleet):
        for i in range(16):
            writer = await send(proxy, chat(words(3000, f"r{i}"), max_tokens=20))
            await spend(i * 0.006)  # at another moment each: that is the input
            leave(writer, "RST" if i % 2 else "FIN")
        await proxy.at_rest()
        await until(lambda: proxy.connections() == 0, "no upstream connection in use")
        await until(lambda: quiet(fleet), "engines idle, nothing pinned")
        assert len(await proxy.records(16)) == 16


def test_stream_head_is_what_engines_send() -> None:
    assert ANSWER.startswith(STREAM_HEAD)
