"""What a load is like: arrivals, lengths, shared prefixes, sessions, requests under way at a time.

Requests are taken by timestamp where all have one, else as the file has them. A hit is of leading
blocks that came before; *within* are those that came in the same session, *across* all others.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import fsum, inf, sqrt
from typing import Any

from replayer.engine.kvcache import SharedStore
from replayer.replay.plan import IdealCache, is_literal
from replayer.replay.schedule import Pace, PaceRules, check_order
from replayer.survey.figures import Sessions, spread
from replayer.terminal import IDLE, Working
from replayer.trace.loaders import PRIVATE_ID, TraceRequest, block_ids

PERCENTS = (10, 50, 90, 99)
PARTS = 12
"""Of the time, each with a rate of its own."""
LEAST_CACHE_TOKENS = 1 << 18
CACHE_STEP = 4
"""How much larger each cache is than the one before."""


def profile(requests: Sequence[TraceRequest], working: Working = IDLE) -> dict[str, Any]:
    """Compute all figures but concurrency, as a document; `working` says what takes long."""
    if all(one.arrival_s is not None for one in requests):
        requests = sorted(requests, key=lambda one: one.arrival_s or 0.0)
    sessions = Sessions()
    names = [sessions.add(one) for one in requests]
    hits = _Hits(requests, names, sessions, working)
    delays_s = [one.delay_s for one in requests if one.delay_s is not None]
    return {
        "requests": len(requests),
        "arrivals": arrivals([one.arrival_s for one in requests if one.arrival_s is not None]),
        "input_tokens": _spread([one.input_tokens for one in requests if one.input_tokens]),
        "output_tokens": _spread([one.output_tokens for one in requests]),
        "new_tokens": _spread(hits.new_tokens) if hits.is_known else {},
        "sessions": len(sessions.turns),
        "turns": _spread(list(sessions.turns.values())) if sessions.several else {},
        "think_s": _spread(delays_s),
        "prefixes": hits.document() if hits.is_known else None,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    mean = {"mean": fsum(values) / len(values)} if values else {}
    return mean | spread(values, *PERCENTS)


def arrivals(times_s: Sequence[float]) -> dict[str, Any] | None:
    """Describe arrivals; None where no two differ.

    `gap_cv` is the standard deviation of the gaps over their mean: 1 for a Poisson process.
    """
    times_s = sorted(times_s)
    gaps = [after - before for before, after in pairwise(times_s)]
    span_s = fsum(gaps)
    if not span_s:
        return None
    mean = span_s / len(gaps)
    part_s = span_s / PARTS
    parts = Counter(min(int((at - times_s[0]) / part_s), PARTS - 1) for at in times_s)
    return {
        "requests": len(times_s),
        "first_s": times_s[0],
        "span_s": span_s,
        "rate_rps": len(times_s) / span_s,
        "gap_cv": sqrt(fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean,
        "tied_ratio": gaps.count(0.0) / len(gaps),
        "busiest_second": max(Counter(int(at) for at in times_s).values()),
        "part_s": part_s,
        "rates_rps": [parts[part] / part_s for part in range(PARTS)],
    }


class _Hits:
    """How much of the prompts caches would have, endless ones and some of limited size."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        names: Sequence[str],
        sessions: Sessions,
        working: Working,
    ) -> None:
        self._requests, self._working = requests, working
        self._everywhere = IdealCache()
        # A session of one turn finds nothing of its own.
        own = {name: IdealCache() for name, turns in sessions.turns.items() if turns > 1}
        self._tokens = sum(one.input_tokens or 0 for one in requests)
        self._within, shares = 0, 0.0
        self.new_tokens: list[int] = []
        self.is_known = bool(self._tokens) and any(
            one.names_blocks or is_literal(one) for one in requests
        )
        pairs = zip(requests, names, strict=True)
        for one, name in working.over(pairs, "hits of an endless cache", len(requests)):
            tokens, share = one.input_tokens or 0, self._everywhere.add(one)
            shares += share
            self.new_tokens.append(tokens - round(share * tokens))
            self._within += round(own[name].add(one) * tokens) if name in own else 0
        self._mean_share = shares / len(requests)

    def document(self) -> dict[str, Any]:
        """Return shares of all prompt tokens."""
        hit = self._tokens - sum(self.new_tokens)
        sizes = {one.block_tokens for one in self._requests}
        document: dict[str, Any] = {
            "ideal_hit_ratio": hit / self._tokens,
            "mean_hit_ratio": self._mean_share,
            "within_sessions_ratio": self._within / self._tokens,
            "across_sessions_ratio": (hit - self._within) / self._tokens,
        }
        if len(sizes) > 1 or any(map(is_literal, self._requests)):
            return document  # there is no one size of a block
        block = sizes.pop()
        blocks = self._everywhere.blocks + sum(
            count for one in self._requests for start, count in one.runs if start >= PRIVATE_ID
        )
        return document | {
            "block_tokens": block,
            "shared_blocks": self._everywhere.blocks,
            "working_set_tokens": blocks * block,
            "by_cache": self._by_cache(block, blocks),
        }

    def _by_cache(self, block: int, blocks: int) -> list[dict[str, float]]:
        found, size = [], LEAST_CACHE_TOKENS
        while size < blocks * block:
            ratio = self._limited(size // block, block) / self._tokens
            found.append({"cache_tokens": size, "hit_ratio": ratio})
            size *= CACHE_STEP
        return found

    def _limited(self, blocks: int, block_tokens: int) -> int:
        """Count the tokens that a cache would have which evicts the least recently used."""
        cache, found = SharedStore(blocks), 0
        stage = f"hits of {blocks * block_tokens:,} tokens of cache"
        for one in self._working.over(self._requests, stage, len(self._requests)):
            ids = block_ids(one.runs)
            found += min(cache.match(ids, len(ids)) * block_tokens, one.input_tokens or 0)
            cache.write(ids)
        return found


def concurrency(
    requests: Sequence[TraceRequest], rules: PaceRules, takes_s: Callable[[TraceRequest], float]
) -> dict[str, float]:
    """Count the requests under way on the trace's schedule, if each took so long."""
    check_order(requests)
    pace = Pace(requests, rules)
    ends: list[tuple[float, str]] = []
    peak, busy_s, first_s, last_s = 0, 0.0, inf, 0.0
    while not pace.finished:
        due_s = pace.next_due_s()
        if due_s is not None and (not ends or due_s < ends[0][0]):
            for due in pace.take_due(due_s):
                time_s = takes_s(due.request)
                busy_s, first_s = busy_s + time_s, min(first_s, due.intended_s)
                heapq.heappush(ends, (due.intended_s + time_s, due.request.request_id))
            peak = max(peak, len(ends))
        else:
            last_s, name = heapq.heappop(ends)
            pace.finish(name, last_s, ok=True)
    span_s = last_s - first_s
    return {"peak": peak, "mean": busy_s / span_s if span_s else 0.0}
