"""Retry-After of refused requests: each reserves capacity, so clients return one by one.

A client that does not come back leaves its reservation unused. So what refusals reserve is the part
of their prompts that lately did come back. Each tenant has promises of its own, from its share of
the rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from heapq import heapify, heappop, heappush

from proxy.core.admission.largest_pays import LargestPays
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
"""Most promises that are remembered; of the tenant that has most, the oldest are forgotten without
a judgement."""
TENANTS = 1024
"""Most tenants whose promises are remembered; the one that was refused longest ago is forgotten."""


class Promises:
    """What one tenant's refused clients were promised.

    `until_s`: the time up to which capacity is promised. `is_sharing`: whether the tenant's weight
    is among those that share the rate. `kept_ratio`: the part of the promises, lately, whose
    clients came back.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.until_s = 0.0
        self.is_sharing = False
        self.kept_ratio = 1.0
        # Times promised, never before those promised earlier, and the same by request.
        self._promised: deque[tuple[float, int]] = deque()
        self._due_s: dict[int, deque[float]] = {}

    def __len__(self) -> int:
        return len(self._promised)

    @property
    def awaited(self) -> int:
        """Number of requests whose retry is awaited, at least."""
        return len(self._due_s)

    def promise(self, request: int, at_s: float) -> None:
        """Await a request's retry."""
        self._promised.append((at_s, request))
        self._due_s.setdefault(request, deque()).append(at_s)

    def came(self, request: int, now_s: float) -> None:
        """Note a request; it counts if it was refused before and returns no earlier than told."""
        self.lapse(now_s)
        due_s = self._due_s.get(request)
        if due_s is not None and due_s[0] <= now_s + EARLY_S:
            self._forget(request, due_s)
            self.kept_ratio += KEPT_GAIN * (1.0 - self.kept_ratio)

    def lapse(self, now_s: float) -> None:
        """Judge the promises whose time has passed without a retry."""
        while self._promised and self._promised[0][0] + LAPSE_S < now_s:
            if self.drop_oldest():
                self.kept_ratio -= KEPT_GAIN * self.kept_ratio

    def drop_oldest(self) -> bool:
        """Forget the oldest promise; whether its retry was still awaited."""
        at_s, request = self._promised.popleft()
        due_s = self._due_s.get(request)
        if due_s is None or due_s[0] != at_s:
            return False
        self._forget(request, due_s)
        return True

    def _forget(self, request: int, due_s: deque[float]) -> None:
        due_s.popleft()
        if not due_s:
            del self._due_s[request]


class RetryAdvice:
    """The capacity already promised, by Retry-After, to refused clients: of each tenant its share.

    A tenant's sizes, and whether its clients come back, change nothing for others. To them it is
    one more among those that share.
    """

    def __init__(self, weight_of: Callable[[str], float] = lambda _tenant: 1.0) -> None:
        self._weight_of = weight_of
        self._tenants: dict[str, Promises] = {}  # the one refused last comes last
        self._sharing: list[tuple[float, int, Promises]] = []
        """A heap of those with promised capacity ahead, by a time up to which it is so. Of a tenant
        that was forgotten it stays here until then, and shares nothing."""
        self._entered = 0
        """Entries of the heap so far: of two at one time the earlier comes first."""
        self._weights = 0.0
        """Sum of the weights of those that share."""
        self._counted: LargestPays[Promises] = LargestPays(PROMISES)

    def advise(
        self,
        reject: Reject,
        tokens: int,
        backlog_tokens: float,
        now_s: float,
        client: tuple[str, int | None] = ("", None),
    ) -> Reject:
        """The refusal with this client's wait; reserves capacity for its retry.

        `tokens`: of the refused prompt; `backlog_tokens`: of the waiting requests before it;
        `client`: its tenant, and the same number as that of its retry, see `came`.
        `reject.drain_tps`: rate at which prompts are admitted; `wait_s`: until the first one is.
        """
        tenant, request = client
        self._end_shares(now_s)
        own = self._of(tenant)
        self._lapse(own, now_s)
        rate = max(1.0, reject.drain_tps)
        soonest_s = now_s + reject.wait_s + backlog_tokens / rate
        at_s = min(max(soonest_s, own.until_s), now_s + RETRY_AFTER_MAX_S)
        if not own.is_sharing:
            own.is_sharing = True
            self._weights += own.weight
            self._enter(own, at_s)
        share = own.weight / self._weights
        reserved_s = own.kept_ratio * tokens / (PROMISED_RATIO * share * rate)
        own.until_s = at_s + min(reserved_s, RETRY_AFTER_MAX_S)
        if request is not None:
            self._promise(own, request, at_s)
        wait_s = max(LEAST_WAIT_S, at_s - now_s)
        return replace(reject, wait_s=wait_s, retry_after_s=retry_after_s([wait_s]))

    def came(self, tenant: str, request: int, now_s: float) -> None:
        """Note a request, see `Promises.came`.

        Requests with equal numbers may be one another's retries.
        """
        if (own := self._tenants.get(tenant)) is not None:
            own.came(request, now_s)
            self._counted.hold(own, "", len(own))

    def awaits(self, tenant: str) -> bool:
        """Whether `came` may have an effect for this tenant."""
        own = self._tenants.get(tenant)
        return own is not None and own.awaited > 0

    @property
    def promises(self) -> int:
        """Number of requests whose retry is awaited, at least."""
        return sum([own.awaited for own in self._tenants.values()])

    def kept_ratio(self, tenant: str = "") -> float:
        """The part of a tenant's promises, lately, whose clients came back."""
        own = self._tenants.get(tenant)
        return 1.0 if own is None else own.kept_ratio

    def _of(self, tenant: str) -> Promises:
        own = self._tenants.pop(tenant, None)
        if own is None:
            own = Promises(self._weight_of(tenant))
            if len(self._tenants) >= TENANTS:
                self._forget_one()
        self._tenants[tenant] = own
        return own

    def _forget_one(self) -> None:
        """Forget the tenant that was refused longest ago, and its share."""
        left = self._tenants.pop(next(iter(self._tenants)))
        self._counted.drop(left)
        if left.is_sharing:
            self._no_longer(left)
            if len(self._sharing) > 2 * TENANTS:
                self._sharing = [each for each in self._sharing if each[2].is_sharing]
                heapify(self._sharing)

    def _enter(self, own: Promises, at_s: float) -> None:
        self._entered += 1
        heappush(self._sharing, (at_s, self._entered, own))

    def _no_longer(self, own: Promises) -> None:
        own.is_sharing = False
        self._weights -= own.weight

    def _end_shares(self, now_s: float) -> None:
        """Take the shares of tenants that have no promised capacity ahead any more."""
        while self._sharing and self._sharing[0][0] <= now_s:
            own = heappop(self._sharing)[2]
            if own.is_sharing and own.until_s > now_s:
                self._enter(own, own.until_s)
            elif own.is_sharing:
                self._no_longer(own)
        if not self._sharing:
            self._weights = 0.0

    def _lapse(self, own: Promises, now_s: float) -> None:
        own.lapse(now_s)
        self._counted.hold(own, "", len(own))

    def _promise(self, own: Promises, request: int, at_s: float) -> None:
        own.promise(request, at_s)
        largest = self._counted.hold(own, "", len(own))
        if largest is not None:
            largest.drop_oldest()
            self._counted.hold(largest, "", len(largest))


def milliseconds(reject: Reject) -> int:
    """A refusal's wait for the header `retry-after-ms`, preferred by OpenAI's clients."""
    return math.ceil((reject.wait_s or reject.retry_after_s) * 1000)
