"""Instances that fail for a while: who is asked how often, and who comes back when."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from proxy.core.fleet import health
from proxy.core.fleet.health import FAULTS, Health, State
from proxy.core.types import FailureKind
from proxy.fleet import probes
from proxy.fleet.probes import Probes
from proxy.protocol.errors import UpstreamFailure
from tests.support.harness import (
    ANSWER,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    plain,
    proxied,
    resets,
    says,
    until,
)

GOOD, BOOM = says(ANSWER), plain(b'{"error":{"message":"boom"}}', "500 Internal Server Error")
FAILS: dict[str, Script] = {
    "500": says(BOOM),
    "reset": resets(),
    "closes": says(b"", close=True),
    "garbage": says(b"\x16\x03\x01 not HTTP at all\r\n\r\n", close=True),
}
CASES = [("500", 1), ("500", 8), ("500", 40), ("reset", 40), ("closes", 8), ("garbage", 40)]
MANY = 120


@asynccontextmanager
async def fleet(
    tmp_path: Path, *scripts: Script, **options: Any
) -> AsyncIterator[tuple[ServedProxy, list[RawEngine]]]:
    """A proxy before engines that answer so; each was seen, and nobody is probed while it lasts."""
    defaults: dict[str, Any] = {
        "kv_connector": "none",
        "health_interval": 60,
        "placement": "round-robin",
        "offload_policy": "never",
    }
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(RawEngine(script)) for script in scripts]
        urls = [f"e{i}={e.address}" for i, e in enumerate(engines)]
        proxy = ServedProxy(tmp_path / "log", urls, **(defaults | options))
        await stack.enter_async_context(proxy)
        await proxy.up()
        yield proxy, engines


async def burst(proxy: ServedProxy, count: int = MANY, at_once: int = 8) -> Counter[int]:
    """Statuses of so many requests, so many of them at a time."""
    statuses: Counter[int] = Counter()

    async def client(requests: int) -> None:
        for _ in range(requests):
            statuses[(await proxy.post(chat("x", max_tokens=2))).status] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client(count // at_once))
    return statuses


def clients_posts(engine: RawEngine) -> list[bytes]:
    """All posts but the trials, which are the proxy's own."""
    return [post for post in engine.posts if b'"max_tokens":1}' not in post]


@pytest.mark.parametrize(("how", "at_once"), CASES)
async def test_one_of_three_fails_and_no_client_notices(
    tmp_path: Path, how: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "OPEN_S", 60.0)  # longer than all of it, on any machine
    async with fleet(tmp_path, FAILS[how], GOOD, GOOD) as (proxy, engines):
        assert await burst(proxy, at_once=at_once) == {200: MANY}
        replayed = proxy.metric("upstream_replays_total")
        # Those that were on their way when the breaker opened come on top.
        assert len(engines[0].posts) - replayed <= FAULTS + at_once
        assert proxy.metric("breaker_state", upstream="e0") == list(State).index(State.EJECTED)
        assert proxy.metric("retry_budget_refused_total") == 0
        assert proxy.metric("panic") == 0
        assert proxy.server.state.in_flight.budget.in_flight == 0
        await proxy.at_rest()


async def test_one_good_one_of_three_serves_all(tmp_path: Path) -> None:
    """Panic uses the others as well; whatever fails there is repeated, within the budget."""
    async with fleet(tmp_path, FAILS["500"], FAILS["reset"], GOOD) as (proxy, engines):
        assert await burst(proxy, at_once=6) == {200: MANY}
        assert proxy.metric("panic") == 1
        assert len(engines[2].posts) == MANY
        assert proxy.metric("retry_budget_refused_total") == 0
        await proxy.at_rest()


async def test_one_of_three_fails_all_it_has_at_once(tmp_path: Path) -> None:
    """More repetitions at a time than the budget has: they go to instances that have not failed."""
    here, everybody = 0, asyncio.Event()

    def together(answer: Script) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal here
            here += 1
            if here == 60:
                everybody.set()
            await everybody.wait()
            await answer(reader, writer)

        return script

    good = together(GOOD)
    async with fleet(tmp_path, together(says(BOOM)), good, good) as (proxy, engines):
        assert await burst(proxy, 60, at_once=60) == {200: 60}
        assert len(clients_posts(engines[0])) == 20
        assert proxy.metric("upstream_retries_total", reason="server_error") == 20
        assert proxy.server.state.in_flight.budget.in_flight == 0


