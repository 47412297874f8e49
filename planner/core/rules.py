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


@dataclass(frozen=True, slots=True)
class Rules:
    """What the builtin plugins go by. The defaults are those of Dynamo's planner.

    `aim`: what load scaling keeps; `own`: the thresholds of the aim LOAD.
    `sensitivity`: share of the targets below which there is room, 0..1; 0: never fewer.
    `max_step`: most replicas by which throughput scaling changes a component at once.
    """

    slo: Slo = field(default_factory=lambda: Slo(0.5, 0.05))
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
