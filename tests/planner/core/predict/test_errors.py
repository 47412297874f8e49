"""The reserve: quantiles of errors by hand, and how the first one fades."""

from __future__ import annotations

import pytest

from planner.core.predict.errors import Errors


def test_a_quantile_of_what_forecasts_missed() -> None:
    errors = Errors(1000.0, 0.0, 0)
    assert errors.reserve(0.5) == 0.0
    for tick, demand in enumerate((1.0, 2.0, 3.0, 4.0, 5.0)):
        errors.expect(10.0 * tick, 1.0)
        errors.observe(10.0 * tick, demand)
    assert errors.reserve(0.5) == pytest.approx(2.0)
    assert errors.reserve(1.0) == pytest.approx(4.0)
    assert errors.reserve(0.875) == pytest.approx(3.5)


def test_a_forecast_is_compared_when_it_is_due() -> None:
    errors = Errors(1000.0, 0.0, 0)
    errors.expect(20.0, 1.0)
    errors.observe(15.0, 9.0)
    assert errors.reserve(1.0) == 0.0
    errors.observe(20.0, 3.0)
    assert errors.reserve(1.0) == pytest.approx(2.0)


def test_less_than_was_forecast_needs_no_reserve() -> None:
    errors = Errors(1000.0, 0.0, 0)
    errors.expect(5.0, 4.0)
    errors.observe(5.0, 1.0)
    assert errors.reserve(0.95) == 0.0


def test_the_first_error_fades_as_others_come_and_others_are_forgotten() -> None:
    errors = Errors(100.0, 3.0, 1)
    assert errors.reserve(0.95) == 3.0
    found = []
    for tick in range(1, 31):
        errors.expect(float(tick), 1.0)
        errors.observe(float(tick), 1.0)
        found.append(errors.reserve(0.95))
    assert found == sorted(found, reverse=True)
    assert found[18] > 0.0 == found[20], "19 others are 95 % of 20"
    errors.expect(40.0, 1.0)
    errors.observe(40.0, 9.0)
    assert errors.reserve(1.0) == 8.0
    errors.observe(141.0, 0.0)
    assert errors.reserve(1.0) == 3.0
