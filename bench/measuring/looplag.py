"""The lateness of a peer's event loop, as it exports it: the samples of one window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from bench.measuring.peers import Running
from bench.measuring.processes import get

LagCounts = Mapping[str, int]
"""Upper bound of a bucket, in seconds as exported, to samples in this bucket alone."""


def read_lag(running: Running, since: LagCounts | None = None) -> LagCounts:
    """Samples so far, or since an earlier reading; empty for a peer that exports none."""
    if running.peer.lag_metric is None:
        return {}
    text = get(running.port, "/metrics")[1].decode()
    now = buckets(text, running.peer.lag_metric)
    return {bound: n - (since or {}).get(bound, 0) for bound, n in now.items()}


def buckets(exposition: str, metric: str) -> dict[str, int]:
    """One histogram's samples, bucket by bucket (the exposition counts them cumulatively)."""
    cumulative = {
        sample.labels["le"]: int(sample.value)
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == f"{metric}_bucket"
    }
    below, alone = 0, {}
    for bound in sorted(cumulative, key=float):
        alone[bound] = cumulative[bound] - below
        below = cumulative[bound]
    return alone


def quantile_bound_s(windows: Iterable[LagCounts], q: float) -> float | None:
    """The bucket's upper bound below which a share `q` of all samples lies; None without any."""
    pooled: Counter[str] = Counter()
    for counts in windows:
        pooled.update(counts)
    wanted, seen = q * pooled.total(), 0
    for bound in sorted(pooled, key=float):
        seen += pooled[bound]
        if seen and seen >= wanted:
            return float(bound)
    return None
