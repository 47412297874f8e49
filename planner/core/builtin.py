"""The builtin plugins in one pipeline over one state: as founded, or with a reserve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.core.budget import SHARED, Bounded, Claim, Limits, Share
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
        self._limits = limits

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

    def remember(self, share: Share | None, targets: Mapping[str, int]) -> None:
        """What was wanted before is its own until it is seen: others need not wait for that."""
        count = targets.get(COMPONENT)
        if share is not None and count is not None:
            share.budget.remember(share.name, self._claim(count, count, count))

    def shared(self, share: Share, context: Context, outcome: Outcome, there: int) -> Outcome:
        """An outcome with as many replicas as a shared budget grants.

        `there`: instances that hold GPUs; 0 where nothing is carried out.
        """
        wanted = outcome.targets[COMPONENT]
        claim = self._claim(wanted, context.baseline[COMPONENT], there)
        claim = replace(claim, rate=share.weight * self._rate(context, wanted))
        if (need := self.reserve.needs.get(COMPONENT)) is not None:
            sure = max(need.level, need.backlog)
            claim = replace(claim, sure=sure, spare=max(0.0, need.level + need.reserve - sure))
        granted = share.budget.granted(share.name, claim, context.now_s)
        if granted == wanted:
            return outcome
        limits = Bounded({COMPONENT: granted}, SHARED)
        return replace(outcome, targets=limits.targets, limits=limits)

    def _rate(self, context: Context, wanted: int) -> float:
        """Requests per second that one replica serves: by the model, else by what is wanted now."""
        need = self.reserve.needs.get(COMPONENT)
        capacity = self.throughput.capacities.get(COMPONENT)
        if need is not None:
            return need.rate
        if capacity is not None:
            return capacity.rate
        seen = context.traffic or context.recent
        return seen.requests / seen.window_s / max(1, wanted) if seen is not None else 0.0

    def _claim(self, wanted: int, target: int, there: int) -> Claim:
        """Of a load of which nothing is known but that all is needed."""
        least, gpus = self._limits.min_replicas[COMPONENT], self._limits.gpus[COMPONENT]
        return Claim(wanted, target, there, least, gpus, sure=float(wanted))


def limits_of(gpus: int, least: int, most: int) -> Limits:
    """The limits of one component: GPUs per replica, fewest and most replicas."""
    return Limits({COMPONENT: gpus}, {COMPONENT: least}, gpus * most)
