"""A pure model of one vLLM engine, driven by the times that its methods are given.

This module decides when a step ends and what follows for each request and transfer. `scheduler`
decides what a step contains, `costs` how long it takes. There is no asyncio, text, socket or clock
in it, so that one model serves behind HTTP in scaled real time and in virtual time.

A driver calls `submit`, `abort`, `pull` and `pull_done` when these happen. It calls
`advance(now_s)` at `next_event_s()`, or earlier at `next_step_s()` to see each token. Requests have
token counts; there is no object per token. Runs of pure decode steps are computed in closed form
(DecodeRun), and cut at the end of a step when a request or transfer comes in between. `deliver`
passes pulls between models of one process without delay: the sender computes the time of a
transfer.

Transfers have Mooncake's semantics (vLLM >= 0.16). A prefill leg that ends with "length" stays
pinned for its transfer id, see `kv_sender`. A decode leg takes blocks for its whole prompt, emits
PullWanted for KV that its prefix cache lacks, and waits. The last prompt token is recomputed to
sample the first output. After a failed load the prompt is computed here, unless
`recompute_failed_loads` is off.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from replayer.engine.costs import DecodeRun
from replayer.engine.iterations import Iterations
from replayer.engine.kv_sender import Sender
from replayer.engine.kvcache import SharedStore
from replayer.engine.scheduler import Scheduler, Work
from replayer.engine.types import (
    Counters,
    EngineOptions,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    Job,
    Pull,
    PullServed,
    PullWanted,
    SimRequest,
    Unpinned,
)


class Engine:
    """One simulated engine; every method takes times in engine seconds that never decrease."""

    def __init__(
        self, options: EngineOptions, start_s: float = 0.0, store: SharedStore | None = None
    ) -> None:
        self.options = options
        self.counters = Counters()
        self.iterations: Iterations | None = None
        """Counts each step where somebody reads that; None: nobody does."""
        self.sender = Sender(
            options.transfer,
            options.sender_slots,
            options.abort_timeout_s,
            reads_anything=options.reads_anything,
        )
        self.fetching: dict[SimRequest, float] = {}
        """Decode legs that wait for remote KV, with the time at which each gives up (engine
        seconds)."""
        self._taken_in: list[tuple[float, int, SimRequest]] = []
        self._order = count()
        self._loads: list[tuple[float, int, SimRequest]] = []
        """Heap of requests whose blocks are being read from the store: (end, order, request)."""
        self._scheduler = Scheduler(options, self.counters, store)
        self._cold_steps = options.warm_up_steps
        self._clock_s = start_s
        self._work = Work()
        self._run: DecodeRun | None = None
        self._stalled = True
        self._outbox: list[Event] = []
        self.pool = self._scheduler.pool
        self.running = self._scheduler.running
        self.waiting = self._scheduler.waiting

    def submit(self, job: Job, now_s: float) -> SimRequest:
        """Accept a request. It queues after its way and the intake, and can join the next step."""
        self._catch_up(now_s)
        request = SimRequest(job, now_s, job.block_hashes, job.prompt_tokens)
        request.fetch_pending = job.fetch is not None
        delay_s = self.options.intake.delay_s(job.prompt_tokens) + job.way_s
        if delay_s:
            heapq.heappush(self._taken_in, (now_s + delay_s, next(self._order), request))
        else:
            self._queue(request)
        return request

    def abort(self, request: SimRequest, now_s: float) -> None:
        """End a request at once; while it receives KV, its blocks stay held."""
        self._catch_up(now_s)
        if request.finish_reason is not None:
            return
        if request not in self.fetching:
            if request in self.running:
                self.running.remove(request)
                self._work.drop(request)
            elif request in self.waiting:
                self.waiting.remove(request)
            self._release(request)
        self._mark_finished(request, "abort", now_s)

    def pull(self, pull: Pull, now_s: float) -> None:
        """Accept another engine's pull; a PullServed event answers it."""
        self._catch_up(now_s)
        self.sender.pull(pull, now_s)

    def pull_done(self, request: SimRequest, now_s: float, *, ok: bool) -> None:
        """Note that a decode leg's KV has arrived (`ok`), or that it will not come."""
        self._catch_up(now_s)
        if request in self.fetching:
            self._received(request, now_s, ok=ok)

    def advance(self, now_s: float) -> list[Event]:
        """Run the model up to and including `now_s`; return the events since the last call."""
        self._catch_up(now_s)
        if self._run is None and not self._stalled:
            self._begin_step()
        events, self._outbox = self._outbox, []
        return events

    def next_event_s(self) -> float:
        """Return the time of the next event, at which to call `advance`; infinity when idle."""
        return self._next_s(whole_run=True)

    def next_step_s(self) -> float:
        """Return when the current step ends, or an earlier event happens."""
        return self._next_s(whole_run=False)

    def _next_s(self, *, whole_run: bool) -> float:
        run = self._run
        if self._outbox or (run is None and not self._stalled):
            return self._clock_s
        timer_s = self._next_timer_s()
        return timer_s if run is None else min(timer_s, run.end_s(run.steps if whole_run else 1))

    def _next_timer_s(self) -> float:
        # Called several times per request; mostly only the sender has a timer.
        timer_s = self.sender.next_s()
        if self.fetching:
            # All legs wait equally long, so the first entry is the first to give up.
            timer_s = min(timer_s, next(iter(self.fetching.values())))
        if self._taken_in:
            timer_s = min(timer_s, self._taken_in[0][0])
        if self._loads:
            timer_s = min(timer_s, self._loads[0][0])
        return timer_s

    def _catch_up(self, now_s: float) -> None:
        """Process everything due by `now_s`, but begin no step at `now_s` itself.

        Requests that arrive at the same time thus share their first step.
        """
        while True:
            if self._run is None and not self._stalled and self._clock_s < now_s:
                self._begin_step()
            timer_s = self._next_timer_s()
            run = self._run
            end_s = math.inf if run is None else run.end_s(run.steps)
            if end_s > now_s and timer_s > now_s:
                break
            if end_s <= timer_s:
                self._end_steps(end_s)
            else:
                self._handle_timers(max(timer_s, self._clock_s))
        self._commit_until(now_s)

    def _begin_step(self) -> None:
        now_s = self._clock_s
        work = self._work = self._scheduler.plan(now_s)
        give_up_s = now_s + self.options.abort_timeout_s + self.options.receive_grace_s
        for request in work.wanted:
            remote = request.job.fetch
            if remote is None:
                self._load(request, now_s)
            else:
                self.fetching[request] = give_up_s
                missing = request.job.prompt_tokens - request.local_hit_tokens
                self._outbox.append(PullWanted(now_s, request, remote, missing))
        if work.empty:
            self._stalled = True
            return
        cost = self.options.step
        growth_s = cost.a3 * len(work.decodes)
        step_s = work.step_s(cost)
        if self._cold_steps and work.chunks:
            self._cold_steps -= 1
            step_s *= self.options.warm_up_factor
        self._run = DecodeRun(now_s, step_s, growth_s, work.steps)

    def _load(self, request: SimRequest, now_s: float) -> None:
        """Start to read the stored part of a prompt; this involves no other engine."""
        self.fetching[request] = math.inf
        tokens = request.fetch_tokens - request.local_hit_tokens
        ready_s = now_s + self.options.transfer.transfer_s(tokens)
        heapq.heappush(self._loads, (ready_s, next(self._order), request))

    def _end_steps(self, end_s: float) -> None:
        """Book the whole run and clear it for the next one."""
        run, self._run = self._run, None
        self._clock_s = end_s
        if run is not None:
            self._book(run, run.steps, end_s)

    def _commit_until(self, now_s: float) -> None:
        """Book the steps of the run that have ended; the current step goes on."""
        run = self._run
        if run is None:
            self._clock_s = max(self._clock_s, now_s)
            return
        done = run.steps_by(now_s) if run.steps > 1 else 0
        if done:
            self._book(run, done, run.end_s(done))
            self._run = run.after(done)

    def _book(self, run: DecodeRun, steps: int, at_s: float) -> None:
        if self.iterations is not None:
            self.iterations.count(self._work, run, steps)
        for request in self._scheduler.commit(self._work, steps):
            if request.first_token_s is None:
                self._first_token(request, at_s)
            if request.output_tokens >= request.job.output_tokens:
                self._finish(request, at_s)

    def _first_token(self, request: SimRequest, at_s: float) -> None:
        request.first_token_s = at_s
        self._outbox.append(FirstToken(at_s, request))
        # Counted only at this point, since a load may have failed before.
        self.counters.prompt_local_hits += request.local_hit_tokens
        self.counters.prompt_external += request.external_tokens
        self.counters.prompt_computed += request.prompt_computed_tokens

    def _finish(self, request: SimRequest, at_s: float) -> None:
        job = request.job
        self.running.remove(request)
        # Mooncake keeps the KV of a leg that ended by length, and frees it at once after a stop.
        # NIXL keeps it in both cases.
        keeps = job.finish_reason == "length" or self.options.reads_anything
        if job.send_as is not None and keeps:
            self.sender.pin(job.send_as, request, at_s)
        else:
            self._release(request)
        self._mark_finished(request, job.finish_reason, at_s)

    def _mark_finished(self, request: SimRequest, reason: FinishReason, at_s: float) -> None:
        request.finish_reason = reason
        request.finished_s = at_s
        self.counters.finished[reason] += 1
        self._outbox.append(Finished(at_s, request))

    def _release(self, request: SimRequest) -> None:
        self._scheduler.release(request)
        self._wake()

    def _handle_timers(self, at_s: float) -> None:
        """Handle the timers due at `at_s`: intake, loads, the sender, and legs that give up."""
        self._commit_until(at_s)
        while self._taken_in and self._taken_in[0][0] <= at_s:
            _ready_s, _order, request = heapq.heappop(self._taken_in)
            if request.finish_reason is None:
                self._queue(request)
        while self._loads and self._loads[0][0] <= at_s:
            self._received(heapq.heappop(self._loads)[2], at_s, ok=True)
        for event in self.sender.advance(at_s):
            if isinstance(event, Unpinned):
                self._release(event.request)
            self._outbox.append(event)
        for request in [r for r, give_up_s in self.fetching.items() if give_up_s <= at_s]:
            self._received(request, at_s, ok=False)

    def _received(self, request: SimRequest, now_s: float, *, ok: bool) -> None:
        """End a decode leg's wait: it queues at the head, and recomputes a failed load."""
        del self.fetching[request]
        if request.finish_reason is not None:
            self._release(request)
            return
        if ok:
            request.external_tokens = request.fetch_tokens - request.local_hit_tokens
            request.computed_tokens = request.fetch_tokens
            self._scheduler.publish(request)
            if request.computed_tokens == request.job.prompt_tokens:
                request.computed_tokens -= 1
        else:
            self.counters.failed_receives += 1
            if not self.options.recompute_failed_loads:
                self._release(request)
                self._mark_finished(request, "error", now_s)
                return
        self.waiting.appendleft(request)
        self._wake()

    def _queue(self, request: SimRequest) -> None:
        self.waiting.append(request)
        self._wake()

    def _wake(self) -> None:
        """Schedule again: at once when idle, else when the current step ends."""
        self._stalled = False
        run = self._run
        if run is not None and run.steps > 1:
            self._run = run.only(1)


@dataclass(frozen=True, slots=True)
class _Receiver:
    engine: Engine
    request: SimRequest


def deliver(
    event: Event, source: Engine, engines: Mapping[str, Engine], now_s: float
) -> Engine | None:
    """Pass an event of `source` to the engine that it concerns, and return that engine.

    `engines` maps engine ids to the running engines. A pull from any other id fails at once, as if
    its bootstrap server had refused. Returns None for an event that concerns no other engine.
    """
    match event:
        case PullWanted():
            sender = engines.get(event.remote.engine_id)
            if sender is None:
                source.pull_done(event.request, now_s, ok=False)
                return source
            receiver = _Receiver(source, event.request)
            sender.pull(Pull(event.remote.transfer_id, event.tokens, receiver), now_s)
            return sender
        case PullServed(pull=Pull(receiver=_Receiver() as to)):
            to.engine.pull_done(to.request, now_s, ok=event.ok)
            return to.engine
        case _:
            return None
