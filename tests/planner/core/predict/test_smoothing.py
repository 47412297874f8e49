"""Holt and the season: their formulas by hand."""

from __future__ import annotations

import pytest

from planner.core.predict import Holt, Seasonal


def test_holt_by_hand() -> None:
    holt = Holt(alpha=0.5, beta=0.2, damping=0.5)
    holt.observe(10.0)
    holt.observe(14.0)  # level 12, trend 0.2 * 2 + 0.8 * 0 = 0.4
    assert holt.predict(2) == pytest.approx(12.0 + 0.4 * (0.5 + 0.25))


def test_a_season_comes_again_at_its_new_height() -> None:
    seasonal = Seasonal(season=4)
    for value in (1.0, 5.0, 9.0, 5.0):
        seasonal.observe(value)
    assert seasonal.predict() == 5.0, "no season is over"
    seasonal.observe(3.0)  # two above its own of the season before
    assert [seasonal.predict(i) for i in (1, 2, 3, 4, 5)] == [7.0, 11.0, 7.0, 5.0, 7.0]
