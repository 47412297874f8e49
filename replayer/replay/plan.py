"""The selection of a trace's requests to send, and its effect on the ideal cache hit.

A selection changes how much a cache could hit at best, so the ideal hit ratio is given both for the
whole trace and for the selection.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from replayer.replay.options import ReplayOptions, SessionSample
from replayer.replay.schedule import check_order, units
from replayer.trace.loaders import TraceRequest, read_trace
from replayer.trace.rows import TraceError


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a run in file order, and notes on the ones left out."""

    requests: tuple[TraceRequest, ...]
    notes: tuple[str, ...]
    ideal_hit_ratio: float | None


def ideal_hits(requests: Iterable[TraceRequest]) -> dict[str, int]:
    """Count the prompt tokens each request could find in one cache that never evicts.

    Requests are taken in the order given; a hit is a leading block that came before.
    """
    seen: set[int] = set()
    hits: dict[str, int] = {}
    for request in requests:
        blocks = 0
        for start, count in request.runs:
            run = range(start, start + count)
            found = count if seen.issuperset(run) else _leading(run, seen)
            blocks += found
            if found < count:
                break
        for start, count in request.runs:
            seen.update(range(start, start + count))
        hits[request.request_id] = min(blocks * request.block_tokens, request.input_tokens or 0)
    return hits


def _leading(run: range, seen: set[int]) -> int:
    return next((index for index, block in enumerate(run) if block not in seen), len(run))


def ideal_ratio(requests: Sequence[TraceRequest]) -> float | None:
    """Return the share of prompt tokens that an endless cache would hit (None: no tokens)."""
    tokens = sum(request.input_tokens or 0 for request in requests)
    return sum(ideal_hits(requests).values()) / tokens if tokens else None


def make_plan(options: ReplayOptions) -> Plan:
    """Read the trace and select; raises TraceError for a bad row or an empty selection."""
    notes: list[str] = []
    requests = list(_in_window(read_trace(options.trace, options.format), options.window_s))
    whole, total = ideal_ratio(requests), len(requests)
    if options.sample is not None:
        requests = _sampled(requests, options.sample, options.seed)
        notes.append(f"sampled {len(requests)} of {total} requests in whole sessions")
    if options.max_input_tokens is not None:
        before = len(requests)
        requests = _up_to(requests, options.max_input_tokens)
        notes.append(
            f"dropped {before - len(requests)} of {before} requests: longer than "
            f"{options.max_input_tokens} tokens, or later in such a session"
        )
    requests = requests[: options.limit]
    if not requests:
        raise TraceError(f"{options.trace}: the selection leaves no request")
    check_order(requests)
    ideal = ideal_ratio(requests)
    if len(requests) < total and whole is not None and ideal is not None:
        notes.append(f"ideal cache hit {ideal:.1%} of what is sent ({whole:.1%} before selection)")
    start_s = _origin_s(requests, options.window_s)
    placed = [_placed(request, start_s, options.max_output_tokens) for request in requests]
    return Plan(tuple(placed), tuple(notes), ideal)


def _in_window(
    requests: Iterable[TraceRequest], window_s: tuple[float, float] | None
) -> Iterator[TraceRequest]:
    """Keep requests in the window; one without a timestamp if one that it waits for is kept."""
    if window_s is None:
        yield from requests
        return
    kept: set[str] = set()
    for request in requests:
        if request.arrival_s is None:
            inside = not kept.isdisjoint(request.wait_for)
        else:
            inside = window_s[0] <= request.arrival_s < window_s[1]
        if inside:
            kept.add(request.request_id)
            yield request


def _sampled(requests: list[TraceRequest], sample: SessionSample, seed: int) -> list[TraceRequest]:
    numbers = units(requests)
    distinct = sorted(set(numbers))
    wanted = sample.count or max(1, round(len(distinct) * (sample.ratio or 0.0)))
    chosen = set(random.Random(seed).sample(distinct, min(wanted, len(distinct))))
    return [r for r, number in zip(requests, numbers, strict=True) if number in chosen]


def _up_to(requests: list[TraceRequest], max_tokens: int) -> list[TraceRequest]:
    """Drop each session from its first longer prompt on, and sub-agents started after that."""
    ended: set[str] = set()
    dropped: set[str] = set()
    begun: set[str] = set()
    kept = []
    for request in requests:
        session = request.session_id or request.request_id
        orphan = session not in begun and not dropped.isdisjoint(request.wait_for)
        begun.add(session)
        if (request.input_tokens or 0) > max_tokens or session in ended or orphan:
            ended.add(session)
            dropped.add(request.request_id)
        else:
            kept.append(request)
    return kept


def _origin_s(requests: Sequence[TraceRequest], window_s: tuple[float, float] | None) -> float:
    if window_s is not None:
        return window_s[0]
    return min((r.arrival_s for r in requests if r.arrival_s is not None), default=0.0)


def _placed(request: TraceRequest, origin_s: float, max_output: int | None) -> TraceRequest:
    """Shift a request's arrival to the run's clock and limit its answer."""
    arrival_s = None if request.arrival_s is None else request.arrival_s - origin_s
    output_tokens = min(request.output_tokens, max_output or request.output_tokens)
    return replace(request, arrival_s=arrival_s, output_tokens=output_tokens)
