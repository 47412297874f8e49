"""What each predictor does with any series."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.predict import PREDICTORS, Constant


@pytest.mark.parametrize("name", PREDICTORS)
@pytest.mark.parametrize("log", [False, True])
def test_leading_zeros_are_skipped(name: str, log: bool) -> None:
    one, other = PREDICTORS[name](log=log), PREDICTORS[name](log=log)
    for _ in range(20):
        one.observe(0.0)
    assert one.predict() is None
    for predictor in (one, other):
        for value in (4.0, 6.0, 8.0):
            predictor.observe(value)
    assert one.predict(3) == other.predict(3)


@pytest.mark.parametrize("name", PREDICTORS)
@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30))
def test_it_is_a_number_and_no_negative_one(name: str, values: list[float]) -> None:
    for log in (False, True):
        predictor = PREDICTORS[name](log=log)
        for value in values:
            predictor.observe(min(1e9, max(0.0, value)) if math.isfinite(value) else value)
        found = predictor.predict(4)
        assert found is None or (math.isfinite(found) and found >= 0.0)


@pytest.mark.parametrize("name", PREDICTORS)
def test_what_never_changes_stays(name: str) -> None:
    predictor = PREDICTORS[name]()
    for _ in range(200):
        predictor.observe(7.0)
    assert predictor.predict(5) == pytest.approx(7.0, rel=1e-3)


def test_a_warm_up_leaves_no_beginning() -> None:
    constant = Constant()
    constant.observe(5.0)
    constant.reset_idle_skip()
    constant.observe(0.0)
    assert constant.predict() is None
    constant.observe(3.0)
    assert constant.predict() == 3.0
