"""What a tick sees of real proxies and engines on sockets, and of those that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import pytest

from planner.config.components import Component
from planner.core.types import COMPONENT, Capabilities, Context, Replicas
from planner.scalers.base import Failure, ScalerError
from planner.sources.engines import Engines, work
from planner.sources.live import Live
from planner.sources.proxy import ABSENT_S, Proxies
from planner.sources.reading import SourceError, fetch, samples
from replayer.answers import MOST_BYTES
from tests.support.harness import RawEngine, chat, plain, proxied, until, words

PART = Component()


@asynccontextmanager
async def sources(
    urls: Sequence[str], window_s: float = 10.0, token: str | None = None
) -> AsyncIterator[tuple[Live, Proxies]]:
    async with aiohttp.ClientSession() as session:
        proxies = Proxies(session, urls, token, [PART])
        yield Live(proxies, Engines(session), {PART: Capabilities()}, window_s, 1800.0), proxies


async def test_traffic_and_iterations_are_those_of_the_fleet(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2) as (proxy, _), sources([proxy.server.url]) as (live, _):
        first = await live.look(1, 0.0, {})
        assert first is not None
        assert first.replicas == {COMPONENT: Replicas(2, 2)}
        assert first.traffic is None, "the window is not whole"
        async with asyncio.TaskGroup() as tasks:
            for n in range(6):
                tasks.create_task(proxy.post(chat(words(200, f"s{n}"), max_tokens=20)))
        await proxy.at_rest()
        seen = await live.look(2, 10.0, {COMPONENT: 2})
        assert seen is not None
        assert seen.traffic is not None
        assert (seen.traffic.requests, seen.traffic.window_s) == (6, 10.0)
        assert seen.traffic.osl_tokens == 20.0
        assert seen.traffic.isl_tokens is not None
        assert seen.traffic.isl_tokens > 200.0
        assert seen.traffic.ttft_s is not None
        engines = seen.engines[COMPONENT]
        assert len(engines) == 2
        assert all(one.wall_s is not None and one.prefill_tokens > 0 for one in engines)
        assert seen.capabilities[COMPONENT].kv_tokens is not None


async def test_tokens_per_step_come_from_the_engines_that_draft() -> None:
    async with RawEngine() as fake, RawEngine() as engine, sources([fake.address]) as (live, _):
        fake.gets |= {
            "/metrics": plain(b"cache_proxy_issued_total 5\n"),
            "/health": plain(b'{"started_at": 1.5}'),
            "/instances": plain(orjson.dumps([told("a") | {"url": engine.address}])),
        }

        async def look(now_s: float, drafts: int, accepted: int) -> Context | None:
            series = {"drafts": drafts, "accepted_tokens": accepted}
            lines = (f"vllm:spec_decode_num_{n}_total {v}" for n, v in series.items())
            engine.gets["/metrics"] = plain("\n".join((*lines, "")).encode())
            return await live.look(1, now_s, {COMPONENT: 1})

        await look(0.0, 5, 5)
        seen = await look(5.0, 15, 20)
        assert seen is not None
        assert seen.recent is not None
        assert seen.recent.accept_length == 2.5


async def test_who_drains_is_pending_and_who_left_is_told(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2) as (proxy, fleet), sources([proxy.server.url]) as (live, all_):
        await live.look(1, 0.0, {})
        gone, stays = (one.name for one in all_.members(COMPONENT))
        await all_.drain(gone)
        await until(lambda: len(proxy.router.known.fleet.members()) == 1, "it has drained")
        assert not await all_.has_left(gone), "not seen yet"
        seen = await live.look(2, 5.0, {COMPONENT: 1})
        assert seen is not None
        assert seen.replicas == {COMPONENT: Replicas(1, 1)}
        assert await all_.has_left(gone)
        await all_.drain(gone)  # again, with no effect
        (url,) = (e.url for e in fleet.engines if e.url.endswith(gone))
        await all_.add(gone, url)
        await all_.add(gone, url)
        await until(lambda: all(m.health.is_up for m in proxy.router.known.fleet.members()), "up")
        await live.look(3, 10.0, {COMPONENT: 2})
        assert [one.name for one in all_.members(COMPONENT)] == sorted([gone, stays])


def told(name: str, *, is_up: bool = True, is_draining: bool = False) -> dict[str, object]:
    load = dict.fromkeys(("prefill_requests", "inbound_requests", "decode_requests"), 0)
    load |= {"prefill_tokens": 0, "decode_tokens": 0}
    state = {"is_up": is_up, "is_draining": is_draining}
    return {"name": name, "url": "http://127.0.0.1:1", "load": load, "heat": {}, **state}


async def test_lost_is_not_pending_and_what_drains_is() -> None:
    async with RawEngine() as fake, sources([fake.address]) as (live, _):
        fake.gets |= {
            "/metrics": plain(b"cache_proxy_issued_total 5\n"),
            "/health": plain(b'{"started_at": 1.5}'),
        }
        for rows, found in (
            ([told("a"), told("b")], Replicas(2, 3, 1)),
            ([told("a"), told("b", is_up=False)], Replicas(1, 3, 1)),
            ([told("a"), told("b", is_up=False), told("c", is_up=False)], Replicas(1, 3, 1)),
            ([told("a"), told("b"), told("c")], Replicas(3, 3, 0)),
            ([told("a"), told("b"), told("c", is_draining=True)], Replicas(2, 3, 2)),
        ):
            fake.gets["/instances"] = plain(orjson.dumps(rows))
            seen = await live.look(1, 5.0, {COMPONENT: 3})
            assert seen is not None
            assert seen.replicas[COMPONENT] == found


async def test_what_never_comes_counts_as_absent_after_the_longest_wait(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _), sources([proxy.server.url]) as (live, _):
        for now_s, pending, absent in ((0.0, 2, 0), (1800.0, 2, 0), (1801.0, 0, 2)):
            seen = await live.look(1, now_s, {COMPONENT: 3})
            assert seen is not None
            assert seen.replicas[COMPONENT] == Replicas(1, 3, pending)
            assert live.absent.get(COMPONENT, 0) == absent


async def test_without_a_proxy_nothing_is_known_and_its_age_grows(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        url = proxy.server.url
        async with sources([url, "http://127.0.0.1:1"]) as (live, all_):
            assert await live.look(1, 0.0, {}) is None
            (why,) = all_.failures()
            assert "http://127.0.0.1:1/metrics" in why
            assert all_.ages_s(3.0) == {url: 3.0, "http://127.0.0.1:1": None}
            assert await live.look(2, ABSENT_S, {}) is not None, "the other one never was there"


async def test_a_proxy_that_is_away_for_long_is_counted_no_more(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _), RawEngine() as other:
        async with proxy.http.get("/metrics") as answer:
            metrics = await answer.read()
        other.gets |= {
            "/metrics": plain(metrics),
            "/instances": plain(b"[]"),
            "/health": plain(b'{"started_at": 1.5}'),
        }
        async with sources([proxy.server.url, other.address]) as (live, all_):
            assert await live.look(1, 0.0, {}) is not None
            before = all_.generation()
            other.gets["/metrics"] = plain(b"", "500 Oh")
            assert await live.look(2, 5.0, {}) is None
            assert await live.look(3, ABSENT_S + 1, {}) is not None
            assert all_.generation() == before
            with pytest.raises(ScalerError) as caught:
                await all_.drain("a")
            assert caught.value.failure is Failure.UNREACHABLE


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("/metrics", plain(b"vllm:x 1\n"), "is it a cache-proxy"),
        ("/metrics", plain(b"", "401 No"), "status 401"),
        ("/metrics", plain(b'cache_proxy_issued_total{a="'), "is it a cache-proxy"),
        ("/instances", plain(b"{}"), "of another form"),
        ("/instances", plain(b'[{"name": 5}]'), "of another form"),
        ("/instances", plain(b"[" * 100_000), "of another form"),
        ("/health", plain(b"[]"), "of another form"),
    ],
)
async def test_garbage_of_a_proxy_is_a_line_and_decides_nothing(
    path: str, answer: bytes, why: str
) -> None:
    async with RawEngine() as fake:
        fake.gets = {
            "/metrics": plain(b"cache_proxy_issued_total 5\n"),
            "/instances": plain(b"[]"),
            "/health": plain(b'{"started_at": 1.5}'),
        }
        async with sources([fake.address]) as (live, all_):
            assert await live.look(1, 0.0, {}) is not None
            fake.gets[path] = answer
            assert await live.look(2, 1.0, {}) is None
            (said,) = all_.failures()
            assert why in said
            assert "\n" not in said


async def test_an_answer_without_end_is_cut() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        for _ in range(MOST_BYTES // (1 << 20) + 8):
            writer.write(b"x" * (1 << 20))
            await writer.drain()

    async with RawEngine() as fake, aiohttp.ClientSession() as session:
        fake.gets["/metrics"] = endless
        with pytest.raises(SourceError, match="larger than"):
            await fetch(session, "GET", f"{fake.address}/metrics")


async def test_an_engine_is_the_sum_of_its_ranks_by_its_names_of_today_or_before() -> None:
    text = b"""# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_count{engine="0"} 10
