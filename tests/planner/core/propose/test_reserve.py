"""Scaling with a reserve: needs by hand, what holds, and what each part does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.builtin import Builtin, limits_of
from planner.core.perf.capacity import Demand, Slo, aggregated
from planner.core.propose.reserve import ReserveDecision
from planner.core.rules import ReserveRules, Rules, Strategy
from planner.core.types import COMPONENT, Capabilities, Context, Engine, Replicas, Traffic
from tests.planner.core.perf.test_capacity import line

OF = Capabilities(step_tokens=1000, max_seqs=64, kv_tokens=100_000)
BARE = ReserveRules(quantile=0.0, first=0.0, hold_ratio=0.0, backlog_ratio=0.0, by_size=False)
"""Every part taken away: replicas for the work of now."""
SLO = Slo(0.5, 0.05)
LINE = line(0.01, 1e-4, 1e-7)
ONE = aggregated(LINE, Demand(1.0, 500.0, 100.0), SLO, OF).rate
"""Requests per second that one replica carries."""


class Fleet:
    """A planner, and a fleet that it gets at once unless `delay` ticks are named."""

    def __init__(self, own: ReserveRules, initial: int = 2, delay: int = 0, least: int = 1) -> None:
        rules = Rules(SLO, Strategy.RESERVE, own, min_endpoint=least)
        self.builtin = Builtin(rules, limits_of(1, least, 20))
        self.builtin.state.models[COMPONENT] = LINE
        self.wanted, self.ready = initial, initial
        self.ticks = 0
        self._to_come = [initial] * delay

    def tick(self, rate: float, queued: float = 0.0, isl: float = 500.0) -> int:
        """Five seconds of so many requests per second; the replicas wanted then."""
        self.ticks += 1
        count = 5.0 * rate
        recent = Traffic(5.0, count, isl, 100.0, 0.0, ended=count) if rate else Traffic(5.0, 0.0)
        engines = [Engine(str(i), None, 0.0, 0.0, 0.0, queued) for i in range(self.ready)]
        context = Context(
            self.ticks,
            5.0 * self.ticks,
            {COMPONENT: Replicas(self.ready, self.wanted, self.wanted - self.ready)},
            {COMPONENT: OF},
            engines={COMPONENT: tuple(engines)},
            baseline={COMPONENT: self.wanted},
            recent=recent,
        )
        self.wanted = self.builtin.tick(context).targets[COMPONENT]
        self._to_come.append(self.wanted)
        self.ready = min(self.wanted, self._to_come.pop(0))
        return self.wanted

    def run(self, rate: float, ticks: int) -> list[int]:
        return [self.tick(rate) for _ in range(ticks)]


@pytest.mark.parametrize(("load", "replicas"), [(0.2, 1), (1.0, 1), (1.01, 2), (4.5, 5)])
def test_bare_it_is_the_offered_work_in_whole_replicas(load: float, replicas: int) -> None:
    assert Fleet(BARE).run(load * ONE, 3) == [replicas] * 3


def test_a_first_reserve_fades_while_nothing_goes_wrong() -> None:
    fleet = Fleet(replace(BARE, quantile=0.9, first=3.0, first_s=5.0, start_up_s=10.0), initial=4)
    found = fleet.run(1.5 * ONE, 20)
    assert found[0] == 5, "1.5 and 3"
    assert found == sorted(found, reverse=True)
    assert found[-1] == 2


def test_a_first_reserve_is_a_share_of_the_fleet_as_it_was_found() -> None:
    assert Fleet(ReserveRules(), initial=1).run(0.2 * ONE, 60) == [1] * 60
    assert Fleet(ReserveRules(), initial=2).tick(1.2 * ONE) == 5, "1.2 and 3"
    assert Fleet(ReserveRules(), initial=9).tick(8.5 * ONE) == 12, "8.5 and 3, the most"


def test_errors_of_a_process_before_stand_in_for_the_first_one() -> None:
    own = replace(BARE, quantile=0.9, first=3.0, first_s=5.0, start_up_s=20.0, memory_s=600.0)
    before = Fleet(own)
    before.run(0.9 * ONE, 30)
    before.run(2.9 * ONE, 20)
    told = before.builtin.reserve.errors()
    assert told[COMPONENT][-1][0] == 0.0
    after = Fleet(own, initial=3)
    after.builtin.reserve.recall(told)
    assert after.builtin.reserve.errors() == told, "before the first tick"
    known, fresh = after.tick(0.9 * ONE), Fleet(own, initial=3).tick(0.9 * ONE)
    assert (known, fresh) == (3, 4)
    assert after.run(0.9 * ONE, 150)[-1] == 1, "forgotten"


def test_the_reserve_is_what_the_forecast_missed() -> None:
    """After a step from 1 to 3 replicas' work the next one like it finds them there."""
    fleet = Fleet(replace(BARE, quantile=0.9, start_up_s=20.0, memory_s=600.0))
    assert fleet.run(0.9 * ONE, 30)[-1] == 1
    fleet.run(2.9 * ONE, 20)
    assert fleet.run(0.9 * ONE, 20)[-1] == 3
    assert fleet.run(0.9 * ONE, 120)[-1] == 1, "forgotten"


