"""Where requests wait for their turn: woken by what frees load, never by looking again and again.

While nobody waits nothing here runs, and nothing is called back. Once somebody does, every change
of a lease, threshold, report or instance asks for one round of admissions in the loop's next pass;
one timer stands for what time alone changes, such as the end of an engine's cool-down.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.core.admission.queue import Entry, Priority, QueueLimits, WaitQueue
from proxy.core.admission.retry_after import RetryAdvice
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Reject, RejectReason, RequestFacts
from proxy.net.timeouts import Clock, Limit
from proxy.protocol.errors import DRAIN_RETRY_S
from proxy.telemetry.metrics import Metrics

PRIORITY_HEADER = "X-Request-Priority"
_BY_NAME = {priority.name.lower(): priority for priority in Priority}
TRIALS, TRIAL_S = 4, 0.1
"""After an engine's own "busy" so many are let in, twice as many that much later, and so on until
it says so again: it alone knows what it can take, and says it only to who has been sent."""
_FULL = Reject(RejectReason.QUEUE_FULL, 1)
_HARDLY_LATER_S = 0.001
"""A report is too old just after its time, not at it."""


def priority_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> Priority:
    """`X-Request-Priority: high|normal|low`, else vLLM's body field `priority`, lower is sooner."""
    named = _BY_NAME.get(headers.get(PRIORITY_HEADER, "").strip().lower())
    if named is not None:
        return named
    number = body.get("priority")
    if not isinstance(number, int | float) or not number:
        return Priority.NORMAL
    return Priority.HIGH if number < 0 else Priority.LOW


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest(Entry):
    """An entry with the request behind it; `result` is there once `done` is."""

    facts: RequestFacts
    done: asyncio.Future[None]
    result: Route | Reject | None = field(default=None, init=False)

    def settle(self, result: Route | Reject) -> None:
        """The wait is over, in this way."""
        self.result = result
        if not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True)
class _Ramp:
    """Why a model's next one waits, and how many of its may be tried now."""

    reject: Reject
    batch: int = TRIALS
    trials: int = 0
    until_s: float = 0.0

    def may_try(self, now_s: float, most: int) -> bool:
        """Whether one more may be let in now, where an engine's own word was the last."""
        if self.reject.reason is not RejectReason.UPSTREAM_BUSY:
            return True
        if now_s >= self.until_s:
            self.trials, self.until_s = self.batch, now_s + TRIAL_S
            self.batch = min(2 * self.batch, most)
        return self.trials > 0


