"""By how much demand exceeds its forecasts, and the reserve that covers most of that."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np


class Errors:
    """Errors of the forecasts of the last `memory_s` seconds.

    `first`: an error that is taken for granted before any is known, `first_count` times. It fades
    as others come: it is within a quantile q until about first_count / (1 - q) are known.
    """

    def __init__(self, memory_s: float, first: float, first_count: int) -> None:
        self._memory_s = memory_s
        self._first = [first] * first_count
        self._awaited: deque[tuple[float, float]] = deque()
        self._known: deque[tuple[float, float]] = deque()

    def expect(self, due_s: float, value: float) -> None:
        """Take a forecast, and the time that it is for."""
        self._awaited.append((due_s, value))

    def observe(self, now_s: float, value: float) -> None:
        """Compare the demand of now with the forecasts that are due."""
        while self._awaited and self._awaited[0][0] <= now_s:
            _, expected = self._awaited.popleft()
            self._known.append((now_s, value - expected))
        while self._known and self._known[0][0] < now_s - self._memory_s:
            self._known.popleft()

    def ages(self) -> list[tuple[float, float]]:
        """All known errors, each with its age as of the newest."""
        return [(self._known[-1][0] - at_s, error) for at_s, error in self._known]

    def recall(self, now_s: float, ages: Iterable[tuple[float, float]]) -> None:
        """Take over what a process before has known, the oldest first; it was of right now."""
        self._known.extend((now_s - age_s, error) for age_s, error in ages)

    def reserve(self, quantile: float) -> float:
        """What was enough above the forecast for this share of the past; never negative."""
        errors = self._first + [error for _, error in self._known]
        return max(0.0, float(np.quantile(errors, quantile))) if errors else 0.0
