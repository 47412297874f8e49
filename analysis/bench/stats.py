"""Statistics of experiments: means over seeds with intervals, relative changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np

from analysis.measures import Row, grouped

RESAMPLES = 1000
INTERVAL_PERCENT = 95


Summary = TypeVar("Summary", bound=Row)


def figure(row: Row, name: str, absent: float = math.nan) -> float:
    """Return a figure of a row, infinite where a failure decides it; `absent` if it has none."""
    first, _, last = name.partition(".")
    value = row.get(first)
    if last and value is not None:
        value, absent = value[last], math.inf
    return absent if value is None else float(value)


def cells(rows: Iterable[Summary], keys: Sequence[str], name: str) -> list[dict[str, Summary]]:
    """Group rows that are alike in `keys`, each group by the rows' `name`."""
    return [{row[name]: row for row in part} for part in grouped(rows, itemgetter(*keys)).values()]


def mean_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its percentile bootstrap interval; infinite if any value is."""
    found = np.asarray(values, dtype=float)
    if not np.isfinite(found).all():
        return math.inf, float(found.min()), math.inf
    draws = np.random.default_rng(0).choice(found, size=(RESAMPLES, len(found))).mean(axis=1)
    tail = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(draws, [tail, 100 - tail])
    return float(found.mean()), float(low), float(high)


def change(mine: float, base: float) -> float:
    """Return a figure relative to another, less one; what is infinite in both is equal."""
    if not (math.isfinite(mine) and math.isfinite(base)):
        return 0.0 if mine == base else math.copysign(math.inf, mine - base)
    return float(mine / base - 1.0) if base else 0.0
