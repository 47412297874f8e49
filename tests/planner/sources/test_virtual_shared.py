"""Two deployments in virtual time, in step, with GPUs that they share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest

from planner.core.budget import Share, SharedBudget
from planner.core.builtin import Builtin, limits_of
from planner.core.pipeline import Outcome
from planner.core.rules import Rules, Strategy
from planner.core.types import Context
from planner.sources.virtual import VirtualPlanner, VirtualSite
from replayer.virtual.scaling import Life, ScaledRun
from tests.planner.sources.test_virtual import OF, RULES, play

WAIT_S = 120.0
"""For the other deployment's tick, on a machine with much else to do."""


class Steps:
    """Lets the ticks of two runs go in turn, as equal virtual times come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn, self._has_ended = 0, False

    def wait(self, whose: int) -> None:
        """Wait until it is the turn of one of them, which it is for good once the other ended."""
        with self._changed:
            is_own = self._changed.wait_for(
                lambda: self._has_ended or self._turn % 2 == whose, WAIT_S
            )
            assert is_own, "the other run does not go on"

    def done(self, *, ends: bool = False) -> None:
        with self._changed:
            self._turn += 1
            self._has_ended |= ends
            self._changed.notify_all()


class Sharing(Builtin):
    """The builtin rules, within a share."""

    def __init__(self, rules: Rules, least: int, share: Share, steps: Steps, whose: int) -> None:
        limits = limits_of(1, least, GPUS)
        super().__init__(rules, limits)
        self._share, self._steps, self._whose = share, steps, whose
        share.budget.join(share.name, 1, limits.min_replicas)
        self.wanted: list[int] = []
        self.targets: list[int] = []

    def tick(self, context: Context) -> Outcome:
        self._steps.wait(self._whose)
        outcome = super().tick(context)
        (own,) = context.replicas.values()
        found = self.shared(self._share, context, outcome, own.ready + own.pending)
        self.wanted += outcome.targets.values()
        self.targets += found.targets.values()
        self._steps.done()
        return found


GPUS = 6
QUIET, BUSY = (1.0, 60.0), (12.0, 60.0)


def played(
    strategy: Strategy,
    floors: tuple[int, int],
    weights: tuple[float, float],
    *rates: list[tuple[float, float]],
) -> tuple[list[Sharing], list[ScaledRun]]:
    budget, steps = SharedBudget(GPUS, hold_s=20.0), Steps()
    rules = replace(RULES, strategy=strategy)
    planners, own = [], []
    for at, least in enumerate(floors):
        planner = VirtualPlanner(VirtualSite(OF, least, least, GPUS), rules)
        share = Share(budget, "ab"[at], weights[at])
        planner.builtin = Sharing(rules, least, share, steps, at)
        planners.append(planner)
        own.append(planner.builtin)

    def run(at: int) -> ScaledRun:
        try:
            return play(planners[at], rates[at], initial=floors[at])
        finally:
            steps.done(ends=True)

    with ThreadPoolExecutor(2) as pool:
        return own, list(pool.map(run, (0, 1)))


def alive(lives: list[Life], at_s: float) -> int:
    return sum(
        life.ordered_s <= at_s and (life.left_s is None or at_s < life.left_s) for life in lives
    )


@pytest.mark.long
@pytest.mark.parametrize("strategy", list(Strategy))
def test_gpus_go_to_whose_load_is_high_and_none_falls_below_its_floor(strategy: Strategy) -> None:
    floors = (1, 2)
    rates = [BUSY, QUIET, QUIET], [QUIET, QUIET, BUSY]
    own, runs = played(strategy, floors, (1.0, 1.0), *rates)
    for one, least in zip(own, floors, strict=True):
        assert min(one.targets) >= least
        assert max(one.targets) > GPUS / 2, "more than its half while it is busy"
    lives = [list(run.lives) for run in runs]
    end_s = min(run.run.makespan_s for run in runs)
    assert all(sum(alive(of, float(at)) for of in lives) <= GPUS for at in range(int(end_s)))
    assert all(row.outcome == "ok" for run in runs for row in run.run.rows)


HEAVY = (25.0, 100.0)


@pytest.mark.long
@pytest.mark.parametrize("more", [0, 1])
def test_where_both_need_all_the_one_that_counts_more_has_it_and_keeps_it(more: int) -> None:
    weights = (5.0, 1.0) if more == 0 else (1.0, 5.0)
    own, _ = played(Strategy.RESERVE, (1, 1), weights, [QUIET, HEAVY], [QUIET, HEAVY])
    assert {tuple(one.wanted[24:32]) for one in own} == {(GPUS,) * 8}
    assert own[more].targets[24:32] == [GPUS - 1] * 8
    assert own[1 - more].targets[24:32] == [1] * 8


@pytest.mark.long
def test_equal_loads_do_not_pass_gpus_to_and_fro() -> None:
    busy = [QUIET, (12.0, 180.0)]
    own, _ = played(Strategy.RESERVE, (1, 1), (1.0, 1.0), busy, busy)
    for one in own:
        steps = [after - before for before, after in pairwise(one.targets) if after != before]
        assert sum(one * other < 0 for one, other in pairwise(steps)) <= 2, "up, down, and up"
