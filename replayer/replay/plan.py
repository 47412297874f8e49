"""The selection of a trace's requests to send, and its effect on the ideal cache hit.

A selection changes how much a cache could hit at best, so the ideal hit ratio is given both for the
whole trace and for the selection.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import orjson
import xxhash

from replayer.replay.options import ReplayOptions, SessionSample
from replayer.replay.schedule import check_order, units
from replayer.trace.loaders import PRIVATE_ID, TraceRequest, block_ids, read_trace
from replayer.trace.rows import Runs, TraceError

LITERAL_BLOCK_BYTES = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a run in file order, and notes on the ones left out."""

    requests: tuple[TraceRequest, ...]
    notes: tuple[str, ...]
    ideal_hit_ratio: float | None


class IdealCache:
    """One cache that never evicts, and what each request finds in it.

    Of a literal prompt, whose tokens nobody has counted, the blocks are pieces of its text.
    """

    def __init__(self) -> None:
        """Start with nothing in it."""
        self._seen: set[int] = set()

    @property
    def blocks(self) -> int:
        """Count the blocks in it."""
        return len(self._seen)

    def add(self, request: TraceRequest) -> float:
        """Put a request's blocks into the cache; returns the share of its prompt that was there."""
        found = self.share(request)
        for start, count in runs_of(request):
            if start < PRIVATE_ID:  # no other request has those
                self._seen.update(range(start, start + count))
        return found

    def share(self, request: TraceRequest) -> float:
        """Return the share of a prompt that is there: leading blocks that came before."""
        blocks = 0
        for start, count in runs_of(request):
            run = range(start, start + count)
            found = count if self._seen.issuperset(run) else _leading(run, self._seen.__contains__)
            blocks += found
            if found < count:
                break
        return _share(request, blocks)


class BusyCache:
    """A cache that may have a block as soon as another request with it was sent.

    Engines need not begin requests in the order of their sending, so this is the most that one
    which began empty can hit.
    """

    def __init__(self, sent: Iterable[tuple[TraceRequest, float]]) -> None:
        """Take all requests of a run in the order of sending, with their times."""
        self._first: dict[int, tuple[float, str]] = {}
        self._second_s: dict[int, float] = {}
        for request, sent_s in sent:
            for block in _common_blocks(request):
                if block not in self._first:
                    self._first[block] = sent_s, request.request_id
                elif self._first[block][1] != request.request_id:
                    self._second_s.setdefault(block, sent_s)

    def share(self, request: TraceRequest, until_s: float) -> float:
        """Return the share of a prompt that others had sent by a time: leading blocks."""

        def was_sent(block: int) -> bool:
            first_s, owner = self._first[block]
            mine = owner == request.request_id
            return (self._second_s.get(block, inf) if mine else first_s) <= until_s

        return _share(request, _leading(_common_blocks(request), was_sent))


def _common_blocks(request: TraceRequest) -> list[int]:
    """Return the leading blocks of a prompt that another request may have."""
    return [block for block in block_ids(runs_of(request)) if block < PRIVATE_ID]


def _leading(blocks: Sequence[int], is_there: Callable[[int], bool]) -> int:
    return next((at for at, block in enumerate(blocks) if not is_there(block)), len(blocks))


def _share(request: TraceRequest, blocks: int) -> float:
    """Return the share of a prompt that its first blocks are."""
    if is_literal(request):
        return blocks * LITERAL_BLOCK_BYTES / max(1, len(literal_text(request)))
    tokens = request.input_tokens or 0
    return min(blocks * request.block_tokens, tokens) / max(1, tokens)


def ideal_hits(requests: Iterable[TraceRequest]) -> dict[str, int]:
    """Count the prompt tokens each request could find in one cache that never evicts.

    Requests are taken in the order given. Those of unknown length have none.
    """
    cache = IdealCache()
    return {one.request_id: round(cache.add(one) * (one.input_tokens or 0)) for one in requests}


def is_literal(request: TraceRequest) -> bool:
    """Whether a request has its text, and not the ids of its blocks."""
    return request.messages is not None or request.prompt is not None


def literal_text(request: TraceRequest) -> bytes:
    """Return the text of a literal prompt, such that a longer conversation begins alike."""
    if request.messages is not None:
        return orjson.dumps(list(request.messages)).removesuffix(b"]")
    return (request.prompt or "").encode()


def runs_of(request: TraceRequest) -> Runs:
    """Return a request's blocks; of a literal prompt, those of its text."""
    if not is_literal(request):
        return request.runs
    text, before, ids = literal_text(request), b"", []
    for at in range(0, len(text) // LITERAL_BLOCK_BYTES * LITERAL_BLOCK_BYTES, LITERAL_BLOCK_BYTES):
        before = xxhash.xxh3_64_digest(before + text[at : at + LITERAL_BLOCK_BYTES])
        ids.append(int.from_bytes(before, "big"))
    return tuple((block, 1) for block in ids)


def digest(requests: Iterable[TraceRequest]) -> str:
    """Return what tells one selection of requests and its schedule from every other."""
    found = xxhash.xxh3_64()
    for one in requests:
        times = (one.arrival_s, one.delay_s, one.wait_for, one.session_id)
        sizes = (one.input_tokens, one.output_tokens, one.block_tokens, one.runs)
        found.update(repr((one.request_id, times, sizes)).encode())
        found.update(literal_text(one) if is_literal(one) else b"")
    return found.hexdigest()


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
        requests = _sampled(requests, options.sample, options.seed or 0)
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
