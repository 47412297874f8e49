"""Retry-After of refused requests: each reserves capacity, so clients return one by one."""

from __future__ import annotations

import math
from dataclasses import replace

from proxy.core.types import Reject

RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1, 30
UNKNOWN_DRAIN_S = 10.0
"""Predicted wait while the rate at which KV is released is unknown: no stream has ended yet."""


def retry_after_s(waits_s: list[float]) -> int:
    """The shortest predicted wait in whole seconds, within 1..30."""
    soonest = min(waits_s, default=UNKNOWN_DRAIN_S)
    return math.ceil(max(RETRY_AFTER_MIN_S, min(RETRY_AFTER_MAX_S, soonest)))


PROMISED_RATIO = 0.5
"""Share of the drain rate that is promised to refused clients; the rest is for new requests."""
LEAST_WAIT_S = 0.05
"""The shortest wait advised, about a client's round trip."""


class RetryAdvice:
    """The time up to which capacity is already promised, by Retry-After, to refused clients."""

    def __init__(self) -> None:
        self._until_s = 0.0

    def advise(self, reject: Reject, tokens: int, backlog_tokens: int, now_s: float) -> Reject:
        """The refusal with the wait that this client is told; reserves capacity for its retry.

        `tokens`: of the refused prompt; `backlog_tokens`: of the waiting requests.
        `reject.drain_tps`: rate at which prompts are admitted; `wait_s`: until the first one is.
        """
        rate = max(1.0, reject.drain_tps)
        soonest_s = now_s + reject.wait_s + backlog_tokens / rate
        at_s = min(max(soonest_s, self._until_s), now_s + RETRY_AFTER_MAX_S)
        self._until_s = at_s + tokens / (PROMISED_RATIO * rate)
        wait_s = max(LEAST_WAIT_S, at_s - now_s)
        return replace(reject, wait_s=wait_s, retry_after_s=retry_after_s([wait_s]))


def milliseconds(reject: Reject) -> int:
    """A refusal's wait for the header `retry-after-ms`, which OpenAI's clients prefer."""
    return math.ceil((reject.wait_s or reject.retry_after_s) * 1000)
