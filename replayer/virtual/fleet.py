"""The router and N engine models on one virtual clock: a trace of hours in seconds of CPU time.

The driver replaces the proxy's IO. It performs the steps of each request's flow
(`proxy.core.routing.request_flow`) on engine models, and reports the results to the flow as events.
Hedges, fall-backs, retries, time limits, moves of streams and the wait queue are the proxy's own
code. Engine reports come at every scrape, and probes of engines that have died. Network and proxy
take no time unless given some (`IntakeCost`, `WayNoise`). No clock or random number is used: equal
loads give equal rows.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count

from proxy.core.accounts.engine_reports import EngineKv
from proxy.core.admission.queue import QueueLimits
from proxy.core.fleet.health import Change
from proxy.core.fleet.retries import Budget
from proxy.core.routing.actions import (
    AwaitHedge,
    CancelHedge,
    CancelPrefill,
    Effect,
    GiveUp,
    InstanceFailed,
    LegCaps,
    LegFailure,
    LegLimit,
    NotMoved,
    Pause,
    SendDecode,
    SendHedge,
    SendPrefill,
    Step,
)
from proxy.core.routing.evictions import Running
from proxy.core.routing.request_flow import (
    RequestFlow,
    State,
)
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.routing.time_limits import look_again_s
from proxy.core.routing.waiting import QueuedRequest, Waiting
from proxy.core.thermal.victims import Victim
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
from replayer.virtual.heat import TICK_S, HeatRow, VirtualHeat
from replayer.virtual.hooks import Hooks
from replayer.virtual.replicas import Replicas
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
_AWAITED = _UNANSWERED | {State.MOVING}
DIED = LegFailure(FailureKind.RESET, "the engine died")
REFUSED = LegFailure(FailureKind.CONNECT, "nobody listens")
OFF, NO_TOKEN = "migration is off", "it has no token yet"
GROW_TOKENS = 64
"""Output is charged at scrapes, in steps of at least this many tokens; the proxy charges each
token."""


class Kind(IntEnum):
    """The purpose of a timer: an arrival, a limit, a scrape, a look, an engine's life, control.

    SHARE: an exchange between fronts. PLAN, START and GONE are those of a fleet that scales
    (`replayer.virtual.scaling`).
    """

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
    LOSS = 11
    BACK = 12
    PLAN = 13
    START = 14
    GONE = 15
    SHARE = 16


def _no_limit() -> LegLimit:
    return LegLimit("", math.inf, math.inf)


@dataclass(slots=True, eq=False)
class LiveLeg:
    """A leg that an engine works on; `number` distinguishes it from the request's others.

    `behind`: tokens of output that were its prompt's end, as an earlier leg had brought them.
    """

    number: int = 0
    behind: int = 0
    engine: int = 0
    request: SimRequest | None = None
    limit: LegLimit = field(default_factory=_no_limit)


class Front:
    """One proxy in front of the engines: what it knows, its queue, its budget of retries.

    `observers` are called by `Hooks`.
    """

    def __init__(
        self, number: int, router: Router, queue: QueueLimits, observers: Sequence[object] = ()
    ) -> None:
        self.number = number
        self.router, self.known = router, router.known
        self.waiting = Waiting(router, queue)
        self.budget = Budget()
        self.hooks = Hooks([router, *observers])
        self.is_woken = False

    def wake(self) -> None:
        """Something has changed that may let a waiting request in."""
        self.is_woken = True


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between arrival and end, at one front."""

    index: int
    row: VirtualRow
    facts: RequestFacts
    front: Front
    route: Route | None = None
    flow: RequestFlow | None = None
    queued: QueuedRequest | None = None
    admitted_s: float = 0.0
    leg: LiveLeg = field(default_factory=LiveLeg)
    """Its current leg."""
    hedge: LiveLeg = field(default_factory=LiveLeg)
    """The leg on D while P is late."""
    old: LiveLeg = field(default_factory=LiveLeg)
    """The leg where the stream still runs while it migrates."""
    sent: int = 0
    """Legs so far."""
    charged_tokens: int = 0
    """Output of the present leg that its lease has."""
    shown: int = 0
    """Output that the client has, as of the last loss or migration."""
    is_in_service: bool = False
    """The proxy has the request and has not refused it."""
    hot_moves: int = 0
    """Migrations for heat."""
    hot_moved_s: float = -math.inf
    """Time of the last one."""

    @property
    def transfer_id(self) -> str:
        """The id of the request's only hand-over."""
        return f"xfer-{self.index}"

    def note_shown(self, leg: SimRequest) -> None:
        """The client has what the present leg has brought."""
        self.shown = max(self.shown, self.leg.behind + leg.output_tokens)


