"""The rollout oracle: gaps are gaps, and luck is told apart."""

from dataclasses import replace

import pytest

from analysis.regret.actions import forced
from analysis.regret.oracle import Mode
from analysis.regret.outcomes import held_out_ratio
from analysis.regret.regret import run_probed
from analysis.regret.summary import regret_ratios
from replayer.virtual.requests import Loss
from tests.support.regret import (
    PLANNED,
    SOURCE,
    TASK,
    Watched,
    watch,
)
from tests.support.regret_runs import replayed, total_s

pytestmark = pytest.mark.figures


def test_gaps_are_never_negative_and_actions_never_repeat(watched: Watched) -> None:
    decisions, _run = watched
    for one in decisions:
        assert one.gap_s >= 0.0
        assert one.floor_ratio >= 0.0
        assert one.held_out_ratio is None
        kinds = [tried.action for tried in one.tried]
        assert len(set(kinds)) == len(kinds) <= 10
        assert {a.decode for a in kinds if a.prefill is None} == {"e0", "e1", "e2"}
        assert len(one.placebo) == len(kinds) - 1


def test_a_rule_that_looks_at_nothing_leaves_something_to_gain() -> None:
    decisions, _run = watch(replace(TASK, policy="round-robin"))
    assert any(one.gap_s > 0.0 for one in decisions)


def test_an_oracle_that_knows_the_future_never_loses_and_has_no_regret_of_its_own(
    watched: Watched,
) -> None:
    _decisions, plain = watched
    probe, run = run_probed(TASK, PLANNED, SOURCE.block_tokens, Mode.ROLLOUT, frozenset(range(5)))
    assert total_s(run) <= total_s(plain)
    assert total_s(run) == probe.decisions[-1].best.cost_s
    actions = {d.number: d.best.action for d in probe.decisions if d.best is not d.chosen}
    again = replayed(
        lambda number, scene, choice: (
            forced(scene, actions[number]) if number in actions else choice
        )
    )
    assert total_s(again) == total_s(run)
    assert regret_ratios([total_s(again)], [total_s(run)]) == [0.0]


def test_luck_is_found_by_postponing_alone(watched: Watched) -> None:
    _decisions, plain = watched
    _probe, run = run_probed(TASK, PLANNED, SOURCE.block_tokens, Mode.PLACEBO, frozenset(range(4)))
    assert total_s(run) <= total_s(plain)
    assert run.drift == 0


def test_a_retry_is_not_judged() -> None:
    """It cannot be postponed: its request is in the middle of its life."""
    lossy = replace(TASK, fleet=replace(TASK.fleet, losses=(Loss(0, 30.0, 40.0),)))
    for mode in (Mode.WATCH, Mode.PLACEBO):
        probe, run = run_probed(lossy, PLANNED, SOURCE.block_tokens, mode, frozenset(range(4, 9)))
        assert sum(row.retries for row in run.rows) > 0
        assert [one.number for one in probe.decisions] == [4, 5, 6, 7, 8]


def test_resampled_futures_are_the_same_for_every_action_and_every_time(
    watched: Watched,
) -> None:
    task = replace(TASK, horizon_s=20.0, futures=2)
    decisions, run = watch(task)
    assert run == watched[1]
    again, _run = watch(task)
    assert [d.as_dict() for d in decisions] == [d.as_dict() for d in again]
    for one in decisions:
        first, second = one.chosen.outcomes
        assert first.members != second.members or first.cost_s != second.cost_s
        assert all(t.outcomes[0].members == first.members for t in one.tried)
        assert all(o.requests == len(o.members or ()) for t in one.tried for o in t.outcomes)
        assert one.held_out_ratio is not None


def test_held_out_gaps_are_judged_where_nothing_was_chosen() -> None:
    assert held_out_ratio([[2.0, 2.0], [1.0, 1.0]]) == 1.0
    # Each action is the better one in one future: whoever chooses by the other one is wrong.
    assert held_out_ratio([[1.0, 2.0], [2.0, 1.0]]) == pytest.approx((1 / 2 - 1) / 2)
    assert held_out_ratio([[1.0]]) is None