@pytest.mark.parametrize(("how", "at_once"), CASES)
async def test_when_all_fail_nothing_is_amplified(tmp_path: Path, how: str, at_once: int) -> None:
    """Those at once that fail first, as no engine is known to, are few of this many."""
    many = 2 * MANY
    async with fleet(tmp_path, *[FAILS[how]] * 3) as (proxy, engines):
        assert set(await burst(proxy, many, at_once)) <= {500, 502}
        replayed = proxy.metric("upstream_replays_total")
        asked = sum(len(clients_posts(e)) for e in engines) - replayed
        assert asked <= 1.2 * many
        assert proxy.metric("panic") == 1
        records = await proxy.records(many)
        assert {r["outcome"] for r in records} == {"upstream_error"}
        assert proxy.server.state.in_flight.budget.in_flight == 0
        await proxy.at_rest()


async def test_a_dead_one_is_asked_a_few_times_and_comes_back(tmp_path: Path) -> None:
    options = {"health_interval": 0.2, "slow_start": 0}
    async with fleet(tmp_path, GOOD, GOOD, **options) as (proxy, engines):
        await engines[0].__aexit__()
        assert await burst(proxy, at_once=4) == {200: MANY}
        assert proxy.metric("upstream_retries_total", reason="connect") < 5
        assert proxy.router.known.fleet.get("e0").health.is_gone
        again = RawEngine(GOOD)
        again.port = engines[0].port
        async with again:
            await until(lambda: proxy.router.known.fleet.is_up("e0"), "back")
            assert await burst(proxy, 10, at_once=1) == {200: 10}
            assert len(again.posts) == 5
            await proxy.at_rest()


async def test_when_nobody_listens_nothing_is_sent(tmp_path: Path) -> None:
    async with fleet(tmp_path, GOOD, GOOD) as (proxy, engines):
        for engine in engines:
            await engine.__aexit__()
        statuses = await burst(proxy)
        assert set(statuses) <= {502, 503}
        assert statuses[503] > MANY * 0.8, "an honest 503 with Retry-After"
        assert proxy.metric("upstream_retries_total", reason="connect") <= 0.2 * MANY
        await proxy.at_rest()


async def test_one_request_alone_opens_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path, *[FAILS["500"]] * 3) as (proxy, _):
        for _ in range(FAULTS - 1):
            assert (await proxy.post(chat("x"))).status == 500
        assert len(proxy.router.known.fleet.up()) == 3
        members = proxy.router.known.fleet.members()
        assert all(len(m.health._faults) <= FAULTS - 1 for m in members)


async def test_the_clients_own_errors_pass_untouched_and_count_nothing(tmp_path: Path) -> None:
    for status in ("400 Bad Request", "413 Too Large", "422 Unprocessable", "501 Not Implemented"):
        body = b'{"error":{"message":"your fault, \xc3\xa9"}}'
        async with fleet(tmp_path, says(plain(body, status)), GOOD) as (proxy, engines):
            proxy.router.known.fleet.get("e1").is_draining = True
            for _ in range(2 * FAULTS):
                answer = await proxy.post(chat("x"))
                assert (answer.status, answer.body) == (int(status[:3]), body)
            assert not engines[1].posts
            assert not proxy.router.known.fleet.has_failed_lately("e0")


async def test_a_busy_engine_is_left_alone_for_as_long_as_it_says(tmp_path: Path) -> None:
    refused = says(plain(b'{"error":{"message":"full"}}', "429 Too Many", "Retry-After: 7\r\n"))
    async with fleet(tmp_path, refused, GOOD) as (proxy, engines):
        assert await burst(proxy, 24, at_once=1) == {200: 24}
        assert len(engines[0].posts) == 1
        assert not proxy.router.known.fleet.has_failed_lately("e0"), "load is no failure"
        now_s = proxy.server.state.clock.now_s()
        busy = proxy.router.known.busy("e0", "sim-8b", now_s)
        assert 5 < busy.free_in_s <= 7


@pytest.mark.parametrize(
    ("given", "passed"), [("7", "7"), ("1000000000", "30"), ("-3", "1"), ("soon", "1")]
)
async def test_where_all_are_busy_the_engine_says_so_itself(
    tmp_path: Path, given: str, passed: str
) -> None:
    body = b'{"error":{"message":"full"}}'
    refused = says(plain(body, "429 Too Many Requests", f"Retry-After: {given}\r\n"))
    async with fleet(tmp_path, refused, refused, max_queue=0) as (proxy, engines):
        answer = await proxy.post(chat("x"))
        assert (answer.status, answer.body) == (429, body)
        assert answer.headers["Retry-After"] == passed
        assert [len(e.posts) for e in engines] == [1, 1]


