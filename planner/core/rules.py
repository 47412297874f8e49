"""The settings of the builtin plugins."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from planner.core.perf.capacity import Slo
from planner.core.propose.static import DECODE, Aim, Thresholds


class DownRule(StrEnum):
    """When load scaling takes an instance away."""

    CONSOLIDATION = "consolidation"
    SENSITIVITY = "sensitivity"


class Strategy(StrEnum):
    """Which builtin plugins propose."""

    FOUNDING = "founding"
    RESERVE = "reserve"


@dataclass(frozen=True, slots=True)
class ReserveRules:
    """What the strategy of a reserve goes by; 0 takes its part away.

    `quantile`: share of past errors of the forecast that the reserve covers, 0..1. `memory_s`: how
    long an error is remembered. `first`: replicas of one error that is taken for granted before
    any is known, as if it had lasted `first_s`. `first_ratio`: most of these for each instance that
    the fleet has beyond one, as it is found. An idle fleet of one stays one. `hold_ratio`: how long
    a larger need of the past holds, in delays of a start, and `hold_s` at least. `backlog_ratio`: a
    backlog asks for up to so many times the replicas that the offered work takes. `by_size`: what
    ends counts by its tokens, beside what arrives by its number. `start_up_s`: delay of a start
    before one was measured. `waits`: nothing is ordered while instances come or go, as founded.
    """

    quantile: float = 0.95
    memory_s: float = 900.0
    first: float = 3.0
    first_s: float = 15.0
    first_ratio: float = 3.0
    hold_ratio: float = 1.0
    hold_s: float = 60.0
    backlog_ratio: float = 2.0
    by_size: bool = True
    start_up_s: float = 120.0
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """What the builtin plugins go by. The defaults are those of Dynamo's planner.

    `aim`: what load scaling keeps; `own`: the thresholds of the aim LOAD.
    `sensitivity`: share of the targets below which there is room, 0..1; 0: never fewer.
    `max_step`: most replicas by which throughput scaling changes a component at once.
    """

    slo: Slo = field(default_factory=lambda: Slo(0.5, 0.05))
    strategy: Strategy = Strategy.FOUNDING
    reserve: ReserveRules = field(default_factory=ReserveRules)
    aim: Aim = Aim.SLA
    own: Thresholds = field(default_factory=lambda: DECODE[Aim.THROUGHPUT])
    throughput_scaling: bool = True
    load_scaling: bool = True
    throughput_interval_s: float = 180.0
    load_interval_s: float = 5.0
    predictor: str = "kalman"
    predictor_log: bool = False
    sensitivity: float = 0.8
    down_rule: DownRule = DownRule.CONSOLIDATION
    max_step: int = 8
    min_endpoint: int = 1
    min_observations: int = 5
    most_accept_length: float = 1.0
