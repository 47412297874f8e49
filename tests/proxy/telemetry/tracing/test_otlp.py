"""The exporter: where spans go, and whatever text a record has."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.types import Outcome
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.tracing.otlp import Otlp
from proxy.telemetry.tracing.trace import Trace
from tests.support.collector import Collector


def ended(model: str) -> RequestRecord:
    trace = Trace("1" * 32, None, "", is_sampled=True)
    return RequestRecord(request_id="r", model=model, outcome=Outcome.OK, trace=trace)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_a_bare_address_has_the_usual_path(path: str) -> None:
    async with Collector() as collector:
        said = await asyncio.to_thread(Otlp(collector.url + path, "me").send, [ended("m")])
    assert (said, len(collector.spans)) == (None, 2)
    assert collector.spans[0].resource["service.instance.id"] == "me"


async def test_another_path_is_taken_as_it_is() -> None:
    async with Collector() as collector:
        said = await asyncio.to_thread(Otlp(f"{collector.url}/otlp", "me").send, [ended("m")])
    assert said is not None
    assert "Not Found" in said


@pytest.mark.parametrize("model", ["", "\ud800", "\x00\n", "\U0001f600" * 400])
async def test_no_text_costs_the_spans_of_others(model: str) -> None:
    async with Collector() as collector:
        send = Otlp(collector.url, "me").send
        assert await asyncio.to_thread(send, [ended("m"), ended(model)]) is None
        assert len(collector.spans) == 4


async def test_connections_are_used_again() -> None:
    async with Collector() as collector:
        collector.answer = b"x" * 1000
        send = Otlp(collector.url, "me").send
        for _ in range(3):
            assert await asyncio.to_thread(send, [ended("m")]) is None
    assert len(set(collector.peers)) == 1
    assert collector.calls == 3


async def test_a_wrong_header_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20geheim%0Ax")
    async with Collector() as collector:
        said = await asyncio.to_thread(Otlp(collector.url, "me").send, [ended("m")])
    assert said == "OTEL_EXPORTER_OTLP_HEADERS has what no header can have"
