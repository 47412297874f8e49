"""Proxies that are each other's instances: a request that comes back ends at once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.admin import call
from tests.support.harness import ANSWER, RawEngine, ServedProxy, chat, says, until


async def test_a_request_that_comes_back_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both find the other healthy: its /health is 200 as long as it has an instance that is up."""
    own = {"kv_connector": "none", "slow_start": 0}
    async with RawEngine(says(ANSWER)) as engine:
        async with ServedProxy(tmp_path / "a", [f"e={engine.address}"], **own) as first:
            await first.up()
            async with ServedProxy(tmp_path / "b", [f"a={first.server.url}"], **own) as second:
                await second.up()
                added = {"instance": f"b={second.server.url}"}
                assert (await call(first, "POST", "/instances", added))[0] == 201
                fleet = first.router.known.fleet
                await until(lambda: fleet.get("b").health.is_up, "it is taken for an engine")
                assert (await call(first, "DELETE", "/instances/e"))[0] == 200
                answer = await first.post(chat("x"))
                assert answer.status >= 500
                await first.at_rest()
                await second.at_rest()
                assert len(first.listener.connections) < 10
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert any("one of them is a proxy whose instances lead back here" in line for line in lines)
