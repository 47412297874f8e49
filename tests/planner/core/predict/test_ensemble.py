"""The ensemble: who speaks, by hand, and that it depends on the values alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.plan.predictors import loss, predicted
from planner.core.predict import EXPERTS, Ensemble
from tests.support.examples import examples

LEVELS = (90, 104, 97, 110, 93, 101, 108, 95, 99, 103, 91, 107)


def test_the_last_value_speaks_until_another_has_cost_less() -> None:
    """Losses after 10, 20, 30: the last value 0.98 * 8 + 8; Holt, who said 15.9, 0.98 * 8 + 11.3.

    On a line the filter knows the trend: it is right where the last value is always 10 short.
    """
    ensemble = Ensemble(EXPERTS)
    for value in (10.0, 20.0, 30.0):
        ensemble.observe(value)
    assert ensemble.predict() == 30.0
    for n in range(4, 41):
        ensemble.observe(10.0 * n)
    assert ensemble.predict() == pytest.approx(410.0, rel=0.01)
    assert ensemble.predict(3) == pytest.approx(430.0, rel=0.02)


def test_an_expert_speaks_with_a_margin_where_values_are_noisy() -> None:
    """Too little costs four times as much, so the mean is not what costs least."""
    values = [*LEVELS * 8]
    own = loss(values, predicted(Ensemble(EXPERTS), values, 3), 3)
    assert own < min(loss(values, predicted(make(), values, 3), 3) for make in EXPERTS)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=25), st.integers(1, 6))
@settings(max_examples=examples(15))
def test_it_does_not_matter_when_it_was_asked(values: list[int], ahead: int) -> None:
    often, late = Ensemble(EXPERTS), Ensemble(EXPERTS)
    for value in values:
        often.observe(value)
        for distance in range(1, 8):  # more than it keeps
            often.predict(distance)
        late.observe(value)
    assert often.predict(ahead) == late.predict(ahead)


def test_its_experts_see_logarithms_where_it_is_asked_to() -> None:
    ensemble = Ensemble(EXPERTS, log=True)
    for n in range(1, 40):
        ensemble.observe(1.1**n)
    found = ensemble.predict(2)
    assert found is not None
    assert found == pytest.approx(1.1**41, rel=0.25)
