"""Means over seeds with their intervals, relative changes."""

import math

from analysis.bench.stats import change, mean_and_interval


def test_the_mean_over_seeds_has_an_interval() -> None:
    mean, low, high = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert 1.0 <= low < mean < high <= 3.0
    assert mean_and_interval([1.0, math.inf]) == (math.inf, 1.0, math.inf)


def test_what_is_infinite_in_both_is_equal() -> None:
    assert change(1.5, 1.0) == 0.5
    assert change(math.inf, math.inf) == 0.0
    assert change(math.inf, 1.0) == math.inf
    assert change(1.0, math.inf) == -math.inf
    assert change(1.0, 0.0) == 0.0
