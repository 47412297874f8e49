"""Traces of real requests at a real OTLP receiver, and collectors that are of no use."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.protocol.names.trace_parent import parent_of
from proxy.telemetry.tracing.spans import TERMS
from tests.scenarios.test_hedge import BODY, LENGTH, pair
from tests.scenarios.test_migration import CHAT, INSIDE, SLOW, asked, cut, home_first, stream
from tests.scenarios.test_offload import ALWAYS
from tests.support.collector import Collector, Span
from tests.support.harness import (
    ANSWER,
    GOOD,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    plain,
    proxied,
    resets,
    says,
    stalls,
    until,
    words,
)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
FROM_ABOVE = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1"}
SECRET = "zebra"
"""A word of prompts, which no span may have."""


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as found:
        yield found


def named(spans: list[Span]) -> list[str]:
    return [span.name.split(" ")[0] for span in spans]


def parents(engine: RawEngine) -> list[tuple[str, str, bool] | None]:
    """The parents that an engine's requests named."""
    lines = [re.findall(rb"(?mi)^traceparent: (.*)\r$", head) for head in engine.post_heads]
    return [parent_of([line.decode() for line in found]) for found in lines]


async def test_a_request_its_phases_and_its_leg(tmp_path: Path, collector: Collector) -> None:
    async with proxied(tmp_path, 1, otlp_endpoint=collector.url) as (proxy, fleet):
        await proxy.post(chat(f"a {SECRET} eats"), headers={"X-Session-ID": "s"} | FROM_ABOVE)
        of = await collector.request()
        (record,) = await proxy.records(1)
    assert (of.name, of.trace, of.parent, of.is_error) == ("chat sim-8b", TRACE, PARENT, False)
    assert record["trace"] == TRACE
    name = fleet.engines[0].url.removeprefix("http://")
    read, leg = collector.below(of)
    assert (read.name, leg.name, leg.kind) == ("read", f"decode {name}", 3)
    first, flow = collector.below(leg)
    assert (first.name, flow.name) == ("first_token", "stream")
    seconds = [record[at] for at in ("t_proxy_recv", "t_decided", "t_decode_sent", "t_done")]
    times = [of.times[0], read.times[1], leg.times[0], leg.times[1]]
    assert times == pytest.approx([int(at * 1e9) for at in seconds], abs=1000)
    assert first.times[1] == flow.times[0] == int(record["t_first_token"] * 1e9)
    usage = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
    assert [of[key] for key in usage] == [record["prompt_tokens"], 8]
    assert (of["gen_ai.operation.name"], of["gen_ai.provider.name"]) == ("chat", "vllm")
    assert (of["gen_ai.request.model"], of["gen_ai.request.stream"]) == ("sim-8b", True)
    assert (of["gen_ai.conversation.id"], of["http.response.status_code"]) == ("s", 200)
    assert of["error.type"] is None
    assert of["cache_proxy.request_id"] == record["request_id"]
    assert of["cache_proxy.route_class"] == record["route_class"]
    (option,) = record["candidates"]
    assert {term: of[f"cache_proxy.cost.{term}"] for term in TERMS} == {
        term: option[term] for term in TERMS
    }
    assert f"{leg['server.address']}:{leg['server.port']}" == name
    assert of.resource["service.name"] == "cache-proxy"
    assert SECRET not in repr(collector.spans)


async def test_an_offload_has_two_legs(tmp_path: Path, collector: Collector) -> None:
    async with proxied(tmp_path, otlp_endpoint=collector.url, **ALWAYS) as (proxy, _):
        await proxy.post(chat(words(2000)))
        of = await collector.request()
        (record,) = await proxy.records(1)
    _, prefill, decode = collector.below(of)
    assert named([prefill, decode]) == ["prefill", "decode"]
    assert prefill["cache_proxy.leg.instance"] == record["prefill_instance"]
    assert decode["cache_proxy.leg.instance"] == record["decode_instance"]
    assert decode["cache_proxy.leg.kv_from"] == record["prefill_instance"]
    assert prefill.times[1] <= decode.times[0]
    assert named(collector.below(prefill)) == []
    assert named(collector.below(decode)) == ["transfer", "stream"]
    assert of["cache_proxy.offload_decision_reason"] == "policy_always"


