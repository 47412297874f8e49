"""Overload in words: its start, the number of requests refused or waiting long, and the check.

Pure: a driver tells what is refused and how long requests wait, and asks whether a line is due.
"""

from __future__ import annotations

from collections import deque

from proxy.core.types import NOBODY, Reject, RejectReason, Thresholds

LONG_S = 1.0
"""A shorter wait is a burst's, and no overload."""
WINDOW_S = 10
"""Seconds over which refusals are counted, after which a calm is the end, and between two lines."""
_NOT_LOAD = NOBODY | {RejectReason.HOLDER_DOWN, RejectReason.DRAINING}
"""Refusals that more instances, or fewer requests, would not have spared."""
_BY_ITSELF = {
    RejectReason.UPSTREAM_BUSY: "report that they are busy",
    RejectReason.HEAT_CAP: "at their thermal cap",
    RejectReason.TTFT_SLO: "too full for --ttft-slo",
    RejectReason.TPOT_SLO: "too full for --tpot-slo",
}


class Overload:
    """Whether requests are refused or wait long. `since_s`: since when; None: they are not.

    `total`: requests refused since then.
    """

    def __init__(self) -> None:
        self.since_s: float | None = None
        self.total = 0
        self.longest_s = 0.0
        """The longest wait at the last look."""
        self._last_s = 0.0
        self._full_s: float | None = None
        """When the queue was full last."""
        self._said_s: float | None = None
        self._reject: Reject | None = None
        self._by_second: deque[tuple[int, int]] = deque(maxlen=WINDOW_S + 1)

    def refused(self, reject: Reject, now_s: float) -> None:
        """Count a refused request."""
        if reject.reason in _NOT_LOAD:
            return
        self._goes_on(reject, now_s)
        if reject.reason is RejectReason.QUEUE_FULL:
            self._full_s = now_s
        self.total += 1
        second, count = int(now_s), 1
        if self._by_second and self._by_second[-1][0] == second:
            count += self._by_second.pop()[1]
        self._by_second.append((second, count))

    def look(self, longest: tuple[float, Reject] | None, now_s: float) -> bool:
        """Take in the longest wait, with what stands against it; returns whether to say a line."""
        self.longest_s = longest[0] if longest is not None else 0.0
        if longest is not None and longest[0] >= LONG_S and longest[1].reason not in _NOT_LOAD:
            self._goes_on(longest[1], now_s)
        if self.since_s is None:
            return False
        if now_s - self._last_s > WINDOW_S:
            self.since_s = self._said_s = self._reject = None
            self._by_second.clear()
            return False
        said_s = self._said_s
        if said_s is not None and (now_s - said_s < WINDOW_S or self._last_s <= said_s):
            return False
        self._said_s = now_s
        return True

    def refused_lately(self, now_s: float) -> int:
        """Requests refused in the last WINDOW_S."""
        return sum([count for second, count in self._by_second if now_s - second <= WINDOW_S])

    def is_queue_full(self, now_s: float) -> bool:
        """Whether a request was refused for a full queue in the last WINDOW_S."""
        return self._full_s is not None and now_s - self._full_s <= WINDOW_S

    @property
    def reject(self) -> Reject | None:
        """The refusal to explain: the last one, or what stands against the oldest request."""
        return self._reject

    def _goes_on(self, reject: Reject, now_s: float) -> None:
        if self.since_s is None:
            self.since_s, self.total = now_s, 0
        self._last_s = now_s
        says_why = reject.past or reject.reason is RejectReason.MEMORY
        if says_why or self._reject is None or not self._reject.past:
            self._reject = reject


def cause(reject: Reject, limits: Thresholds, model: str | None = None) -> str:
    """Why a request is refused: the number of instances per failed check, with its limit.

    `limits`: those in force for the request's model. `model`: to be named, as there are others.
    """
    serving = f"instances of {model}" if model else "instances"
    counts: dict[RejectReason, int] = {}
    for one in reject.past:
        counts[one.checks[0]] = counts.get(one.checks[0], 0) + 1
    known, total = sorted(counts.items(), key=lambda item: -item[1]), len(reject.past)
    parts = [f"{count} of {total} {serving} {_past(check, limits)}" for check, count in known]
    if reject.reason is RejectReason.MEMORY:
        return "the proxy is short of memory (--max-memory-bytes)"
    return ", ".join(parts) or "every instance is busy"


def _past(check: RejectReason, limits: Thresholds) -> str:
    if check in _BY_ITSELF:
        return _BY_ITSELF[check]
    name, limit = {
        RejectReason.DECODE_BLOCKS: ("decode_blocks", limits.active_decode_blocks_threshold),
        RejectReason.PREFILL_TOKENS: ("prefill_tokens", limits.active_prefill_tokens_threshold),
        RejectReason.PREFILL_FRAC: (
            "prefill_tokens_frac",
            limits.active_prefill_tokens_threshold_frac,
        ),
    }.get(check, (str(check), None))
    # An operator may have changed the limit since.
    return f"past active_{name}" + ("" if limit is None else f" {limit:g}")
