"""The Kalman filter: its formulas by hand, and growth."""

from __future__ import annotations

import pytest

from planner.core.predict import Kalman


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


def test_growth_by_a_factor_is_a_line_in_logarithms() -> None:
    plain, logged = Kalman(), Kalman(log=True, q_level=0.01, q_trend=0.001, r=0.01)
    for i in range(1, 12):
        plain.observe(2.0**i)
        logged.observe(2.0**i)
    assert logged.predict(2) == pytest.approx(2.0**13, rel=0.15)