async def test_inference_that_hangs_behind_a_healthy_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes say nothing of it: it is out until a request of the proxy's own is answered."""
    monkeypatch.setattr(health, "OPEN_S", 0.2)
    hangs = True

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if hangs:
            await reader.read()
            raise ConnectionError
        await GOOD(reader, writer)

    options = {"health_interval": 0.05, "ttft_timeout": 1.0, "slow_start": 0}
    async with fleet(tmp_path, script, GOOD, **options) as (proxy, engines):
        assert await burst(proxy, 20, at_once=20) == {200: 20}
        e0 = proxy.router.known.fleet.get("e0").health
        assert (e0.is_up, e0.is_open) == (False, True)
        asked = len(engines[0].posts)
        assert await burst(proxy, 20, at_once=1) == {200: 20}
        trials = [post for post in engines[0].posts[asked:] if b'"max_tokens":1' not in post]
        assert not trials, "no client was sent there"
        hangs = False
        await until(lambda: e0.is_up, "a trial was answered")
        assert await burst(proxy, 4, at_once=1) == {200: 4}
        await proxy.at_rest()


async def test_health_that_fails_everywhere_while_inference_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """More than half out is panic: all are used, and a line says so, once."""
    caplog.set_level(logging.INFO)
    async with fleet(tmp_path, GOOD, GOOD) as (proxy, _):
        watcher = proxy.server.state.instances
        failure = UpstreamFailure(FailureKind.SERVER_ERROR, "status 500")
        for name in ("e0", "e1"):
            for _ in range(2):
                watcher.probe_failed(name, failure)
        assert not proxy.router.known.fleet.up()
        assert proxy.metric("panic") == 1
        assert await burst(proxy, 10, at_once=2) == {200: 10}
        told = [line for line in caplog.messages if line.startswith("more than half")]
        assert len(told) == 1
        async with proxy.http.get("/ready") as ready:
            assert ready.status == 200
        for name in ("e0", "e1"):
            for _ in range(2):
                watcher.probe_answered(name)
        await asyncio.sleep(0)
        assert "enough instances are up again" in caplog.messages
        for name in ("e0", "e1"):
            for _ in range(2):
                watcher.probe_failed(name, UpstreamFailure(FailureKind.CONNECT, "refused"))
        await asyncio.sleep(0)
        assert caplog.messages[-1] == "no instance is up: every request is refused"