def test_a_larger_need_holds_as_long_as_a_start_takes() -> None:
    fleet = Fleet(replace(BARE, hold_ratio=1.0, hold_s=10.0, start_up_s=60.0))
    fleet.run(2.9 * ONE, 20)
    course = fleet.run(0.9 * ONE, 30)
    steady = course.index(1)
    assert course[:8] == [3] * 8
    assert 60.0 <= 5.0 * steady <= 60.0 + 60.0, "and the window of the level"
    assert course[steady:] == [1] * (30 - steady)


def test_the_fleet_as_it_was_found_holds_first() -> None:
    assert Fleet(replace(BARE, hold_ratio=1.0, start_up_s=50.0), initial=6).run(ONE, 10) == [6] * 10


def test_what_is_ordered_counts_at_once() -> None:
    fleet = Fleet(BARE, delay=24)
    assert fleet.run(3.5 * ONE, 20) == [4] * 20


def test_as_founded_nothing_is_ordered_while_instances_come() -> None:
    own = replace(BARE, waits=True)
    course = [*(waiting := Fleet(own, delay=6)).run(2.5 * ONE, 2), *waiting.run(9.5 * ONE, 4)]
    assert course == [3] * 6
    assert waiting.builtin.reserve.decisions == {COMPONENT: ReserveDecision.IN_PROGRESS}
    eager = Fleet(replace(own, waits=False), delay=6)
    assert [*eager.run(2.5 * ONE, 2), *eager.run(9.5 * ONE, 4)][-1] > 3


def test_a_backlog_asks_for_more_but_not_for_all() -> None:
    """20,000 tokens wait: 2 s of prompts in a fleet that has half a second."""
    own = replace(BARE, backlog_ratio=2.0)
    assert Fleet(own).tick(0.9 * ONE, queued=10_000.0) == 3, "4, but at most 2 x 0.9 + 1"
    assert Fleet(replace(own, backlog_ratio=9.0)).tick(0.9 * ONE, queued=10_000.0) == 4
    assert Fleet(BARE).tick(0.9 * ONE, queued=10_000.0) == 1


def test_few_but_huge_requests_are_an_error_of_the_forecast() -> None:
    usual = replace(BARE, quantile=0.95, start_up_s=10.0)
    found = {}
    for by_size in (True, False):
        fleet = Fleet(replace(usual, by_size=by_size))
        fleet.run(0.5 * ONE, 20)
        for _ in range(3):
            fleet.tick(0.5 * ONE, isl=4000.0)
        fleet.run(0.5 * ONE, 20)
        found[by_size] = fleet.builtin.reserve.needs[COMPONENT].reserve
    assert found[True] > found[False]


def test_without_traffic_or_a_model_nothing_changes() -> None:
    silent = Fleet(ReserveRules(), initial=4)
    assert silent.run(0.0, 5) == [4] * 5
    assert silent.builtin.reserve.decisions == {COMPONENT: ReserveDecision.NO_DATA}
    unlearned = Fleet(ReserveRules(), initial=4)
    unlearned.builtin.state.models.clear()
    assert unlearned.run(ONE, 5) == [4] * 5
    assert unlearned.builtin.reserve.decisions == {COMPONENT: ReserveDecision.NOT_READY}


def test_a_line_under_which_nothing_keeps_the_slo_changes_no_capacity() -> None:
    fleet = Fleet(BARE)
    assert fleet.run(2.5 * ONE, 2) == [3, 3]
    fleet.builtin.state.models[COMPONENT] = line(1.0, 1e-4, 1e-7)
    assert fleet.run(2.5 * ONE, 2) == [3, 3]


@given(st.lists(st.floats(0.0, 12.0), min_size=1, max_size=60), st.integers(1, 4))
def test_never_below_the_floor_and_equal_runs_are_equal(loads: list[float], least: int) -> None:
    courses = []
    for _ in range(2):
        fleet = Fleet(ReserveRules(), initial=least, delay=3, least=least)
        courses.append([fleet.tick(load * ONE, queued=100 * load) for load in loads])
    assert courses[0] == courses[1]
    assert min(courses[0]) >= least
    assert max(courses[0]) <= 20


@pytest.mark.long
@given(st.floats(0.1, 15.0), st.integers(1, 10))
def test_a_constant_load_never_goes_down_and_up(load: float, initial: int) -> None:
    fleet = Fleet(ReserveRules(), initial=initial, delay=2)
    course = fleet.run(load * ONE, 200)
    ups = [at for at, (one, other) in enumerate(pairwise(course)) if other > one]
    downs = [at for at, (one, other) in enumerate(pairwise(course)) if other < one]
    assert not ups or not downs or max(ups) < min(downs)
    assert len(set(course[-50:])) == 1
