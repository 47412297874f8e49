"""A real Prometheus evaluates every board and alert over a proxy that offloads and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.support.harness import ServedProxy, chat, proxied, until, words
from tests.support.prometheus_server import needs_prometheus, prometheus
from tests.support.promql import as_drawn
from tests.test_configs import CONFIGS, EXPRESSIONS

BOARDS = ("wrong", "overview", "offload", "instances", "proxy")
EMPTY = {"Discovery: age, addresses refused"}
"""Panels of what is not here."""


async def asked(session: aiohttp.ClientSession, address: str, expression: str) -> list[Any]:
    """The series of an expression now; fails where Prometheus refuses it."""
    given = {"query": as_drawn(expression)}
    async with session.get(f"{address}/api/v1/query", params=given) as answer:
        told = orjson.loads(await answer.read())
    assert told["status"] == "success", f"{expression}: {told}"
    return list(told["data"]["result"])


def open_panels() -> list[dict[str, Any]]:
    """The panels of the boards' open rows."""
    boards = [orjson.loads((CONFIGS / f"grafana/{name}.json").read_bytes()) for name in BOARDS]
    return [panel for board in boards for panel in board["panels"] if panel["type"] != "row"]


async def load(proxy: ServedProxy) -> None:
    """Turns of sessions, offloads, refusals, a wrong key, a request that is none."""
    for turn in range(6):
        body = chat(words(600 * (turn % 2 + 1), f"s{turn}"), stream=True)
        await proxy.post(body, headers={"X-Session-ID": f"s{turn % 2}"})
    await proxy.post(b"{")
    await proxy.post(chat(words(20), model="unknown"))


@pytest.mark.long
@needs_prometheus
async def test_every_expression_evaluates_and_open_rows_have_data(tmp_path: Path) -> None:
    options: dict[str, Any] = {"offload_policy": "always", "warm_threshold": 100}
    options |= {"heavy_threshold": 500, "slow_start": 0, "shadow_policy": "never"}
    async with proxied(tmp_path, 2, **options) as (proxy, fleet):
        targets = {"cache-proxy": proxy.server.url, "vllm": fleet.engines[0].url}
        async with (
            prometheus(tmp_path, targets) as address,
            aiohttp.ClientSession() as session,
        ):
            for expression in EXPRESSIONS:
                await asked(session, address, expression)
            empty: set[str] = set()

            async def is_drawn() -> bool:
                await load(proxy)
                empty.clear()
                for panel in open_panels():
                    found = [await asked(session, address, t["expr"]) for t in panel["targets"]]
                    if not any(found):
                        empty.add(panel["title"])
                return empty == EMPTY

            assert await until(is_drawn, "every panel has data")