class WaitingRoom:
    """The queue, its wake-ups, and what a refused client is told."""

    def __init__(
        self,
        router: Router,
        clock: Clock,
        metrics: Metrics,
        limits: QueueLimits,
        weights: Mapping[str, float],
    ) -> None:
        self.queue = WaitQueue(limits, weights)
        self._router, self._clock, self._metrics = router, clock, metrics
        self._promises = RetryAdvice()
        self._ramps: dict[str, _Ramp] = {}
        self._is_closed = False
        self._is_woken = False
        self._timer: asyncio.TimerHandle | None = None
        metrics.queued_requests.set_function(lambda: len(self.queue))
        metrics.queued_bytes.set_function(lambda: self.queue.bytes)

    def admit(self, facts: RequestFacts) -> Route | Reject:
        """Like the router's, but behind those who wait for the same model already."""
        if self.queue.has(facts.model):
            self._wake()
            return self._ramp(facts.model).reject
        return self._router.admit(facts, self._clock.now_s())

    def refusal(self, reject: Reject, tokens: int) -> Reject:
        """A refusal with an honest time to come again."""
        if reject.reason in (RejectReason.NO_INSTANCE, RejectReason.DRAINING):
            return reject
        now_s = self._clock.now_s()
        tps = self.queue.drain_tps(reject.drain_tps, now_s)
        tps_known = replace(reject, drain_tps=tps)
        return self._promises.advise(tps_known, tokens, self.queue.tokens, now_s)

    def enter(
        self, facts: RequestFacts, reject: Reject, priority: Priority, size_bytes: int
    ) -> QueuedRequest | Reject:
        """Take a place after `reject`, to `wait` on at once; a refusal when there is none.

        Turns go round among authenticated tenants only: any other name could be changed with every
        request, and each would have a share of its own.
        """
        may_wait = self.queue.limits.requests and not self._is_closed
        if reject.reason is RejectReason.NO_INSTANCE or not may_wait:
            return self.refusal(reject, facts.prompt_tokens)
        done = asyncio.get_running_loop().create_future()
        model, tokens = facts.model, facts.prompt_tokens
        turn = QueuedRequest(
            model, facts.tenant, priority, tokens, size_bytes, facts=facts, done=done
        )
        now_s = self._clock.now_s()
        offer = self.queue.offer(turn, reject.wait_s, reject.drain_tps, now_s)
        if offer.refused is not None:
            return self.refusal(replace(reject, reason=offer.refused), tokens)
        if isinstance(offer.displaced, QueuedRequest):
            self._refuse(offer.displaced, RejectReason.QUEUE_FULL)
        self._note(model, reject)
        self._router.call_when_freed(self._wake)
        self._set_timer()
        return turn

    async def wait(self, turn: QueuedRequest) -> Route | Reject:
        """Until the turn comes, or its time is over.

        A route that was given to a client that left meanwhile is given back.
        """
        end = "gone"
        try:
            with Limit(self.queue.limits.seconds):
                await turn.done
        except TimeoutError:
            if turn.result is None:
                self._refuse(turn, RejectReason.QUEUE_TIMEOUT)
        except asyncio.CancelledError:
            if isinstance(turn.result, Route):
                self._router.finish(turn.result, self._clock.now_s())
            raise
        finally:
            self.queue.leave(turn)
            self._rest()
            if turn.result is not None:
                end = "admitted" if isinstance(turn.result, Route) else "refused"
            waited_s = self._clock.now_s() - turn.queued_s
            self._metrics.queue_wait.labels(end).observe(waited_s)
        assert turn.result is not None
        return turn.result

    def close(self) -> None:
        """The proxy drains: who waits is told to ask elsewhere, and nobody waits any more."""
        self._is_closed = True
        for turn in self.queue.entries():
            self.queue.leave(turn)
            assert isinstance(turn, QueuedRequest)
            turn.settle(Reject(RejectReason.DRAINING, DRAIN_RETRY_S))
        self._rest()

    def _refuse(self, turn: QueuedRequest, reason: RejectReason) -> None:
        self.queue.leave(turn)
        turn.settle(
            self.refusal(replace(self._ramp(turn.model).reject, reason=reason), turn.tokens)
        )

    def look_again(self) -> None:
        """Somebody may be free, and nothing that is watched tells of it."""
        if len(self.queue):
            self._wake()

    def _wake(self) -> None:
        """Something changed: look once, when whoever changed it is through."""
        if not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Admit as many as get in; for each model until its next one does not."""
        self._is_woken = False
        blocked: set[str] = set()
        now_s = self._clock.now_s()
        while (entry := self.queue.next(blocked, now_s)) is not None:
            assert isinstance(entry, QueuedRequest)
            ramp = self._ramp(entry.model)
            if not ramp.may_try(now_s, self.queue.limits.requests):
                blocked.add(entry.model)
                continue
            answer = self._router.admit(entry.facts, now_s)
            if isinstance(answer, Route):
                ramp.trials -= 1
                self.queue.served(entry, now_s)
                entry.settle(answer)
            elif answer.reason is RejectReason.NO_INSTANCE:
                self.queue.leave(entry)
                entry.settle(answer)
            else:
                self._note(entry.model, answer)
                blocked.add(entry.model)
        self._set_timer()
        self._rest()

    def _ramp(self, model: str) -> _Ramp:
        return self._ramps.get(model) or _Ramp(_FULL)

    def _note(self, model: str, reject: Reject) -> None:
        """What was said to its next one; repeated to one who came behind it, it is nothing new."""
        ramp = self._ramps.get(model)
        if ramp is None:
            if len(self._ramps) > 2 * len(self.queue):
                self._ramps = {m: r for m, r in self._ramps.items() if self.queue.has(m)}
            self._ramps[model] = _Ramp(reject)
        elif reject is not ramp.reject:
            ramp.reject, ramp.batch = reject, TRIALS

    def _set_timer(self) -> None:
        """For the next change that no event will tell of."""
        if self._timer is not None:
            self._timer.cancel()
        now_s = self._clock.now_s()
        at_s = self._router.gate.next_change_s(now_s) if len(self.queue) else None
        spent = [r.until_s for r in self._ramps.values() if r.trials <= 0 and now_s < r.until_s]
        if len(self.queue) and spent:
            at_s = min(at_s or math.inf, *spent)
        if at_s is None:
            self._timer = None
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, at_s - now_s) + _HARDLY_LATER_S, self._look)

    def _rest(self) -> None:
        """With nobody here, nothing is to be watched."""
        if not len(self.queue):
            self._ramps.clear()
            self._router.call_when_freed(None)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
