"""Quantiles of a bounded window against the plain way to compute them, and a learned sum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.latency.regression import (
    FEW,
    PRIOR_RATIO,
    RESIDUALS_WINDOW,
    SHORT_S,
    WINDOW,
    Four,
    JointRegression,
    Residuals,
)

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


UNITS: Four = (1e-3, 1e-6, 1e-4, 1e-9)
amounts = st.floats(0.0, 1e4)
rows = st.tuples(st.sampled_from([0.0, 1.0]), amounts, amounts, st.floats(0.0, 1e8))


def sum_of_four() -> JointRegression:
    alone: list[Four] = [(1e3, 0, 0, 0), (0, 1e6, 0, 0), (0, 0, 1e4, 0), (0, 0, 0, 1e9)]
    return JointRegression(UNITS, [(x, 1.0) for x in alone])


@given(st.lists(st.tuples(rows, st.floats(1e-6, 10.0), st.floats(0.0, 0.1)), max_size=40))
def test_a_term_never_takes_time_off(seen: list[tuple[Four, float, float]]) -> None:
    learned = sum_of_four()
    for x, y, beside in seen:
        learned.learn(x, y, beside)
        assert min(learned.c) >= 0.0


@pytest.mark.long
@given(st.tuples(*[st.floats(0.6, 1.8)] * 4), st.lists(rows, min_size=12, max_size=12))
def test_what_fits_exactly_is_learned(factors: Four, seen: list[Four]) -> None:
    """Within what one observation may say, and once the prior has faded to its least part."""
    learned = sum_of_four()
    true: Four = tuple(f * c for f, c in zip(factors, UNITS, strict=True))  # type: ignore[assignment]
    for _ in range(WINDOW):
        for x in seen:
            learned.learn(x, sum(c * v for c, v in zip(true, x, strict=True)), 0.0)
    for x in seen:
        y = sum(c * v for c, v in zip(true, x, strict=True))
        assert learned.at(x) == pytest.approx(y, rel=0.05, abs=1e-9)
