"""Targets: whether an instance would miss those of a further request, or of what runs there.

For `--late refuse`. By predictions, so nothing has to be tuned or learned first. A first token
waits for all prefills that are reserved on the instance. A running stream waits for each prefill
beside it: with a decode step of `s` seconds, and prefills for a part `b` of the time, its time per
output token is s / (1 - b). Where streams alone take more than the target, it is out of reach, and
FEW_STREAMS times what one alone takes stands in its place.
"""

from __future__ import annotations

import math
from typing import Final

from proxy.core.accounts.instances import InstanceState
from proxy.core.admission.retry_after import UNKNOWN_DRAIN_S
from proxy.core.latency.pace import RECENT_S
from proxy.core.types import RejectReason, RouterConfig

WAIT_RATIO: Final = 0.25
"""Part of the TTFT target that a prompt may wait for others. Its own computation takes the rest."""
BUSY_MOST: Final = 0.95
FEW_STREAMS: Final = 2.0


class Targets:
    """The targets of first tokens and of streams; `is_on`: they decide who is let in."""

    __slots__ = ("_tpot_s", "is_on", "patience_s", "wait_s")

    def __init__(self, config: RouterConfig) -> None:
        self.aim_at(config)

    def aim_at(self, config: RouterConfig) -> None:
        """Set other targets."""
        self.is_on = config.late == "refuse"
        self.wait_s = WAIT_RATIO * config.ttft_slo_s
        self._tpot_s = config.tpot_slo_s
        self.patience_s = config.ttft_slo_s if self.is_on else math.inf
        """Seconds in the queue after which a request would be late, wherever it went."""

    def past(self, state: InstanceState, now_s: float) -> tuple[RejectReason, float] | None:
        """Which target would be missed on an instance, and for how long; None: neither."""
        if state.times is None:
            return None
        pace = state.times.pace()
        waits_s = pace.wait_s(now_s)
        if waits_s > self.wait_s:
            return RejectReason.TTFT_SLO, waits_s - self.wait_s
        load = state.account.seen or state.account.load()
        streams = load.running_requests
        if not streams:
            return None
        step_s = pace.step_s(load.decode_tokens)
        few_s = FEW_STREAMS * pace.step_s(load.decode_tokens // streams)
        target_s, busy = max(self._tpot_s, few_s), min(BUSY_MOST, pace.busy_ratio(now_s))
        if step_s <= target_s * (1.0 - busy):
            return None
        may_be_busy = 1.0 - step_s / target_s
        if may_be_busy <= 0.0:
            return RejectReason.TPOT_SLO, UNKNOWN_DRAIN_S
        return RejectReason.TPOT_SLO, RECENT_S * math.log(busy / may_be_busy)