async def test_health_that_fails_on_one_and_health_that_flaps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails is left out; what comes and goes changes twice in ten seconds, at the most."""
    sick = plain(b"", "500 Internal Server Error")
    async with fleet(tmp_path, GOOD, GOOD, GOOD, health_interval=0.02) as (proxy, engines):
        engines[0].gets["/health"] = sick
        await until(lambda: not proxy.router.known.fleet.is_up("e0"), "ejected")
        asked = len(engines[0].posts)
        assert await burst(proxy, 30, at_once=3) == {200: 30}
        assert len(engines[0].posts) == asked
        assert proxy.metric("panic") == 0
        caplog.clear()
        flapping = proxy.router.known.fleet.get("e1").health
        for round_ in range(10):
            seen = flapping.probes
            engines[1].gets["/health"] = plain(b"") if round_ % 2 else sick
            await until(partial(_probed_since, flapping, seen + 4), "probed")
            assert (await proxy.post(chat("x"))).status == 200
        changes = [r for r in caplog.records if "e1" in r.getMessage() and r.levelname != "DEBUG"]
        assert len(changes) <= 2


def _probed_since(of: Health, probes: int) -> bool:
    return of.probes >= probes


async def test_a_model_that_one_instance_denies(tmp_path: Path) -> None:
    """Another is asked, once; where everybody denies it, that is the answer."""
    body = b'{"error":{"message":"The model `sim-8b` does not exist.","code":404}}'
    denies = says(plain(body, "404 Not Found"))
    async with fleet(tmp_path, denies, GOOD) as (proxy, engines):
        assert await burst(proxy, 10, at_once=1) == {200: 10}
        assert len(engines[0].posts) == 5, "its list still says that it serves the model"
        assert not proxy.router.known.fleet.has_failed_lately("e0")
    async with fleet(tmp_path, denies, denies) as (proxy, engines):
        answer = await proxy.post(chat("x"))
        assert (answer.status, answer.body) == (404, body)
        assert [len(e.posts) for e in engines] == [1, 1]
    other = b'{"detail":"Not Found"}'
    async with fleet(tmp_path, says(plain(other, "404 Not Found")), GOOD) as (proxy, engines):
        answer = await proxy.post(chat("x"))
        assert (answer.status, answer.body, engines[1].posts) == (404, other, [])


async def test_a_restart_between_two_probes_is_noticed(tmp_path: Path) -> None:
    """It never was down, as far as anybody saw; its KV has gone all the same."""
    async with proxied(tmp_path, 2, scrape_interval=60, health_interval=60) as (proxy, fleet):
        answer = await proxy.post(chat("x " * 3000, max_tokens=2), headers={"X-Session-ID": "s"})
        name = answer.headers["X-Cache-Proxy-Instance"]
        state = proxy.server.state
        asked = Probes(state.instances, state.options)
        upstream, member = state.instances.by_name[name], proxy.router.known.fleet.get(name)
        await asked.scrape(upstream)
        assert (member.state.start_s or 0.0) > 1e9
        engine = next(e for e in fleet.engines if e.url.endswith(name))
        await engine.restart()
        assert proxy.router.known.fleet.states.of(name).cache.blocks > 0
        for _ in range(probes.ENGINE_ID_EVERY):
            await asked.probe(upstream)
        assert proxy.router.known.fleet.states.of(name).cache.blocks == 0
        assert proxy.router.known.sessions.home("s", state.clock.now_s()) is None
        assert name not in state.instances.reports, "it was the other process's"
        assert (member.incarnation, member.health.is_up) == (1, True)
        await asked.scrape(upstream)
        assert member.incarnation == 1, "told twice, it is one restart"
        await proxy.at_rest()


@pytest.mark.parametrize(
    ("answer", "ends"), [(BOOM, "open"), (plain(b"{}", "429 Busy", "Retry-After: 9\r\n"), "busy")]
)
async def test_a_p_that_fails_or_is_busy_is_not_asked_for_ever(
    tmp_path: Path, answer: bytes, ends: str
) -> None:
    """Every client gets its answer from D all the while."""
    options = {"health_interval": 60, "offload_policy": "always"}
    async with RawEngine(GOOD) as d, RawEngine(says(answer)) as p:
        urls = [f"d={d.address}", f"p={p.address};bootstrap={p.port}"]
        limits = {"warm_threshold": 10, "heavy_threshold": 20}
        async with ServedProxy(tmp_path / "log", urls, **options, **limits) as proxy:
            await proxy.up()
            for i in range(FAULTS + 3):
                home = proxy.router.known.fleet.states["d"].cache
                proxy.router.known.sessions.assign(f"s{i}", home, proxy.server.state.clock.now_s())
                headers = {"X-Session-ID": f"s{i}"}
                got = await proxy.post(chat(f"{i} " * 3000), headers=headers)
                assert (got.text, got.headers["X-Cache-Proxy-Instance"]) == ("fine", "d")
            if ends == "open":
                assert len(p.posts) <= FAULTS, "or its trial has failed"
                assert proxy.router.known.fleet.open() == {"p"}
            else:
                assert len(p.posts) == 2, "one client that it refuses may be too much for it"
                assert not proxy.router.known.fleet.has_failed_lately("p")
            assert proxy.metric("upstream_retries_total", reason="server_error") == 0
            await proxy.at_rest()


async def test_a_new_engine_id_that_a_request_sees_first_is_a_restart_too(tmp_path: Path) -> None:
    async with RawEngine(GOOD) as engine:
        urls = [f"e={engine.address};bootstrap={engine.port}"]
        async with ServedProxy(tmp_path / "log", urls, health_interval=60) as proxy:
            await proxy.up()
            state, member = proxy.server.state, proxy.router.known.fleet.get("e")
            upstream, asked = state.instances.by_name["e"], Probes(state.instances, state.options)
            assert await upstream.engine_id() == "e-1"
            engine.gets["/query"] = plain(b'{"0":{"engine_id":"e-2"}}')
            upstream.forget_engine_id()
            assert await upstream.engine_id() == "e-2"
            await asked.probe(upstream)
            assert member.incarnation == 1
            await asked.probe(upstream)
            assert member.incarnation == 1
