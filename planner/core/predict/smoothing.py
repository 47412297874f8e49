"""Exponential smoothing: of a level and trend, and of the same time of an earlier season."""

from __future__ import annotations

from collections import deque

from planner.core.predict.base import Predictor


class Holt(Predictor):
    """A level and a trend, both smoothed; the trend fades by `damping` per interval ahead.

    Gardner and McKenzie, Forecasting Trends in Time Series, 1985.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        beta: float = 0.2,
        damping: float = 0.9,
        log: bool = False,
    ) -> None:
        super().__init__(log=log)
        self._alpha, self._beta, self._damping = alpha, beta, damping
        self._level: float | None = None
        self._trend = 0.0

    def _take(self, value: float) -> None:
        if self._level is None:
            self._level = value
            return
        before, faded = self._level, self._damping * self._trend
        self._level = self._alpha * value + (1 - self._alpha) * (before + faded)
        self._trend = self._beta * (self._level - before) + (1 - self._beta) * faded

    def _at(self, intervals: int) -> float:
        assert self._level is not None
        ahead = sum(self._damping ** (i + 1) for i in range(intervals))
        return self._level + ahead * self._trend


class Seasonal(Predictor):
    """What was seen one season ago, moved by how far the last value is from its own.

    `season`: intervals of one. Before a season is over it gives the last value.
    """

    def __init__(self, *, season: int = 480, log: bool = False) -> None:
        super().__init__(log=log)
        self._seen: deque[float] = deque(maxlen=season + 1)
        self._season = season

    def _take(self, value: float) -> None:
        self._seen.append(value)

    def _at(self, intervals: int) -> float:
        last = self._seen[-1]
        if len(self._seen) <= self._season:
            return last
        return self._seen[(intervals - 1) % self._season + 1] + last - self._seen[0]
