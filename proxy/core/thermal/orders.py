"""What an operator asks of hot instances, and which of their requests should leave first.

The words are those of `POST /v1/admin/batch`: a cap on the requests in flight, a number of them
that should leave now, or a temperature to stay below. An order holds for a while (`ttl_s`). Where
GPUs are above its temperature it lowers the cap step by step, and keeps what it has come to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from proxy.core.thermal.readings import GpuReading

TARGET_MOST_CELSIUS = 95.0
"""No order may let GPUs grow hotter than this."""
TTL_S, TTL_MOST_S = 600.0, 86400.0
STEP_S = 8.0
"""Seconds between two steps towards a temperature: about what a cap takes to show in it."""
PER_CELSIUS = 0.5
"""Requests that each degree above the temperature takes off the cap, one at least."""
FRESH_S = 3.0
"""An older reading says nothing of the temperature now."""
WATTS_PER_SEQ = 3.2
"""Watts of one decoding sequence, where nothing is learned yet: an assumption of others."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in flight on an instance, as far as its eviction depends on it.

    `last_token_s`: when it last brought output, or was placed; `tokens_per_s`: since its first
    token; `remaining_tokens`: the most output that it may still bring. `priority`: 0 is high, the
    higher the lower.
    """

    request_id: str
    kv_tokens: int
    began_s: float
    last_token_s: float
    priority: int = 1
    remaining_tokens: float = math.inf
    tokens_per_s: float = 0.0


VictimKey = Callable[[RunningRequest], tuple[float, ...]]


def _lru(one: RunningRequest) -> tuple[float, ...]:
    return (one.last_token_s, one.began_s)


def _largest_kv(one: RunningRequest) -> tuple[float, ...]:
    return (-one.kv_tokens,)


def _lowest_priority(one: RunningRequest) -> tuple[float, ...]:
    return (-one.priority, -one.began_s)


def _longest_remaining(one: RunningRequest) -> tuple[float, ...]:
    return (-one.remaining_tokens, -one.kv_tokens)


def _least_qps(one: RunningRequest) -> tuple[float, ...]:
    return (one.tokens_per_s, one.began_s)


def _max_relief(one: RunningRequest) -> tuple[float, ...]:
    """Most output to come per token of KV to move."""
    remaining = min(one.remaining_tokens, 1e9)
    return (-remaining / max(1, one.kv_tokens),)


VICTIMS: dict[str, VictimKey] = {
    "lru": _lru,
    "largest_kv": _largest_kv,
    "lowest_priority": _lowest_priority,
    "longest_remaining": _longest_remaining,
    "least_qps": _least_qps,
    "max_relief": _max_relief,
}
"""Policies by name: the request with the lowest key leaves first."""


def victims(running: Iterable[RunningRequest], policy: str, count: int) -> list[RunningRequest]:
    """The first `count` requests to leave; KeyError for a policy that is not in VICTIMS."""
    return sorted(running, key=VICTIMS[policy])[: max(0, count)]


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """What an operator asks of one instance or several.

    `max_num_seqs`: a cap on the requests in flight; `force_evict`: so many should leave now;
    `target_celsius`: the cap is lowered until the GPUs are no hotter.
    """

    max_num_seqs: int | None = None
    force_evict: int = 0
    target_celsius: float | None = None
    policy: str = "lru"
    ttl_s: float = TTL_S
    reason: str = ""

    def cap(self, running: int) -> int | None:
        """The cap that the order begins with where so many are in flight; None: no cap yet.

        Who is to leave must find no place to come back to, or the instance would be as full as
        before: so without a cap of its own an eviction caps at what is to be left.
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

    def step(self, celsius: float | None, running: int, now_s: float) -> int:
        """Lower the cap where the GPUs are too hot; returns how many requests should leave now.

        `celsius`: None where no reading is fresh; then nothing changes.
        """
        target = self.order.target_celsius
        if target is None or celsius is None:
            return 0
        self.is_reached = celsius <= target
        if self.is_reached or now_s < self._step_due_s:
            return 0
        self._step_due_s = now_s + STEP_S
        less = max(1, int(PER_CELSIUS * (celsius - target)))
        most = running if self.cap is None else min(self.cap, running)
        self.cap = max(1, most - less)
        return max(0, running - self.cap)


def hottest_celsius(readings: Sequence[GpuReading], now_s: float) -> float | None:
    """The highest fresh temperature of an instance's GPUs; None where there is none.

    All GPUs of an instance work in step, so the hottest counts.
    """
    fresh = [r.celsius for r in readings if r.celsius is not None and now_s - r.at_s <= FRESH_S]
    return max(fresh, default=None)
