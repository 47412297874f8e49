"""Gauges of the fleet in the exposition."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.harness import chat, proxied, until


async def test_metrics_parse_and_carry_the_fleet(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        await proxy.post(chat("x"))
        await until(lambda: len(proxy.server.state.instances.reports) == 2, "engines scraped")
        async with proxy.http.get("/metrics") as response:
            families = {f.name for f in text_string_to_metric_families(await response.text())}
        assert {"cache_proxy_requests", "cache_proxy_kv_cache_usage_ratio"} <= families
        assert proxy.metric("accounting_drift") == 0
