"""Predictors: their formulas by hand, and what each does with any series."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.predict import PREDICTORS, Constant, Holt, Kalman, Seasonal


@pytest.mark.parametrize("name", PREDICTORS)
@pytest.mark.parametrize("log", [False, True])
def test_leading_zeros_are_skipped(name: str, log: bool) -> None:
    one, other = PREDICTORS[name](log=log), PREDICTORS[name](log=log)
    for _ in range(20):
        one.observe(0.0)
    assert one.predict() is None
    for predictor in (one, other):
        for value in (4.0, 6.0, 8.0):
            predictor.observe(value)
    assert one.predict(3) == other.predict(3)


@pytest.mark.parametrize("name", PREDICTORS)
@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30))
def test_it_is_a_number_and_no_negative_one(name: str, values: list[float]) -> None:
    for log in (False, True):
        predictor = PREDICTORS[name](log=log)
        for value in values:
            predictor.observe(min(1e9, max(0.0, value)) if math.isfinite(value) else value)
        found = predictor.predict(4)
        assert found is None or (math.isfinite(found) and found >= 0.0)


@pytest.mark.parametrize("name", PREDICTORS)
def test_what_never_changes_stays(name: str) -> None:
    predictor = PREDICTORS[name]()
    for _ in range(200):
        predictor.observe(7.0)
    assert predictor.predict(5) == pytest.approx(7.0, rel=1e-3)


def test_kalman_by_hand() -> None:
    """Two steps of the filter with F = [[1, 1], [0, 1]], H = [1, 0], P0 = 1000 I.

    First: P = [[2001, 1000], [1000, 1000.1]], K = [2001, 1000] / 2011, so the level is 10 K0.
    """
    kalman = Kalman(min_points=1)
    kalman.observe(10.0)
    level, trend = 10.0 * 2001 / 2011, 10.0 * 1000 / 2011
    assert kalman.predict(1) == pytest.approx(level + trend)
    assert kalman.predict(3) == pytest.approx(level + 3 * trend)
    a, b, c = 2001 * (1 - 2001 / 2011), 1000 * (1 - 2001 / 2011), 1000.1 - 1000 * 1000 / 2011
    a, b, c = a + 2 * b + c + 1.0, b + c, c + 0.1
    gap = 12.0 - (level + trend)
    kalman.observe(12.0)
    level, trend = level + trend + a / (a + 10) * gap, trend + b / (a + 10) * gap
    assert kalman.predict(2) == pytest.approx(level + 2 * trend)


def test_kalman_gives_the_last_value_below_its_points() -> None:
    kalman = Kalman(min_points=5)
    for value in (1.0, 2.0, 3.0, 4.0):
        kalman.observe(value)
    assert kalman.predict(9) == 4.0
    kalman.observe(5.0)
    found = kalman.predict(9)
    assert found is not None
    assert found > 9.0


def test_holt_by_hand() -> None:
    holt = Holt(alpha=0.5, beta=0.2, damping=0.5)
    holt.observe(10.0)
    holt.observe(14.0)  # level 12, trend 0.2 * 2 + 0.8 * 0 = 0.4
    assert holt.predict(2) == pytest.approx(12.0 + 0.4 * (0.5 + 0.25))


def test_a_season_comes_again_at_its_new_height() -> None:
    seasonal = Seasonal(season=4)
    for value in (1.0, 5.0, 9.0, 5.0):
        seasonal.observe(value)
    assert seasonal.predict() == 5.0, "no season is over"
    seasonal.observe(3.0)  # two above its own of the season before
    assert [seasonal.predict(i) for i in (1, 2, 3, 4, 5)] == [7.0, 11.0, 7.0, 5.0, 7.0]


def test_growth_by_a_factor_is_a_line_in_logarithms() -> None:
    plain, logged = Kalman(), Kalman(log=True, q_level=0.01, q_trend=0.001, r=0.01)
    for i in range(1, 12):
        plain.observe(2.0**i)
        logged.observe(2.0**i)
    assert logged.predict(2) == pytest.approx(2.0**13, rel=0.15)


def test_a_warm_up_leaves_no_beginning() -> None:
    constant = Constant()
    constant.observe(5.0)
    constant.reset_idle_skip()
    constant.observe(0.0)
    assert constant.predict() is None
    constant.observe(3.0)
    assert constant.predict() == 3.0
