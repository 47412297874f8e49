"""What a request's record learns from its route and from the engine's usage."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.core.record import RequestRecord
from proxy.core.routing.route import Route
from proxy.core.types import Outcome, RequestFacts

MOST_TOKENS = 100_000_000
"""No prompt and no answer is longer: what an engine says beyond it is not believed."""


def note_facts(record: RequestRecord, facts: RequestFacts) -> None:
    """Who asks, and how much."""
    record.session_id, record.model = facts.session_id, facts.model or None
    record.isl_tokens = facts.prompt_tokens


def note_route(record: RequestRecord, route: Route) -> None:
    """The decision as it was first made; what became of it is noted at the end."""
    record.turn, record.policy = route.turn, route.policy
    record.route_class, record.offload_decision_reason = route.route_class, route.reason
    record.decode_instance = route.decode.name
    record.hit_tokens, record.new_tokens = route.hit_tokens, route.new_tokens
    record.predicted_ttft_s = route.predicted_ttft_s
    if route.prefill is not None:
        record.prefill_instance = route.prefill.name
        record.new_tokens_prefill = route.new_tokens_prefill
    record.predicted_transfer_s = route.predicted_transfer_s
    record.predicted_ttft_bound_s = route.predicted_ttft_bound_s
    record.predicted_prefill_s = route.predicted_prefill_s
    record.candidates, record.shadow = route.options, route.shadow


def note_end(
    record: RequestRecord, outcome: Outcome, status: int | None, error: str | None
) -> None:
    """How it ended; what was said first stays."""
    if record.outcome is None:
        record.outcome, record.status, record.error = outcome, status, error


def note_usage(record: RequestRecord, usage: bytes | None) -> None:
    """The engine's own counts, where the answer carried them."""
    try:
        counts = orjson.loads(usage or b"{}")
    except orjson.JSONDecodeError:
        return
    found = counts.get("prompt_tokens_details")
    details = found if isinstance(found, dict) else {}
    record.prompt_tokens = _count(counts.get("prompt_tokens"))
    record.osl_tokens = _count(counts.get("completion_tokens"))
    most = MOST_TOKENS if record.prompt_tokens is None else record.prompt_tokens
    record.cached_tokens = _count(details.get("cached_tokens"), most)


def _count(value: Any, most: int = MOST_TOKENS) -> int | None:
    """A plausible count; an engine's lie must not get into sums and learned rates."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
    return value if is_count else None


def outcome_of(status: int) -> Outcome:
    """The outcome of an answer that was passed on to its end."""
    if status < 400:
        return Outcome.OK
    return Outcome.BAD_REQUEST if status < 500 else Outcome.UPSTREAM_ERROR


def phase(record: RequestRecord) -> str:
    """How far a request had come."""
    if record.t_first_token is not None:
        return "decode"
    if record.t_decode_sent is not None:
        return "first_token"
    if record.t_prefill_sent is not None:
        return "prefill"
    is_queued = record.t_queued is not None and record.t_decided is None
    return "queue" if is_queued else "upload"
