"""The watched run anew, with some of its decisions changed."""

import math
from collections.abc import Callable

from analysis.league.simulate import make_rule, setting
from analysis.regret.actions import is_heavy
from analysis.regret.branching import BranchingFleet, Terms, cost_s
from analysis.rivals.registry import RIVALS
from proxy.core.known.fleet_state import FleetState
from proxy.core.placement.decision import Choice, Decide, PlacementView
from proxy.core.placement.policies import POLICIES
from proxy.core.routing.router import Router
from replayer.virtual.requests import VirtualRun
from tests.support.regret import (
    FLEET,
    PLANNED,
    RULES,
    SOURCE,
)


def total_s(run: VirtualRun) -> float:
    return math.fsum(cost_s(row, RULES.slo, FLEET.timeout_s) for row in run.rows)


def replayed(change: Callable[[int, PlacementView, Choice], Choice]) -> VirtualRun:
    """The run anew, from its start and in this process, with HEAVY decisions changed by number."""
    rival = RIVALS["cost"]
    config, options = setting(rival, FLEET, SOURCE.block_tokens)
    policy: Decide = make_rule(rival, FLEET) or POLICIES[config.offload_policy]
    seen = -1

    def decide(scene: PlacementView) -> Choice:
        nonlocal seen
        choice = policy(scene)
        if not is_heavy(scene, choice):
            return choice
        seen += 1
        return change(seen, scene, choice)

    router = Router(FleetState(config), decide=decide)
    return BranchingFleet(PLANNED, router, options, [], Terms(RULES.slo)).run()
