"""Gauges of the fleet in the exposition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replayer.simulator.host import SimFleet
from tests.support.harness import ServedProxy, chat, proxied, until, words
from tests.support.promql import Scrapes, as_drawn
from tests.test_configs import panels


async def test_metrics_parse_and_carry_the_fleet(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        await proxy.post(chat("x"))
        await until(lambda: len(proxy.server.state.instances.reports) == 2, "engines scraped")
        async with proxy.http.get("/metrics") as response:
            families = {f.name for f in text_string_to_metric_families(await response.text())}
        assert {"cache_proxy_requests", "cache_proxy_kv_cache_usage_ratio"} <= families
        assert proxy.metric("accounting_drift") == 0


COUNTED = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits")
Counted = tuple[int, int, int]
"""Prompt tokens looked up, found in the own cache, and brought by a peer; of all engines."""


def counted(fleet: SimFleet) -> Counted:
    each = [engine.driver.engine.counters for engine in fleet.engines]
    looked_up = sum(one.prefix_queries for one in each)
    return looked_up, sum(one.prefix_hits for one in each), sum(one.prompt_external for one in each)


async def scraped(proxy: ServedProxy, fleet: SimFleet) -> tuple[str, Counted]:
    """The proxy's /metrics, once they have what the engines have counted."""
    text, expected = "", (0, 0, 0)

    async def is_there() -> bool:
        nonlocal text, expected
        async with proxy.http.get("/metrics") as response:
            text = await response.text()
        now, expected = Scrapes(), counted(fleet)
        now.add(0.0, text)
        sums = [now.vector(f"sum(cache_proxy_{name}_total)") for name in COUNTED]
        return sums == [{"": count} for count in expected]

    await until(is_there, "the engines' counts in /metrics")
    return text, expected


async def test_hit_ratios_of_a_window_add_up_across_a_restart_of_the_engines(
    tmp_path: Path,
) -> None:
    """The panel's expressions give what the engines of both lives have counted together."""
    panel = next(p for p in panels() if p["title"] == "Hit ratio as the engines report")
    options: dict[str, Any] = {"offload_policy": "always", "warm_threshold": 100}
    options |= {"heavy_threshold": 500, "slow_start": 0}
    scrapes = Scrapes()
    async with proxied(tmp_path, **options) as (proxy, fleet):
        scrapes.add(0.0, (await scraped(proxy, fleet))[0])
        for _ in range(2):
            body = chat(words(2000))
            assert (await proxy.post(body, headers={"X-Session-ID": "s"})).status == 200
        text, first = await scraped(proxy, fleet)
        scrapes.add(15.0, text)
        for engine in fleet.engines:
            await engine.restart()
        members = proxy.router.known.fleet.members()
        await until(lambda: all(m.incarnation and m.health.is_up for m in members), "restarted")
        assert (await proxy.post(chat(words(600, "b")))).status == 200
        text, second = await scraped(proxy, fleet)
        assert second < first
        scrapes.add(30.0, text)
    looked_up, local, external = (a + b for a, b in zip(first, second, strict=True))
    assert 0 < local < looked_up
    assert 0 < external < looked_up
    ratios = {
        target["legendFormat"]: scrapes.vector(as_drawn(target["expr"]))
        for target in panel["targets"]
    }
    assert ratios == {
        "local": {"": pytest.approx(local / looked_up)},
        "external": {"": pytest.approx(external / looked_up)},
        "combined": {"": pytest.approx((local + external) / looked_up)},
    }


async def test_three_hits_and_the_backlog_of_served_models(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        for _ in range(2):
            await proxy.post(chat(words(2000)))
        prompts = proxy.metric("compared_prompt_tokens_total")
        hits = ("reachable", "chosen", "reported")
        reachable, chosen, reported = (
            proxy.metric("compared_hit_tokens_total", which=which) for which in hits
        )
        assert prompts >= reachable >= chosen > 0
        assert prompts / 2 > reported > prompts / 3, "the second prompt is the first one again"
        async with proxy.http.get("/metrics") as response:
            found = [line for line in (await response.text()).splitlines() if "backlog" in line]
        assert found[-1].startswith('cache_proxy_backlog_seconds{model="')
