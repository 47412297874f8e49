"""The router and N engine models on one virtual clock: a trace of hours in seconds of CPU time.

The driver takes the place of the proxy's IO: it performs the actions of each request's flow
(`proxy.core.routing.request_flow`) on engine models, and reports their results to the flow as
events. Hedges, fall-backs, retries, time limits and the wait queue are the proxy's own code. Engine
reports come at every scrape. Network and proxy take no time unless given some (`IntakeCost`,
`WayNoise`). No clock or random number is used: equal loads give equal rows.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count

from proxy.core.admission.engine_reports import EngineKv
from proxy.core.fleet.retries import Budget
from proxy.core.routing.actions import (
    Action,
    AwaitHedge,
    CancelHedge,
    CancelPrefill,
    GiveUp,
    LegCaps,
    LegFailure,
    LegLimit,
    Pause,
    SendDecode,
    SendHedge,
    SendPrefill,
)
from proxy.core.routing.request_flow import (
    RequestFlow,
    State,
)
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.routing.waiting import QueuedRequest, Waiting
from proxy.core.types import FailureKind, Fallback, Instance, Reject, RequestFacts
from replayer.engine.engine import Engine, deliver
from replayer.engine.types import (
    Event,
    Finished,
    FirstToken,
    Job,
    RemoteKv,
    SimRequest,
)
from replayer.virtual.arrivals import Planned
from replayer.virtual.heat import TICK_S, HeatOptions, HeatRow, VirtualHeat
from replayer.virtual.hooks import Hooks
from replayer.virtual.requests import (
    VirtualOptions,
    VirtualRow,
    VirtualRun,
    Waits,
    facts_of,
    new_row,
    note,
)

PAUSE_RATIO = 0.5
"""Random part of the pause before a retry: its mean, so that equal runs are equal."""
BYTES_PER_TOKEN = 4
"""Bytes of a request's body per token, for the queue's limit on bytes."""
HARDLY_LATER_S = 0.001
"""Margin so that the timer fires after a report has expired, not exactly when it does."""
_WITH_P = frozenset({State.PREFILLING, State.HEDGED})
_UNANSWERED = _WITH_P | {State.FETCHING, State.COMPUTING}
GROW_TOKENS = 64
"""Output is charged at scrapes, in steps of at least this many tokens; the proxy charges each
token."""


class Kind(IntEnum):
    """What a timer is for: an arrival, a limit, a scrape, a look, an engine's coming, control."""

    ARRIVAL = 0
    GIVE_UP = 1
    LEG_LATE = 2
    SCRAPE = 3
    PREFILL_LATE = 4
    PAUSE_OVER = 5
    SETTLED = 6
    QUEUE_OVER = 7
    LOOK = 8
    JOIN = 9
    CONTROL = 10


def _no_limit() -> LegLimit:
    return LegLimit("", math.inf, math.inf)


@dataclass(slots=True, eq=False)
class LiveLeg:
    """A leg that an engine works on; `number` distinguishes it from the request's others."""

    number: int = 0
    engine: int = 0
    request: SimRequest | None = None
    limit: LegLimit = field(default_factory=_no_limit)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between arrival and end; `leg` is its current leg.

    `hedge`: the leg on D while P is late. `sent`: legs so far. `is_in_service`: the proxy has the
    request and has not refused it.
    """

    index: int
    row: VirtualRow
    facts: RequestFacts
    route: Route | None = None
    flow: RequestFlow | None = None
    queued: QueuedRequest | None = None
    admitted_s: float = 0.0
    leg: LiveLeg = field(default_factory=LiveLeg)
    hedge: LiveLeg = field(default_factory=LiveLeg)
    sent: int = 0
    charged_tokens: int = 0
    is_in_service: bool = False

    @property
    def transfer_id(self) -> str:
        """The id of the request's only hand-over."""
        return f"xfer-{self.index}"


def job_of(
    live: LiveRequest,
    output_tokens: int,
    *,
    send_as: str | None = None,
    fetch: RemoteKv | None = None,
    way_s: float = 0.0,
) -> Job:
    """The engine's job: a prefill leg, a decode leg that fetches, or the whole request."""
    return Job(
        request_id=f"{live.index}.{live.sent}",
        prompt_tokens=live.row.prompt_tokens,
        block_hashes=live.facts.block_hashes,
        output_tokens=output_tokens,
        send_as=send_as,
        fetch=fetch,
        way_s=way_s,
    )


