"""Figures of several runs of one load, with what a bootstrap over sessions and runs makes of them.

A session's requests are not independent of each other, so sessions are drawn whole. Figures of two
policies are drawn alike: their difference holds less chance than either.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from analysis.bench.stats import INTERVAL_PERCENT

RESAMPLES = 400
Values = NDArray[np.float64]
Numbers = NDArray[np.int64]


def percentiles(values: Values, percent: float, sessions: Numbers) -> Values:
    """Return a percentile of all, then that of each resample.

    `values` has a row per run and a column per request, `sessions` the number of each one's.
    """
    order = np.argsort(values, axis=None)
    ordered = values.ravel()[order]
    found = []
    for weights in _weights(sessions, len(values)):
        sums = np.cumsum(weights.ravel()[order])
        found.append(ordered[np.searchsorted(sums, percent / 100 * sums[-1])])
    return np.array(found)


def shares(values: Values, sessions: Numbers) -> Values:
    """Return the mean of all, then that of each resample."""
    return np.array([np.average(values, weights=one) for one in _weights(sessions, len(values))])


def interval(resampled: Values) -> tuple[float, float]:
    """Return the bounds that hold most of the resamples."""
    tail = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail], method="inverted_cdf")
    return float(low), float(high)


def _weights(sessions: Numbers, runs: int) -> Iterator[Values]:
    """Yield how often each request of each run is drawn; at first each once."""
    yield np.ones((runs, len(sessions)))
    number = int(sessions.max()) + 1
    draw = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        of_sessions = np.bincount(draw.integers(number, size=number), minlength=number)
        of_runs = np.bincount(draw.integers(runs, size=runs), minlength=runs)
        yield np.outer(of_runs, of_sessions[sessions]).astype(float)
