"""Predictors on arrivals: what errors cost, and how soon a rise is seen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.plan.predictors import counts, judge, loss, pinball, predicted, react_s
from planner.core.predict import PREDICTORS, Constant
from replayer.loads import SYNTHETIC, make
from tests.analysis.plan.runs_for_tests import load
from tests.support.examples import examples


def test_too_little_costs_four_times_as_much_as_too_much() -> None:
    assert pinball(10.0, 9.0) == pytest.approx(0.8)
    assert pinball(10.0, 11.0) == pytest.approx(0.2)
    assert pinball(10.0, 10.0) == 0.0


def test_arrivals_are_counted_by_interval() -> None:
    assert counts(load(0.0, 29.9, 30.0, 119.0, 500.0), 30.0) == [2, 1, 0, 2]


def test_the_last_value_is_one_interval_late() -> None:
    values = [2, 2, 8, 8]
    said = predicted(Constant(), values, 1)
    assert said == [2, 2, 8, 8]
    assert loss(values, said, 1) == pytest.approx((0.8 * 6) / 3 / 5)


@pytest.mark.parametrize(
    ("said", "late_s"),
    [
        ([1, 1, 9, 9], 10.0),
        ([1, 1, 1, 9], 20.0),
        ([1, 9, 9, 9], 10.0),
        ([1, 1, 8, 8], math.inf),
    ],
)
def test_a_rise_is_seen_once_nine_tenths_of_it_are_told(said: list[float], late_s: float) -> None:
    """Before it, 9 may be told by chance: it counts from the rise on."""
    assert react_s([1, 1, 10, 10], said, (20.0,), 10.0) == late_s


def test_a_rise_that_is_over_before_it_is_seen_is_never_seen() -> None:
    values = [1, 10, 1, 10]
    assert react_s(values, [0, 0, 10, 10], (10.0, 30.0), 10.0) == pytest.approx(15.0)
    assert react_s(values, [0, 0, 0, 10], (10.0, 30.0), 10.0) == math.inf
    assert react_s(values, values, (), 10.0) is None


@given(st.sampled_from(sorted(PREDICTORS)), st.integers(1, 9), st.sampled_from([0.0, 30.0, 90.0]))
@settings(max_examples=examples(20))
def test_a_flat_load_is_predicted_by_all(name: str, each: int, startup_s: float) -> None:
    arrivals_s = [30.0 * at + n for at in range(40) for n in range(each)]
    found = judge(load(*arrivals_s, end_s=1200.0), name, 30.0, startup_s)
    assert found.loss == pytest.approx(0.0, abs=0.02)
    assert found.ahead == 1 + startup_s / 30.0


@given(st.sampled_from(sorted(PREDICTORS)), st.lists(st.integers(1, 99), min_size=1, max_size=9))
@settings(max_examples=examples(20))
def test_nights_before_the_first_request_teach_nothing(name: str, values: list[int]) -> None:
    of = PREDICTORS[name]
    said = predicted(of(), [0, 0, 0, *values], 2)
    assert said[:3] == [0.0] * 3
    assert said[3:] == predicted(of(), values, 2)


@pytest.mark.long
@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize("startup_s", [0.0, 30.0, 120.0])
def test_the_ensemble_costs_at_most_a_twentieth_more_than_the_best(
    name: str, startup_s: float
) -> None:
    """On seeds that its constants were not chosen on."""
    loads = [make(name, seed, None) for seed in (2, 3)]
    cost = {
        predictor: sum(judge(one, predictor, 30.0, startup_s).loss for one in loads)
        for predictor in PREDICTORS
    }
    assert cost["ensemble"] <= 1.05 * min(cost.values())
