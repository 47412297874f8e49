"""Scaling by load: one replica more or less, by what each instance would take now.

Formulas of Dynamo's planner design, load-based scaling, for instances that prefill and decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.core.perf.capacity import Slo
from planner.core.perf.regression import Line
from planner.core.perf.steps import chunked
from planner.core.propose.static import DECODE, Aim, change
from planner.core.rules import DownRule, Rules
from planner.core.state import PlannerScalingState
from planner.core.types import Capabilities, Context, Engine, Kind, Proposal, Stage, Target


class LoadDecision(StrEnum):
    """What load scaling has decided at a tick, and why not more."""

    DISABLED = "disabled"
    NO_DATA = "no_fpm_data"
    IN_PROGRESS = "scaling_in_progress"
    COUNT_MISMATCH = "worker_count_mismatch"
    INSUFFICIENT = "insufficient_data"
    NO_CHANGE = "no_change"
    UP = "scale_up"
    DOWN = "scale_down"
    CAPPED = "scale_down_capped_by_throughput"
    REFUSED = "scale_down_refused_consolidation"


@dataclass(frozen=True, slots=True)
class Typical:
    """What requests are like: mean tokens of prompts and answers, cached share, tokens per step."""

    isl_tokens: float
    osl_tokens: float
    hit_ratio: float = 0.0
    accept_length: float = 1.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Times of the next request on an instance. `own_s`: what its prompt takes alone."""

    ttft_s: float
    itl_s: float
    own_s: float


@dataclass(frozen=True, slots=True)
class Judge:
    """Estimates an instance's times under its load, and under a multiple of it."""

    line: Line
    typical: Typical
    of: Capabilities

    def estimate(self, engine: Engine, times: float = 1.0) -> Estimate:
        """`times`: the load is so many times as large, as if fewer instances shared it."""
        new, kv = 1.0 - self.typical.hit_ratio, engine.decode_kv_tokens * times
        queued = engine.queued_prefill_tokens * times
        beside: Callable[[float], float] = lambda tokens: self.line(tokens, kv)  # noqa: E731
        budget = max(1.0, self.of.step_tokens - engine.decode_requests * times)
        own_s = chunked(self.typical.isl_tokens * new, budget, beside)
        ttft_s = chunked((queued + self.typical.isl_tokens) * new, budget, beside)
        context = self.typical.isl_tokens + self.typical.osl_tokens / 2
        held = kv + engine.queued_decode_kv_tokens * times + context
        itl_s = self.line(engine.prefill_tokens * times, held) / self.typical.accept_length
        return Estimate(ttft_s, itl_s, own_s)

    def kv_ratio(self, engine: Engine, times: float = 1.0) -> float:
        """Share of the KV cache that running and waiting requests take."""
        if self.of.kv_tokens is None:
            return 0.0
        waiting = engine.queued_decode_kv_tokens + engine.queued_prefill_tokens
        return times * (engine.decode_kv_tokens + waiting) / self.of.kv_tokens


def wants_more(judge: Judge, engines: Sequence[Engine], slo: Slo) -> bool:
    """Whether every instance is too late: with first tokens, or with the next ones."""
    found = [judge.estimate(engine) for engine in engines]
    return all(one.ttft_s > slo.ttft_s for one in found) or all(
        one.itl_s > slo.itl_s for one in found
    )


def wants_fewer_as_founded(
    judge: Judge, engines: Sequence[Engine], slo: Slo, sensitivity: float
) -> bool:
    """Whether every instance has room now: below the targets times the sensitivity.

    It does not ask what the others would have to take over, so it may go down and up for ever.
    """
    found = [judge.estimate(engine) for engine in engines]
    return all(
        one.ttft_s < slo.ttft_s * sensitivity and one.itl_s < slo.itl_s * sensitivity
        for one in found
    )


def wants_fewer(judge: Judge, engines: Sequence[Engine], slo: Slo, sensitivity: float) -> bool:
    """Whether the load of all would have room on one instance fewer."""
    if len(engines) < 2:
        return False
    times = len(engines) / (len(engines) - 1)
    for engine in engines:
        one = judge.estimate(engine, times)
        room_s = (slo.ttft_s - one.own_s) * sensitivity
        is_late = room_s <= 0 or one.ttft_s - one.own_s >= room_s
        if is_late or one.itl_s >= slo.itl_s * sensitivity or judge.kv_ratio(engine, times) >= 1.0:
            return False
    return True


