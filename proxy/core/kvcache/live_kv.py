"""The KV of sessions that may come back, per instance.

A session that is between two turns needs its KV with the chance that it comes back at all. That
chance falls with its idle time, by a curve of the fleet in logarithmic bins. The curve is the
Kaplan-Meier estimate of the time from an answer to the session's next request (Kaplan & Meier,
Nonparametric Estimation from Incomplete Observations, 1958). A session that is still idle, or was
dropped while idle, counts as one that was seen for so long and no longer. So the curve learns the
users' think times and how often sessions end, which nobody announces.

Per instance, idle sessions are kept as counts and tokens in buckets of time, the wider the older:
some hundred numbers whatever the number of sessions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

SHORTEST_S: Final = 0.5
"""Idle times below this share the first bin; each later one is wider by the root of 2."""
BINS: Final = 24
LN_2: Final = math.log(2.0)
ROUNDING: Final = 1e-9
"""Keeps an idle time that is exactly a bin's first in that bin."""
LONGEST_S: Final = 1024.0
"""The last bin begins here, and has no end."""
STARTS_S: Final = [-math.inf, *[SHORTEST_S * 2.0 ** (k / 2.0) for k in range(BINS - 1)]]
"""The shortest idle time of each bin."""
PRIOR_RETURNS: Final = 0.05
"""The prior: of one session in each bin, the part that is assumed to return there."""
MOST_SEEN: Final = 4096.0
"""Idle times remembered: beyond it all counts are halved."""
RENEWED_AFTER, RENEWED_RATIO = 16, 1 / 32
RENEWED_S: Final = 5.0
"""The curve is renewed after so many new idle times, or this part of all, or this time."""
WEIGHED_S: Final = 2.0
"""An instance's idle sessions are weighed again after this time."""
LEAST_WIDTH_S: Final = 1.0
WIDTH_RATIO: Final = 0.125
"""A bucket of idle sessions is at most this part of its age wide, or LEAST_WIDTH_S."""


def bin_of(idle_s: float) -> int:
    """The bin of an idle time."""
    if idle_s < SHORTEST_S:
        return 0
    if idle_s >= LONGEST_S:
        return BINS - 1
    return 1 + int(2.0 / LN_2 * math.log(idle_s / SHORTEST_S) + ROUNDING)


class ReturnCurve:
    """The chance that a session comes back, by the time it has been idle."""

    __slots__ = ("_chances", "_left", "_new", "_renewed_s", "_returned", "_seen")

    def __init__(self) -> None:
        self._returned = [0.0] * BINS
        self._left = [0.0] * BINS
        self._chances = [1.0] * BINS
        self._new = 0
        self._renewed_s = 0.0
        self._seen = 0.0
        self._reckon([0.0] * BINS)

    def returned(self, idle_s: float) -> None:
        """Count a session that came back after this time."""
        self._returned[bin_of(idle_s)] += 1.0
        self._new += 1

    def left(self, idle_s: float) -> None:
        """Count a session that is dropped after this idle time without a request."""
        self._left[bin_of(idle_s)] += 1.0
        self._new += 1

    def chance(self, idle_s: float) -> float:
        """The chance 0..1 that a session idle for this time comes back."""
        return self._chances[bin_of(idle_s)]

    def chance_in(self, k: int) -> float:
        """`chance` in a bin."""
        return self._chances[k]

    def renew(self, idle: Iterable[LiveKv], now_s: float) -> None:
        """Compute the curve again if due; `idle`: of all instances."""
        waited_s = now_s - self._renewed_s
        few = max(RENEWED_AFTER, RENEWED_RATIO * self._seen)
        if self._new < few and 0.0 <= waited_s < RENEWED_S:
            return
        self._new, self._renewed_s = 0, now_s
        counts = [0.0] * BINS
        for live in idle:
            live.count(counts, self, now_s)
        self._reckon(counts)

    def _reckon(self, idle: list[float]) -> None:
        """S(k), the part of idle times that go beyond bin k; the chance is 1 - S(end) / S."""
        self._seen = math.fsum(self._returned) + math.fsum(self._left)
        if self._seen > MOST_SEEN:
            self._returned = [count / 2.0 for count in self._returned]
            self._left = [count / 2.0 for count in self._left]
        reached = 0.0
        kept = [1.0] * BINS
        for k in range(BINS - 1, -1, -1):
            # Who was last seen within a bin has been at risk for half of it.
            unseen = self._left[k] + idle[k]
            at_risk = reached + self._returned[k] + unseen / 2.0
            reached += self._returned[k] + unseen
            kept[k] = 1.0 - (self._returned[k] + PRIOR_RETURNS) / (at_risk + 1.0)
        beyond = 1.0
        for k in range(BINS - 1, -1, -1):
            # At the middle of the bin.
            self._chances[k] = 1.0 - beyond * math.sqrt(max(0.0, kept[k]))
            beyond *= max(0.0, kept[k])


