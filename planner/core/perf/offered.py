"""What clients offer over the last ticks: requests, their lengths, and how much work they are."""

from __future__ import annotations

from collections import deque

from planner.core.perf.capacity import Demand
from planner.core.perf.regression import Line
from planner.core.types import Traffic

LENGTHS_S = 180.0
"""Window of lengths; rates have shorter ones."""


class Offered:
    """Traffic by ticks. What a window does not tell stays as it was."""

    def __init__(self) -> None:
        self._ticks: deque[tuple[float, Traffic]] = deque()
        self._lengths: tuple[float, float] | None = None
        self._hit_ratio, self._accept_length = 0.0, 1.0

    def add(self, now_s: float, recent: Traffic) -> None:
        """Take the traffic since the tick before."""
        self._ticks.append((now_s, recent))
        while self._ticks[0][0] <= now_s - LENGTHS_S:
            self._ticks.popleft()
        told = [one for _, one in self._ticks]
        ended = [(one.ended, one.isl_tokens, one.osl_tokens) for one in told]
        isl = _mean([(weight, value) for weight, value, _ in ended])
        osl = _mean([(weight, value) for weight, _, value in ended])
        if isl is not None and osl is not None:
            self._lengths = isl, osl
        hit = _mean([(one.requests, one.hit_ratio) for one in told])
        self._hit_ratio = self._hit_ratio if hit is None else hit
        accept = _mean([(one.ended, one.accept_length) for one in told])
        self._accept_length = self._accept_length if accept is None else accept

    def rate(self, window_s: float) -> float:
        """Requests per second that were offered."""
        told = self._within(window_s)
        return sum(one.requests for one in told) / sum(one.window_s for one in told)

    def typical(self) -> Demand | None:
        """One request per second with the lengths of those that ended; None before any did."""
        if self._lengths is None:
            return None
        return Demand(1.0, *self._lengths, self._hit_ratio, self._accept_length)

    def ended_rate(self, window_s: float, line: Line, typical: Demand) -> float:
        """Typical requests per second that would be as much work as those that ended."""
        told = self._within(window_s)
        work_s = 0.0
        for one in told:
            if one.ended and one.isl_tokens is not None and one.osl_tokens is not None:
                like = Demand(
                    1.0, one.isl_tokens, one.osl_tokens, typical.hit_ratio, typical.accept_length
                )
                work_s += one.ended * marginal_s(line, like)
        each_s = marginal_s(line, typical)
        return work_s / each_s / sum(one.window_s for one in told) if each_s > 0 else 0.0

    def _within(self, window_s: float) -> list[Traffic]:
        now_s = self._ticks[-1][0]
        return [one for at_s, one in self._ticks if at_s > now_s - window_s]


def marginal_s(line: Line, one: Demand) -> float:
    """Seconds by which a request lengthens the steps of its instance: its prompt, and its KV."""
    idle_s = line(0.0, 0.0)
    steps = one.osl_tokens / one.accept_length
    return line(one.new_tokens, 0.0) - idle_s + steps * (line(0.0, one.context_tokens) - idle_s)


def _mean(weighed: list[tuple[float, float | None]]) -> float | None:
    known = [(weight, value) for weight, value in weighed if weight and value is not None]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else None
