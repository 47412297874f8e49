"""Overload on real sockets: what stderr, /health, the client, metrics and the logs say of it."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.admission import overload as core_overload
from tests.proxy.state.test_queue import A, held, queued
from tests.support.admin import call
from tests.support.harness import chat, until

CHECK = "1 of 1 instances of sim-8b past active_prefill_tokens 0"
"""The engine lists another model beside it."""
MESSAGES = "/v1/messages"


def lines(caplog: pytest.LogCaptureFixture, begin: str = "overload") -> list[str]:
    return [message for message in caplog.messages if message.startswith(begin)]


async def test_a_refusal_is_said_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with held(tmp_path, max_queue=0) as (proxy, _):
        refused = await proxy.post(chat("second"), headers={"X-Request-Id": "second"})
        assert refused.headers["X-Cache-Proxy-Reason"] == "prefill_tokens; prefill_tokens 1 of 1"
        told = {"reason": "prefill_tokens", "check": "prefill_tokens"}
        assert told.items() <= refused.json["error"].items()
        message = {"model": "sim-8b", "max_tokens": 1, "messages": []}
        anthropic = (await proxy.post(message, MESSAGES)).json
        assert (anthropic["type"], anthropic["error"]["check"]) == ("error", "prefill_tokens")
        labels = {"reason": "prefill_tokens", "check": "prefill_tokens"}
        assert proxy.metric("rejected_total", **labels) == 2
        await until(lambda: lines(caplog), "a line")
        _, health = await call(proxy, "GET", "/health")
        (warning,) = health["warnings"]
        assert health["status"] == "degraded"
        assert warning["text"] == f"overload: {CHECK}; 2 refused in 10 s; longest wait 0 s"
        _, decisions = await call(proxy, "GET", "/decisions")
        by_id = {one["request_id"]: one for one in decisions}
        (row,) = by_id["second"]["candidates"]
        assert (row["instance"], row["past"]) == ("i", ["prefill_tokens"])
        assert row["free_in_s"] > 0
        (record,) = [r for r in await proxy.records(2) if r["request_id"] == "second"]
        assert record["candidates"] == [row]
        assert record["t_decided"] <= warning["since"] + 0.1
        assert proxy.metric("rejected_total", reason="queue_full", check="decode_blocks") == 0


async def test_a_wait_that_ends_in_a_refusal_keeps_its_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_overload, "LONG_S", 0.05)
    async with held(tmp_path, max_queue_seconds=1.2) as (proxy, _), asyncio.TaskGroup() as group:
        waits = group.create_task(proxy.post(chat("x")))
        await queued(proxy)
        await until(lambda: lines(caplog), "a line while it waits")
        assert re.fullmatch(
            rf"overload: {CHECK}; 0 refused in 10 s; longest wait \d s", lines(caplog)[0]
        )
        answer = await waits
        assert answer.headers["X-Cache-Proxy-Reason"] == "queue_timeout; prefill_tokens 1 of 1"
        labels = {"reason": "queue_timeout", "check": "prefill_tokens"}
        assert proxy.metric("rejected_total", **labels) == 1
        assert answer.json["error"]["reason"] == "queue_timeout"


async def test_many_refusals_are_one_line_and_push_no_decision_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "proxy.state.overload")
    async with held(tmp_path, max_queue=0) as (proxy, _):
        for number in range(60):
            assert (await proxy.post(chat(f"x{number}"))).status == 503
        await until(lambda: lines(caplog), "a line")
        _, decisions = await call(proxy, "GET", "/decisions?n=200")
        outcomes = [one["outcome"] for one in decisions]
        assert outcomes.count("rejected") == 50
        assert outcomes[-1] is None, "the first one, which is still computed"
        assert len(lines(caplog)) == 1
        state = proxy.server.state
        now_s, later_s = state.clock.now_s, state.clock.now_s() + 11.0
        state.clock.now_s = lambda: later_s
        state.overload.look()
        state.clock.now_s = now_s
        assert state.overload.warning is None
        assert re.fullmatch(
            r"overload is over: it lasted \d\.\d s, 60 requests were refused",
            lines(caplog, "overload is over")[0],
        )


async def test_nothing_is_told_to_tenants_with_salts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"api_key": "a:sk-a-0123456789,b:sk-b-0123456789", "max_queue": 0}
    options["cache_salt_secret"] = "0123456789abcdef"
    async with held(tmp_path, **options) as (proxy, _):
        refused = await proxy.post(chat("x"), headers=A)
        assert refused.status == 503
        assert not [name for name in refused.headers if name.startswith("X-Cache-Proxy")]
        assert b"prefill_tokens" not in refused.body
        assert set(orjson.loads(refused.body)) == {"message", "type", "code", "error"}
