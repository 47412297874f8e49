"""Requests that wait while every instance is busy: their order, and refusals.

Pure: a driver calls `look` when the router says that load was freed, and at `next_look_s`, when
time alone may let one in. It hears the end of a wait by `QueuedRequest.settle`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from proxy.core.admission.queue import Entry, Priority, QueueLimits, WaitQueue
from proxy.core.admission.retry_after import RetryAdvice
from proxy.core.fleet.named_models import OTHERS, NamedModels
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import NOBODY, Reject, RejectReason, RequestFacts

TRIALS, TRIAL_S = 4, 0.1
"""After an engine reported busy, TRIALS requests are let in, TRIAL_S later twice as many, and so on
until it reports busy again. Only the engine knows its capacity."""
MOST_TRIES = 16
"""Requests that a driver should have tried in one turn: each looks at all instances and lanes, and
a client that knows hundreds of models has as many lanes."""
_FULL = Reject(RejectReason.QUEUE_FULL, 1)
ALONE = "\n"
"""Lane of the requests that engines have refused as busy while others may be served: each waits for
as long as the engines have said, or until another instance should be free, and then among the
others of its model. No model has such a name, and none a line's end in it: behind one is the client
that waits in a lane of its own, as instances are closed to it and to nobody else."""


class QueuedRequest(Entry):
    """A request in the queue; `result` is there once it was let in or refused."""

    def __init__(
        self,
        facts: RequestFacts,
        lane: str,
        priority: Priority,
        tokens: int,
        charged: int,
        size_bytes: int,
        on_settled: Callable[[], None],
    ) -> None:
        super().__init__(lane, facts.tenant, priority, tokens, size_bytes, charged)
        self.facts = facts
        self.result: Route | Reject | None = None
        self._on_settled = on_settled

    def settle(self, result: Route | Reject) -> None:
        """End the wait with this result."""
        self.result = result
        self._on_settled()


class _Ramp:
    """Why a lane's next request waits, and how many of its requests may be tried now."""

    def __init__(self, reject: Reject) -> None:
        self.reject = reject
        self.batch = TRIALS
        self.trials = 0
        self.until_s = 0.0

    def may_try(self, now_s: float, most: int) -> bool:
        """Whether one more request may be tried after an engine itself said that it is busy."""
        if self.reject.reason is not RejectReason.UPSTREAM_BUSY:
            return True
        if now_s >= self.until_s:
            self.trials, self.until_s = self.batch, now_s + TRIAL_S
            self.batch = min(2 * self.batch, most)
        return self.trials > 0


