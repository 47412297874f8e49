"""Operators' orders for hot instances, and their enforcement without a controller.

The words are those of `POST /v1/admin/batch`: a cap on the requests in flight, a number of them
that should leave now, or a temperature to stay below. An order holds for a while (`ttl_s`). Where
GPUs are above its temperature it lowers the cap step by step, and keeps what it has come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.thermal.options import MOST_TARGET_CELSIUS, VICTIM_NAMES
from proxy.core.thermal.readings import GpuReading

TARGET_CELSIUS = (30.0, MOST_TARGET_CELSIUS)
"""The least and the highest temperature that an order may name."""
TTL_LEAST_S, TTL_S, TTL_MOST_S = 1.0, 600.0, 86400.0
STEP_S = 8.0
"""Seconds between two steps towards a temperature: about what a cap takes to show in it."""
PER_CELSIUS = 0.5
"""Requests that each degree above the temperature takes off the cap, one at least."""
FRESH_S = 3.0
"""An older reading says nothing of the temperature now."""
WATTS_PER_SEQ = 3.2
"""Watts of one decoding sequence, where nothing is learned yet: an assumption of others."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """An operator's order for one instance or several."""

    max_num_seqs: int | None = None
    """Cap on the requests in flight."""
    force_evict: int = 0
    """Number of requests to evict now."""
    target_celsius: float | None = None
    """The cap is lowered until the GPUs are at most this hot."""
    policy: str = "lru"
    ttl_s: float = TTL_S
    reason: str = ""

    def cap(self, running: int) -> int | None:
        """The cap that the order begins with where so many are in flight; None: no cap yet.

        An evicted request must not return, or the instance would be as full as before. So an
        eviction without a cap sets one at the number of requests that stay.
        """
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return max(1, running - self.force_evict) if self.force_evict and running else None


class StandingOrder:
    """An order that holds on one instance until `until_s`. `cap`: the present one.

    `decision_id`: the answer to its request names it.
    """

    __slots__ = ("_step_due_s", "cap", "decision_id", "is_reached", "order", "until_s")

    def __init__(self, order: BatchOrder, running: int, decision_id: str, now_s: float) -> None:
        self.order, self.decision_id = order, decision_id
        self.cap = order.cap(running)
        self.until_s = now_s + order.ttl_s
        self._step_due_s = now_s
        self.is_reached = False
        """Whether the GPUs were no hotter than its temperature at the last look."""

    def row(self) -> list[object]:
        """The order as plain values, for `of_row` in another process."""
        o = self.order
        asked = [o.max_num_seqs, o.force_evict, o.target_celsius, o.policy, o.ttl_s, o.reason]
        return [*asked, self.decision_id, self.until_s, self.cap]

    @classmethod
    def of_row(cls, row: Sequence[object], now_s: float) -> StandingOrder:
        """The order of a `row`; ValueError, or TypeError, where it is none."""
        most, evict, target, policy, ttl_s, reason, decision_id, until_s, cap = row
        asked = BatchOrder(
            _whole(most),
            _whole(evict) or 0,
            _number(target),
            str(policy),
            _number(ttl_s) or TTL_S,
            str(reason),
        )
        order = cls(asked, 0, str(decision_id), now_s)
        order.until_s = min(_number(until_s) or now_s, now_s + TTL_MOST_S)
        order.cap = _whole(cap)
        if asked.policy not in VICTIM_NAMES or (order.cap is not None and order.cap < 1):
            raise ValueError(f"no order: {asked.policy!r}, cap {order.cap}")
        return order

    def look(self, celsius: float | None) -> None:
        """Note whether the temperature is reached; None: unknown without a fresh reading."""
        target = self.order.target_celsius
        if target is not None and celsius is not None:
            self.is_reached = celsius <= target

    def step(self, celsius: float | None, running: int, now_s: float) -> int:
        """Lower the cap where the GPUs are too hot; returns how many requests should leave now.

        For an instance without a controller, which would hold the temperature by its law.
        """
        target = self.order.target_celsius
        if target is None or celsius is None or celsius <= target or now_s < self._step_due_s:
            return 0
        self._step_due_s = now_s + STEP_S
        less = max(1, int(PER_CELSIUS * (celsius - target)))
        most = running if self.cap is None else min(self.cap, running)
        self.cap = max(1, most - less)
        return max(0, running - self.cap)


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"no number of an order: {value!r}")
    return float(value)


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def hottest_celsius(readings: Sequence[GpuReading], now_s: float) -> float | None:
    """The highest fresh temperature of an instance's GPUs; None where there is none.

    All GPUs of an instance work in step, so the hottest counts.
    """
    fresh = [r.celsius for r in readings if r.celsius is not None and now_s - r.at_s <= FRESH_S]
    return max(fresh, default=None)