vllm:iteration_tokens_total_count{engine="1"} 20
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 300
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 900
vllm:prompt_tokens_total{engine="0"} 1200
vllm:time_per_output_token_seconds_count{engine="0"} 40
vllm:time_per_output_token_seconds_sum{engine="0"} 0.8
"""
    names = ("vllm:iteration_tokens_total_count", "vllm:prompt_tokens_by_source_total")
    more = tuple(f"vllm:time_per_output_token_seconds_{part}" for part in ("count", "sum"))
    found = work(await samples(text, (*names, "vllm:prompt_tokens_total", *more)))
    assert (found.steps, found.computed_tokens) == (30.0, 300.0)
    assert (found.gaps, found.gap_s) == (40.0, 0.8)
    assert work([]) == work(await samples(b"", names))


async def test_a_token_is_sent_and_not_shown(tmp_path: Path) -> None:
    token = "a-token-of-the-operator"
    async with proxied(tmp_path, 1, admin_token=token) as (proxy, _):
        async with sources([proxy.server.url], token=token) as (live, _):
            assert await live.look(1, 0.0, {}) is not None
        async with sources([proxy.server.url], token="another-one-than-it") as (live, all_):
            assert await live.look(1, 0.0, {}) is None
            assert "another" not in orjson.dumps(all_.failures()).decode()
