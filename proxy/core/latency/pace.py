"""What is known of times at one moment, in plain numbers: of an instance, and of all transfers.

A decision reads these and nothing live, so it can be made again later. See `core.latency.model` for
the lines and where they are learned.
"""

from __future__ import annotations

import math
from typing import Final

RECENT_S: Final = 60.0
"""Time constant of an instance's busy ratio: some turns of a session."""
FIRST_STEP: Final = 0.5
"""A prefill with none before it waits for the running step to end: half a step on average."""
Line = tuple[float, float]
"""The two coefficients of a line."""
Lately = tuple[float, float, float]
"""Number and seconds of prefills at a time, which fade over RECENT_S, and that time."""
Numbers = list[float]
"""A `Pace` in the order of its fields, as JSON has it."""


class Pace:
    """One instance's times at a moment. It is never changed.

    `budget`: tokens of a step. `prefill`, `step`: lines, the first one without running streams.
    `is_pending`: whether prefills are reserved, until `busy_until_s`. `recent`, `recent_s`: number
    and seconds of prefills at `recent_at_s`, which fade over RECENT_S.
    """

    __slots__ = (
        "budget",
        "busy_until_s",
        "is_pending",
        "prefill_p",
        "prefill_q",
        "recent",
        "recent_at_s",
        "recent_s",
        "step_p",
        "step_q",
    )

    def __init__(
        self,
        budget: int,
        prefill: Line,
        step: Line,
        busy_until_s: float,
        recent: Lately,
        *,
        is_pending: bool,
    ) -> None:
        self.budget, self.is_pending = budget, is_pending
        self.prefill_p, self.prefill_q = prefill
        self.step_p, self.step_q = step
        self.busy_until_s = busy_until_s
        self.recent, self.recent_s, self.recent_at_s = recent

    def numbers(self) -> Numbers:
        """All of it, for `of`."""
        return [
            *(self.budget, self.prefill_p, self.prefill_q, self.step_p, self.step_q),
            *(self.busy_until_s, self.recent, self.recent_s, self.recent_at_s),
            int(self.is_pending),
        ]

    @classmethod
    def of(cls, numbers: Numbers) -> Pace:
        """The pace of `numbers`."""
        budget, p, q, step_p, step_q, busy_until_s, *recent, is_pending = numbers
        count, seconds, at_s = recent
        lines = (float(p), float(q)), (float(step_p), float(step_q))
        since = float(count), float(seconds), float(at_s)
        return cls(int(budget), *lines, float(busy_until_s), since, is_pending=bool(is_pending))

    def alone_s(self, new: int, context: int) -> float:
        """Time to compute `new` tokens after `context` cached ones, without running streams."""
        tokens = float(new)
        return self.prefill_p * tokens + self.prefill_q * (tokens * (context + 0.5 * tokens))

    def steps_beside(self, new: int) -> float:
        """Decode steps of running streams that a prefill of `new` tokens shares."""
        return -(-new // self.budget) + (0.0 if self.is_pending else FIRST_STEP)

    def prefill_s(self, new: int, context: int, streams: int, kv_tokens: int) -> float:
        """Time to compute `new` tokens after `context` cached ones, beside running streams."""
        alone_s = self.alone_s(new, context)
        if not streams:
            return alone_s
        return alone_s + self.steps_beside(new) * self.step_s(kv_tokens)

    def share_s(self, new: int, context: int, streams: int, kv_tokens: int) -> float:
        """`prefill_s` without the part of its steps that other prefills can use."""
        alone_s = self.alone_s(new, context)
        if not streams:
            return alone_s
        return alone_s + new / self.budget * self.step_s(kv_tokens)

    def step_s(self, kv_tokens: int) -> float:
        """Duration of a decode step over this much KV."""
        return self.step_p + self.step_q * kv_tokens

    def wait_s(self, now_s: float) -> float:
        """Seconds until the instance has computed all reserved prefills."""
        if self.busy_until_s <= now_s:
            return 0.0
        return self.busy_until_s - now_s

    def busy_ratio(self, now_s: float) -> float:
        """Seconds of prefill per second, over about RECENT_S; over 1: the queue grows.

        A prefill counts as it is predicted, and once it is over for no longer than it was there.
        """
        return self.lately(now_s)[0]

    def lately(self, now_s: float) -> tuple[float, float]:
        """Busy ratio and prefills per second, over about RECENT_S."""
        if not self.recent:
            return 0.0, 0.0
        kept = faded(self.recent_at_s, now_s) / RECENT_S
        return self.recent_s * kept, self.recent * kept


def faded(since_s: float, now_s: float) -> float:
    """The part that is left of what was recent at `since_s`; 1 also when the clock goes back."""
    return math.exp(min(0.0, since_s - now_s) / RECENT_S)


def both_lately(one: Lately, other: Lately) -> Lately:
    """The sum of two, at the later time."""
    at_s = max(one[2], other[2])
    kept, also = faded(one[2], at_s), faded(other[2], at_s)
    return one[0] * kept + other[0] * also, one[1] * kept + other[1] * also, at_s


class Transfers:
    """The lines of all transfers at a moment, by P and D; `other`: of pairs unseen."""

    __slots__ = ("other", "pairs")

    def __init__(self, other: Line, pairs: dict[tuple[str, str], Line]) -> None:
        self.other, self.pairs = other, pairs

    def seconds(self, p: str, d: str, tokens: int) -> float:
        """Time to move the KV of `tokens` from P to D, D's first step included."""
        fixed, each = self.pairs.get((p, d), self.other)
        return fixed + each * tokens


class FleetPace:
    """The fleet's times at a moment, for one prompt.

    `way_s`: until an engine begins with it. `alone_s`: to compute all of it on an idle instance.
    `rest_s`, `output_tokens`: see `Latency`.
    """

    __slots__ = ("alone_s", "output_tokens", "rest_s", "transfers", "way_s")

    def __init__(
        self,
        way_s: float,
        alone_s: float,
        rest_s: float,
        output_tokens: float,
        transfers: Transfers,
    ) -> None:
        self.way_s, self.alone_s, self.rest_s = way_s, alone_s, rest_s
        self.output_tokens, self.transfers = output_tokens, transfers
