"""The router and N engine models on one virtual clock: a trace of hours in seconds of CPU time.

The driver stands where the shell stands and makes the shell's calls: admit, prefill_done,
first_token, lease.grow, finish, fall_back; engine reports at every scrape. Network and proxy
take no time unless given some (`IntakeCost`). Nothing here reads a clock or draws a number: equal
loads give equal rows.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import count

from proxy.core.admission.engine_reports import EngineKv
from proxy.core.routing.router import Router
from proxy.core.types import Fallback, Instance, Reject
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
from replayer.virtual.hooks import Hooks
from replayer.virtual.requests import (
    Kind,
    LiveRequest,
    VirtualOptions,
    VirtualRow,
    VirtualRun,
    Waits,
    facts_of,
    job_of,
    new_row,
)

GROW_TOKENS = 64
"""Output is charged in steps of at least this many tokens, at scrapes: the shell charges each."""


class VirtualFleet:
    """One run. `router` gets the instances `e0`, `e1`, ...; observers hear what happens."""

    def __init__(
        self,
        planned: Sequence[Planned],
        router: Router,
        options: VirtualOptions,
        observers: Sequence[object] = (),
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
        self._waits = Waits(planned)
        self._rows: list[VirtualRow | None] = [None] * len(planned)
        self._left = len(planned)
        self._run = VirtualRun([])
        for name in self.names:
            router.add(Instance(name, f"http://{name}", f"http://{name}:8998"))

    def run(self) -> VirtualRun:
        """Run the whole load to its end."""
        for index, waiting in enumerate(self._waits.open):
            if not waiting:
                self._at(self._waits.ready_s[index], Kind.ARRIVAL, index)
        self._at(0.0, Kind.SCRAPE, 0)
        # Looked up each time: an experiment's branch goes on with a heap of its own.
        while self._left:
            due_s = min(self._due_s)
            now_s = min(self._heap[0][0], due_s)
            if now_s > self.options.until_s:
                break
            while self._heap and self._heap[0][0] <= now_s:
                _at_s, _order, kind, what, number = heapq.heappop(self._heap)
                self._handle(kind, what, number, now_s)
            if due_s <= now_s:
                self._dirty.update([n for n, at_s in enumerate(self._due_s) if at_s <= now_s])
            while self._dirty:
                self._advance(self._dirty.pop(), now_s)
        return self._result()

    def _at(self, at_s: float, kind: Kind, what: LiveRequest | int, number: int = 0) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), kind, what, number))

    def _handle(self, kind: Kind, what: LiveRequest | int, number: int, now_s: float) -> None:
        if kind is Kind.SCRAPE:
            self._scrape(now_s)
        elif isinstance(what, int):
            self._arrive(what, now_s)
        elif kind is Kind.ARRIVAL:
            self._admit(what, now_s)
        elif kind is Kind.GIVE_UP:
            self._give_up(what, now_s)
        elif kind is Kind.PREFILL_LATE:
            self._hedge(what, number, now_s)
        elif what.legs == number and what.leg is not None and what.row.ttft_s is None:
            late = Fallback.P_TIMEOUT if what.prefilling else Fallback.TRANSFER_TIMEOUT
            self._fall_back(what, late, now_s)

    def _advance(self, number: int, now_s: float) -> None:
        engine = self.engines[number]
        for event in engine.advance(now_s):
            self._dispatch(event, engine, now_s)
        self._due_s[number] = engine.next_event_s()

    def _dispatch(self, event: Event, engine: Engine, now_s: float) -> None:
        if isinstance(event, FirstToken):
            live = self._legs.get(event.request)
            if live is not None and event.request is live.hedge:
                self._fall_back(live, Fallback.P_LATE, now_s)
            if live is not None and not live.prefilling:
                self._first_token(live, event.request, now_s)
        elif isinstance(event, Finished):
            live = self._legs.pop(event.request, None)
            if live is not None:
                self._leg_ended(live, event.request, now_s)
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
        if live.row.outcome != "ok":
            return
        answer = self.router.admit(live.facts, now_s)
        if isinstance(answer, Reject):
            live.row.rejects += 1
            if self.options.retry_rejects:
                self._at(now_s + answer.retry_after_s, Kind.ARRIVAL, live)
            else:
                self._end(live, "rejected", now_s)
            return
        live.route, live.admitted_s = answer, now_s
        live.row.predicted_ttft_s = answer.predicted_ttft_s
        live.row.estimated_new_tokens = answer.new_tokens
        if answer.prefill is None:
            self._submit(live, answer.decode, now_s, fetch=None)
        else:
            self._submit_prefill(live, answer.prefill, now_s)

    def _submit_prefill(self, live: LiveRequest, p: Instance, now_s: float) -> None:
        live.prefilling = True
        job = job_of(live, 1, send_as=live.transfer_id)
        self._start(live, p, job, now_s)
        live.row.prefill = p.name
        self._at(now_s + self.options.prefill_timeout_s, Kind.LEG_LATE, live, live.legs)
        late_s = math.inf if live.route is None else self.router.hedges.due_s(live.route)
        if late_s < math.inf:
            self._at(late_s, Kind.PREFILL_LATE, live, live.legs)

    def _hedge(self, live: LiveRequest, leg: int, now_s: float) -> None:
        """P is late: D begins as well, where the router allows it."""
        route = live.route
        if route is None or live.legs != leg or live.leg is None or not live.prefilling:
            return
        if self.router.hedges.start(route, live.facts, now_s):
            job = job_of(live, live.row.output_tokens)
            live.hedge = self._by_name[route.decode.name].submit(job, now_s)
            self._legs[live.hedge] = live
            self._dirty.add(self._place[self._by_name[route.decode.name]])

    def _drop_hedge(self, live: LiveRequest, now_s: float) -> None:
        hedge, live.hedge = live.hedge, None
        if hedge is not None and live.route is not None:
            self._legs.pop(hedge, None)
            engine = self._by_name[live.route.decode.name]
            engine.abort(hedge, now_s)
            self._dirty.add(self._place[engine])

    def _submit(self, live: LiveRequest, d: Instance, now_s: float, fetch: RemoteKv | None) -> None:
        live.prefilling = False
        job = job_of(live, live.row.output_tokens, fetch=fetch)
        self._start(live, d, job, now_s)
        if fetch is not None:
            self._at(now_s + self.options.transfer_timeout_s, Kind.LEG_LATE, live, live.legs)

    def _start(self, live: LiveRequest, instance: Instance, job: Job, now_s: float) -> None:
        live.legs += 1
        live.engine = self._place[self._by_name[instance.name]]
        live.leg = self.engines[live.engine].submit(job, now_s)
        self._legs[live.leg] = live
        self._dirty.add(live.engine)

    def _leg_ended(self, live: LiveRequest, leg: SimRequest, now_s: float) -> None:
        route = live.route
        if route is None or leg is not live.leg:
            return
        if live.prefilling and route.prefill is not None:
            live.row.computed_tokens += leg.prompt_computed_tokens
            if live.hedge is not None:
                live.row.hedge = "peer"
                self._drop_hedge(live, now_s)
            found = leg.local_hit_tokens / leg.job.prompt_tokens
            self.router.prefill_done(route, live.facts, now_s, found)
            self._hooks.prefill_done(route, live.facts, leg, now_s)
            fetch = RemoteKv(route.prefill.name, live.transfer_id)
            self._submit(live, route.decode, now_s, fetch=fetch)
        elif leg.finish_reason == "error":
            self._fall_back(live, Fallback.D_FAILED, now_s)
        else:
            self._finish(live, leg, now_s)

    def _first_token(self, live: LiveRequest, leg: SimRequest, now_s: float) -> None:
        row, route = live.row, live.route
        if route is None:
            return
        row.ttft_s = now_s - row.arrival_s
        row.cached_tokens, row.external_tokens = leg.local_hit_tokens, leg.external_tokens
        row.moved_tokens += leg.external_tokens
        row.computed_tokens += leg.prompt_computed_tokens
        self.router.first_token(route, live.facts, now_s)
        self._hooks.first_token(route, live.facts, now_s - live.admitted_s, leg, now_s)

    def _finish(self, live: LiveRequest, leg: SimRequest, now_s: float) -> None:
        live.row.end_s = now_s
        if live.route is not None:
            found = leg.local_hit_tokens / leg.job.prompt_tokens
            self.router.completed(live.route, live.facts, found)
            self._hooks.finish(live.route, live.facts, leg, now_s)
        self._end(live, "ok", now_s)

    def _fall_back(self, live: LiveRequest, why: Fallback, now_s: float) -> None:
        route = live.route
        if route is None:
            return
        self._abort(live, now_s)
        live.row.fallback = why.value
        self.router.fall_back(route, live.facts, why, now_s)
        if live.hedge is None:
            self._submit(live, route.decode, now_s, fetch=None)
            return
        # What D has begun goes on; a late leg's timer is for another leg now.
        live.row.hedge = "local"
        live.leg, live.hedge, live.prefilling = live.hedge, None, False
        live.engine = self._place[self._by_name[route.decode.name]]
        live.legs += 1

    def _give_up(self, live: LiveRequest, now_s: float) -> None:
        if live.row.ttft_s is None and live.row.outcome == "ok" and live.row.end_s is None:
            self._abort(live, now_s)
            self._drop_hedge(live, now_s)
            if live.route is not None:
                self._hooks.failed(live.route, live.facts, now_s)
            self._end(live, "timeout", now_s)

    def _abort(self, live: LiveRequest, now_s: float) -> None:
        leg, live.leg = live.leg, None
        if leg is not None:
            self._legs.pop(leg, None)
            self.engines[live.engine].abort(leg, now_s)
            self._dirty.add(live.engine)

    def _end(self, live: LiveRequest, outcome: str, now_s: float) -> None:
        row, route = live.row, live.route
        row.outcome = outcome
        live.leg = None
        if route is not None:
            row.route_class, row.reason = route.route_class.value, route.reason.value
            row.decode = route.decode.name
            self.router.finish(route, now_s, row.output_tokens if outcome == "ok" else None)
        self._left -= 1
        self._run.makespan_s = now_s
        for index in self._waits.ended(live.index, now_s):
            self._at(self._waits.ready_s[index], Kind.ARRIVAL, index)

    def _scrape(self, now_s: float) -> None:
        """What the shell's scraper and its streams tell the router: KV in use, tokens so far.

        As of each engine's last event: to look in would cut its closed-form runs of decode steps.
        """
        for name, engine in self._by_name.items():
            pool = engine.pool
            tokens = pool.total * engine.options.block_size
            self.router.gate.observe_engine(name, EngineKv(tokens, pool.usage_ratio), now_s)
            self._run.used_ratio.append(pool.usage_ratio)
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
