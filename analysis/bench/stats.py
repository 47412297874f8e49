"""Statistics of experiments: means over seeds with intervals, relative changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 1000
INTERVAL_PERCENT = 95


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