class Waiting:
    """The wait queue in front of a router."""

    def __init__(
        self, router: Router, limits: QueueLimits, weights: Mapping[str, float] | None = None
    ) -> None:
        self.queue = WaitQueue(limits, weights)
        self.is_closed = False
        self._router = router
        self._advice = RetryAdvice(self.queue.weight)
        self._named = NamedModels()
        self._ramps: dict[str, _Ramp] = {}
        self._alone: dict[QueuedRequest, float] = {}
        """Until when each request in the lane of its own kind waits."""
        self._model_changes = 0
        """The fleet's count at the last look."""
        self._blocked: set[str] | None = None
        """Lanes of which the router has rejected one in the pass under way; None: there is none."""

    @property
    def most_s(self) -> float:
        """The longest wait: of the queue, or until a request is late wherever it goes."""
        return min(self.queue.limits.seconds, self._router.known.targets.patience_s)

    def admit(self, facts: RequestFacts, now_s: float) -> Route | Reject:
        """Like the router's `admit`, but behind the requests that wait in the same lane.

        One that only one instance can serve does not wait, so it is not behind them.
        """
        if self._advice.awaits(facts.tenant):
            self._advice.came(facts.tenant, _number(facts), now_s)
        if facts.holder is None and (lane := self._lane_before(facts)) is not None:
            return self._ramp(lane).reject
        return self._router.admit(facts, now_s)

    def is_behind(self, facts: RequestFacts) -> bool:
        """Whether others wait in a request's lane."""
        return self._lane_before(facts) is not None

    def _lane_before(self, facts: RequestFacts) -> str | None:
        """The lane in which others wait before a request, that of its client first."""
        if not len(self.queue):
            return None
        lanes = self._lane(facts, is_own=True), self._lane(facts)
        return next((lane for lane in lanes if self.queue.has(lane)), None)

    def _lane(self, facts: RequestFacts, *, is_own: bool = False) -> str:
        """The lane of a request among others of its model; `is_own`: among those of its client."""
        lane = self._router.known.lane(facts.model)
        return f"{lane}{ALONE}{facts.asker}" if is_own else lane

    def refusal(
        self,
        reject: Reject,
        facts: RequestFacts,
        now_s: float,
        priority: Priority = Priority.NORMAL,
    ) -> Reject:
        """A refusal of a request with its Retry-After."""
        if reject.reason in NOBODY or reject.reason is RejectReason.DRAINING:
            return reject
        tps = self.queue.drain_tps(reject.drain_tps, now_s)
        tps_known = replace(reject, drain_tps=tps)
        # Others do not wait for the length that a prompt seems to have, but for what is computed.
        tokens = self._router.known.fleet.computed(facts.prompt_tokens, facts.model)
        backlog = self.queue.tokens_before(facts.tenant, priority)
        client = facts.tenant, _number(facts)
        return self._advice.advise(tps_known, tokens, backlog, now_s, client)

    def enter(
        self,
        facts: RequestFacts,
        reject: Reject,
        now_s: float,
        on_settled: Callable[[], None],
        priority: Priority = Priority.NORMAL,
        size_bytes: int = 0,
    ) -> QueuedRequest | Reject:
        """Take a place after `reject`; a refusal where there is none.

        Turns go round among authenticated tenants only: any other name could be changed with every
        request, and each would have a share of its own.
        """
        may_wait = self.queue.limits.requests and not self.is_closed
        if reject.reason in NOBODY or not may_wait:
            return self.refusal(reject, facts, now_s, priority)
        until_s = facts.alone_until_s(now_s)
        lane = ALONE if until_s is not None else self._lane(facts, is_own=reject.is_own)
        # Others do not wait for the length that a prompt seems to have, but for what is computed.
        # Its tenant pays for the most that it can be: else it would have all turns by seeming long.
        fleet, seems, model = self._router.known.fleet, facts.prompt_tokens, facts.model
        tokens, charged = fleet.computed(seems, model), fleet.most_computed(seems, model)
        queued = QueuedRequest(facts, lane, priority, tokens, charged, size_bytes, on_settled)
        offer = self.queue.offer(queued, reject.wait_s, reject.drain_tps, now_s, self.most_s)
        if offer.refused is not None:
            return self.refusal(replace(reject, reason=offer.refused), facts, now_s, priority)
        for displaced in offer.displaced:
            assert isinstance(displaced, QueuedRequest)
            self._refuse(displaced, RejectReason.QUEUE_FULL, now_s)
        self._note(lane, reject)
        if until_s is not None:
            self._alone[queued] = min(until_s, now_s + reject.wait_s)
        return queued

    def longest(self, now_s: float) -> tuple[float, Reject] | None:
        """Wait of the oldest request, and its refusal; None: no request waits.

        Requests that wait alone say nothing of the instances.
        """
        oldest = self.queue.oldest()
        if self._alone:
            others = [entry for entry in self.queue.entries() if entry.lane != ALONE]
            oldest = min(others, key=lambda entry: entry.queued_s, default=None)
        if oldest is None:
            return None
        return now_s - oldest.queued_s, self._ramp(oldest.lane).reject

    def backlog_s(self, now_s: float) -> dict[str, float]:
        """Per served model the seconds in which one instance would compute what is to be computed.

        These are this process's own prefills under way, and the waiting prompts of the model. An
        instance with several models is behind with all of them. Models without a name in metrics
        (`NamedModels`) are one, with the most of any of them.
        """
        named = self._named.of(self._router.known.fleet.members(), now_s)
        told: dict[str, float] = {}
        for model, seconds in self._backlog_s().items():
            name = model if model in named else OTHERS
            told[name] = max(told.get(name, 0.0), seconds)
        return told

    def _backlog_s(self) -> dict[str, float]:
        known = self._router.known
        reserved_s: dict[str, float] = {}
        tps: dict[str, list[float]] = {}
        for member in known.fleet.members():
            name, models = member.instance.name, member.models or ()
            own_s = math.fsum([one[1] for one in known.latency.of(name).own_pending()])
            rate = known.latency.prefill_tps(name)
            for model in models:
                reserved_s[model] = reserved_s.get(model, 0.0) + own_s
                tps.setdefault(model, []).append(rate)
        for entry in self.queue.entries():
            assert isinstance(entry, QueuedRequest)
            model = entry.facts.model
            if rates := tps.get(model):
                reserved_s[model] += entry.tokens * len(rates) / math.fsum(rates)
        return reserved_s

    def expire(self, queued: QueuedRequest, now_s: float) -> None:
        """A request's time in the queue is over: refuse it."""
        if queued.result is None:
            self._refuse(queued, RejectReason.QUEUE_TIMEOUT, now_s)

    def leave(self, queued: QueuedRequest) -> None:
        """Take a request out of the queue, however its wait ended."""
        self.queue.leave(queued)
        self._alone.pop(queued, None)
        if not len(self.queue):
            self._ramps.clear()

    def close(self, retry_after_s: int) -> None:
        """Drain: refuse all waiting requests, and accept no further ones."""
        self.is_closed = True
        for entry in self.queue.entries():
            self.queue.leave(entry)
            assert isinstance(entry, QueuedRequest)
            entry.settle(Reject(RejectReason.DRAINING, retry_after_s))
        self._ramps.clear()
        self._alone.clear()

    @property
    def is_in_pass(self) -> bool:
        """Whether the last look has left lanes for the next one."""
        return self._blocked is not None

    def look(self, now_s: float, most: int | None = None) -> None:
        """Admit waiting requests, of each lane until the router rejects one.

        At most `most` are tried. A pass over all lanes then goes on at the next look, so that no
        lane is passed over for those before it.
        """
        if self._blocked is None:
            self._begin_pass(now_s)
        blocked = self._blocked or {ALONE}
        tries = 0
        while (entry := self.queue.next(blocked, now_s)) is not None:
            if tries == most:
                self._blocked = blocked
                return
            tries += 1
            assert isinstance(entry, QueuedRequest)
            self._try(entry, blocked, now_s)
        self._blocked = None

    def _begin_pass(self, now_s: float) -> None:
        if (changes := self._router.known.fleet.model_changes) != self._model_changes:
            self._model_changes = changes
            self._sort_lanes()
        self._join_others(now_s)

    def _try(self, entry: QueuedRequest, blocked: set[str], now_s: float) -> None:
        """Admit one, or add its lane to those that are blocked."""
        ramp = self._ramp(entry.lane)
        if not ramp.may_try(now_s, self.queue.limits.requests):
            blocked.add(entry.lane)
            return
        answer = self._router.admit(entry.facts, now_s)
        if isinstance(answer, Route):
            ramp.trials -= 1
            self.queue.served(entry, now_s)
            entry.settle(answer)
        elif answer.reason in NOBODY:
            self.queue.leave(entry)
            entry.settle(answer)
        elif entry.facts.refused_until_s is not None:
            entry.facts.refused_until_s = None  # it must not hold up those behind it
        else:
            if answer.is_own:
                self._move(entry, self._lane(entry.facts, is_own=True))
            self._note(entry.lane, answer)
            blocked.add(entry.lane)

    def _join_others(self, now_s: float) -> None:
        """Have the requests wait among the others that have waited alone for long enough."""
        for queued in [q for q, until_s in self._alone.items() if until_s <= now_s]:
            del self._alone[queued]
            if queued.is_waiting:
                self._move(queued, self._router.known.lane(queued.facts.model))

    def _sort_lanes(self) -> None:
        """Have each request wait where its model belongs by now."""
        for entry in self.queue.entries():
            assert isinstance(entry, QueuedRequest)
            if entry not in self._alone:
                self._move(entry, self._lane(entry.facts, is_own=ALONE in entry.lane))

    def _move(self, queued: QueuedRequest, lane: str) -> None:
        if lane == queued.lane:
            return
        self._ramps.setdefault(lane, _Ramp(self._ramp(queued.lane).reject))
        self.queue.move(queued, lane)

    def next_look_s(self, now_s: float) -> float | None:
        """When the passing of time alone may admit a request; None: no such time is known."""
        if not len(self.queue):
            return None
        at_s = min(self._alone.values(), default=math.inf)
        if (change_s := self._router.known.gate.next_change_s(now_s)) is not None:
            at_s = min(at_s, change_s)
        spent = [r.until_s for r in self._ramps.values() if r.trials <= 0 and now_s < r.until_s]
        at_s = min(at_s, *spent) if spent else at_s
        return at_s if math.isfinite(at_s) else None

    def _refuse(self, queued: QueuedRequest, reason: RejectReason, now_s: float) -> None:
        self.queue.leave(queued)
        reject = replace(self._ramp(queued.lane).reject, reason=reason)
        queued.settle(self.refusal(reject, queued.facts, now_s, queued.priority))

    def _ramp(self, lane: str) -> _Ramp:
        return self._ramps.get(lane) or _Ramp(_FULL)

    def _note(self, lane: str, reject: Reject) -> None:
        """Keep why the lane's next request was rejected; the same object changes nothing."""
        ramp = self._ramps.get(lane)
        if ramp is None:
            if len(self._ramps) > 2 * len(self.queue):
                self._ramps = {n: r for n, r in self._ramps.items() if self.queue.has(n)}
            self._ramps[lane] = _Ramp(reject)
        elif reject is not ramp.reject:
            ramp.reject, ramp.batch = reject, TRIALS


def _number(facts: RequestFacts) -> int:
    """A number that a request and its retry share: of the session and the prompt's last block.

    A prompt shorter than a block has its length instead.
    """
    hashes = facts.block_hashes
    prompt = hashes[-1] if hashes else facts.prompt_tokens
    return hash((facts.model, facts.tenant, facts.session_id, prompt))
