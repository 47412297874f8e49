"""Scaling with a reserve: replicas for the offered work, and for how wrong forecasts have been.

The load is counted in replicas: requests per second over what one replica carries within the SLO.
An order helps only once its instance serves, so the load of now is a forecast for then, and a
quantile of what such forecasts have missed is kept in reserve. Replicas go late: a larger need
holds as long as it would take to have one back. The target is absolute, so that what is ordered
already counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.core.perf.capacity import Demand, aggregated, most_streams
from planner.core.perf.offered import Offered
from planner.core.perf.regression import Line
from planner.core.perf.start_up import StartUps
from planner.core.predict.errors import Errors
from planner.core.rules import Rules
from planner.core.state import PlannerScalingState
from planner.core.types import Capabilities, Context, Engine, Kind, Proposal, Stage, Target

NOW_S, LEVEL_S = 15.0, 60.0
"""Windows of the demand: the one that has to be met, and the steadier one that is forecast."""
MOST_REPLICAS = 1e5


class ReserveDecision(StrEnum):
    """What the strategy has decided at a tick, and why not more."""

    NO_DATA = "no_traffic_data"
    NOT_READY = "model_not_ready"
    IN_PROGRESS = "scaling_in_progress"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class Need:
    """What the target of a component is made of, in replicas.

    `rate`: requests per second of one replica within the targets.
    """

    level: float
    reserve: float
    backlog: float
    rate: float = 0.0

    @property
    def replicas(self) -> int:
        """Whole replicas for all of it."""
        return math.ceil(min(MOST_REPLICAS, max(self.level + self.reserve, self.backlog)) - 1e-9)


class _Memory:
    """What is known of one component from tick to tick."""

    def __init__(self, rules: Rules, initial: int, *, is_known: bool) -> None:
        own = rules.reserve
        self.start_ups = StartUps(own.start_up_s)
        first = 0.0 if is_known else min(own.first, own.first_ratio * max(0, initial - 1))
        first_count = round(own.first_s / rules.load_interval_s) if first else 0
        self.errors = Errors(own.memory_s, first, first_count)
        self.needs: deque[tuple[float, int]] = deque()
        self.initial = initial
        self.rate: float | None = None
        """Requests per second of one replica, as last found to keep the SLO."""

    def held(self, now_s: float, need: int, hold_s: float) -> int:
        """The largest need of the time that a need holds; at first the fleet as it was found."""
        if not self.needs:
            self.needs.append((now_s, self.initial))
        self.needs.append((now_s, need))
        while len(self.needs) > 1 and self.needs[0][0] <= now_s - hold_s:
            self.needs.popleft()
        return max(replicas for _, replicas in self.needs)


class ReservePropose:
    """Proposes a target for each component at each tick."""

    name = "builtin_reserve_propose"
    stage = Stage.PROPOSE
    priority = 100
    holds = False

    def __init__(self, rules: Rules, state: PlannerScalingState) -> None:
        self._rules, self._state = rules, state
        self.interval_s = rules.load_interval_s
        self._offered = Offered()
        self._memories: dict[str, _Memory] = {}
        self._kept: dict[str, list[tuple[float, float]]] = {}
        """Ages and errors that a process before has known, until a component is seen."""
        self.decisions: dict[str, ReserveDecision] = {}
        self.needs: dict[str, Need] = {}

    def evaluate(self, context: Context) -> Proposal | None:
        """Targets of the components whose need is known."""
        if context.recent is not None:
            self._offered.add(context.now_s, context.recent)
        targets = []
        for component in context.replicas:
            replicas = self._wanted(component, context)
            if replicas is not None:
                targets.append(Target(component, Kind.SET, replicas))
        return Proposal(self.name, tuple(targets), self.priority) if targets else None

    def delay_s(self, component: str) -> float:
        """How long a start takes, as far as is known."""
        return self._memories[component].start_ups.delay_s

    def errors(self) -> dict[str, list[tuple[float, float]]]:
        """Ages and errors of the forecasts of each component."""
        return self._kept | {name: one.errors.ages() for name, one in self._memories.items()}

    def recall(self, errors: Mapping[str, list[tuple[float, float]]]) -> None:
        """Take over what `errors` has told a process before."""
        self._kept = dict(errors)

    def _memory(self, component: str, now_s: float, initial: int) -> _Memory:
        found = self._memories.get(component)
        if found is None:
            kept = self._kept.get(component, [])
            found = self._memories[component] = _Memory(self._rules, initial, is_known=bool(kept))
            found.errors.recall(now_s, kept)
        return found

    def _wanted(self, component: str, context: Context) -> int | None:
        """The target of a component; None where it cannot be said, or must wait."""
        replicas = context.replicas[component]
        current = context.baseline.get(component, replicas.expected)
        memory = self._memory(component, context.now_s, current)
        memory.start_ups.observe(context.now_s, replicas.ready, current)
        need = self._need(component, context, memory)
        if isinstance(need, ReserveDecision):
            self.decisions[component] = need
            return None
        self.needs[component], own = need, self._rules.reserve
        hold_s = max(own.hold_s, own.hold_ratio * memory.start_ups.delay_s) * bool(own.hold_ratio)
        wanted = memory.held(context.now_s, need.replicas, hold_s)
        waits = own.waits and not replicas.is_settled
        self.decisions[component] = ReserveDecision.IN_PROGRESS if waits else ReserveDecision.SCALE
        return None if waits else max(wanted, self._rules.min_endpoint)

    def _need(self, component: str, context: Context, memory: _Memory) -> Need | ReserveDecision:
        typical = self._offered.typical()
        if context.recent is None or typical is None:
            return ReserveDecision.NO_DATA
        line = self._state.model(component)
        if line is None:
            return ReserveDecision.NOT_READY
        of, own = context.capabilities.get(component, Capabilities()), self._rules.reserve
        found = aggregated(line, typical, self._rules.slo, of)
        if found.is_feasible:
            memory.rate = found.rate
        # A line that was learned in an overload may say that nothing keeps the SLO.
        one = memory.rate or found.rate
        level, now = self._offered.rate(LEVEL_S) / one, self._offered.rate(NOW_S) / one
        if own.by_size:
            now = max(now, self._offered.ended_rate(NOW_S, line, typical) / one)
        memory.errors.observe(context.now_s, now)
        due_s = context.now_s + memory.start_ups.delay_s + self.interval_s
        memory.errors.expect(due_s, level)
        reserve = memory.errors.reserve(own.quantile) if own.quantile else 0.0
        waiting = self._backlog(line, typical, of, context.engines.get(component, ()))
        most = own.backlog_ratio * level + 1.0
        return Need(level, reserve, min(waiting, most) if own.backlog_ratio else 0.0, one)

    def _backlog(
        self, line: Line, typical: Demand, of: Capabilities, engines: Sequence[Engine]
    ) -> float:
        """Replicas that hold what runs and waits, and start all that waits within the SLO.

        The hold is by streams' KV, of which one replica has `most_streams` typical ones.
        """
        queued = sum(one.queued_prefill_tokens for one in engines)
        running = sum(one.decode_kv_tokens for one in engines)
        held = (running + queued) / (most_streams(typical, of) * max(1.0, typical.context_tokens))
        new_tokens = queued * (1.0 - typical.hit_ratio)
        prompts_s = line(new_tokens, 0.0) - line(0.0, 0.0)
        return max(held, prompts_s / self._rules.slo.ttft_s)
