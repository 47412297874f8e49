"""Means over seeds."""

import math

from analysis.league.summary import mean_and_interval


def test_the_mean_over_seeds_has_an_interval() -> None:
    mean, low, high = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert 1.0 <= low < mean < high <= 3.0
    assert mean_and_interval([1.0, math.inf]) == (math.inf, 1.0, math.inf)
