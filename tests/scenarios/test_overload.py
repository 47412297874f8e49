"""More than the fleet can do, through sockets: everybody is answered, nobody is left, books agree.

How much of the capacity is left under overload is asserted in virtual time
(test_overload_in_virtual_time.py); here the counts are, and the figures are printed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Answer, ServedProxy, chat, proxied, until, words

CLIENTS, REQUESTS = 16, 48
"""Closed loop, about what the fleet can do; then five times as many of both."""
OPTIONS = {"max_queue": 24, "kv_connector": "none"}
BOUNDS: dict[str, dict[str, Any]] = {
    "thresholds": {"active_prefill_tokens_threshold": 3000, "max_queue_seconds": 1.0},
    "targets": {"late": "refuse", "ttft_slo": 0.2, "tpot_slo": 0.01},
}
CHECKS = {"thresholds": {"prefill_tokens"}, "targets": {"ttft_slo", "tpot_slo"}}


def refused_for(proxy: ServedProxy) -> list[dict[str, str]]:
    """The labels of refusals."""
    found = proxy.server.state.metrics.rejected.collect()
    return [s.labels for one in found for s in one.samples if s.value and "check" in s.labels]


async def served_per_s(proxy: ServedProxy, times: int, got: list[Answer]) -> float:
    """So many clients, each asking again when it has its answer; what they got is added."""
    bodies = [chat(words(400, f"r{times}x{i}x"), max_tokens=8) for i in range(times * REQUESTS)]
    answers: list[Answer] = []

    async def client() -> None:
        while bodies:
            answers.append(await proxy.post(bodies.pop()))

    begun_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(times * CLIENTS):
            group.create_task(client())
    got += answers
    return sum(answer.status == 200 for answer in answers) / (time.monotonic() - begun_s)


@pytest.mark.parametrize("bound", BOUNDS)
async def test_five_times_too_many_clients(tmp_path: Path, bound: str) -> None:
    options = OPTIONS | BOUNDS[bound]
    async with proxied(tmp_path, 2, sim={"speed": 4.0}, **options) as (proxy, fleet):
        got: list[Answer] = []
        rates = [await served_per_s(proxy, times, got) for times in (1, 5)]
        counts = Counter(answer.status for answer in got)
        sys.stdout.write(f"answers per s, at capacity and at five times it: {rates}; {counts}\n")
        assert counts[200] >= REQUESTS / 2
        assert set(counts) <= {200, 503}
        for answer in got:
            if answer.status == 200:
                assert answer.body.endswith(b"data: [DONE]\n\n")
            else:
                assert 1 <= int(answer.headers["Retry-After"]) <= 30
                assert int(answer.headers["retry-after-ms"]) >= 50
        await proxy.at_rest()
        records = await proxy.records(len(got))
        at_once = sorted(
            record["t_done"] - record["t_proxy_recv"]
            for record in records
            if record["outcome"] == "rejected" and record["t_queued"] is None
        )
        p99_ms = at_once[len(at_once) * 99 // 100] * 1000 if at_once else 0.0
        sys.stdout.write(f"refused at once: {len(at_once)}, p99 {p99_ms:.1f} ms\n")
        outcomes = Counter(record["outcome"] for record in records)
        assert (outcomes["ok"], outcomes["rejected"]) == (counts[200], counts[503])
        assert outcomes.total() == len(got)
        reasons = Counter(r["error"] for r in records if r["outcome"] == "rejected")
        assert set(reasons) <= {"queue_full", "queue_deadline", "queue_timeout"}
        checks = {one["check"] for one in refused_for(proxy)}
        assert checks
        assert checks <= CHECKS[bound]
        for reason, count in reasons.items():
            assert proxy.rejected(reason) == count
        waited = sum(
            proxy.metric("queue_wait_seconds_count", end=end) for end in ("admitted", "refused")
        )
        assert waited == sum(record["t_queued"] is not None for record in records)
        assert proxy.metric("queued_requests") == 0
        engines = [host.driver.engine for host in fleet.engines]
        await until(lambda: not any(e.running or e.waiting for e in engines))
        assert sum(engine.counters.finished["length"] for engine in engines) == counts[200]
