"""Spans of records: names, times, what counts as an error, and what is never in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from proxy.core.placement.alternatives import PastChecks
from proxy.core.types import Instance, Outcome, Reject, RejectReason
from proxy.protocol.endpoints import ENDPOINTS
from proxy.telemetry.record import Migration, RequestRecord
from proxy.telemetry.tracing.spans import FIELDS, OPERATIONS, TERMS, TEXT_CHARS, spans_of
from proxy.telemetry.tracing.trace import DECODE, PREFILL, Trace

A = Instance("a", "https://[::1]:8443")
NOBODY = Resource.get_empty()
SECRET = "zebra"


def record(**more: Any) -> RequestRecord:
    """A request that is over, in a trace."""
    given: dict[str, Any] = {
        "request_id": "r",
        "endpoint": "/v1/chat/completions",
        "model": "m",
        "decode_instance": "a",
        "t_proxy_recv": 10.0,
        "t_decided": 11.0,
        "t_done": 20.0,
        "outcome": Outcome.OK,
        "status": 200,
        "trace": Trace("1" * 32, "2" * 16, "", is_sampled=True),
    }
    return RequestRecord(**(given | more))


def made(of: RequestRecord) -> list[ReadableSpan]:
    return spans_of(of, NOBODY)


def of_request(**more: Any) -> ReadableSpan:
    return made(record(**more))[0]


def is_error(span: ReadableSpan) -> bool:
    return span.status.status_code is StatusCode.ERROR


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_no_trace_no_spans() -> None:
    assert made(record(trace=None)) == []


def test_paths_and_fields_are_known_ones() -> None:
    assert set(OPERATIONS) <= set(ENDPOINTS)
    assert set(FIELDS) <= set(RequestRecord.__dataclass_fields__)


def test_the_page_has_every_attribute() -> None:
    page = (Path(__file__).parents[4] / "docs/operate/reading-the-log.md").read_text("utf-8")
    section = page.partition("\n## Traces\n")[2].partition("\n## ")[0]
    assert [name for name in (*FIELDS, *TERMS) if f"`{name}`" not in section] == []


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "chat m"),
        ({"model": None}, "chat"),
        ({"decode_instance": None, "model": "invented"}, "chat"),
        ({"endpoint": "/v1/embeddings"}, "embeddings m"),
        ({"endpoint": "/v1/rerank"}, "/v1/rerank"),
        ({"endpoint": "/v1/whatever/42"}, "other"),
    ],
)
def test_names_are_few(more: dict[str, Any], name: str) -> None:
    assert of_request(**more).name == name


@pytest.mark.parametrize("outcome", list(Outcome))
def test_what_counts_as_an_error(outcome: Outcome) -> None:
    trace = Trace("1" * 32, None, "", is_sampled=True)
    trace.begin(DECODE, A, None, 12.0)
    span, _, leg = made(record(outcome=outcome, trace=trace))
    is_fine = outcome in (Outcome.OK, Outcome.BAD_REQUEST, Outcome.CLIENT_GONE)
    assert (is_error(span), is_error(leg)) == (not is_fine, not is_fine)
    kind = None if outcome is Outcome.OK else str(outcome)
    assert attributes(span).get("error.type") == attributes(leg).get("error.type") == kind


def test_the_wait_in_the_queue_is_a_phase() -> None:
    waited = record(t_queued=10.5, t_decided=14.0)
    _, read, queue = made(waited)
    assert (read.name, read.start_time, read.end_time) == ("read", 10 * 10**9, 10_500_000_000)
    assert (queue.name, queue.end_time) == ("queue", 14 * 10**9)
    _, _, left = made(record(t_queued=10.5, t_decided=None))
    assert left.end_time == 20 * 10**9


def test_a_leg_has_its_address_and_ends_with_its_request() -> None:
    trace = Trace("1" * 32, None, "", is_sampled=True)
    trace.begin(PREFILL, A, None, 12.0).end(13.0, "timeout")
    trace.begin(DECODE, A, "b", 14.0)
    _, _, prefill, decode, transfer, flow = made(
        record(trace=trace, t_decode_sent=14.0, t_first_token=15.0)
    )
    address = [attributes(decode).get(f"server.{part}") for part in ("address", "port")]
    assert address == ["::1", 8443]
    assert (decode.kind, decode.end_time) == (SpanKind.CLIENT, 20 * 10**9)
    assert (attributes(prefill)["error.type"], is_error(prefill)) == ("timeout", True)
    assert (transfer.name, flow.name) == ("transfer", "stream")
    assert transfer.end_time == flow.start_time == 15 * 10**9


def test_a_refusal_says_why() -> None:
    reject = Reject(RejectReason.MEMORY, 5)
    refused = {"outcome": Outcome.REJECTED, "error": "memory", "decode_instance": None}
    assert attributes(of_request(**refused))["cache_proxy.refusal"] == "memory"
    told = attributes(of_request(**refused, candidates=PastChecks(reject)))
    assert told["cache_proxy.refusal"] == reject.why


def test_no_text_of_an_error_is_told() -> None:
    told = {"error": SECRET, "first_failure": f"http: {SECRET}", "outcome": Outcome.UPSTREAM_ERROR}
    assert SECRET not in "".join(map(str, attributes(of_request(**told)).values()))


@pytest.mark.parametrize("name", ["session_id", "model", "request_id", "tenant"])
def test_text_is_bounded_and_can_be_sent(name: str) -> None:
    span = of_request(**{name: "\ud800x" * 500})
    for value in (span.name, *attributes(span).values()):
        assert len(str(value).encode()) <= 8 * TEXT_CHARS


def test_migrations_are_told_by_cause_and_end() -> None:
    rows = [
        Migration("a", "b", "lost", "moved", 3, 0.1),
        Migration("b", None, "lost", "limit", 9, 0),
    ]
    told = attributes(of_request(migrations=rows))["cache_proxy.migrations"]
    assert told == ["lost: moved", "lost: limit"]


def test_times_never_go_backwards() -> None:
    for span in made(record(t_proxy_recv=21.0)):
        assert (span.start_time or 0) <= (span.end_time or 0)
