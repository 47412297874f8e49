"""Intervals of a bootstrap over sessions and runs."""

import math

import numpy as np
import pytest

from analysis.check.intervals import interval, percentiles, shares


def test_the_first_figure_is_that_of_all():
    values = np.array([[4.0, 1.0, 3.0], [2.0, 6.0, 5.0]])
    sessions = np.array([0, 0, 1])
    assert percentiles(values, 50, sessions)[0] == 3.0
    assert percentiles(values, 90, sessions)[0] == 6.0
    assert shares((values > 2.5).astype(float), sessions)[0] == pytest.approx(4 / 6)


def test_sessions_are_drawn_whole():
    values = np.array([[1.0, 1.0, 9.0, 9.0]])
    found = shares(values, np.array([0, 0, 1, 1]))[1:]
    assert set(found) == {1.0, 5.0, 9.0}


def test_many_sessions_make_an_interval_narrow():
    values = np.random.default_rng(1).exponential(1.0, (1, 2000))
    few, many = (
        interval(percentiles(values, 50, np.arange(2000) % number)[1:]) for number in (5, 2000)
    )
    assert many[0] < math.log(2) < many[1]
    low, high = interval(percentiles(values[:, :20], 50, np.arange(20))[1:])
    assert many[1] - many[0] < high - low
    assert few[0] < math.log(2) < few[1]


def test_an_interval_may_end_at_infinity():
    values = np.array([[1.0, math.inf]])
    assert interval(percentiles(values, 90, np.array([0, 1]))[1:]) == (1.0, math.inf)