def job_of(
    live: LiveRequest,
    output_tokens: int,
    *,
    send_as: str | None = None,
    fetch: RemoteKv | None = None,
    way_s: float = 0.0,
) -> Job:
    """The engine's job: a prefill leg, a decode leg that fetches, or all that is left."""
    return Job(
        request_id=f"{live.index}.{live.sent}",
        prompt_tokens=live.row.prompt_tokens + live.shown,
        block_hashes=live.facts.block_hashes,
        output_tokens=output_tokens,
        send_as=send_as,
        fetch=fetch,
        way_s=way_s,
    )


class VirtualFleet:
    """One run. `router` gets the instances `e0`, `e1`, ...; `observers` are called by `Hooks`.

    `others`: further proxies in front of the same engines, each with observers of its own.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        router: Router,
        options: VirtualOptions,
        observers: Sequence[object] = (),
        others: Sequence[tuple[Router, Sequence[object]]] = (),
    ) -> None:
        self.router, self.known = router, router.known
        self.options = options
        self.engines = [Engine(one) for one in options.engines]
        self.names = [f"e{number}" for number in range(len(self.engines))]
        self._planned = planned
        fronts = enumerate([(router, observers), *others])
        self.fronts = [Front(number, one, options.queue, seen) for number, (one, seen) in fronts]
        self._by_name = dict(zip(self.names, self.engines, strict=True))
        self._place = {engine: number for number, engine in enumerate(self.engines)}
        self._due_s = [math.inf] * len(self.engines)
        self._dirty: set[int] = set()
        self._heap: list[tuple[float, int, Kind, LiveRequest | int, int]] = []
        self._order = count()
        self._legs: dict[SimRequest, LiveRequest] = {}
        self._now_s = 0.0
        self._waits = Waits(planned)
        self._rows: list[VirtualRow | None] = [None] * len(planned)
        self._left = len(planned)
        self._run = VirtualRun([])
        self._heat = (
            None if options.heat is None else VirtualHeat(options.heat, router, self._by_name)
        )
        self._gone: set[str] = set()
        """Engines that have died, until the proxy has them back."""
        self._unseen: set[str] = set()
        """Lost engines whose successor has not reported yet."""
        self._replicas = Replicas(options.replicas, [front.router for front in self.fronts])
        for number, start_s in enumerate(self._replicas.starts_s):
            self._at(start_s, Kind.SHARE, number)
        for loss in options.losses:
            self._at(loss.at_s, Kind.LOSS, loss.engine)
            self._at(loss.back_s, Kind.BACK, loss.engine)
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
        for front in self.fronts:
            front.known.add(Instance(name, f"http://{name}", f"http://{name}:8998"))

    def _settle(self, now_s: float) -> None:
        """Process all that follows at this moment: engines' events, then the queue's."""
        while self._dirty:
            self._advance(self._dirty.pop(), now_s)
        for front in self.fronts:
            if front.is_woken:
                self._look(front, now_s)

    def _at(self, at_s: float, kind: Kind, what: LiveRequest | int, number: int = 0) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), kind, what, number))

    def _handle(self, kind: Kind, what: LiveRequest | int, number: int, now_s: float) -> None:
        if kind is Kind.SCRAPE:
            self._scrape(now_s)
        elif kind is Kind.CONTROL and self._heat is not None:
            self._heat.tick(now_s, len(self.fronts[0].waiting.queue), self)
            self._at(now_s + TICK_S, Kind.CONTROL, 0)
        elif isinstance(what, int):
            self._handle_number(kind, what, now_s)
        elif what.row.outcome == "ok":
            self._handle_request(kind, what, number, now_s)

    def _handle_number(self, kind: Kind, number: int, now_s: float) -> None:
        """Handle what happens to an engine, or a request's arrival."""
        if kind is Kind.JOIN:
            self._join(number)
        elif kind is Kind.LOSS:
            self._lose(number, now_s)
        elif kind is Kind.BACK:
            self._bring_back(number, now_s)
        elif kind is Kind.LOOK:
            self.fronts[number].wake()
        elif kind is Kind.SHARE:
            self._at(self._replicas.tick(number, now_s), Kind.SHARE, number)
        else:
            self._arrive(number, now_s)

    def _handle_request(self, kind: Kind, live: LiveRequest, number: int, now_s: float) -> None:
        if kind is Kind.ARRIVAL:
            self._admit(live, now_s)
        elif kind is Kind.SETTLED:
            self._settled(live, now_s)
        elif kind is Kind.GIVE_UP:
            self._give_up(live, now_s)
        elif kind is Kind.QUEUE_OVER:
            if live.queued is not None:
                live.front.waiting.expire(live.queued, now_s)
        elif live.flow is not None:
            self._time_is_up(kind, live, live.flow, number, now_s)

    def _time_is_up(
        self, kind: Kind, live: LiveRequest, flow: RequestFlow, number: int, now_s: float
    ) -> None:
        """Handle the end of a pause, a P that is late for a hedge, or a leg at its limit."""
        if kind is Kind.PAUSE_OVER:
            self._go_on(live, flow.pause_over(now_s, PAUSE_RATIO), now_s)
        elif kind is Kind.PREFILL_LATE:
            if flow.state is State.PREFILLING and number == live.leg.number:
                beside = flow.prefill_late(now_s)
                if beside is not None:
                    self._send(live, beside, now_s)
        elif number == live.leg.number and flow.state in _AWAITED:
            self._leg_late(live, flow, live.leg, now_s)
        elif number == live.hedge.number and flow.state is State.HEDGED:
            self._leg_late(live, flow, live.hedge, now_s)

    def _leg_late(self, live: LiveRequest, flow: RequestFlow, leg: LiveLeg, now_s: float) -> None:
        """Apply a limit as the proxy does: below the cap only if another instance may be tried."""
        limit = leg.limit
        if limit.seconds < limit.cap_s and not flow.has_other(now_s):
            later_s = look_again_s(limit.seconds, limit.cap_s)
            leg.limit = LegLimit(limit.option, later_s, limit.cap_s)
            self._at(now_s + later_s - limit.seconds, Kind.LEG_LATE, live, leg.number)
            return
        self._abort(leg, now_s)
        failure = LegFailure(limit.kind, "late")
        self._failed(live, flow, leg, failure, Fallback.P_TIMEOUT, now_s)

    def _failed(
        self,
        live: LiveRequest,
        flow: RequestFlow,
        leg: LiveLeg,
        failure: LegFailure,
        why: Fallback,
        now_s: float,
    ) -> None:
        """Tell the flow that a leg has failed before its first token; `why`: where it is P's."""
        if leg is live.hedge:
            self._perform(live, flow.hedge_failed(failure, now_s), now_s)
        elif flow.state in _WITH_P:
            self._go_on(live, flow.prefill_failed(why, now_s, failure), now_s)
        elif flow.state is State.MOVING:
            self._go_on(live, flow.move_failed(failure, live.shown, math.inf, now_s), now_s)
        else:
            self._go_on(live, flow.decode_failed(failure, now_s, PAUSE_RATIO), now_s)

    def _lose(self, number: int, now_s: float) -> None:
        """An engine dies with all that it holds; what runs there fails at once."""
        self._advance(number, now_s)
        name, engine = self.names[number], self.engines[number]
        del self._by_name[name]
        self._gone.add(name)
        self._unseen.add(name)
        self._due_s[number] = math.inf
        self._count(engine)
        for request, live in list(self._legs.items()):
            if self._legs.get(request) is live and live.flow is not None:
                for leg in (live.leg, live.hedge, live.old):
                    if leg.request is request and leg.engine == number:
                        self._leg_died(live, live.flow, leg, request, now_s)
                        break

    def _leg_died(
        self, live: LiveRequest, flow: RequestFlow, leg: LiveLeg, request: SimRequest, now_s: float
    ) -> None:
        del self._legs[request]
        leg.request = None
        if leg is live.old:
            return
        if leg is live.hedge or flow.state in _AWAITED:
            self._failed(live, flow, leg, DIED, Fallback.P_ERROR, now_s)
            return
        live.note_shown(request)
        self._stream_lost(live, flow, now_s)

    def _stream_lost(self, live: LiveRequest, flow: RequestFlow, now_s: float) -> None:
        self._go_on(live, flow.stream_lost(live.shown, math.inf, now_s, DIED), now_s)

    def _bring_back(self, number: int, now_s: float) -> None:
        """Another engine answers where one has died, with nothing cached."""
        engine = Engine(self.options.engines[number], now_s)
        self.engines[number] = self._by_name[self.names[number]] = engine
        self._place[engine] = number

    def _count(self, engine: Engine) -> None:
        """Add an engine's totals to those of the run."""
        self._run.preemptions += engine.counters.preemptions
        self._run.evicted_blocks += engine.pool.evicted_blocks
        self._run.moved_bytes += engine.sender.bytes_sent

    def _probe_gone(self, now_s: float) -> None:
        """Probe what has died, until it answers and is used again by every front."""
        for name in sorted(self._gone):
            if name in self._by_name:
                up = [self._is_up_again(front, name, now_s) for front in self.fronts]
                self._unseen.discard(name)
                if all(up):
                    self._gone.discard(name)
                continue
            for front in self.fronts:
                events = front.known.events
                if events.probe_failed(name, "refused", now_s, is_refused=True) is Change.GONE:
                    self._peer_gone(front, name, now_s)

    def _is_up_again(self, front: Front, name: str, now_s: float) -> bool:
        """A probe of a front is answered by an engine that had died; whether it is used again."""
        if name in self._unseen:
            front.known.events.restarted(name, now_s)
        front.known.events.probe_answered(name, now_s)
        member = front.known.fleet.get(name)
        return member is not None and member.health.is_up

    def _peer_gone(self, front: Front, name: str, now_s: float) -> None:
        """End the legs of a front that fetch KV from an instance that is gone."""
        gone = LegFailure(FailureKind.PEER_GONE, "the peer is gone")
        for live in list(self._legs.values()):
            flow = live.flow
            if flow is None or flow.state is not State.FETCHING or live.front is not front:
                continue
            if flow.route.prefill is not None and flow.route.prefill.name == name:
                self._abort(live.leg, now_s)
                self._failed(live, flow, live.leg, gone, Fallback.P_GONE, now_s)

    def _advance(self, number: int, now_s: float) -> None:
        engine = self.engines[number]
        if self._by_name.get(self.names[number]) is not engine:
            return  # it has died
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
        live = LiveRequest(index, row, facts, self.fronts[self._replicas.place(planned, index)])
        self._at(now_s + self.options.timeout_s, Kind.GIVE_UP, live)
        decided_s = now_s + self.options.proxy.delay_s(planned.turn.prompt_tokens)
        if decided_s > now_s:
            self._at(decided_s, Kind.ARRIVAL, live)
        else:
            self._admit(live, now_s)

    def _admit(self, live: LiveRequest, now_s: float) -> None:
        live.front.budget.active += not live.is_in_service
        live.is_in_service = True
        waiting = live.front.waiting
        answer = waiting.admit(live.facts, now_s)
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
                live.front.known.call_when_freed(live.front.wake)
                self._at(now_s + waiting.most_s, Kind.QUEUE_OVER, live)
                self._look_later(live.front, now_s)
            else:
                self._rejected(live, queued, now_s)
            return
        self._placed(live, answer, now_s)

    def _settled(self, live: LiveRequest, now_s: float) -> None:
        """The request's wait in the queue is over."""
        queued, live.queued = live.queued, None
        if queued is None or queued.result is None:
            return
        live.front.waiting.leave(queued)
        if not len(live.front.waiting.queue):
            live.front.known.call_when_freed(None)
        if isinstance(queued.result, Reject):
            self._rejected(live, queued.result, now_s)
        else:
            self._placed(live, queued.result, now_s)

    def _look(self, front: Front, now_s: float) -> None:
        """Load was freed, or time has passed: admit waiting requests in their order."""
        front.is_woken = False
        front.waiting.look(now_s)
        self._look_later(front, now_s)

    def _look_later(self, front: Front, now_s: float) -> None:
        at_s = front.waiting.next_look_s(now_s)
        if at_s is not None:
            self._at(at_s + HARDLY_LATER_S, Kind.LOOK, front.number)

    def _rejected(self, live: LiveRequest, reject: Reject, now_s: float) -> None:
        live.row.rejects += 1
        self._left_service(live)
        after_s = self.options.retry.after_s(live.row, reject.retry_after_s)
        if after_s is None:
            self._end(live, "rejected", now_s)
        else:
            live.row.sent_s = now_s + after_s
            self._at(live.row.sent_s, Kind.ARRIVAL, live)

    def _left_service(self, live: LiveRequest) -> None:
        live.front.budget.active -= live.is_in_service
        live.is_in_service = False

    def _placed(self, live: LiveRequest, route: Route, now_s: float) -> None:
        options = self.options
        caps = LegCaps(
            options.ttft_timeout_s,
            options.prefill_timeout_s,
            options.transfer_timeout_s,
            math.inf,
            options.migration_limit,
        )
        live.route, live.admitted_s = route, now_s
        front = live.front
        live.flow = RequestFlow(
            front.router, front.budget, live.facts, route, caps, now_s, streams=True
        )
        live.row.predicted_ttft_s = route.predicted_ttft_s
        live.row.estimated_new_tokens = route.new_tokens
        live.row.estimated_hit_ratio = 1.0 - route.new_tokens / live.facts.prompt_tokens
        self._send(live, live.flow.begin(now_s), now_s)

    def _go_on(
        self,
        live: LiveRequest,
        step: Step[SendDecode | AwaitHedge | Pause | GiveUp | NotMoved],
        now_s: float,
    ) -> None:
        """Perform a step of the request's flow."""
        self._perform(live, step.effects, now_s)
        then = step.next
        if isinstance(then, SendDecode):
            self._send(live, then, now_s)
        elif isinstance(then, AwaitHedge):
            self._hedge_counts(live, now_s)
        elif isinstance(then, Pause):
            self._at(now_s + then.seconds, Kind.PAUSE_OVER, live)
        else:
            self._not_moved(live, now_s)

    def _perform(self, live: LiveRequest, effects: Sequence[Effect], now_s: float) -> None:
        """Perform effects of the request's flow."""
        for effect in effects:
            if isinstance(effect, CancelHedge):
                self._abort(live.hedge, now_s)
            elif isinstance(effect, CancelPrefill):
                self._hedge_counts(live, now_s)
            elif isinstance(effect, InstanceFailed) and effect.change is Change.GONE:
                self._peer_gone(live.front, effect.name, now_s)
            else:
                note(live.row, effect)

    def _hedge_counts(self, live: LiveRequest, now_s: float) -> None:
        """P's leg is over: the one on D beside it is the request's now."""
        self._abort(live.leg, now_s)
        live.leg, live.hedge = live.hedge, LiveLeg()

    def _send(
        self, live: LiveRequest, send: SendPrefill | SendDecode | SendHedge, now_s: float
    ) -> None:
        live.sent += 1
        row, leg, flow = (
            live.row,
            live.hedge if isinstance(send, SendHedge) else live.leg,
            live.flow,
        )
        assert flow is not None
        engine = self._by_name.get(send.instance.name)
        if engine is None:
            leg.number = live.sent
            self._failed(live, flow, leg, REFUSED, Fallback.P_REFUSED, now_s)
            return
        way_s = self.options.way.delay_s(live.index, row.session_id, live.sent)
        if isinstance(send, SendPrefill):
            row.prefill = send.instance.name
            job = job_of(live, 1, send_as=live.transfer_id, way_s=way_s)
            if send.hedge_at_s < math.inf:
                self._at(send.hedge_at_s, Kind.PREFILL_LATE, live, live.sent)
            flow.prefill_sent()
        else:
            source = send.fetch_from if isinstance(send, SendDecode) else None
            fetch = RemoteKv(source.name, live.transfer_id) if source else None
            job = job_of(live, max(1, row.output_tokens - live.shown), fetch=fetch, way_s=way_s)
            if source is not None:
                flow.decode_sent()
        leg.number, leg.limit, leg.engine = live.sent, send.limit, self._place[engine]
        leg.behind, live.charged_tokens = live.shown, 0
        leg.request = engine.submit(job, now_s)
        self._legs[leg.request] = live
        self._dirty.add(leg.engine)
        self._at(now_s + send.limit.seconds, Kind.LEG_LATE, live, leg.number)

    def _not_moved(self, live: LiveRequest, now_s: float) -> None:
        """End a request that no instance serves; its stream continues where it still runs."""
        if not live.old.number:
            if live.flow is not None:
                live.front.hooks.failed(live.flow.route, live.facts, now_s)
            self._end(live, "failed", now_s)
            return
        live.leg, live.old = live.old, LiveLeg()
        live.charged_tokens = live.shown - live.leg.behind
        leg, flow = live.leg.request, live.flow
        assert flow is not None
        if leg is None:
            self._stream_lost(live, flow, now_s)
        elif leg.finish_reason is not None:
            self._finish(live, flow, leg, now_s)

    def running_on(self, name: str, now_s: float) -> list[Running]:
        """The requests that an instance works on, as those who may have to leave it."""
        found = []
        why = None if self.options.migration_limit else OFF
        for leg, live in self._legs.items():
            flow = live.flow
            if flow is None or leg is not live.leg.request or flow.route.decode.name != name:
                continue
            fixed = why if flow.state is State.STREAMING else NO_TOKEN
            found.append(Running(self._victim(live, flow, leg, now_s, fixed), live.facts, fixed))
        return found

    def _victim(
        self,
        live: LiveRequest,
        flow: RequestFlow,
        leg: SimRequest,
        now_s: float,
        why_fixed: str | None,
    ) -> Victim:
        written = live.leg.behind + leg.output_tokens
        expected = int(live.front.known.latency.output_tokens)
        return Victim(
            str(live.index),
            kv_tokens=live.row.prompt_tokens + written,
            last_token_s=now_s,
            remaining_tokens=max(1, expected - written),
            qps=leg.output_tokens / max(1e-3, now_s - flow.route.reserved_s),
            is_movable=why_fixed is None,
            moves=live.hot_moves,
            moved_s=live.hot_moved_s,
        )

    def leave_hot(self, request_id: str, now_s: float) -> None:
        """Migrate a stream if it can; it continues on its instance until then."""
        for leg, live in self._legs.items():
            if live.index == int(request_id) and leg is live.leg.request:
                break
        else:
            return
        live.hot_moves, live.hot_moved_s = live.hot_moves + 1, now_s
        live.note_shown(leg)
        assert live.flow is not None
        move = live.flow.move_asked(live.shown, math.inf, now_s)
        if isinstance(move, SendDecode):
            live.old, live.leg = live.leg, LiveLeg()
            self._send(live, move, now_s)

    def _leg_ended(
        self, live: LiveRequest, flow: RequestFlow, leg: SimRequest, now_s: float
    ) -> None:
        live.leg.request = None
        if flow.state in _WITH_P:
            live.row.computed_tokens += leg.prompt_computed_tokens
            found = leg.local_hit_tokens / leg.job.prompt_tokens
            step = flow.prefill_answered(now_s, found)
            live.front.hooks.prefill_done(flow.route, live.facts, leg, now_s)
            self._go_on(live, step, now_s)
        elif leg.finish_reason == "error" and flow.state in _UNANSWERED:
            failure = LegFailure(FailureKind.SERVER_ERROR, "the KV did not come")
            self._go_on(live, flow.decode_failed(failure, now_s, PAUSE_RATIO), now_s)
        elif leg.finish_reason == "error":
            self._end(live, "failed", now_s)
        else:
            self._finish(live, flow, leg, now_s)

    def _first_token(
        self, live: LiveRequest, flow: RequestFlow, leg: SimRequest, now_s: float
    ) -> None:
        if leg is live.hedge.request and flow.state is State.HEDGED:
            self._perform(live, flow.hedge_answered(now_s), now_s)
        elif leg is live.leg.request and flow.state is State.MOVING:
            self._moved(live, flow, leg, now_s)
            return
        elif leg is live.leg.request and flow.state in _UNANSWERED - _WITH_P:
            self._perform(live, flow.decode_answered(now_s), now_s)
        else:
            return
        row = live.row
        row.ttft_s = now_s - row.arrival_s
        row.cached_tokens, row.external_tokens = leg.local_hit_tokens, leg.external_tokens
        row.computed_tokens += leg.prompt_computed_tokens
        flow.first_token(now_s)
        live.front.hooks.first_token(flow.route, live.facts, now_s - live.admitted_s, leg, now_s)

    def _moved(self, live: LiveRequest, flow: RequestFlow, leg: SimRequest, now_s: float) -> None:
        """Another engine goes on with the stream."""
        self._abort(live.old, now_s)
        live.old = LiveLeg()
        self._perform(live, flow.decode_answered(now_s), now_s)
        live.row.moves += 1
        live.row.computed_tokens += leg.prompt_computed_tokens
        flow.first_token(now_s)

    def _finish(self, live: LiveRequest, flow: RequestFlow, leg: SimRequest, now_s: float) -> None:
        live.row.end_s = now_s
        # As in the proxy: of a stream that has moved nothing is learned.
        is_told = not flow.moves and live.facts.offloadable
        flow.completed(leg.local_hit_tokens / leg.job.prompt_tokens if is_told else None)
        live.front.hooks.finish(flow.route, live.facts, leg, now_s)
        self._end(live, "ok", now_s)

    def _give_up(self, live: LiveRequest, now_s: float) -> None:
        """The client's time limit for a first token is over."""
        if live.row.ttft_s is None and live.row.outcome == "ok" and live.row.end_s is None:
            if live.queued is not None:
                live.front.waiting.leave(live.queued)
                live.queued = None
            if live.route is not None:
                live.front.hooks.failed(live.route, live.facts, now_s)
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
        for leg in (live.leg, live.hedge, live.old):
            self._abort(leg, now_s)
        if route is not None and live.flow is not None:
            row.route_class, row.reason = route.route_class.value, route.reason.value
            row.decode = route.decode.name
            teaches = outcome == "ok" and not live.flow.moves
            live.flow.end(now_s, row.output_tokens if teaches else None)
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
            kv = EngineKv(pool.total * engine.options.block_size, pool.usage_ratio)
            for front in self.fronts:
                if self.options.reports_kv:
                    front.known.gate.observe_engine(name, kv, now_s)
                member = front.known.fleet.get(name)
                if member is not None and member.health.trial_due(now_s):
                    front.known.events.trial_ended(name, None, now_s)
            self._run.used_ratio.append(pool.usage_ratio)
        self._probe_gone(now_s)
        for leg, live in self._legs.items():
            grown = leg.output_tokens - live.charged_tokens
            if leg is not live.leg.request:
                continue
            if grown >= GROW_TOKENS and live.row.ttft_s is not None and live.route is not None:
                live.route.lease.grow(grown)
                live.charged_tokens = leg.output_tokens
        self._at(now_s + self.options.scrape_interval_s, Kind.SCRAPE, 0)

    def _result(self) -> VirtualRun:
        run = self._run
        run.rows = [row for row in self._rows if row is not None]
        for engine in self._by_name.values():
            self._count(engine)
        run.drift = sum(front.known.ledger.drift() for front in self.fronts)
        return run


def simulate(
    planned: Sequence[Planned],
    router: Router,
    options: VirtualOptions,
    observers: Sequence[object] = (),
    others: Sequence[tuple[Router, Sequence[object]]] = (),
) -> VirtualRun:
    """Run the load through fresh routers; `observers` may have any of the hooks.

    See `VirtualFleet` for `others`; `options.replicas` says how requests are spread over all.
    """
    return VirtualFleet(planned, router, options, observers, others).run()