class LoadPropose:
    """Proposes one replica more or fewer, and never fewer than throughput scaling's lower bound."""

    name = "builtin_load_propose"
    stage = Stage.PROPOSE
    priority = 100
    holds = False

    def __init__(self, rules: Rules, state: PlannerScalingState) -> None:
        self._rules, self._state = rules, state
        self.interval_s = rules.load_interval_s
        self.decisions: dict[str, LoadDecision] = {}

    def evaluate(self, context: Context) -> Proposal | None:
        """A target per component that is to change."""
        targets = []
        for component, replicas in context.replicas.items():
            engines = context.engines.get(component, ())
            wanted = self._wanted(component, context, engines)
            if wanted != context.baseline.get(component, replicas.expected):
                targets.append(Target(component, Kind.SET, wanted))
        return Proposal(self.name, tuple(targets), self.priority) if targets else None

    def _wanted(self, component: str, context: Context, engines: Sequence[Engine]) -> int:
        """The target of a component; the lower bound holds whatever load scaling says."""
        current = context.baseline.get(component, context.replicas[component].expected)
        floor = self._state.floors.get(component)
        least = max(self._rules.min_endpoint, floor.replicas if floor is not None else 0)
        decision = self._decide(component, context, engines)
        if decision is LoadDecision.DOWN and current - 1 < least:
            decision = LoadDecision.CAPPED
        self.decisions[component] = decision
        step = {LoadDecision.UP: 1, LoadDecision.DOWN: -1}.get(decision, 0)
        return max(current + step, least)

    def _decide(self, component: str, context: Context, engines: Sequence[Engine]) -> LoadDecision:
        replicas = context.replicas[component]
        if not engines:
            return LoadDecision.NO_DATA
        if not replicas.is_settled:
            return LoadDecision.IN_PROGRESS
        if len(engines) != replicas.ready:
            return LoadDecision.COUNT_MISMATCH
        if self._rules.aim is not Aim.SLA:
            return self._by_use(engines, context.capabilities.get(component, Capabilities()))
        return self._by_model(component, context, engines)

    def _by_use(self, engines: Sequence[Engine], of: Capabilities) -> LoadDecision:
        aim, own = self._rules.aim, self._rules.own
        found = change(engines, of, own if aim is Aim.LOAD else DECODE[aim])
        if found is None:
            return LoadDecision.INSUFFICIENT
        return {1: LoadDecision.UP, -1: LoadDecision.DOWN}.get(found, LoadDecision.NO_CHANGE)

    def _by_model(
        self, component: str, context: Context, engines: Sequence[Engine]
    ) -> LoadDecision:
        model, typical = self._state.model(component), self.typical()
        if model is None or typical is None:
            return LoadDecision.INSUFFICIENT
        judge = Judge(model, typical, context.capabilities.get(component, Capabilities()))
        return self._change(judge, engines)

    def _change(self, judge: Judge, engines: Sequence[Engine]) -> LoadDecision:
        slo, sensitivity = self._rules.slo, self._rules.sensitivity
        if wants_more(judge, engines, slo):
            return LoadDecision.UP
        has_room = wants_fewer_as_founded(judge, engines, slo, sensitivity)
        if self._rules.down_rule is DownRule.SENSITIVITY:
            return LoadDecision.DOWN if has_room else LoadDecision.NO_CHANGE
        if wants_fewer(judge, engines, slo, sensitivity):
            return LoadDecision.DOWN
        return LoadDecision.REFUSED if has_room else LoadDecision.NO_CHANGE

    def typical(self) -> Typical | None:
        """What requests are like; None before any has ended."""
        known = self._state
        if known.isl_tokens.value is None or known.osl_tokens.value is None:
            return None
        hit, accept = known.hit_ratio.value or 0.0, known.accept_length.value or 1.0
        return Typical(known.isl_tokens.value, known.osl_tokens.value, hit, accept)