async def test_a_stream_that_loses_its_instance(tmp_path: Path, collector: Collector) -> None:
    options: dict[str, Any] = {"migration_limit": 1, "otlp_endpoint": collector.url}
    async with proxied(tmp_path, 2, sim=SLOW, **options) as (proxy, fleet):
        await stream(proxy, CHAT, asked(CHAT))
        await collector.request()
        collector.spans.clear()
        cut(proxy, fleet, INSIDE, 1)
        await stream(proxy, CHAT, asked(CHAT, 200))
        of = await collector.request()
        _, record = await proxy.records(2)
    (row,) = record["migrations"]
    _, lost, moved = collector.below(of)
    assert (of["cache_proxy.migrations"], of.is_error) == ([f"{row['cause']}: moved"], False)
    assert named([lost, moved]) == ["decode", "move"]
    assert (lost["error.type"], lost.is_error) == (row["cause"], True)
    assert (moved["error.type"], moved.is_error) == (None, False)
    assert moved["cache_proxy.leg.instance"] == row["to_instance"]
    assert lost.times[1] <= moved.times[0] < moved.times[1] == of.times[1]


async def test_a_stream_that_leaves_its_instance(tmp_path: Path, collector: Collector) -> None:
    options: dict[str, Any] = {"migration_limit": 1, "otlp_endpoint": collector.url}
    async with proxied(tmp_path, 2, sim=SLOW, **options) as (proxy, fleet):
        await stream(proxy, CHAT, asked(CHAT))
        await collector.request()
        collector.spans.clear()
        name = home_first(proxy, fleet)[0].url.removeprefix("http://")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stream(proxy, CHAT, asked(CHAT, 100)))
            load = proxy.router.known.ledger.load
            await until(lambda: load(name).decode_tokens > 0, "its first token")
            async with proxy.http.delete(f"/instances/{name}?drain=true&mode=migrate") as said:
                assert said.status == 202
            await running
        of = await collector.request()
    legs = [span for span in collector.below(of) if span.kind == 3]
    assert named(legs) in (["decode", "move"], ["decode", "warm", "move"])
    assert not any(leg.is_error for leg in legs)
    assert legs[0]["cache_proxy.leg.superseded"] is True
    assert legs[0].times[1] > legs[-1].times[0]


async def test_a_refused_request(tmp_path: Path, collector: Collector) -> None:
    options: dict[str, Any] = {"max_queue": 0, "active_prefill_tokens_threshold": 0}
    async with RawEngine(stalls()) as engine:
        log, told = tmp_path / "log", options | {"otlp_endpoint": collector.url}
        async with ServedProxy(log, [engine.address], **told) as proxy:
            await proxy.up()
            waits = asyncio.create_task(proxy.post(chat(words(2000))))
            await until(lambda: engine.busy, "one is under way")
            answer = await proxy.post(chat(words(200)))
            assert answer.status == 503
            of = await collector.request()
            waits.cancel()
            with suppress(asyncio.CancelledError):
                await waits
    assert (of.name, of.is_error, of["error.type"]) == ("chat", True, "rejected")
    assert "prefill_tokens" in of["cache_proxy.refusal"]
    assert of["http.response.status_code"] == 503
    assert named(collector.below(of)) == ["read"]


async def test_a_wrong_request_and_one_without_a_key(tmp_path: Path, collector: Collector) -> None:
    options: dict[str, Any] = {"api_key": "team:key", "otlp_endpoint": collector.url}
    async with proxied(tmp_path, 1, **options) as (proxy, _):
        assert (await proxy.post(b"{}")).status == 401
        key = {"Authorization": "Bearer key"}
        assert (await proxy.post(f'{{"{SECRET}'.encode(), headers=key)).status == 400
        of = await collector.request()
    assert (of["cache_proxy.tenant"], of["error.type"]) == ("team", "bad_request")
    assert not of.is_error
    assert SECRET not in repr(collector.spans)


