"""What proxies have counted, from series of theirs that are read directly or in Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.core.observe import Counters, Totals, total
from planner.sources.reading import MOST_VALUE, SourceError

ISSUED, QUEUED = "cache_proxy_issued_total", "cache_proxy_queued_requests"
PROMPTS, ANSWERS = "cache_proxy_isl_tokens", "cache_proxy_osl_tokens"
TTFT, TPOT = "cache_proxy_ttft_seconds", "cache_proxy_tpot_seconds"
LOOKED_UP = "cache_proxy_prefix_cache_queries_total"
HITS = (
    "cache_proxy_prefix_cache_hits_total",
    "cache_proxy_external_prefix_cache_hits_total",
)
NAMES = (
    *(ISSUED, QUEUED, LOOKED_UP, *HITS),
    *(f"{name}_{part}" for name in (PROMPTS, ANSWERS, TTFT, TPOT) for part in ("sum", "count")),
)
Sample = tuple[str, Mapping[str, str], float]


class Counted:
    """The growth of all proxies' counters together, since each was read first."""

    def __init__(self) -> None:
        self._counters, self._grown = Counters(), dict[str, float]()

    def take(self, source: str, samples: Iterable[Sample]) -> float:
        """Take a proxy's reading; gives the requests that wait in it. Raises SourceError."""
        told: dict[str, float] = {}
        for name, labels, value in samples:
            if abs(value) < MOST_VALUE:
                key = _key(name, labels)
                told[key] = told.get(key, 0.0) + value
        if ISSUED not in told:
            raise SourceError(f"there is no {ISSUED}; is it a cache-proxy?")
        queued = told.pop(QUEUED, 0.0)
        grown: dict[str, float] = {}
        for key, value in self._counters.grown(source, told).items():
            name = key.partition(" ")[0]
            grown[name] = grown.get(name, 0.0) + value
        self._grown = total([self._grown, grown])
        return queued

    def forget(self, source: str) -> None:
        """A proxy has gone; what it has counted stays."""
        self._counters.forget(source)

    def totals(self, queued: float) -> Totals:
        """All of it, with `queued` requests that wait now."""

        def of(name: str) -> float:
            return self._grown.get(name, 0.0)

        return Totals(
            of(ISSUED) + queued,
            of(f"{PROMPTS}_count"),
            of(f"{PROMPTS}_sum"),
            of(f"{ANSWERS}_count"),
            of(f"{ANSWERS}_sum"),
            of(LOOKED_UP),
            sum(of(name) for name in HITS),
            *(of(f"{name}_{part}") for name in (TTFT, TPOT) for part in ("count", "sum")),
        )


def _key(name: str, labels: Mapping[str, str]) -> str:
    """A counter per instance where an engine's own is passed on: each falls at a restart.

    Other labels, as that of the route, are parts of one counter.
    """
    return f"{name} {labels['upstream']}" if "upstream" in labels else name
