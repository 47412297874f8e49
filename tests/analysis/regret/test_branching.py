"""Branches of a run: each is the run that it would have been, and none leaves a process."""

from dataclasses import replace

import psutil
import pytest

from analysis.league.simulate import run_policy, setting
from analysis.regret.actions import Action, forced
from analysis.regret.branching import BranchingFleet, Postponed, Terms, cost_s, objective_s
from analysis.regret.outcomes import Tried
from analysis.rivals.registry import RIVALS
from proxy.core.known.fleet_state import FleetState
from proxy.core.latency.slo import Slo
from proxy.core.placement.decision import Choice, PlacementView
from proxy.core.routing.router import Router
from replayer.virtual.requests import VirtualRow
from tests.support.regret import (
    FLEET,
    PLANNED,
    RULES,
    SOURCE,
    Watched,
    watch,
)
from tests.support.regret_runs import replayed, total_s

pytestmark = pytest.mark.figures


def test_to_watch_changes_nothing_and_leaves_nothing(watched: Watched) -> None:
    _decisions, plain = watched
    assert run_policy("cost", PLANNED, FLEET, SOURCE.block_tokens) == plain
    before = _children()
    _again, run = watch()
    assert run == plain
    assert _children() == before


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_a_branch_with_the_chosen_action_is_the_run_itself(watched: Watched) -> None:
    decisions, plain = watched
    assert len(decisions) == 4
    for one in decisions:
        outcome = one.chosen.outcomes[0]
        assert outcome.cost_s == total_s(plain)
        assert outcome.requests == len(PLANNED)
        assert outcome.own_ttft_s == plain.rows[one.request].ttft_s


@pytest.mark.parametrize("place", range(4))
def test_a_branch_is_what_a_run_with_that_action_would_have_been(
    place: int, watched: Watched
) -> None:
    decisions, _run = watched
    one = decisions[place]
    kinds: dict[str, Tried] = {}
    for tried in one.tried:
        kinds.setdefault(tried.action.kind(one.home), tried)
    for tried in kinds.values():
        action = tried.action

        def change(
            number: int, scene: PlacementView, choice: Choice, action: Action = action
        ) -> Choice:
            return forced(scene, action) if number == one.number else choice

        assert total_s(replayed(change)) == tried.outcomes[0].cost_s


def test_a_failure_costs_its_timeout_and_a_second_try() -> None:
    row = VirtualRow(0, "s", 0.0, 1000, 101, 1000, outcome="timeout")
    assert cost_s(row, Slo(), 60.0) == pytest.approx(60.0 + 2.1 + 5.05 + 10.0)
    good = replace(row, outcome="ok", ttft_s=1.0, end_s=2.0)
    assert objective_s([good, row], Slo(), 60.0) == pytest.approx((2.0 + 77.15) / 2)


def test_a_branch_that_breaks_is_an_error_here_and_nothing_is_left() -> None:
    def broken(scene: PlacementView) -> Choice:
        if fleet.is_branch or fleet.branch(scene.now_s, None, None) is None:
            raise ValueError("broken rule")
        raise Postponed(1.0)

    before = _children()
    rival = RIVALS["cost"]
    config, options = setting(rival, FLEET, SOURCE.block_tokens)
    router = Router(FleetState(config), decide=broken)
    fleet = BranchingFleet(PLANNED, router, options, [], Terms(RULES.slo))
    with pytest.raises(RuntimeError, match="a branch of the run died"):
        fleet.run()
    assert _children() == before
