"""A virtual fleet as the planner's source and scaler: the context that a real proxy would give.

All figures are differences of counters and the proxy's own accounts, as design section 4 has them.
The window of traffic is the throughput interval; before it is whole nothing is told of traffic.
An instance's iterations are those that its engine counts. Their time is the mean gap between two
tokens of a stream: a step's tokens come together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.core.builtin import Builtin, limits_of
from planner.core.observe import (
    Account,
    EngineWindows,
    Totals,
    TrafficWindow,
    Work,
    traffic_between,
)
from planner.core.pipeline import Outcome
from planner.core.rules import Rules
from planner.core.types import COMPONENT, Capabilities, Context, Engine, Replicas, Traffic
from replayer.virtual.seen import Seen, SeenInstance, Told, Wish


@dataclass(frozen=True, slots=True)
class VirtualSite:
    """What an operator would configure; nothing of the load. `initial`: replicas at the start."""

    of: Capabilities
    initial: int
    min_replicas: int
    max_replicas: int


class VirtualPlanner:
    """One run of the planner's core on a fleet in virtual time; a `Scaler` of that."""

    def __init__(self, site: VirtualSite, rules: Rules) -> None:
        limits = limits_of(site.of.gpus, site.min_replicas, site.max_replicas)
        self.builtin = Builtin(rules, limits)
        self.first_s = self.builtin.interval_s
        self.outcome: Outcome | None = None
        self._site = site
        self._ticks, self._target = 0, site.initial
        self._windows = EngineWindows()
        self._window = TrafficWindow(rules.throughput_interval_s)
        self._window.add(0.0, Totals())
        self._before: tuple[float, Totals] = (0.0, Totals())

    def tick(self, look: Callable[[], Seen], now_s: float) -> Wish:
        """What the pipeline makes of a look; nothing where the fleet is as it is wanted."""
        self._ticks += 1
        seen = look()
        self.outcome = self.builtin.tick(self._context(seen))
        self._target = self.outcome.targets[COMPONENT]
        changed = self._target if self._target != seen.wanted else None
        return Wish(changed, now_s + self.builtin.interval_s)

    def _context(self, seen: Seen) -> Context:
        ready = len(seen.instances)
        pending = seen.ordered + seen.draining
        (before_s, before), now = self._before, totals_of(seen.told)
        traffic = self._window.add(seen.now_s, now)
        self._before = seen.now_s, now
        return Context(
            self._ticks,
            seen.now_s,
            {COMPONENT: Replicas(ready, self._target, pending)},
            {COMPONENT: self._site.of},
            traffic,
            {COMPONENT: self._engines(seen, traffic)},
            baseline={COMPONENT: self._target},
            recent=traffic_between(before, now, seen.now_s - before_s),
        )

    def _engines(self, seen: Seen, traffic: Traffic | None) -> tuple[Engine, ...]:
        isl_tokens = (traffic.isl_tokens if traffic else None) or 0.0
        waiting_tokens = seen.queued * isl_tokens / max(1, len(seen.instances))
        return self._windows.look(
            seen.now_s,
            {one.name: _account(one) for one in seen.instances},
            {one.name: _work(one) for one in seen.instances},
            waiting_tokens,
        )


def _account(one: SeenInstance) -> Account:
    load = one.load
    return Account(load.prefill_tokens, load.decode_requests, load.decode_tokens)


def _work(one: SeenInstance) -> Work:
    return Work(one.iterations, one.computed_tokens, one.gaps, one.gap_s)


def totals_of(told: Told) -> Totals:
    """The proxy's counters; all prompts of requests that have ended well were looked up."""
    return Totals(
        told.offered,
        told.ended,
        told.prompt_tokens,
        told.ended,
        told.output_tokens,
        told.prompt_tokens,
        told.cached_tokens,
    )
