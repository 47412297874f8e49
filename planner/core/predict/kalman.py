"""A Kalman filter of a level and its trend."""

from __future__ import annotations

from planner.core.predict.base import Predictor

FIRST_VARIANCE = 1000.0


class Kalman(Predictor):
    """Local linear trend: x' = F x with F = [[1, 1], [0, 1]], and the level is what is seen.

    `q_level`, `q_trend`: variances of what moves both between two intervals; `r`: of the noise of a
    value. Below `min_points` values it gives the last one. Harvey, Forecasting, Structural Time
    Series Models and the Kalman Filter, 1989, section 2.3.
    """

    def __init__(
        self,
        *,
        q_level: float = 1.0,
        q_trend: float = 0.1,
        r: float = 10.0,
        min_points: int = 5,
        log: bool = False,
    ) -> None:
        super().__init__(log=log)
        self._q, self._r, self._min_points = (q_level, q_trend), r, min_points
        self._points = 0
        self._last = self._level = self._trend = 0.0
        # The covariance: of the level, of both, of the trend.
        self._p = (FIRST_VARIANCE, 0.0, FIRST_VARIANCE)

    def _take(self, value: float) -> None:
        self._points += 1
        self._last = value
        a, b, c = self._p
        a, b, c = a + 2 * b + c + self._q[0], b + c, c + self._q[1]
        level = self._level + self._trend
        gain_level, gain_trend = a / (a + self._r), b / (a + self._r)
        self._level = level + gain_level * (value - level)
        self._trend += gain_trend * (value - level)
        self._p = (1 - gain_level) * a, (1 - gain_level) * b, c - gain_trend * b

    def _at(self, intervals: int) -> float:
        if self._points < self._min_points:
            return self._last
        return self._level + intervals * self._trend
