"""When a refused client should come again: Retry-After, and what earlier refusals have promised."""

from __future__ import annotations

import math
from dataclasses import replace

from proxy.core.types import Reject

RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1, 30
UNKNOWN_DRAIN_S = 10.0
"""Predicted wait while no stream has ended yet, so that the rate of release is unknown."""


def retry_after_s(waits_s: list[float]) -> int:
    """Whole seconds until the first instance is predicted to be free, within 1..30."""
    soonest = min(waits_s, default=UNKNOWN_DRAIN_S)
    return math.ceil(max(RETRY_AFTER_MIN_S, min(RETRY_AFTER_MAX_S, soonest)))


PROMISED_RATIO = 0.5
"""Of the rate: a fleet that took in nobody but the promised ones would refuse all new ones."""
LEAST_WAIT_S = 0.05
"""Less than this a client's own round trip is about as long."""


class RetryAdvice:
    """The time up to which capacity is already promised, by Retry-After, to refused clients."""

    def __init__(self) -> None:
        self._until_s = 0.0

    def advise(self, reject: Reject, tokens: int, backlog_tokens: int, now_s: float) -> Reject:
        """The same refusal with the wait that this client is told.

        `tokens`: of its prompt; `backlog_tokens`: of those who wait already.
        `reject.drain_tps` is the rate at which prompts are taken in, `wait_s` until the first.
        """
        rate = max(1.0, reject.drain_tps)
        soonest_s = now_s + reject.wait_s + backlog_tokens / rate
        at_s = min(max(soonest_s, self._until_s), now_s + RETRY_AFTER_MAX_S)
        self._until_s = at_s + tokens / (PROMISED_RATIO * rate)
        wait_s = max(LEAST_WAIT_S, at_s - now_s)
        return replace(reject, wait_s=wait_s, retry_after_s=retry_after_s([wait_s]))


def milliseconds(reject: Reject) -> int:
    """The wait of a refusal, for `retry-after-ms`: OpenAI's clients prefer it to whole seconds."""
    return math.ceil((reject.wait_s or reject.retry_after_s) * 1000)
