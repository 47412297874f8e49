"""The spans of one request, made of its record: the request, its phases, and its legs.

Names are those of OpenTelemetry's conventions for generative AI where there is one, else
`cache_proxy.*`. No text of a prompt, an answer or an error is in them: kinds and reasons only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from proxy import __version__
from proxy.core.placement.alternatives import Alternatives, PastChecks
from proxy.core.types import Outcome
from proxy.protocol.endpoints import endpoint_of
from proxy.telemetry.log import printable
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.tracing.trace import PREFILL, SUPERSEDED, LegSpan, Trace, new_id

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""What the conventions call a request for a path; other paths are no such operation."""
PROVIDER: Final = "vllm"
TEXT_CHARS: Final = 256
FIELDS: Final = (
    *("request_id", "tenant", "turn", "route_class", "offload_decision_reason", "policy", "place"),
    *("prefill_instance", "decode_instance", "home_instance", "rehomed"),
    *("isl_tokens", "hit_tokens", "reachable_hit_tokens", "new_tokens", "new_tokens_prefill"),
    *("predicted_ttft_s", "predicted_prefill_s", "predicted_transfer_s"),
    *("outcome", "retries", "first_failed_instance", "fallback", "hedge", "limit"),
)
"""Fields of the record that a request's span has as `cache_proxy.*`."""
TERMS: Final = (
    *("cost_s", "ttft_s", "harm_s", "behind_s", "decode_s", "next_s", "memory_s", "heat_s"),
)
"""The price of the option taken and its terms, as `cache_proxy.cost.*`."""
_NO_ERROR: Final = frozenset({Outcome.OK, Outcome.BAD_REQUEST, Outcome.CLIENT_GONE})
"""A request that the client ended, or got wrong, is no error of a server."""
_SCOPE: Final = InstrumentationScope("cache-proxy", __version__)
_OK, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
Attributes = Mapping[str, object]


def spans_of(record: RequestRecord, resource: Resource) -> list[ReadableSpan]:
    """The spans of a request that is over; none for one without a trace."""
    trace = record.trace
    if trace is None:
        return []
    return _Spans(record, trace, resource).made


class _Spans:
    """Makes the spans of one request; `made` has them, the request's own first."""

    def __init__(self, record: RequestRecord, trace: Trace, resource: Resource) -> None:
        self._record, self._trace, self._resource = record, trace, resource
        self._end_s = record.t_done or record.t_proxy_recv
        self._number = int(trace.trace_id, 16)
        self.made: list[ReadableSpan] = []
        self._request()
        self._phases()
        for leg in trace.legs:
            self._leg(leg)

    def _request(self) -> None:
        record, trace = self._record, self._trace
        operation = _operation(record)
        name = operation or endpoint_of(record.endpoint).label
        if operation and record.model and record.decode_instance:
            name = f"{operation} {printable(record.model[:TEXT_CHARS])}"  # one that is served
        found = _of_request(record) | _of_decision(record)
        times = record.t_proxy_recv, self._end_s
        status = _OK if record.outcome in _NO_ERROR else _ERROR
        self._add((name, trace.span_id), trace.parent_id, times, found, (SpanKind.SERVER, status))

    def _phases(self) -> None:
        """What came before the first leg: the body and the decision, and the wait in the queue."""
        record = self._record
        read_s = record.t_queued or record.t_decided
        self._phase("read", record.t_proxy_recv, read_s or self._end_s, self._trace.span_id)
        if record.t_queued is not None:
            waited_s = record.t_decided or self._end_s
            self._phase("queue", record.t_queued, waited_s, self._trace.span_id)

    def _phase(self, name: str, began_s: float, ended_s: float, parent: str) -> None:
        self._add((name, new_id()), parent, (began_s, ended_s), {}, (SpanKind.INTERNAL, _OK))

    def _leg(self, leg: LegSpan) -> None:
        record = self._record
        outcome = record.outcome or Outcome.OK
        ended_s, result = leg.ended_s, leg.result
        if ended_s is None:
            ended_s, result = self._end_s, None if outcome is Outcome.OK else str(outcome)
        found = _of_leg(record, leg, result)
        is_good = result in (None, SUPERSEDED) or (leg.ended_s is None and outcome in _NO_ERROR)
        shown = SpanKind.CLIENT, _OK if is_good else _ERROR
        name = f"{leg.kind} {leg.instance.name}"
        times = leg.began_s, ended_s
        self._add((name, leg.span_id), self._trace.span_id, times, found, shown)
        first_s = record.t_first_token
        if first_s is not None and leg.kind != PREFILL and leg.began_s == record.t_decode_sent:
            waits = "first_token" if leg.source is None else "transfer"
            self._phase(waits, leg.began_s, min(first_s, ended_s), leg.span_id)
            self._phase("stream", min(first_s, ended_s), ended_s, leg.span_id)

    def _add(
        self,
        named: tuple[str, str],
        parent_id: str | None,
        times: tuple[float, float],
        attributes: Attributes,
        shown: tuple[SpanKind, Status],
    ) -> None:
        """Make a span. `named`: its name and id; `shown`: its kind and status."""
        began_s, ended_s = times
        name, span_id = named
        is_remote = span_id == self._trace.span_id
        span = ReadableSpan(
            name,
            self._context(span_id, is_remote=False),
            None if parent_id is None else self._context(parent_id, is_remote=is_remote),
            self._resource,
            {key: _plain(value) for key, value in attributes.items() if value is not None},
            kind=shown[0],
            status=shown[1],
            start_time=int(began_s * 1e9),
            end_time=int(max(began_s, ended_s) * 1e9),
            instrumentation_scope=_SCOPE,
        )
        self.made.append(span)

    def _context(self, span_id: str, *, is_remote: bool) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(self._number, int(span_id, 16), is_remote, flags)


