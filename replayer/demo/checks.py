"""Checks of a demo run, on the independent records of client, proxy and engines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

CLASSES = ("WARM", "MEDIUM", "HEAVY_P2P", "HEAVY_COLO")
STREAMED = frozenset({"disconnect_mid", "stream_error", "truncated"})
"""Client outcomes of a request that had begun to stream."""
_ENGINE_ID = re.compile(r"-[0-9a-f]{12}(-p)?$")
"""What the proxy adds to a request's id for an engine, and for a prefill leg."""
Check = tuple[bool, str]
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Logs and metrics of one run; a killed engine's are left out.

    `classes`: the route classes that the run must have, none of them if it is empty.
    """

    proxy_log: Path
    client_log: Path
    proxy_metrics: str
    engine_metrics: dict[str, str]
    engine_logs: dict[str, Path]
    killed: bool
    offloads_expected: bool
    wait: Callable[[Callable[[], bool]], None]
    classes: tuple[str, ...] = ()


def checks(evidence: Evidence) -> Iterator[Check]:
    """Yield each claim: whether it holds, and its text with figures."""
    proxy, client = _rows(evidence.proxy_log), _rows(evidence.client_log)
    yield _requests(client, killed=evidence.killed)
    if evidence.killed:
        yield _noticed(proxy)
    if evidence.classes:
        yield _classes(proxy, evidence.classes)
    yield _moved(evidence, proxy)
    yield _at_rest(evidence.proxy_metrics)


def _rows(path: Path) -> Rows:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def _requests(client: Rows, *, killed: bool) -> Check:
    outcomes = Counter(row["outcome"] for row in client)
    tolerated = STREAMED | {"skipped"} if killed else set()
    lost = {name: n for name, n in outcomes.items() if name != "ok" and name not in tolerated}
    detail = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    what = "no request lost that had not begun to stream" if killed else "every request ok"
    return not lost and outcomes["ok"] > 0, f"{what}: {detail}"


def _noticed(proxy: Rows) -> Check:
    retried = sum(row["retries"] > 0 for row in proxy)
    fallbacks = Counter(row["fallback"] for row in proxy if row["fallback"])
    broken = sum(row["outcome"] not in ("ok", "rejected") for row in proxy)
    return bool(retried or fallbacks or broken), (
        f"the kill was noticed: {retried} requests run again elsewhere, {broken} streams broken, "
        f"fallbacks {dict(fallbacks) or 'none'}"
    )


def _classes(proxy: Rows, expected: tuple[str, ...]) -> Check:
    seen = Counter(row["route_class"] for row in proxy)
    detail = ", ".join(f"{seen[name]} {name}" for name in expected)
    return all(seen[name] for name in expected), f"all route classes in the proxy's log: {detail}"


def _moved(evidence: Evidence, proxy: Rows) -> Check:
    """Compare the offloads' KV tokens in the engines' logs with the engines' counters."""
    offloaded = {
        row["request_id"]
        for row in proxy
        if row["route_class"] == "HEAVY_P2P" and row["decode_instance"] in evidence.engine_logs
    }
    counted = sum(
        metric_sum(text, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        for text in evidence.engine_metrics.values()
    )
    book = _received if evidence.killed else _sent
    evidence.wait(lambda: book(evidence, offloaded) >= counted)
    received = _received(evidence, offloaded)
    found = (
        f"external KV tokens: engines count {counted:,}; the {len(offloaded)} offloads of the "
        f"proxy's log received {received:,}"
    )
    if evidence.killed:
        return received == counted, f"{found} (live engines; the killed one's book is lost)"
    sent = _sent(evidence, offloaded)
    enough = counted > 0 or not evidence.offloads_expected
    return enough and received == counted == sent, f"{found} and were sent {sent:,}"


def metric_sum(exposition: str, name: str, **labels: str) -> int:
    """Sum the samples of one Prometheus series that have these labels."""
    samples = (s for f in text_string_to_metric_families(exposition) for s in f.samples)
    return sum(
        int(one.value)
        for one in samples
        if one.name == name and labels.items() <= one.labels.items()
    )


def _received(evidence: Evidence, offloaded: set[str]) -> int:
    return sum(
        row["external_tokens"]
        for path in evidence.engine_logs.values()
        for row in _rows(path)
        if _ENGINE_ID.sub("", row["request_id"]) in offloaded
    )


def _sent(evidence: Evidence, offloaded: set[str]) -> int:
    return sum(
        row["sent_tokens"]
        for path in evidence.engine_logs.values()
        for row in _rows(path)
        if row["request_id"].endswith("-p") and _ENGINE_ID.sub("", row["request_id"]) in offloaded
    )


def _at_rest(exposition: str) -> Check:
    names = ("ongoing_", "in_flight", "pinned_tokens", "accounting_drift", "live_leases")
    prefixes = tuple(f"cache_proxy_{name}" for name in names)
    lines = [line for line in exposition.splitlines() if line.startswith(prefixes)]
    left = [line for line in lines if float(line.rsplit(" ", 1)[1])]
    return bool(lines) and not left, (
        f"counters at the end: {len(lines)} gauges, "
        + (f"not zero: {'; '.join(left)}" if left else "all zero, accounting_drift 0")
    )
