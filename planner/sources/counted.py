"""What proxies have counted, from series of theirs that are read directly or in Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from planner.core.observe import Counters, Totals, total
from planner.sources.reading import SourceError
from replayer.answers import MOST_VALUE

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
MOST_SHARE = 2.0
"""An engine's looked-up tokens count at most so many times those of the median engine."""
Sample = tuple[str, Mapping[str, str], float]


class Counted:
    """The growth of all proxies' counters together, since each was read first."""

    def __init__(self) -> None:
        self._counters, self._grown = Counters(), dict[str, float]()

    def take(self, source: str, samples: Iterable[Sample]) -> float:
        """Take a proxy's reading; gives the requests that wait in it. Raises SourceError."""
        told: dict[str, float] = {}
        for name, labels, value in samples:
            if 0.0 <= value < MOST_VALUE:
                key = _key(name, labels)
                told[key] = told.get(key, 0.0) + value
        if ISSUED not in told:
            raise SourceError(f"there is no {ISSUED}; is it a cache-proxy?")
        queued = told.pop(QUEUED, 0.0)
        grown: dict[str, float] = {}
        engines: dict[str, _Lookups] = {}
        for key, value in self._counters.grown(source, told).items():
            name, _, engine = key.partition(" ")
            if name == LOOKED_UP or name in HITS:
                engines.setdefault(engine, _Lookups()).add(name, value)
            else:
                grown[name] = grown.get(name, 0.0) + value
        self._grown = total([self._grown, grown, _believed(list(engines.values()))])
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
            of(HITS[0]),
            *(of(f"{name}_{part}") for name in (TTFT, TPOT) for part in ("count", "sum")),
        )


@dataclass(slots=True)
class _Lookups:
    """Tokens that one engine has looked up, and those that it has found, as it counts itself."""

    looked_up: float = 0.0
    found: float = 0.0

    def add(self, name: str, grown: float) -> None:
        if name == LOOKED_UP:
            self.looked_up += grown
        else:
            self.found += grown


def _believed(engines: Sequence[_Lookups]) -> dict[str, float]:
    """The sums of all engines: none finds more than it looks up, or counts for many others.

    An engine tells these of itself, and they set the size of the whole fleet.
    """
    told = [one for one in engines if one.looked_up > 0.0]
    if not told:
        return {}
    most = MOST_SHARE * median_low(one.looked_up for one in told)
    weighed = [(min(one.looked_up, most), one) for one in told]
    return {
        LOOKED_UP: sum(weight for weight, _ in weighed),
        HITS[0]: sum(weight * min(1.0, one.found / one.looked_up) for weight, one in weighed),
    }


def _key(name: str, labels: Mapping[str, str]) -> str:
    """A counter per instance where an engine's own is passed on: each falls at a restart.

    Other labels, as that of the route, are parts of one counter.
    """
    return f"{name} {labels['upstream']}" if "upstream" in labels else name