async def test_a_client_that_leaves(tmp_path: Path, collector: Collector) -> None:
    async with proxied(tmp_path, 1, sim=SLOW, otlp_endpoint=collector.url) as (proxy, _):
        async with proxy.http.post(CHAT, json=chat("x", max_tokens=5000)) as response:
            await response.content.readany()
            response.close()
        of = await collector.request()
    leg = collector.below(of)[-1]
    assert (of["error.type"], leg["error.type"]) == ("client_gone", "client_gone")
    assert (of["http.response.status_code"], of.is_error, leg.is_error) == (499, False, False)
    assert leg.times[1] == of.times[1]


async def traced(proxy: ServedProxy, collector: Collector) -> Span:
    """The span of one more request."""
    collector.spans.clear()
    assert (await proxy.post(chat("x"), headers=FROM_ABOVE)).status == 200
    return await collector.request()


async def test_each_leg_has_a_parent_of_its_own(tmp_path: Path, collector: Collector) -> None:
    """The first instance breaks; the client's own parent reaches none of them."""
    async with RawEngine(resets()) as broken, RawEngine(GOOD) as good:
        engines = [broken.address, good.address]
        told: dict[str, Any] = {"placement": "round-robin", "offload_policy": "never"}
        options = told | {"otlp_endpoint": collector.url}
        async with ServedProxy(tmp_path / "log", engines, **options) as proxy:
            await proxy.up()
            of = await traced(proxy, collector)
            if not broken.posts:  # the other one had its turn
                of = await traced(proxy, collector)
    legs = [span for span in collector.below(of) if span.kind == 3]
    asked_for = [parents(broken)[0], parents(good)[-1]]
    assert asked_for == [(TRACE, leg.id, True) for leg in (legs[0], legs[-1])]
    assert len({leg.id for leg in legs} | {of.id, PARENT}) == len(legs) + 2
    assert legs[0].is_error
    assert not legs[-1].is_error
    assert b"\r\ntracestate: a=1\r\n" in good.post_heads[-1]


@pytest.mark.parametrize(
    ("script", "kind", "is_superseded"),
    [(says(LENGTH), "decode", None), (stalls(), "hedge", True)],
    ids=["P answers", "P is late"],
)
async def test_p_and_d_have_parents_of_their_own(
    tmp_path: Path, collector: Collector, script: Script, kind: str, is_superseded: bool | None
) -> None:
    p, d = RawEngine(script), RawEngine(GOOD)
    async with pair(tmp_path, p, d, otlp_endpoint=collector.url) as proxy:
        assert (await proxy.post(BODY, headers=FROM_ABOVE)).status == 200
        of = await collector.request()
    _, prefill, other = collector.below(of)
    assert named([prefill, other]) == ["prefill", kind]
    assert parents(p) == [(TRACE, prefill.id, True)]
    assert parents(d) == [(TRACE, other.id, True)]
    assert prefill["cache_proxy.leg.superseded"] is is_superseded
    assert not prefill.is_error
    assert not other.is_error
    assert other["cache_proxy.leg.superseded"] is None


@pytest.mark.parametrize("given", ["nonsense", f"00-{TRACE.upper()}-{PARENT}-01", ""])
async def test_a_bad_parent_begins_a_new_trace(
    tmp_path: Path, collector: Collector, given: str
) -> None:
    async with RawEngine(GOOD) as engine:
        at, options = [engine.address], {"otlp_endpoint": collector.url}
        async with ServedProxy(tmp_path / "log", at, **options) as proxy:
            await proxy.up()
            headers = FROM_ABOVE | {"traceparent": given}
            assert (await proxy.post(chat("x"), headers=headers)).status == 200
            of = await collector.request()
    assert of.parent == ""
    assert of.trace != TRACE
    (told,) = parents(engine)
    assert told is not None
    assert told[0] == of.trace
    assert b"tracestate" not in engine.post_heads[0]


@pytest.mark.parametrize(
    ("headers", "ratio"),
    [({}, 0.0), ({"traceparent": f"00-{TRACE}-{PARENT}-00"}, 1.0)],
)
async def test_what_is_not_sampled_is_told_so(
    tmp_path: Path, collector: Collector, headers: dict[str, str], ratio: float
) -> None:
    async with RawEngine(GOOD) as engine:
        told = {"otlp_endpoint": collector.url, "trace_ratio": ratio}
        async with ServedProxy(tmp_path / "log", [engine.address], **told) as proxy:
            await proxy.up()
            assert (await proxy.post(chat("x"), headers=headers)).status == 200
            (record,) = await proxy.records(1)
    (told_of,) = parents(engine)
    assert told_of is not None
    assert (told_of[0], told_of[2]) == (record["trace"], False)
    assert collector.spans == []


