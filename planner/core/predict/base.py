"""What all predictors share: which values they take, and how far they look."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod


class Predictor(ABC):
    """Predicts one figure, such as requests per interval, some intervals ahead.

    Zeros before the first other value are skipped: nothing had begun. What is no number counts as
    zero. With `log` it sees ln(1 + value), so that growth by a factor is a line.
    """

    def __init__(self, *, log: bool = False) -> None:
        self._log = log
        self._has_begun = False

    def observe(self, value: float) -> None:
        """Take the value of the interval that has just ended."""
        value = value if math.isfinite(value) else 0.0
        if not self._has_begun and value == 0.0:
            return
        self._has_begun = True
        self._take(math.log1p(max(0.0, value)) if self._log else value)

    def predict(self, intervals: int = 1) -> float | None:
        """The value of so many intervals after the last one; None before the first."""
        if not self._has_begun:
            return None
        value = self._at(intervals)
        return max(0.0, math.expm1(min(value, _MOST_LOG)) if self._log else value)

    def reset_idle_skip(self) -> None:
        """Skip leading zeros again: after a warm-up by a trace, the fleet itself begins anew."""
        self._has_begun = False

    @abstractmethod
    def _take(self, value: float) -> None: ...

    @abstractmethod
    def _at(self, intervals: int) -> float: ...


_MOST_LOG = 60.0


class Constant(Predictor):
    """The last value."""

    def __init__(self, *, log: bool = False) -> None:
        super().__init__(log=log)
        self._last = 0.0

    def _take(self, value: float) -> None:
        self._last = value

    def _at(self, intervals: int) -> float:
        return self._last
