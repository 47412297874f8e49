"""How long it takes from an order to an instance that serves, measured."""

from __future__ import annotations

import math
from collections import deque

MOST_MEASURED, SHARE = 16, 0.9


class StartUps:
    """Orders of one component. `usual_s`: what is assumed before the first has come."""

    def __init__(self, usual_s: float) -> None:
        self._usual_s = usual_s
        self._ordered_s: deque[float] = deque()
        self._measured_s: deque[float] = deque(maxlen=MOST_MEASURED)
        self._ready: int | None = None
        self._before_s = 0.0

    def observe(self, now_s: float, ready: int, wanted: int) -> None:
        """Take the instances that serve, and how many were wanted up to now.

        Whatever is new was ordered first; of orders taken back the newest was. What is wanted now
        was ordered at the tick before.
        """
        came = 0 if self._ready is None else max(0, ready - self._ready)
        for _ in range(min(came, len(self._ordered_s))):
            self._measured_s.append(now_s - self._ordered_s.popleft())
        self._ready = ready
        under_way = max(0, wanted - ready)
        while len(self._ordered_s) > under_way:
            self._ordered_s.pop()
        while len(self._ordered_s) < under_way:
            self._ordered_s.append(self._before_s)
        self._before_s = now_s

    @property
    def delay_s(self) -> float:
        """The delay that all but one in ten orders keep."""
        if not self._measured_s:
            return self._usual_s
        ranked = sorted(self._measured_s)
        return ranked[math.ceil(SHARE * len(ranked)) - 1]