async def test_without_tracing_headers_are_passed_on(tmp_path: Path) -> None:
    async with RawEngine(GOOD) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address]) as proxy:
            await proxy.up()
            assert (await proxy.post(chat("x"), headers=FROM_ABOVE)).status == 200
            (record,) = await proxy.records(1)
            assert proxy.server.state.telemetry.tracing is None
    assert parents(engine) == [(TRACE, PARENT, True)]
    assert b"\r\ntracestate: a=1\r\n" in engine.post_heads[0]
    assert record["trace"] is None


async def test_the_last_spans_are_sent_at_the_end(tmp_path: Path, collector: Collector) -> None:
    async with proxied(tmp_path, 1, otlp_endpoint=collector.url) as (proxy, _):
        for _ in range(5):
            await proxy.post(chat("x"))
    await collector.got(5, lambda span: span.kind == 2)


GARBAGE = b"\x00\xffnot HTTP at all\r\n\r\n"
FULL = plain(b"x" * 300_000, "400 Bad Request")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (says(GARBAGE, close=True), "traces: spans are dropped"),
        (says(FULL), "reason: Bad Request"),
        (says(ANSWER), None),
        (stalls(), "timed out"),
        (stalls(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"), "timed out"),
        (resets(), "traces: spans are dropped"),
    ],
    ids=["garbage", "refuses", "another answer", "silent", "silent within", "resets"],
)
async def test_a_collector_of_no_use_costs_spans_only(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    said: str | None,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    async with RawEngine(answer) as bad, RawEngine(GOOD) as engine:
        told = {"otlp_endpoint": bad.address}
        async with ServedProxy(tmp_path / "log", [engine.address], **told) as proxy:
            await proxy.up()
            for _ in range(3):
                assert (await proxy.post(chat("x"))).status == 200
            await until(lambda: bad.posts, "it was sent spans")
            if said:
                await until(partial(dropped, proxy, 3), "counted")
            await proxy.at_rest()
    lines = [r.getMessage() for r in caplog.records if "traces" in r.getMessage()]
    assert len(lines) == (1 if said else 0)
    assert said is None or said in lines[0]
    assert not any(r.name.startswith("opentelemetry") for r in caplog.records)


def dropped(proxy: ServedProxy, count: int) -> bool:
    return proxy.metric("traces_dropped_total") == count


async def test_a_dead_collector_and_one_that_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    async with RawEngine() as gone:
        at = gone.address
    async with RawEngine(GOOD) as engine:
        async with ServedProxy(tmp_path / "log", [engine.address], otlp_endpoint=at) as proxy:
            await proxy.up()
            for turn in range(1, 4):
                assert (await proxy.post(chat("x"))).status == 200
                await until(partial(dropped, proxy, turn), "counted")
            async with RawEngine(says(plain(b"")), port=gone.port):
                assert (await proxy.post(chat("x"))).status == 200
                await until(lambda: "takes spans again" in caplog.text, "it is taken")
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("traces")]
    assert len(lines) == 2
    assert "refused" in lines[0]


async def test_headers_of_the_environment_are_sent(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    async with proxied(tmp_path, 1, otlp_endpoint=f"{collector.url}/v1/traces") as (proxy, _):
        await proxy.post(chat("x"))
        of = await collector.request()
    assert (collector.headers["x-team"], of.resource["service.name"]) == ("blue", "front")


async def test_a_session_named_by_its_trace_stays_one(tmp_path: Path, collector: Collector) -> None:
    options: dict[str, Any] = {"session_headers": "traceparent", "otlp_endpoint": collector.url}
    async with proxied(tmp_path, 1, **options) as (proxy, _):
        for _ in range(2):
            await proxy.post(chat("x"), headers=FROM_ABOVE)
        *_, record = await proxy.records(2)
    assert orjson.dumps(record["session_id"]).startswith(b'"00-')
