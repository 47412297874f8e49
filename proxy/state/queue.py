"""The wait queue on the event loop: woken by events that free load, without polling.

While no request waits, nothing runs here and no callback is set. While a request waits, every
change of a lease, threshold, report or instance schedules one round of admissions in the loop's
next pass. A timer covers changes by time alone, such as the end of an engine's cool-down.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.core.admission.queue import Priority, QueueLimits
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.routing.waiting import MOST_TRIES, QueuedRequest, Waiting
from proxy.core.types import Reject, RequestFacts
from proxy.net.timeouts import Clock, Limit
from proxy.protocol.errors import DRAIN_RETRY_S
from proxy.protocol.offloadable import whole_number
from proxy.telemetry.metrics import Metrics

PRIORITY_HEADER = "X-Request-Priority"
_BY_NAME = {priority.name.lower(): priority for priority in Priority}
WAITS_KEPT = 20
_HARDLY_LATER_S = 0.001
"""Margin so that the timer fires after a report has expired, not exactly when it does."""


def priority_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> Priority:
    """`X-Request-Priority: high|normal|low`, else vLLM's body field `priority`: lower is first."""
    named = _BY_NAME.get(headers.get(PRIORITY_HEADER, "").strip().lower())
    if named is not None:
        return named
    number = whole_number(body.get("priority"))
    if not number:
        return Priority.NORMAL
    return Priority.HIGH if number < 0 else Priority.LOW


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that is over: predicted and real seconds, and whether the request was admitted."""

    promised_s: float
    waited_s: float
    end: str


@dataclass(slots=True)
class Ticket:
    """A place in the queue; `done` is set when the request is admitted or refused."""

    queued: QueuedRequest
    done: asyncio.Future[None]


class WaitingRoom:
    """Runs `core.routing.waiting` on the event loop: wake-ups, time limits, metrics."""

    def __init__(
        self,
        router: Router,
        clock: Clock,
        metrics: Metrics,
        limits: QueueLimits,
        weights: Mapping[str, float],
    ) -> None:
        self.waiting = Waiting(router, limits, weights)
        self.queue = self.waiting.queue
        self.last: deque[Wait] = deque(maxlen=WAITS_KEPT)
        """The last waits, for operators."""
        self._router, self._known = router, router.known
        self._clock, self._metrics = clock, metrics
        self._is_woken = self._is_freed = False
        self._timer: asyncio.TimerHandle | None = None
        metrics.queued_requests.set_function(lambda: len(self.queue))
        metrics.backlog.read = lambda: self.waiting.backlog_s(clock.now_s())
        metrics.queued_bytes.set_function(lambda: self.queue.bytes)

    def admit(self, facts: RequestFacts) -> Route | Reject:
        """Like the router's `admit`, but after the requests that wait in the same lane."""
        if self.waiting.is_behind(facts):
            self._wake()
        return self.waiting.admit(facts, self._clock.now_s())

    def enter(
        self, facts: RequestFacts, reject: Reject, priority: Priority, size_bytes: int
    ) -> Ticket | Reject:
        """Queue the request after `reject`, for `wait`; a Reject if the queue refuses it too."""
        done = asyncio.get_running_loop().create_future()

        def settled() -> None:
            if not done.done():
                done.set_result(None)

        now_s = self._clock.now_s()
        queued = self.waiting.enter(facts, reject, now_s, settled, priority, size_bytes)
        if isinstance(queued, Reject):
            return queued
        self._known.call_when_freed(self._wake)
        self._set_timer(now_s)
        return Ticket(queued, done)

    async def wait(self, ticket: Ticket) -> Route | Reject:
        """Wait until the request is admitted or its time is over.

        If the client has left meanwhile, an admitted request's route is finished.
        """
        queued = ticket.queued
        try:
            with Limit(self.waiting.most_s):
                await ticket.done
        except TimeoutError:
            self.waiting.expire(queued, self._clock.now_s())
        except asyncio.CancelledError:
            if isinstance(queued.result, Route):
                self._router.finish(queued.result, self._clock.now_s())
            raise
        finally:
            self._left(queued)
        assert queued.result is not None
        return queued.result

    def _left(self, queued: QueuedRequest) -> None:
        self.waiting.leave(queued)
        self._rest()
        end = "gone"
        if queued.result is not None:
            end = "admitted" if isinstance(queued.result, Route) else "refused"
        waited_s = self._clock.now_s() - queued.queued_s
        self._metrics.queue_wait.labels(end).observe(waited_s)
        self.last.append(Wait(queued.promised_s, waited_s, end))

    def close(self) -> None:
        """Drain: refuse every waiting request; its client may retry another proxy."""
        self.waiting.close(DRAIN_RETRY_S)
        self._rest()

    def look_again(self) -> None:
        """Try to admit: an instance may be free though none of the watched events has happened."""
        if len(self.queue):
            self._wake()

    def _wake(self) -> None:
        """A load changed: schedule one round of admissions after the change is complete."""
        self._is_freed = True
        if not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Go on with a pass over all lanes, or begin one; what is freed then begins another."""
        self._is_woken = False
        if not self.waiting.is_in_pass:
            self._is_freed = False
        now_s = self._clock.now_s()
        self.waiting.look(now_s, MOST_TRIES)
        if self.waiting.is_in_pass or self._is_freed:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._look)
        else:
            self._set_timer(now_s)
        self._rest()

    def _set_timer(self, looked_s: float) -> None:
        """Set the timer for the next change by time after `looked_s`, when the queue was looked at.

        Counted from that look and not from now: a change in between would wake nothing.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = self.waiting.next_look_s(looked_s)
        if at_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(at_s - looked_s + _HARDLY_LATER_S, self._look)

    def _rest(self) -> None:
        """While the queue is empty, stop all callbacks and the timer."""
        if not len(self.queue):
            self._known.call_when_freed(None)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
