"""The metrics of a run: one record each, with unit and formula, computed from request rows.

A row is one line of `requests.jsonl`; its times are seconds from the start of the run. This module
does not import pandas, so that a summary can be computed without it.

A target may be a simulation that runs faster than the system it simulates. Only `in_target_time`
scales measured times to the target's time; all later functions get scaled rows.

Percentiles are exact and by nearest rank: the p-th percentile is the smallest value that at least
p percent of the values do not exceed (numpy's `inverted_cdf`). It is always a measured value, so a
failed request can stand in the data as +inf without spoiling the ranks below it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Row = Mapping[str, Any]
Item = TypeVar("Item")
Key = TypeVar("Key")
PERCENTS = (50, 90, 95, 99)
TIME_SUFFIX = "_s"  # fields with this ending are seconds: one, a list, or some by name
MOST = 1e15  # beyond any time or count of a run, and sums of what is below it are finite
SPREAD = ("count", "mean", *(f"p{percent}" for percent in PERCENTS), "max")
INFINITE = "inf"  # +inf in JSON, which has no number for it; null means unknown


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured quantity; `samples` returns none, one or many values of a row."""

    tag: str
    title: str
    unit: str
    formula: str
    samples: Callable[[Row], Sequence[float]]


def in_target_time(rows: Sequence[Row], time_scale: float) -> Sequence[Row]:
    """Return rows with their times in seconds of a target that runs `time_scale` times faster.

    A scaled row has the field `time_scale`, from which the client's real times can be recovered.
    """
    return rows if time_scale == 1 else [_scaled(row, time_scale) for row in rows]


def _scaled(row: Row, time_scale: float) -> Row:
    times = {
        name: _times(value, time_scale)
        for name, value in row.items()
        if name.endswith(TIME_SUFFIX) and value is not None
    }
    return {**row, **times, "time_scale": time_scale}


def _times(value: Any, time_scale: float) -> Any:
    if isinstance(value, int | float):
        return value * time_scale
    if isinstance(value, Mapping):
        return {name: one * time_scale for name, one in value.items()}
    return [one * time_scale for one in value]


def is_number(value: Any) -> bool:
    """Whether a value is a number that a run can have."""
    return isinstance(value, int | float) and abs(value) <= MOST


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of values in ascending order (at least one)."""
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(rank, 1) - 1]


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by a key; groups and their items keep the order in which they come first."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def spread(
    values: Iterable[float],
    names: Sequence[str] = SPREAD,
    infinite: str | None = INFINITE,
    add: Callable[[Sequence[float]], float] = math.fsum,
) -> dict[str, Any]:
    """Summarise values by names of SPREAD, or of other percentiles; None where there are none.

    `infinite` stands for +inf, which JSON lacks; `add` sums for the mean.
    """
    ordered = sorted(values)
    if not ordered:
        return {name: 0 if name == "count" else None for name in names}
    known = {"count": len(ordered), "mean": add(ordered) / len(ordered), "max": ordered[-1]}
    found = {n: known[n] if n in known else percentile(ordered, int(n[1:])) for n in names}
    return {name: infinite if math.isinf(one) else one for name, one in found.items()}


def _between(start: str, end: str) -> Callable[[Row], Sequence[float]]:
    def samples(row: Row) -> Sequence[float]:
        started, ended = row.get(start), row.get(end)
        return () if started is None or ended is None else (ended - started,)

    return samples


def _lag(row: Row) -> Sequence[float]:
    intended, sent = row.get("intended_s"), row.get("sent_s")
    if intended is None or sent is None:
        return ()
    return ((sent - intended) / row.get("time_scale", 1.0),)


def _tpot(row: Row) -> Sequence[float]:
    first, tokens = row.get("first_token_s"), row.get("completion_tokens")
    if first is None or tokens is None or tokens < 2:
        return ()
    return ((row["end_s"] - first) / (tokens - 1),)


def _gaps(row: Row) -> Sequence[float]:
    gaps: Sequence[float] = row.get("itl_s") or ()
    return gaps


METRICS: dict[str, Metric] = {
    "ttft_s": Metric(
        "ttft_s",
        "TTFT",
        "s",
        "first event with content - sent",
        _between("sent_s", "first_token_s"),
    ),
    "effective_ttft_s": Metric(
        "effective_ttft_s",
        "TTFT from intended",
        "s",
        "first event with content - intended",
        _between("intended_s", "first_token_s"),
    ),
    "tpot_s": Metric(
        "tpot_s",
        "TPOT",
        "s",
        "(end - first event with content) / (usage.completion_tokens - 1), from 2 tokens on",
        _tpot,
    ),
    "itl_s": Metric("itl_s", "ITL", "s", "pauses between events with content, pooled", _gaps),
    "e2e_s": Metric("e2e_s", "E2E", "s", "end - sent", _between("sent_s", "end_s")),
    "schedule_lag_s": Metric(
        "schedule_lag_s", "schedule lag", "s", "sent - intended, in the client's own time", _lag
    ),
}


def samples_of(tag: str, rows: Iterable[Row]) -> list[float]:
    """Pool the samples of one metric over rows."""
    take = METRICS[tag].samples
    return [sample for row in rows for sample in take(row)]


def is_ok(row: Row) -> bool:
    """Whether a request got its whole answer."""
    return bool(row["outcome"] == "ok")


def is_good(row: Row, slo_s: Mapping[str, float]) -> bool:
    """Whether a request is ok and keeps every limit on a metric that it has."""
    return is_ok(row) and all(
        value <= limit for name, limit in slo_s.items() for value in samples_of(f"{name}_s", [row])
    )