class Bucket:
    """The sessions that became idle between two times: their number and KV tokens."""

    __slots__ = ("count", "end_s", "start_s", "tokens")

    def __init__(self, at_s: float, tokens: int) -> None:
        self.start_s = self.end_s = at_s
        self.count, self.tokens = 1, tokens


class LiveKv:
    """KV tokens of the sessions that live on one instance.

    `running`: of those with a request in flight.
    """

    __slots__ = ("_buckets", "_by_bin", "_weighed", "_weighed_s", "running")

    def __init__(self) -> None:
        self.running = 0
        self._buckets: list[Bucket] = []
        self._weighed = 0.0
        self._weighed_s = -math.inf
        self._by_bin = [0] * BINS

    @property
    def idle_tokens(self) -> int:
        """Tokens of all idle sessions, whether they come back or not."""
        return sum([bucket.tokens for bucket in self._buckets])

    def becomes_idle(self, tokens: int, now_s: float) -> float:
        """Note that a session is idle; returns the time to pass to `leaves_idle`."""
        at_s = now_s
        newest = self._buckets[-1] if self._buckets else None
        if newest is not None and now_s < newest.start_s + LEAST_WIDTH_S:
            at_s = max(now_s, newest.start_s)  # the clock may go back
            newest.end_s = max(at_s, newest.end_s)
            newest.count += 1
            newest.tokens += tokens
        else:
            self._buckets.append(Bucket(at_s, tokens))
        self._weighed += tokens
        return at_s

    def leaves_idle(self, tokens: int, since_s: float) -> None:
        """Note that a session idle since then has a request again, or is forgotten."""
        at = self._place_of(since_s)
        bucket = self._buckets[at]
        bucket.count -= 1
        bucket.tokens -= tokens
        if not bucket.count:
            del self._buckets[at]
        self._weighed = max(0.0, self._weighed - tokens) if self._buckets else 0.0

    def tokens(self, curve: ReturnCurve, now_s: float) -> float:
        """Tokens needed: of running sessions, and of idle ones times their chance."""
        if not 0.0 <= now_s - self._weighed_s < WEIGHED_S:
            self._weigh(curve, now_s)
        return self.running + self._weighed

    def count(self, counts: list[float], curve: ReturnCurve, now_s: float) -> None:
        """Add the idle sessions to the counts of each bin, as of their last weighing."""
        self.tokens(curve, now_s)
        for k, count in enumerate(self._by_bin):
            if count:
                counts[k] += count

    def _weigh(self, curve: ReturnCurve, now_s: float) -> None:
        self._merge(now_s)
        weighed, by_bin = 0.0, [0] * BINS
        k, shortest_s, count, tokens = 0, math.inf, 0, 0
        # The oldest first, so those of one bin are neighbours, and few bins are looked up.
        for bucket in self._buckets:
            idle_s = now_s - (bucket.start_s + bucket.end_s) / 2.0
            if idle_s < shortest_s:
                by_bin[k] += count
                weighed += tokens * curve.chance_in(k)
                k = bin_of(idle_s)
                shortest_s, count, tokens = STARTS_S[k], 0, 0
            count += bucket.count
            tokens += bucket.tokens
        by_bin[k] += count
        weighed += tokens * curve.chance_in(k)
        self._weighed, self._weighed_s, self._by_bin = weighed, now_s, by_bin

    def _merge(self, now_s: float) -> None:
        """Merge neighbours that are old enough to share a bucket."""
        buckets, kept = self._buckets, 0
        last: Bucket | None = None
        for bucket in buckets:
            end_s = bucket.end_s
            if last is not None and end_s - last.start_s <= WIDTH_RATIO * (now_s - end_s):
                last.end_s = end_s
                last.count += bucket.count
                last.tokens += bucket.tokens
                continue
            buckets[kept] = last = bucket
            kept += 1
        del buckets[kept:]

    def _place_of(self, since_s: float) -> int:
        """The index of the last bucket that begins no later than this."""
        buckets, low, high = self._buckets, 0, len(self._buckets)
        while low < high:
            # Not `bisect`: compiled, its calls of a key cost more than these steps.
            middle = (low + high) // 2
            if buckets[middle].start_s > since_s:
                high = middle
            else:
                low = middle + 1
        return low - 1
