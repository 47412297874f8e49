"""The builtin plugins in one pipeline over one state: as founded, or with a reserve."""

from __future__ import annotations

from collections.abc import Sequence

from planner.core.budget import Limits
from planner.core.perf.regression import Inputs
from planner.core.pipeline import Outcome, Pipeline, Plugin, Steps, finished
from planner.core.predict.plugin import LoadPredict
from planner.core.propose.load import LoadPropose
from planner.core.propose.reserve import ReservePropose
from planner.core.propose.throughput import ThroughputPropose
from planner.core.rules import Rules, Strategy
from planner.core.state import PlannerScalingState
from planner.core.types import COMPONENT, Context


class Builtin:
    """The builtin plugins. `limits`: what none of them gets past; `priors`: points of a profile."""

    def __init__(
        self, rules: Rules, limits: Limits, priors: Sequence[tuple[Inputs, float]] = ()
    ) -> None:
        self.rules, self.state = rules, PlannerScalingState(priors)
        self.load = LoadPropose(rules, self.state)
        self.throughput = ThroughputPropose(rules, self.state)
        self.reserve = ReservePropose(rules, self.state)
        self.predict = LoadPredict(rules, self.state)
        self.pipeline = Pipeline([self.predict, *self._proposers()], limits)

    def _proposers(self) -> list[Plugin]:
        rules = self.rules
        if rules.strategy is Strategy.RESERVE:
            return [self.reserve]
        founding: list[tuple[bool, Plugin]] = [
            (rules.load_scaling, self.load),
            (rules.throughput_scaling, self.throughput),
        ]
        return [plugin for is_on, plugin in founding if is_on]

    @property
    def interval_s(self) -> float:
        """Seconds between two ticks."""
        rules = self.rules
        is_fast = rules.load_scaling or rules.strategy is Strategy.RESERVE
        return rules.load_interval_s if is_fast else rules.throughput_interval_s

    def tick(self, context: Context) -> Outcome:
        """Learn what the instances have shown, and decide, with builtin plugins alone."""
        return finished(self.steps(context))

    def steps(self, context: Context) -> Steps:
        """The same, with whom to ask beside the builtin plugins."""
        self.state.learn(context.engines, self.rules.min_observations)
        return self.pipeline.steps(context)


def limits_of(gpus: int, least: int, most: int) -> Limits:
    """The limits of one component: GPUs per replica, fewest and most replicas."""
    return Limits({COMPONENT: gpus}, {COMPONENT: least}, gpus * most)
