"""Targets: whether an instance would miss those of a further request, or of what runs there.

For `--late refuse`. By predictions, so nothing has to be tuned or learned first. A first token
waits for all prefills that are reserved on the instance. A running stream waits for each prefill
beside it: with a decode step of `s` seconds, and prefills for a part `b` of the time, its time per
output token is s / (1 - b).

That part is a mean over a minute. Where a lack of room lasts, the streams themselves are bounded
too, which acts at once. Prefills may take a part r = 1 - s / T of the time at a target of T, so
there may be r / W of W seconds each in a second. With L tokens in an answer each is there for
W + L T seconds. By Little's law r (1 + L T / W) streams run then in the mean. STREAMS_RATIO of them
may, since the target is for nine of ten.

Where streams alone take more than the target, it is out of reach, and FEW_STREAMS times what one
alone takes stands in its place.
"""

from __future__ import annotations

import math
from typing import Final

from proxy.core.accounts.instances import InstanceState
from proxy.core.admission.retry_after import UNKNOWN_DRAIN_S
from proxy.core.latency.pace import RECENT_S, Pace
from proxy.core.types import Load, RejectReason, RouterConfig

WAIT_RATIO: Final = 0.25
"""Part of the TTFT target that a prompt may wait for others. Its own computation takes the rest."""
STREAMS_RATIO: Final = 0.4
BUSY_MOST: Final = 0.95
FEW_STREAMS: Final = 2.0
LASTS_S, GOES_ON_S = 2.0, 15.0
"""A lack of room lasts that is met again after so long, with no longer pauses than the second."""
MOST_LANES: Final = 256
"""Models of which it is known since when they lack room."""
Late = tuple[RejectReason, float]
"""The target that would be missed, and for how many seconds."""


class Targets:
    """The targets of first tokens and of streams; `is_on`: they decide who is let in.

    `patience_s`: seconds in the queue after which a request would be late, wherever it went.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._full: dict[str, tuple[float, float]] = {}
        """Since when a model lacks room, and when it did last."""
        self.aim_at(config)

    def aim_at(self, config: RouterConfig) -> None:
        """Set other targets."""
        self.is_on = config.late == "refuse"
        self._wait_s = WAIT_RATIO * config.ttft_slo_s
        self._tpot_s = config.tpot_slo_s
        self.patience_s = config.ttft_slo_s if self.is_on else math.inf

    def lacks_room(self, lane: str, now_s: float) -> None:
        """Every instance of a model would miss a target."""
        since_s, last_s = self._full.pop(lane, (now_s, now_s))
        if len(self._full) >= MOST_LANES:
            del self._full[next(iter(self._full))]
        self._full[lane] = (since_s if now_s - last_s <= GOES_ON_S else now_s), now_s

    def lasts(self, lane: str, now_s: float) -> bool:
        """Whether a model has lacked room for a while, and did lately."""
        found = self._full.get(lane)
        if found is None:
            return False
        since_s, last_s = found
        return now_s - last_s <= GOES_ON_S and last_s - since_s >= LASTS_S

    def missed(
        self, state: InstanceState, now_s: float, output_tokens: float | None = None
    ) -> Late | None:
        """Which target would be missed on an instance; None: neither.

        `output_tokens`: of an answer in the mean, where the streams themselves are to be bounded.
        """
        if state.times is None:
            return None
        pace = state.times.pace()
        waits_s = pace.wait_s(now_s)
        if waits_s > self._wait_s:
            return RejectReason.TTFT_SLO, waits_s - self._wait_s
        load = state.account.seen or state.account.load()
        return (
            self._streams_miss(pace, load, now_s, output_tokens) if load.running_requests else None
        )

    def _streams_miss(
        self, pace: Pace, load: Load, now_s: float, output_tokens: float | None
    ) -> Late | None:
        streams = load.running_requests
        step_s = pace.step_s(load.decode_tokens)
        target_s = max(self._tpot_s, FEW_STREAMS * pace.step_s(load.decode_tokens // streams))
        part = 1.0 - step_s / target_s
        if part <= 0.0:
            return RejectReason.TPOT_SLO, UNKNOWN_DRAIN_S
        busy = min(BUSY_MOST, pace.busy_ratio(now_s))
        if busy > part:
            return RejectReason.TPOT_SLO, RECENT_S * math.log(busy / part)
        if output_tokens is None or not pace.recent or pace.recent_s <= 0.0:
            return None
        stays_s = output_tokens * target_s
        most = STREAMS_RATIO * part * (1.0 + stays_s * pace.recent / pace.recent_s)
        most = max(FEW_STREAMS, most)
        if streams <= most:
            return None
        return RejectReason.TPOT_SLO, (streams - most) * stays_s / streams
