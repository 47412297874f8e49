"""The most that an admission which knows everything could get."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from analysis.league.capacity.bound import least_work_s, most_answers
from analysis.league.fleet import EngineFleet
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import Planned
from replayer.virtual.load import TraceTurn

ENGINE = EngineOptions()
FLEET = EngineFleet((ENGINE,))
TURN = TraceTurn("a", 8_000, 1, 8_000, (), 0, (), 0.0, 0.0)


def _turn(new_tokens: int) -> TraceTurn:
    return replace(TURN, prompt_tokens=new_tokens, new_tokens=new_tokens)


def _due(new_tokens: int, at_s: float, *wait_for: int) -> Planned:
    return Planned(_turn(new_tokens), "a", at_s, 1.0, wait_for)


def test_the_least_work_is_below_what_an_idle_engine_takes() -> None:
    assert 0 < least_work_s(TURN, ENGINE) < ENGINE.alone_s(8_000)
    assert least_work_s(replace(TURN, new_tokens=100), ENGINE) < least_work_s(TURN, ENGINE)
    assert least_work_s(replace(TURN, output_tokens=2), ENGINE) > least_work_s(TURN, ENGINE)


def test_as_many_fit_as_the_time_of_all_engines_holds() -> None:
    planned, one_s = [_due(8_000, 0.0)] * 50, least_work_s(TURN, ENGINE)
    assert most_answers(planned, FLEET, 10.6 * one_s) == 10
    assert most_answers(planned, EngineFleet((ENGINE,) * 2), 10.6 * one_s) == 21


def test_time_before_a_request_came_is_no_use_to_it() -> None:
    one_s = least_work_s(TURN, ENGINE)
    assert most_answers([_due(8_000, 8.5 * one_s)] * 50, FLEET, 10 * one_s) == 1
    after = [_due(8_000, 8.5 * one_s), *[_due(8_000, 0.0, 0)] * 3]
    assert most_answers(after, FLEET, 10 * one_s) == 1, "the next turn comes a second later"


def test_the_choice_is_the_best_of_all_sets() -> None:
    sizes = (9_000, 3_000, 5_000, 2_000, 7_000, 4_000)
    planned = [_due(size, 0.1 * at) for at, size in enumerate(sizes)]

    def fits(chosen: tuple[Planned, ...], horizon_s: float) -> bool:
        return all(
            sum(least_work_s(o.turn, ENGINE) for o in chosen if o.earliest_s >= one.earliest_s)
            <= horizon_s - one.earliest_s
            for one in chosen
        )

    for horizon_s in (0.3, 0.5, 0.7, 0.9, 1.2):
        best = max(
            count
            for count in range(len(planned) + 1)
            for chosen in itertools.combinations(planned, count)
            if fits(chosen, horizon_s)
        )
        came = [one for one in planned if one.earliest_s < horizon_s]
        assert most_answers(came, FLEET, horizon_s) == pytest.approx(best)
