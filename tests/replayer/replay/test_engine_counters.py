"""The engines' own prefix cache counters: which series, of whom, and what is said of the others."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from replayer.answers import ENGINE_BYTES, MOST_BYTES
from replayer.replay.client import open_session
from replayer.replay.engine_counters import (
    MOST_ENGINES,
    CounterReader,
    engine_counters,
    proxy_counters,
)
from tests.support.told_engine import ToldEngine, endless

NOW = """\
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="a b}"} 1.2e+03
vllm:prefix_cache_queries_total{engine="1",model_name="a b}"} 300.0
vllm:prefix_cache_queries_created{engine="0",model_name="a b}"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="a b}"} 600.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 500.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 90.0
vllm:external_prefix_cache_queries_total{engine="0"} 600.0
vllm:external_prefix_cache_hits_total{engine="0"} 100.0
process_start_time_seconds 1.7e+09
"""
ALL = {
    "local_queries": 1500.0,
    "local_hits": 600.0,
    "external_queries": 600.0,
    "external_hits": 100.0,
    "external_in_place": 90.0,
    "start_s": 1.7e9,
}
OF_PROXY = """\
cache_proxy_prefix_cache_queries_total{upstream="x"} 10.0
cache_proxy_prefix_cache_hits_total{upstream="x"} 4.0
cache_proxy_prefix_cache_hit_ratio{upstream="x"} 0.4
cache_proxy_external_prefix_cache_hits_total{upstream="x"} 2.0
cache_proxy_prefix_cache_queries_total{upstream="y"} 5.0
"""


@pytest.mark.parametrize(
    ("exposition", "counters"),
    [
        (NOW, ALL),
        # While vLLM renamed the series it exported both, with the same counts.
        ("vllm:gpu_prefix_cache_queries 7\nvllm:gpu_prefix_cache_hits 3", {"q": 7, "h": 3}),
        ("vllm:gpu_prefix_cache_queries_total 7\nvllm:prefix_cache_queries_total 9", {"q": 9}),
        ("vllm:prefix_cache_queries 7 1700000000\nvllm:prefix_cache_hits NaN", {"q": 7}),
        ("vllm:external_prefix_cache_queries_total 7", {"external_queries": 7}),
        ("process_start_time_seconds 5\nvllm:prefix_cache_hits 3", {}),
        ("vllm:prefix_cache_queries -1", {}),
        ("vllm:prefix_cache_queries 1e308\nvllm:prefix_cache_queries 1e308", {}),
        (OF_PROXY, {}),
        ("<html>", {}),
        ("", {}),
    ],
)
def test_the_series_of_every_vllm(exposition: str, counters: dict[str, float]) -> None:
    short = {"q": "local_queries", "h": "local_hits"}
    assert engine_counters(exposition) == {short.get(k, k): v for k, v in counters.items()}


def test_a_proxys_own_counters() -> None:
    x = {"looked_up": 10.0, "local_hits": 4.0, "external_in_place": 2.0}
    assert proxy_counters(OF_PROXY) == {"x": x, "y": {"looked_up": 5.0}}


T, A, B = "http://t:1", "http://a:1", "http://b:1"
LISTED = {"payload": [{"name": "a", "url": A}, {"name": "b", "url": B}]}
ENGINE, PROXY = {"body": NOW}, {"body": OF_PROXY}


@pytest.mark.parametrize(
    ("prepared", "engines", "source", "read", "unread"),
    [
        ({f"{T}/metrics": ENGINE}, (), "engines", {T}, {}),
        (
            {f"{T}/metrics": PROXY, f"{T}/instances": LISTED, f"{A}/metrics": ENGINE},
            (),
            "engines",
            {"a"},
            {"b": "GET /metrics: ClientConnectionError"},
        ),
        (
            {f"{T}/metrics": PROXY, f"{T}/instances": {"status": 401}},
            (),
            "proxy",
            {"x", "y"},
            {T: "GET /instances answers 401"},
        ),
        ({f"{A}/metrics": ENGINE, f"{B}/metrics": ENGINE}, (A, B), "engines", {A, B}, {}),
        (
            {f"{A}/metrics": {"exception": TimeoutError()}, f"{B}/metrics": PROXY},
            (A, B),
            None,
            set(),
            {
                A: "no answer to GET /metrics within 5 s",
                B: "no prefix cache counters in its /metrics",
            },
        ),
        (
            {f"{T}/metrics": {"status": 404}, f"{T}/instances": {"payload": [1]}},
            (),
            None,
            set(),
            {T: "GET /metrics answers 404"},
        ),
        (
            {
                f"{T}/metrics": PROXY,
                f"{T}/instances": {"payload": [{"name": "a" * 257, "url": A}]},
            },
            (),
            "proxy",
            {"x", "y"},
            {},
        ),
    ],
)
async def test_who_is_asked(
    answers: Any,
    prepared: dict[str, Any],
    engines: tuple[str, ...],
    source: str | None,
    read: set[str],
    unread: dict[str, str],
) -> None:
    for url, answer in prepared.items():
        answers.get(url, **answer, repeat=True)
    async with aiohttp.ClientSession() as session:
        reader = CounterReader(session, T, {"Authorization": "Bearer sk-1"}, engines)
        await reader.read_before()
        await reader.read_after()
    found = reader.counters
    assert (found.source, found.unread) == (source, unread)
    assert found.before.keys() == found.after.keys() == read
    for (_method, url), calls in answers.requests.items():
        sent = ["Authorization" in call.kwargs["headers"] for call in calls]
        assert set(sent) == {url.host == "t"}, "the key is for the target alone"


async def test_an_engine_that_compresses_is_asked_not_to() -> None:
    """As vLLM's /metrics do; the session of a run decompresses nothing."""

    async def metrics(_request: web.Request) -> web.Response:
        response = web.Response(text=NOW)
        response.enable_compression()
        return response

    engine = ToldEngine()
    engine.routes["/metrics"] = metrics
    async with engine, open_session() as session:
        reader = CounterReader(session, engine.url, {})
        await reader.read_before()
    assert reader.counters.before == {engine.url: ALL}


def test_a_proxy_names_no_more_instances_than_are_read() -> None:
    line = 'cache_proxy_prefix_cache_queries_total{{upstream="{}"}} 1.0\n'
    assert len(proxy_counters("".join(map(line.format, range(MOST_ENGINES + 9))))) == MOST_ENGINES


async def test_an_address_that_no_resolver_takes_is_a_reason() -> None:
    url = f"http://{'a' * 64}.test:1"
    async with open_session() as session:
        reader = CounterReader(session, T, {}, (url,))
        await reader.read_before()
    assert reader.counters.unread.keys() == {url}


async def test_metrics_without_an_end_are_a_reason() -> None:
    target, engine = ToldEngine(), ToldEngine()
    target.routes["/metrics"] = engine.routes["/metrics"] = endless(b"# x\n" * 1000)
    async with target, engine, open_session() as session:
        listed = [{"name": "a", "url": engine.url}, {"name": "b", "url": "http://["}]

        async def instances(_request: web.Request) -> web.Response:
            return web.json_response(listed)

        target.routes["/instances"] = instances
        reader = CounterReader(session, target.url, {})
        await reader.read_before()
    assert reader.counters.unread == {
        target.url: f"GET /metrics answers over {MOST_BYTES} bytes",
        "a": f"GET /metrics answers over {ENGINE_BYTES} bytes",
        "b": "GET /metrics: InvalidUrlClientError",
    }
