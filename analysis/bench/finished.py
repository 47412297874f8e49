"""A finished request, whatever it came from, and what experiments say of many.

Replay and the proxy's request log give rows (`analysis.runs`), a virtual run gives a `VirtualRow`.
A failed request is infinitely late, and what is infinite is None in figures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.measures import Row, is_ok, samples_of, spread
from proxy.core.latency.slo import Slo
from replayer.virtual.requests import VirtualRow, keeps_slo


@dataclass(frozen=True, slots=True)
class Finished:
    """One request; times in seconds, None if it failed. `keeps_slo` None: there was no SLO."""

    ok: bool
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    route_class: str
    reason: str
    keeps_slo: bool | None = None


def of_row(row: Row) -> Finished:
    """Take one from a row of a replay or of the request log."""
    ttft_s, tpot_s, e2e_s = (
        next(iter(samples_of(tag, [row] if is_ok(row) else [])), None)
        for tag in ("ttft_s", "tpot_s", "e2e_s")
    )
    reason = row.get("offload_decision_reason") or ""
    return Finished(is_ok(row), ttft_s, tpot_s, e2e_s, row.get("route_class") or "", reason)


def of_virtual(row: VirtualRow, slo: Slo) -> Finished:
    """Take one from a virtual run."""
    ok = row.outcome == "ok"
    times_s = (row.ttft_s, row.tpot_s, row.e2e_s) if ok else (None, None, None)
    return Finished(ok, *times_s, row.route_class, row.reason, keeps_slo(row, slo))


def times(
    rows: Sequence[Finished], tag: str, *names: str, answered: bool = False
) -> dict[str, Any]:
    """Summarise a time of all requests, or of those that have it."""
    values = [getattr(row, tag) for row in rows]
    late_s = [] if answered else [math.inf] * values.count(None)
    return summary([one for one in values if one is not None] + late_s, *names)


def summary(values: Sequence[float], *names: str) -> dict[str, Any]:
    """Summarise values by names of percentiles, and `mean`."""
    # With `fsum` the last digit of means would differ from that of rows made before.
    return spread(values, names, infinite=None, add=sum)


def goodput_ratio(rows: Sequence[Finished]) -> float | None:
    """Return the share of requests that keep the SLO; None without any, or without an SLO."""
    good = [row.keeps_slo for row in rows if row.keeps_slo is not None]
    return sum(good) / len(good) if good else None