def _operation(record: RequestRecord) -> str | None:
    return OPERATIONS.get(record.endpoint)


def _of_genai(record: RequestRecord) -> dict[str, object]:
    operation = _operation(record)
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER if operation else None,
        "gen_ai.request.model": record.model,
    }


def _of_request(record: RequestRecord) -> dict[str, object]:
    """What the conventions have names for."""
    outcome = record.outcome
    return _of_genai(record) | {
        "gen_ai.request.stream": record.stream,
        "gen_ai.conversation.id": record.session_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.osl_tokens,
        "gen_ai.response.time_to_first_chunk": record.ttft_s(),
        "http.route": endpoint_of(record.endpoint).label,
        "http.response.status_code": record.status,
        "error.type": None if outcome is Outcome.OK else outcome,
    }


def _of_decision(record: RequestRecord) -> dict[str, object]:
    """What was decided, and why."""
    found = {f"cache_proxy.{name}": getattr(record, name) for name in FIELDS}
    options = record.candidates
    if isinstance(options, PastChecks):
        found["cache_proxy.refusal"] = options.why
    elif record.outcome is Outcome.REJECTED:
        found["cache_proxy.refusal"] = record.error
    elif isinstance(options, Alternatives):
        row = options.taken() or {}
        found |= {f"cache_proxy.cost.{name}": row.get(name) for name in TERMS}
        found["cache_proxy.gain_s"] = options.gain_s()
    if record.shadow is not None:
        found["cache_proxy.shadow.agrees"] = record.shadow.agrees
    if record.migrations:
        found["cache_proxy.migrations"] = [f"{m.cause}: {m.ended}" for m in record.migrations]
    return found


def _of_leg(record: RequestRecord, leg: LegSpan, result: str | None) -> dict[str, object]:
    address = urlsplit(leg.instance.url)
    return _of_genai(record) | {
        "server.address": address.hostname,
        "server.port": address.port,
        "error.type": None if result == SUPERSEDED else result,
        "cache_proxy.leg.kind": leg.kind,
        "cache_proxy.leg.instance": leg.instance.name,
        "cache_proxy.leg.kv_from": leg.source,
        "cache_proxy.leg.superseded": result == SUPERSEDED or None,
    }


def _plain(value: object) -> bool | int | float | str | list[str]:
    """A value as the exporter takes it; text is bounded, and has no halves of characters."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list):
        return [printable(str(item)[:TEXT_CHARS]) for item in value]
    return printable(str(value)[:TEXT_CHARS])
