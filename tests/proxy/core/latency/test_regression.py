"""Quantiles of a bounded window against the plain way to compute them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.latency.regression import FEW, PRIOR_RATIO, RESIDUALS_WINDOW, SHORT_S, Residuals

ratios = st.lists(st.floats(0.001, 1000.0), max_size=3 * RESIDUALS_WINDOW)


@given(ratios, st.floats(0.0, 1.0))
def test_the_quantile_is_that_of_the_last_window(given_ratios: list[float], q: float) -> None:
    residuals = Residuals()
    for ratio in given_ratios:
        residuals.add(ratio)
    kept = sorted(given_ratios[-RESIDUALS_WINDOW:])
    assert len(residuals) == len(kept)
    expected = kept[min(len(kept) - 1, int(q * len(kept)))] if len(kept) >= FEW else None
    assert residuals.quantile(q) == expected


@given(ratios, st.floats(0.0, 100.0))
def test_nothing_is_late_before_its_prediction(given_ratios: list[float], by_s: float) -> None:
    residuals = Residuals()
    for ratio in given_ratios:
        residuals.observe(1.0, ratio)
    p50_s, p95_s = (residuals.bound_s(by_s, q) for q in (0.5, 0.95))
    assert by_s <= p50_s <= p95_s
    assert residuals.bound_s(by_s + 1.0, 0.95) >= p95_s


def test_short_predictions_say_nothing_of_long_ones() -> None:
    residuals = Residuals()
    for _ in range(RESIDUALS_WINDOW):
        residuals.observe(SHORT_S / 10, 1.0)
    assert len(residuals) == 0
    assert residuals.bound_s(0.0, 0.95) == pytest.approx(PRIOR_RATIO * SHORT_S)
