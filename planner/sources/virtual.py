"""A virtual fleet as the planner's source and scaler: the context that a real proxy would give.

All figures are differences of counters and the proxy's own accounts, as design section 4 has them.
The window of traffic is the throughput interval; before it is whole nothing is told of traffic.
An instance's iterations are those that its engine counts. Their time is the mean gap between two
tokens of a stream: a step's tokens come together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from planner.core.builtin import COMPONENT, Builtin, limits_of
from planner.core.pipeline import Outcome
from planner.core.rules import Rules
from planner.core.types import Capabilities, Context, Engine, Replicas, Traffic
from planner.core.window import Counters
from proxy.core.types import Load
from replayer.virtual.seen import Seen, SeenInstance, Told, Wish

HARDLY_S = 1e-6


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
        self._site, self._rules = site, rules
        self._ticks, self._target = 0, site.initial
        self._counters = Counters()
        self._loads: dict[str, Load] = {}
        """Each instance's load at the tick before."""
        self._told: deque[tuple[float, Told]] = deque()
        self._before: tuple[float, Told] = (0.0, Told())

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
        traffic, (before_s, before) = self._traffic(seen), self._before
        self._before = seen.now_s, seen.told
        return Context(
            self._ticks,
            seen.now_s,
            {COMPONENT: Replicas(ready, self._target, pending)},
            {COMPONENT: self._site.of},
            traffic,
            {COMPONENT: self._engines(seen, traffic)},
            baseline={COMPONENT: self._target},
            recent=traffic_between(before, seen.told, seen.now_s - before_s),
        )

    def _traffic(self, seen: Seen) -> Traffic | None:
        """What was offered in the last throughput interval."""
        told, since_s = self._told, seen.now_s - self._rules.throughput_interval_s
        if not told:
            told.append((0.0, Told()))
        told.append((seen.now_s, seen.told))
        while len(told) > 1 and told[1][0] <= since_s + HARDLY_S:
            told.popleft()
        begin_s, before = told[0]
        if begin_s > since_s + HARDLY_S:
            return None
        return traffic_between(before, seen.told, seen.now_s - begin_s)

    def _engines(self, seen: Seen, traffic: Traffic | None) -> tuple[Engine, ...]:
        """The mean state of each instance since the tick before."""
        isl_tokens = (traffic.isl_tokens if traffic else None) or 0.0
        waiting_tokens = seen.queued * isl_tokens / max(1, len(seen.instances))
        engines = tuple(self._engine(one, waiting_tokens) for one in seen.instances)
        present = {one.name: one.load for one in seen.instances}
        for name in self._loads.keys() - present.keys():
            self._counters.forget(name)
        self._loads = present
        return engines

    def _engine(self, one: SeenInstance, waiting_tokens: float) -> Engine:
        """`waiting_tokens`: its share of what the proxy has not placed yet."""
        grown = self._counters.grown(
            one.name,
            {
                "steps": one.iterations,
                "computed": one.computed_tokens,
                "gaps": one.gaps,
                "gap_s": one.gap_s,
            },
        )
        before, now = self._loads.get(one.name, one.load), one.load
        gaps, steps = grown.get("gaps", 0.0), grown.get("steps", 0.0)
        return Engine(
            one.name,
            wall_s=grown["gap_s"] / gaps if gaps else None,
            prefill_tokens=grown["computed"] / steps if steps else 0.0,
            decode_requests=(before.decode_requests + now.decode_requests) / 2,
            decode_kv_tokens=(before.decode_tokens + now.decode_tokens) / 2,
            queued_prefill_tokens=now.prefill_tokens + waiting_tokens,
        )


def traffic_between(before: Told, now: Told, window_s: float) -> Traffic:
    """The traffic between two readings of the proxy's counters."""
    ended = now.ended - before.ended
    prompts = now.prompt_tokens - before.prompt_tokens
    return Traffic(
        window_s,
        now.offered - before.offered,
        prompts / ended if ended else None,
        (now.output_tokens - before.output_tokens) / ended if ended else None,
        (now.cached_tokens - before.cached_tokens) / prompts if prompts else None,
        ended=ended,
    )