class VirtualFleet:
    """One run. `router` gets the instances `e0`, `e1`, ...; `observers` are called by `Hooks`.

    `heat`: thermal control of the run; None for none.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        router: Router,
        options: VirtualOptions,
        observers: Sequence[object] = (),
        heat: HeatOptions | None = None,
    ) -> None:
        self.router = router
        self.options = options
        self.engines = [Engine(one) for one in options.engines]
        self.names = [f"e{number}" for number in range(len(self.engines))]
        self._planned = planned
        self._hooks = Hooks([router, *observers])
        self._by_name = dict(zip(self.names, self.engines, strict=True))
        self._place = {engine: number for number, engine in enumerate(self.engines)}
        self._due_s = [math.inf] * len(self.engines)
        self._dirty: set[int] = set()
        self._heap: list[tuple[float, int, Kind, LiveRequest | int, int]] = []
        self._order = count()
        self._legs: dict[SimRequest, LiveRequest] = {}
        self._waiting = Waiting(router, options.queue)
        self._is_woken = False
        self._now_s = 0.0
        self.budget = Budget()
        self._waits = Waits(planned)
        self._rows: list[VirtualRow | None] = [None] * len(planned)
        self._left = len(planned)
        self._run = VirtualRun([])
        self._heat = None if heat is None else VirtualHeat(heat, router, self._by_name)
        for number, join_s in enumerate(options.joins_s or [0.0] * len(self.names)):
            if join_s:
                self._at(join_s, Kind.JOIN, number)
            else:
                self._join(number)

    @property
    def heat_rows(self) -> list[HeatRow]:
        """Each engine at each control tick so far."""
        return [] if self._heat is None else self._heat.rows

    def run(self) -> VirtualRun:
        """Run the whole load to its end."""
        for index, waiting in enumerate(self._waits.open):
            if not waiting:
                self._at(self._waits.ready_s[index], Kind.ARRIVAL, index)
        self._at(0.0, Kind.SCRAPE, 0)
        if self._heat is not None:
            self._at(0.0, Kind.CONTROL, 0)
        # `self._heap` is read anew in each round: an experiment's branch replaces it.
        while self._left:
            due_s = min(self._due_s)
            now_s = min(self._heap[0][0], due_s)
            if now_s > self.options.until_s:
                break
            while self._heap and self._heap[0][0] <= now_s:
                _at_s, _order, kind, what, number = heapq.heappop(self._heap)
                self._handle(kind, what, number, now_s)
            self._now_s = now_s
            if due_s <= now_s:
                self._dirty.update([n for n, at_s in enumerate(self._due_s) if at_s <= now_s])
            self._settle(now_s)
        return self._result()

    def _join(self, number: int) -> None:
        name = self.names[number]
        self.router.add(Instance(name, f"http://{name}", f"http://{name}:8998"))

    def _settle(self, now_s: float) -> None:
        """Process all that follows at this moment: engines' events, then the queue's."""
        while self._dirty:
            self._advance(self._dirty.pop(), now_s)
        if self._is_woken:
            self._look(now_s)

    def _at(self, at_s: float, kind: Kind, what: LiveRequest | int, number: int = 0) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), kind, what, number))

    def _handle(self, kind: Kind, what: LiveRequest | int, number: int, now_s: float) -> None:
        if kind is Kind.SCRAPE:
            self._scrape(now_s)
        elif kind is Kind.CONTROL and self._heat is not None:
            self._heat.tick(now_s, len(self._waiting.queue))
            self._at(now_s + TICK_S, Kind.CONTROL, 0)
        elif kind is Kind.LOOK:
            self._is_woken = True
        elif kind is Kind.JOIN and isinstance(what, int):
            self._join(what)
        elif isinstance(what, int):
            self._arrive(what, now_s)
        elif what.row.outcome == "ok":
            self._handle_request(kind, what, number, now_s)

    def _handle_request(self, kind: Kind, live: LiveRequest, number: int, now_s: float) -> None:
        if kind is Kind.ARRIVAL:
            self._admit(live, now_s)
        elif kind is Kind.SETTLED:
            self._settled(live, now_s)
        elif kind is Kind.GIVE_UP:
            self._give_up(live, now_s)
        elif kind is Kind.QUEUE_OVER:
            if live.queued is not None:
                self._waiting.expire(live.queued, now_s)
        elif live.flow is not None:
            self._time_is_up(kind, live, live.flow, number, now_s)

    def _time_is_up(
        self, kind: Kind, live: LiveRequest, flow: RequestFlow, number: int, now_s: float
    ) -> None:
        """Handle the end of a pause, a P that is late for a hedge, or a leg at its limit."""
        if kind is Kind.PAUSE_OVER:
            self._perform(live, flow.pause_over(now_s, PAUSE_RATIO), now_s)
        elif kind is Kind.PREFILL_LATE:
            if flow.state is State.PREFILLING and number == live.leg.number:
                self._perform(live, flow.prefill_late(now_s), now_s)
        elif number == live.leg.number and flow.state in _UNANSWERED:
            self._leg_late(live, flow, live.leg, now_s)
        elif number == live.hedge.number and flow.state is State.HEDGED:
            self._leg_late(live, flow, live.hedge, now_s)

    def _leg_late(self, live: LiveRequest, flow: RequestFlow, leg: LiveLeg, now_s: float) -> None:
        """As in the proxy: a limit below the cap only counts if another instance may be asked."""
        limit, is_prefill = leg.limit, leg is live.leg and flow.state in _WITH_P
        if limit.seconds < limit.cap_s and not flow.has_other():
            leg.limit = LegLimit(limit.option, limit.cap_s, limit.cap_s)
            rest_s = limit.cap_s - limit.seconds
            self._at(now_s + rest_s, Kind.LEG_LATE, live, leg.number)
            return
        self._abort(leg, now_s)
        failure = LegFailure(limit.kind, "late")
        if is_prefill:
            actions = flow.prefill_failed(Fallback.P_TIMEOUT, now_s, failure)
        elif leg is live.hedge:
            actions = flow.hedge_failed(failure, now_s)
        else:
            actions = flow.decode_failed(failure, now_s, PAUSE_RATIO)
        self._perform(live, actions, now_s)

    def _advance(self, number: int, now_s: float) -> None:
        engine = self.engines[number]
        for event in engine.advance(now_s):
            self._dispatch(event, engine, now_s)
        self._due_s[number] = engine.next_event_s()

    def _dispatch(self, event: Event, engine: Engine, now_s: float) -> None:
        if isinstance(event, FirstToken):
            live = self._legs.get(event.request)
            if live is not None and live.flow is not None:
                self._first_token(live, live.flow, event.request, now_s)
        elif isinstance(event, Finished):
            live = self._legs.pop(event.request, None)
            if live is not None and live.flow is not None and event.request is live.leg.request:
                self._leg_ended(live, live.flow, event.request, now_s)
        else:
            other = deliver(event, engine, self._by_name, now_s)
            if other is not None:
                self._dirty.add(self._place[other])

    def _arrive(self, index: int, now_s: float) -> None:
        planned = self._planned[index]
        row = self._rows[index] = new_row(index, planned, now_s)
        facts = facts_of(planned, self.options)
        live = LiveRequest(index, row, facts)
        self._at(now_s + self.options.timeout_s, Kind.GIVE_UP, live)
        decided_s = now_s + self.options.proxy.delay_s(planned.turn.prompt_tokens)
        if decided_s > now_s:
            self._at(decided_s, Kind.ARRIVAL, live)
        else:
            self._admit(live, now_s)

    def _admit(self, live: LiveRequest, now_s: float) -> None:
        self.budget.active += not live.is_in_service
        live.is_in_service = True
        waiting, answer = self._waiting, self._waiting.admit(live.facts, now_s)
        if isinstance(answer, Reject):
            size_bytes = live.row.prompt_tokens * BYTES_PER_TOKEN
            queued = waiting.enter(
                live.facts,
                answer,
                now_s,
                lambda: self._at(self._now_s, Kind.SETTLED, live),
                size_bytes=size_bytes,
            )
            if isinstance(queued, QueuedRequest):
                live.queued = queued
                self.router.call_when_freed(self._wake)
                self._at(now_s + waiting.queue.limits.seconds, Kind.QUEUE_OVER, live)
                self._look_later(now_s)
            else:
                self._rejected(live, queued, now_s)
            return
        self._placed(live, answer, now_s)

    def _settled(self, live: LiveRequest, now_s: float) -> None:
        """The request's wait in the queue is over."""
        queued, live.queued = live.queued, None
        if queued is None or queued.result is None:
            return
        self._waiting.leave(queued)
        if not len(self._waiting.queue):
            self.router.call_when_freed(None)
        if isinstance(queued.result, Reject):
            self._rejected(live, queued.result, now_s)
        else:
            self._placed(live, queued.result, now_s)

    def _wake(self) -> None:
        self._is_woken = True

    def _look(self, now_s: float) -> None:
        """Load was freed, or time has passed: admit waiting requests in their order."""
        self._is_woken = False
        self._waiting.look(now_s)
        self._look_later(now_s)

    def _look_later(self, now_s: float) -> None:
        at_s = self._waiting.next_look_s(now_s)
        if at_s is not None:
            self._at(at_s + HARDLY_LATER_S, Kind.LOOK, 0)

    def _rejected(self, live: LiveRequest, reject: Reject, now_s: float) -> None:
        live.row.rejects += 1
        self._left_service(live)
        if self.options.retry_rejects:
            self._at(now_s + reject.retry_after_s, Kind.ARRIVAL, live)
        else:
            self._end(live, "rejected", now_s)

    def _left_service(self, live: LiveRequest) -> None:
        self.budget.active -= live.is_in_service
        live.is_in_service = False

    def _placed(self, live: LiveRequest, route: Route, now_s: float) -> None:
        options = self.options
        caps = LegCaps(
            options.ttft_timeout_s,
            options.prefill_timeout_s,
            options.transfer_timeout_s,
            math.inf,
        )
        live.route, live.admitted_s = route, now_s
        live.flow = RequestFlow(
            self.router, self.budget, live.facts, route, caps, now_s, streams=True
        )
        live.row.predicted_ttft_s = route.predicted_ttft_s
        live.row.estimated_new_tokens = route.new_tokens
        live.row.estimated_hit_ratio = 1.0 - route.new_tokens / live.facts.prompt_tokens
        self._perform(live, live.flow.begin(now_s), now_s)

    def _perform(self, live: LiveRequest, actions: Sequence[Action], now_s: float) -> None:
        """Perform the actions of the request's flow."""
        for action in actions:
            if isinstance(action, SendPrefill | SendDecode | SendHedge):
                self._send(live, action, now_s)
            elif isinstance(action, CancelHedge):
                self._abort(live.hedge, now_s)
            elif isinstance(action, CancelPrefill | AwaitHedge):
                self._abort(live.leg, now_s)
                live.leg, live.hedge = live.hedge, LiveLeg()
            elif isinstance(action, Pause):
                self._at(now_s + action.seconds, Kind.PAUSE_OVER, live)
            elif isinstance(action, GiveUp):
                self._end(live, "failed", now_s)
            else:
                note(live.row, action)

    def _send(
        self, live: LiveRequest, send: SendPrefill | SendDecode | SendHedge, now_s: float
    ) -> None:
        live.sent += 1
        row, leg = live.row, live.hedge if isinstance(send, SendHedge) else live.leg
        way_s = self.options.way.delay_s(live.index, row.session_id, live.sent)
        if isinstance(send, SendPrefill):
            row.prefill = send.instance.name
            job = job_of(live, 1, send_as=live.transfer_id, way_s=way_s)
            if send.hedge_at_s < math.inf:
                self._at(send.hedge_at_s, Kind.PREFILL_LATE, live, live.sent)
        else:
            source = send.fetch_from if isinstance(send, SendDecode) else None
            fetch = RemoteKv(source.name, live.transfer_id) if source else None
            job = job_of(live, row.output_tokens, fetch=fetch, way_s=way_s)
        engine = self._by_name[send.instance.name]
        assert live.flow is not None
        if isinstance(send, SendPrefill):
            live.flow.prefill_sent()
        elif isinstance(send, SendDecode) and send.fetch_from is not None:
            live.flow.decode_sent()
        leg.number, leg.limit, leg.engine = live.sent, send.limit, self._place[engine]
        leg.request = engine.submit(job, now_s)
        self._legs[leg.request] = live
        self._dirty.add(leg.engine)
        self._at(now_s + send.limit.seconds, Kind.LEG_LATE, live, leg.number)

    def _leg_ended(
        self, live: LiveRequest, flow: RequestFlow, leg: SimRequest, now_s: float
    ) -> None:
        live.leg.request = None
        if flow.state in _WITH_P:
            live.row.computed_tokens += leg.prompt_computed_tokens
            found = leg.local_hit_tokens / leg.job.prompt_tokens
            actions = flow.prefill_answered(now_s, found)
            self._hooks.prefill_done(flow.route, live.facts, leg, now_s)
            self._perform(live, actions, now_s)
        elif leg.finish_reason == "error" and flow.state in _UNANSWERED:
            failure = LegFailure(FailureKind.SERVER_ERROR, "the KV did not come")
            self._perform(live, flow.decode_failed(failure, now_s, PAUSE_RATIO), now_s)
        elif leg.finish_reason == "error":
            self._end(live, "failed", now_s)
        else:
            self._finish(live, flow, leg, now_s)

    def _first_token(
        self, live: LiveRequest, flow: RequestFlow, leg: SimRequest, now_s: float
    ) -> None:
        if leg is live.hedge.request and flow.state is State.HEDGED:
            self._perform(live, flow.hedge_answered(now_s), now_s)
        elif leg is live.leg.request and flow.state in _UNANSWERED - _WITH_P:
            self._perform(live, flow.decode_answered(now_s), now_s)
        else:
            return
        row = live.row
        row.ttft_s = now_s - row.arrival_s
        row.cached_tokens, row.external_tokens = leg.local_hit_tokens, leg.external_tokens
        row.computed_tokens += leg.prompt_computed_tokens
        flow.first_token(now_s)
        self._hooks.first_token(flow.route, live.facts, now_s - live.admitted_s, leg, now_s)

    def _finish(self, live: LiveRequest, flow: RequestFlow, leg: SimRequest, now_s: float) -> None:
        live.row.end_s = now_s
        flow.completed(leg.local_hit_tokens / leg.job.prompt_tokens)
        self._hooks.finish(flow.route, live.facts, leg, now_s)
        self._end(live, "ok", now_s)

    def _give_up(self, live: LiveRequest, now_s: float) -> None:
        """The client's time limit for a first token is over."""
        if live.row.ttft_s is None and live.row.outcome == "ok" and live.row.end_s is None:
            if live.queued is not None:
                self._waiting.leave(live.queued)
                live.queued = None
            if live.route is not None:
                self._hooks.failed(live.route, live.facts, now_s)
            self._end(live, "timeout", now_s)

    def _abort(self, leg: LiveLeg, now_s: float) -> None:
        request, leg.request = leg.request, None
        if request is not None:
            self._legs.pop(request, None)
            self.engines[leg.engine].abort(request, now_s)
            self._dirty.add(leg.engine)

    def _end(self, live: LiveRequest, outcome: str, now_s: float) -> None:
        row, route = live.row, live.route
        row.outcome = outcome
        self._left_service(live)
        for leg in (live.leg, live.hedge):
            self._abort(leg, now_s)
        if route is not None and live.flow is not None:
            row.route_class, row.reason = route.route_class.value, route.reason.value
            row.decode = route.decode.name
            live.flow.end(now_s, row.output_tokens if outcome == "ok" else None)
        self._left -= 1
        self._run.makespan_s = now_s
        for index in self._waits.ended(live.index, now_s):
            self._at(self._waits.ready_s[index], Kind.ARRIVAL, index)

    def _scrape(self, now_s: float) -> None:
        """Report to the router what scrapes and streams would: KV in use, and output tokens so far.

        As of each engine's last event: asking for the present would cut its closed-form decode
        runs.
        """
        for name, engine in self._by_name.items():
            pool = engine.pool
            if self.options.reports_kv:
                tokens = pool.total * engine.options.block_size
                self.router.gate.observe_engine(name, EngineKv(tokens, pool.usage_ratio), now_s)
            self._run.used_ratio.append(pool.usage_ratio)
            member = self.router.fleet.get(name)
            if member is not None and member.health.trial_due(now_s):
                self.router.events.trial_ended(name, None, now_s)
        for leg, live in self._legs.items():
            grown = leg.output_tokens - live.charged_tokens
            if grown >= GROW_TOKENS and live.row.ttft_s is not None and live.route is not None:
                live.route.lease.grow(grown)
                live.charged_tokens = leg.output_tokens
        self._at(now_s + self.options.scrape_interval_s, Kind.SCRAPE, 0)

    def _result(self) -> VirtualRun:
        run = self._run
        run.rows = [row for row in self._rows if row is not None]
        run.preemptions = sum(engine.counters.preemptions for engine in self.engines)
        run.evicted_blocks = sum(engine.pool.evicted_blocks for engine in self.engines)
        run.moved_bytes = sum(engine.sender.bytes_sent for engine in self.engines)
        run.drift = self.router.ledger.drift()
        return run


def simulate(
    planned: Sequence[Planned],
    router: Router,
    options: VirtualOptions,
    observers: Sequence[object] = (),
) -> VirtualRun:
    """Run the load through a fresh router; `observers` may have any of the hooks."""
    return VirtualFleet(planned, router, options, observers).run()
