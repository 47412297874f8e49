"""Hits of the engines' own prefix caches during a run, by their counters before and after.

Ratios are per prompt token looked up. The local cache looks up all of a prompt. A KV connector
looks up the rest, or all of it if the local cache is off. The prompt of an offload is looked up on
P and on D. A ratio is None where an engine does not count what it is made of.
"""

from collections.abc import Mapping, Sequence
from typing import Any

COUNTERS = ("local_queries", "local_hits", "external_queries", "external_hits", "external_in_place")
"""Tokens; `external_in_place`: of `external_hits` those that did come."""
START = "start_s"
Counts = Mapping[str, float]


def engine_cache(read: Mapping[str, Any] | None) -> dict[str, Any]:
    """Summarise both readings of the counters; what is unknown is None."""
    read = read or {}
    before, after = read.get("before") or {}, read.get("after") or {}
    unread = dict(read.get("unread") or {})
    grown: list[Counts] = []
    for name in before:
        if name not in after:
            unread.setdefault(name, "not read after the run")
        elif _is_new(before[name], after[name]):
            unread[name] = "restarted during the run"
        else:
            grown.append(_growth(before[name], after[name]))
    looked_up = _total([_looked_up(one) for one in grown])
    local = _total([one.get("local_hits") for one in grown])
    external = _total([one.get("external_in_place", one.get("external_hits")) for one in grown])
    both = None if local is None or external is None else local + external
    return {
        "source": read.get("source"),
        "engines": {
            name: {"before": before[name], "after": after.get(name)} for name in sorted(before)
        },
        "layouts": dict(read.get("layouts") or {}),
        "unread": unread,
        "during": {name: _total([one.get(name) for one in grown]) for name in COUNTERS},
        "engines_counted": len(grown),
        "looked_up_tokens": looked_up,
        "local_hit_ratio": _ratio(local, looked_up),
        "external_hit_ratio": _ratio(external, looked_up),
        "combined_hit_ratio": _ratio(both, looked_up),
    }


def _growth(before: Counts, after: Counts) -> Counts:
    """Return what was counted in between; a counter that appeared in between was 0."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if name != START}


def _is_new(before: Counts, after: Counts) -> bool:
    """Whether the second reading is of another process than the first."""
    started = {one[START] for one in (before, after) if START in one}
    return len(started) > 1 or min(_growth(before, after).values(), default=0.0) < 0


def _looked_up(grown: Counts) -> float | None:
    counts = (grown.get(name) for name in ("looked_up", "local_queries", "external_queries"))
    return max((count for count in counts if count is not None), default=None)


def _total(values: Sequence[float | None]) -> float | None:
    """Sum what all engines know; None if one does not, or if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
