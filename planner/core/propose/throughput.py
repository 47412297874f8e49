"""Scaling by throughput: replicas for the load that is predicted."""

from __future__ import annotations

from enum import StrEnum

from planner.core.budget import within_step
from planner.core.perf.capacity import Capacity, Demand, aggregated
from planner.core.rules import Rules
from planner.core.state import Floor, PlannerScalingState
from planner.core.types import Capabilities, Context, Kind, Prediction, Proposal, Stage, Target


class ThroughputDecision(StrEnum):
    """What throughput scaling has decided at a tick, and why not more."""

    DISABLED = "disabled"
    NO_DATA = "no_traffic_data"
    PREDICT_FAILED = "predict_failed"
    NOT_READY = "model_not_ready"
    FLOOR = "set_lower_bound"
    SCALE = "scale"


class ThroughputPropose:
    """Proposes a target; where load scaling runs beside it, a lower bound for that."""

    name = "builtin_throughput_propose"
    stage = Stage.PROPOSE
    priority = 100
    holds = False

    def __init__(self, rules: Rules, state: PlannerScalingState) -> None:
        self._rules, self._state = rules, state
        self.interval_s = rules.throughput_interval_s
        self.decisions: dict[str, ThroughputDecision] = {}
        self.capacities: dict[str, Capacity] = {}

    def evaluate(self, context: Context) -> Proposal | None:
        """Replicas of each component for the predicted load."""
        targets = [
            target
            for component in context.replicas
            if (target := self._of(component, context)) is not None
        ]
        return Proposal(self.name, tuple(targets), self.priority) if targets else None

    def _of(self, component: str, context: Context) -> Target | None:
        needed = self._needed(component, context)
        if needed is None:
            return None
        now = {component: context.baseline.get(component, context.replicas[component].expected)}
        n = within_step(now, {component: needed}, self._rules.max_step)[component]
        if not self._rules.load_scaling:
            self.decisions[component] = ThroughputDecision.SCALE
            return Target(component, Kind.SET, n)
        self._state.floors[component] = Floor(n, context.tick)
        self.decisions[component] = ThroughputDecision.FLOOR
        return Target(component, Kind.AT_LEAST, n)

    def _needed(self, component: str, context: Context) -> int | None:
        """Replicas for the predicted load; None, and why, where that cannot be said."""
        demand = self._demand(context)
        if isinstance(demand, ThroughputDecision):
            self.decisions[component] = demand
            return None
        model = self._state.model(component)
        if model is None:
            self.decisions[component] = ThroughputDecision.NOT_READY
            return None
        of = context.capabilities.get(component, Capabilities())
        one = self.capacities[component] = aggregated(model, demand, self._rules.slo, of)
        return one.replicas(demand, self._rules.min_endpoint)

    def _demand(self, context: Context) -> Demand | ThroughputDecision:
        if context.traffic is None:
            return ThroughputDecision.NO_DATA
        told = context.prediction
        if None in (told.next_num_req, told.next_isl, told.next_osl):
            return ThroughputDecision.PREDICT_FAILED
        return demand_of(told, context.traffic.window_s)


def demand_of(told: Prediction, window_s: float) -> Demand:
    """The load of a predicted interval of so many seconds."""
    return Demand(
        (told.next_num_req or 0.0) / window_s,
        told.next_isl or 0.0,
        told.next_osl or 0.0,
        min(1.0, max(0.0, told.hit_ratio or 0.0)),
        told.accept_length or 1.0,
    )
