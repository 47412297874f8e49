"""Kubernetes' HorizontalPodAutoscaler: from a metric to a wish, and from wishes to replicas.

Windows, rate limits and the tolerance are those of `autoscaling/v2` with `selectPolicy: Max`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.1
"""A metric within this of its target changes nothing."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that replicas may change within a period: a number of them, or a percentage."""

    value: float
    period_s: float
    is_percent: bool = False


def pods(value: int, period_s: float) -> Limit:
    """A limit in replicas."""
    return Limit(value, period_s)


def percent(value: float, period_s: float) -> Limit:
    """A limit relative to the replicas at the period's start."""
    return Limit(value, period_s, is_percent=True)


@dataclass(frozen=True, slots=True)
class Behavior:
    """`spec.behavior`: stabilization windows and limits, up and down. The widest limit counts."""

    up: Sequence[Limit]
    down: Sequence[Limit]
    up_window_s: float = 0.0
    down_window_s: float = 300.0


class Hpa:
    """What the autoscaler remembers: its wishes, and its changes."""

    def __init__(self, behavior: Behavior) -> None:
        self._behavior = behavior
        self._longest_s = max(
            *(behavior.up_window_s, behavior.down_window_s),
            *(limit.period_s for limit in (*behavior.up, *behavior.down)),
        )
        self._wishes: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def step(self, now_s: float, current: int, wish: int) -> int:
        """The replicas to have now."""
        self._wishes.append((now_s, wish))
        for past in (self._wishes, self._changes):
            while past and past[0][0] <= now_s - max(self._longest_s, 1.0):
                past.popleft()
        replicas = self._limited(now_s, current, self._stable(now_s, current))
        if replicas != current:
            self._changes.append((now_s, replicas - current))
        return replicas

    def _stable(self, now_s: float, current: int) -> int:
        """Up to the least wish of the one window, down to the largest of the other."""
        low = min(self._wished(now_s, self._behavior.up_window_s))
        high = max(self._wished(now_s, self._behavior.down_window_s))
        return min(max(current, low), high)

    def _wished(self, now_s: float, window_s: float) -> list[int]:
        return [n for at_s, n in self._wishes if at_s > now_s - window_s or at_s == now_s]

    def _limited(self, now_s: float, current: int, wanted: int) -> int:
        if wanted > current:
            most = max(self._bound(now_s, current, limit, 1) for limit in self._behavior.up)
            return min(wanted, max(most, current))
        if wanted < current:
            least = min(self._bound(now_s, current, limit, -1) for limit in self._behavior.down)
            return max(wanted, min(least, current))
        return current

    def _bound(self, now_s: float, current: int, limit: Limit, sign: int) -> int:
        """How far a limit lets the replicas go, from those at its period's start."""
        since_s = now_s - limit.period_s
        start = current - sum(change for at_s, change in self._changes if at_s > since_s)
        if not limit.is_percent:
            return start + sign * int(limit.value)
        bound = start * (1 + sign * limit.value / 100)
        return math.ceil(bound) if sign > 0 else math.floor(bound)


def average_value(total: float, target: float, current: int) -> int:
    """`AverageValue`: a replica per `target` of the total."""
    if current > 0 and abs(total / (target * current) - 1) <= TOLERANCE:
        return current
    return math.ceil(total / target)
