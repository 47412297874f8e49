"""Retry-After of refused requests: each reserves capacity, so clients return one by one.

A client that does not come back leaves its reservation unused. So what refusals reserve is the part
of their prompts that lately did come back.
"""

from __future__ import annotations

import math
from collections import deque
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


LAPSE_S = 5.0
"""A client that has not come back so long after its Retry-After counts as lost."""
EARLY_S = 0.05
"""Clients wait at least as long as they were told, but for the clocks."""
KEPT_GAIN = 0.1
"""Weight of one promise, kept or not, in the part of promises that are kept."""
PROMISES = 4096
"""Most promises that are remembered; the oldest are forgotten without a judgement."""


class RetryAdvice:
    """The time up to which capacity is already promised, by Retry-After, to refused clients.

    `kept_ratio`: the part of the promises, lately, whose clients came back.
    """

    def __init__(self) -> None:
        self._until_s = 0.0
        self.kept_ratio = 1.0
        # Times promised, never before those promised earlier, and the same by request.
        self._promised: deque[tuple[float, int]] = deque()
        self._due_s: dict[int, deque[float]] = {}

    def advise(
        self,
        reject: Reject,
        tokens: int,
        backlog_tokens: int,
        now_s: float,
        request: int | None = None,
    ) -> Reject:
        """The refusal with this client's wait; reserves capacity for its retry.

        `tokens`: of the refused prompt; `backlog_tokens`: of the waiting requests; `request`: the
        same number as that of its retry, see `came`. `reject.drain_tps`: rate at which prompts are
        admitted; `wait_s`: until the first one is.
        """
        self._lapse(now_s)
        rate = max(1.0, reject.drain_tps)
        soonest_s = now_s + reject.wait_s + backlog_tokens / rate
        at_s = min(max(soonest_s, self._until_s), now_s + RETRY_AFTER_MAX_S)
        reserved_s = self.kept_ratio * tokens / (PROMISED_RATIO * rate)
        self._until_s = at_s + min(reserved_s, RETRY_AFTER_MAX_S)
        if request is not None:
            self._promise(request, at_s)
        wait_s = max(LEAST_WAIT_S, at_s - now_s)
        return replace(reject, wait_s=wait_s, retry_after_s=retry_after_s([wait_s]))

    def came(self, request: int, now_s: float) -> None:
        """Note a request; it counts if it was refused before and returns no earlier than told.

        Requests with equal numbers may be one another's retries.
        """
        self._lapse(now_s)
        due_s = self._due_s.get(request)
        if due_s is not None and due_s[0] <= now_s + EARLY_S:
            self._forget(request, due_s)
            self.kept_ratio += KEPT_GAIN * (1.0 - self.kept_ratio)

    @property
    def promises(self) -> int:
        """Number of requests whose retry is awaited, at least; 0: `came` has no effect."""
        return len(self._due_s)

    def _promise(self, request: int, at_s: float) -> None:
        if len(self._promised) >= PROMISES:
            oldest_s, oldest = self._promised.popleft()
            due_s = self._due_s.get(oldest)
            if due_s is not None and due_s[0] == oldest_s:
                self._forget(oldest, due_s)
        self._promised.append((at_s, request))
        self._due_s.setdefault(request, deque()).append(at_s)

    def _forget(self, request: int, due_s: deque[float]) -> None:
        due_s.popleft()
        if not due_s:
            del self._due_s[request]

    def _lapse(self, now_s: float) -> None:
        """Judge the promises whose time has passed without a retry."""
        while self._promised and self._promised[0][0] + LAPSE_S < now_s:
            at_s, request = self._promised.popleft()
            due_s = self._due_s.get(request)
            if due_s is not None and due_s[0] == at_s:
                self._forget(request, due_s)
                self.kept_ratio -= KEPT_GAIN * self.kept_ratio


def milliseconds(reject: Reject) -> int:
    """A refusal's wait for the header `retry-after-ms`, preferred by OpenAI's clients."""
    return math.ceil((reject.wait_s or reject.retry_after_s) * 1000)
