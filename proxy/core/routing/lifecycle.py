"""Effects of a route's steps: they reserve, release and teach time on instances and KV blocks.

The router tells each step with its time. `LatencyTracker` keeps the model of time in step: a
prefill is timed from the end of the one before it. A step time counts only over a whole answer.
`BlockUses` keeps the use of the prompt's blocks.

A route holds the times and the cache that it has begun with (`Route.times`, `Route.use`), which are
parts of one incarnation's state. An instance that went down in between has lost everything, and one
that came back is another: what a route still writes to the old one is never read.
"""

from __future__ import annotations

from proxy.core.accounts.instances import InstanceStates
from proxy.core.kvcache.engine_cache import Use
from proxy.core.kvcache.reuse import Reuse
from proxy.core.latency.model import Latency
from proxy.core.latency.slo_pressure import SloPressure
from proxy.core.routing.route import Hedge, Route
from proxy.core.sharing.batch import Course
from proxy.core.sharing.journal import Journal
from proxy.core.types import Instance, Load, RequestFacts

BUSY_MOST = 0.9
"""Above this busy ratio an answer teaches no step time: the instance mostly prefilled."""


class LatencyTracker:
    """Reservations and observations of requests, over one Latency and one SloPressure."""

    def __init__(self, latency: Latency, slo_pressure: SloPressure) -> None:
        self.latency = latency
        self.slo_pressure = slo_pressure

    def reserve(
        self,
        route: Route,
        computing: Instance,
        hit_tokens: int,
        load: Load,
        now_s: float,
        kv_wait_s: float = 0.0,
    ) -> None:
        """Occupy the computing instance for as long as this prefill is predicted to take.

        `kv_wait_s`: until it has room for the prompt's KV.
        """
        new = max(1, route.prompt_tokens - hit_tokens)
        times = self.latency.of(computing.name)
        pace = times.pace()
        streams, kv_tokens = load.decode_requests, load.decode_tokens
        route.reserved_s = now_s
        route.beside_step_s = pace.step_s(kv_tokens) if streams else 0.0
        route.computes_tokens = new
        wait_s, way_s = pace.wait_s(now_s), self.latency.way_s(route.prompt_tokens)
        route.waited_for_room = kv_wait_s > max(wait_s, way_s)
        route.is_queued = max(wait_s, kv_wait_s) > way_s
        work_s = pace.prefill_s(new, hit_tokens, streams, kv_tokens)
        route.predicted_prefill_s = max(wait_s, kv_wait_s, way_s) + work_s
        share_s = pace.share_s(new, hit_tokens, streams, kv_tokens)
        route.times = times
        self.latency.reserve_prefill(times, id(route.lease), work_s, now_s, share_s, way_s)

    def hedge(self, route: Route, load: Load, now_s: float, kv_wait_s: float) -> Hedge:
        """Occupy D as well, for what it would have to compute; P's reservation stays."""
        new = max(1, route.prompt_tokens - route.hit_tokens)
        times = self.latency.of(route.decode.name)
        pace = times.pace()
        work_s = pace.prefill_s(new, route.hit_tokens, load.decode_requests, load.decode_tokens)
        wait_s, way_s = pace.wait_s(now_s), self.latency.way_s(route.prompt_tokens)
        self.latency.reserve_prefill(times, id(route.lease), work_s, now_s, way_s=way_s)
        ready_s = max(wait_s, kv_wait_s, way_s) + work_s
        step_s = pace.step_s(load.decode_tokens) if load.decode_requests else 0.0
        return Hedge(times, now_s, work_s, ready_s, new, kv_wait_s > max(wait_s, way_s), step_s)

    def end_hedge(self, route: Route, hedge: Hedge, now_s: float) -> None:
        """D computes no more beside P."""
        self.latency.end_prefill(hedge.times, id(route.lease), now_s)

    def resume(self, route: Route, hedge: Hedge) -> None:
        """P's leg is over: the hedge is now the attempt that counts; D's reservation goes on."""
        route.times = hedge.times
        route.reserved_s, route.computes_tokens = hedge.started_s, hedge.computes_tokens
        route.predicted_prefill_s = hedge.predicted_prefill_s
        route.waited_for_room, route.beside_step_s = hedge.waited_for_room, hedge.beside_step_s

    def release_reservation(self, route: Route, now_s: float) -> None:
        """End the reservation. A prefill that is given up late teaches how late it was.

        What D computes as a hedge goes on.
        """
        times, route.times = route.times, None
        if times is None:
            return
        is_handed = route.prefill is not None and route.handed_s is not None
        if not is_handed and route.first_token_s is None:
            elapsed_s = now_s - route.reserved_s
            if elapsed_s > route.predicted_prefill_s:
                # Without those given up as late, the late bound would shrink each time.
                times.ready.observe(route.predicted_prefill_s, elapsed_s)
        self.latency.end_prefill(times, id(route.lease), now_s)

    def prefill_done(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        """P has answered: learn its prefill time."""
        if route.prefill is not None:
            self._computed(route, facts, now_s)
            route.handed_s = now_s

    def first_token(
        self, route: Route, facts: RequestFacts, now_s: float, *, seen: bool = True
    ) -> None:
        """D has answered: after a transfer, or after computing.

        Not `seen`: it answered in one piece, and when its first token was there nobody knows.
        """
        route.first_token_s = now_s
        if not seen:
            if route.times is not None:
                route.times.computed_tokens += route.computes_tokens
                self.latency.end_prefill(route.times, id(route.lease), now_s)
            return
        if route.fallback is None and not route.tried:
            predicted_s, seconds = route.predicted_ttft_s, now_s - route.reserved_s
            self.latency.observe_ttft(predicted_s, seconds)
            name, queued = route.route_class.value, route.is_queued
            self.latency.calibration.observe(name, predicted_s, seconds, queued=queued)
            if route.times is not None:
                route.times.calibration.observe(name, predicted_s, seconds, queued=queued)
        if route.prefill is None:
            self._computed(route, facts, now_s)
        elif route.handed_s is not None:
            names = route.prefill.name, route.decode.name
            self.latency.observe_transfer(*names, route.new_tokens, now_s - route.handed_s)

    def _computed(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        times = route.times
        if times is None:
            return
        times.computed_tokens += route.computes_tokens
        times.ready.observe(route.predicted_prefill_s, now_s - route.reserved_s)
        turn_s = self.latency.end_prefill(times, id(route.lease), now_s)
        if turn_s is not None and not route.waited_for_room:
            saw_way = turn_s <= route.reserved_s + self.latency.way_s(route.prompt_tokens)
            seconds = now_s - (route.reserved_s if saw_way else turn_s)
            route.measured = times.measured(
                route.prompt_tokens,
                route.computes_tokens,
                seconds,
                route.beside_step_s,
                saw_way=saw_way,
            )

    def told(self, route: Route, cached_ratio: float | None = None) -> None:
        """The engine has told how much of the prompt it had cached; None: it tells nothing."""
        seen, route.measured = route.measured, None
        if seen is not None:
            new, tokens = route.computes_tokens, route.prompt_tokens
            if cached_ratio is not None:
                new = max(1, round(tokens * (1.0 - cached_ratio)))
            self.latency.told(seen, new, tokens - new)

    def finished(
        self, route: Route, kv_tokens: int, output_tokens: int | None, now_s: float
    ) -> None:
        """The answer is whole, beside `kv_tokens` of running streams, its own included."""
        if output_tokens is not None:
            self.latency.observe_output(output_tokens)
        if route.first_token_s is not None and output_tokens is not None and output_tokens > 1:
            tpot_s = (now_s - route.first_token_s) / (output_tokens - 1)
            self.slo_pressure.observe_tpot(tpot_s)
            # Prefills beside the stream are not a part of a decode step: subtract their time.
            times = self.latency.of(route.decode.name)
            step_s = tpot_s * (1.0 - min(BUSY_MOST, times.pace().busy_ratio(now_s)))
            self.latency.observe_step(times, kv_tokens, step_s)


class BlockUses:
    """Keeps `Route.use` in step with the request's course.

    `journal`: what other replicas are told of it; None where nothing is shared.
    """

    def __init__(self, reuse: Reuse, states: InstanceStates) -> None:
        self._reuse = reuse
        self._states = states
        self.journal: Journal | None = None

    def begin_use(self, route: Route, name: str, facts: RequestFacts) -> None:
        """An instance begins to compute the prompt; an earlier use of the route ends."""
        self.end_use(route)
        if route.lease.is_open:
            route.use = self.open_use(name, facts)

    def open_use(self, name: str, facts: RequestFacts) -> Use:
        """A use for a hedge: it is not the route's own, or not yet."""
        state = self._states.of(name)
        self._reuse.limit(state.cache, state.kv_tokens, state.assumed_kv_tokens, facts)
        use = self._reuse.begin_use(state.cache, facts)
        if self.journal is not None:
            self.journal.began(Course.BEGUN, use, facts)
        return use

    def close_use(self, use: Use | None) -> None:
        """A hedge's use is over."""
        if use is not None:
            self._reuse.end_use(use)
            if self.journal is not None:
                self.journal.went_on(Course.ENDED, use)

    def computed(
        self, route: Route, facts: RequestFacts, cached_ratio: float | None = None
    ) -> None:
        """The prompt is computed; `cached_ratio` of it was cached, None if not reported."""
        if (use := _open(route)) is not None:
            self._reported(use, facts, cached_ratio)
            self._reuse.computed(use, facts)
            if self.journal is not None:
                self.journal.went_on(Course.COMPUTED, use)

    def received(self, route: Route, facts: RequestFacts) -> None:
        """D has fetched the KV: P's use ends, D's begins."""
        self.end_use(route)
        if route.lease.is_open:
            use = self._reuse.received(self._states.of(route.decode.name).cache, facts)
            route.use = use
            if self.journal is not None:
                self.journal.began(Course.RECEIVED, use, facts)

    def completed(
        self,
        route: Route,
        facts: RequestFacts,
        cached_ratio: float | None,
        answer_tokens: int,
    ) -> None:
        """The answer is whole: its blocks are the most recently used ones."""
        if (use := _open(route)) is not None:
            if use.cache.name == route.decode.name:
                self._reported(use, facts, cached_ratio)
            self._reuse.released(use, facts, answer_tokens)
            if self.journal is not None:
                self.journal.went_on(Course.RELEASED, use, answer_tokens)

    def _reported(self, use: Use, facts: RequestFacts, cached_ratio: float | None) -> None:
        if cached_ratio is None:
            return
        if self._reuse.reported(use, facts, cached_ratio):
            self._states.assume_sizes()
        if self.journal is not None:
            self.journal.went_on(Course.REPORTED, use, cached_ratio)

    def end_use(self, route: Route) -> None:
        """End the route's use, if it has one."""
        use, route.use = route.use, None
        self.close_use(use)


def _open(route: Route) -> Use | None:
    return route.use if route.lease.is_open else None
