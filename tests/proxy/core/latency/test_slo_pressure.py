"""The price of running streams' time follows a target, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.latency.slo_pressure import HIGHEST, LOWEST, MISS_RATIO, SloPressure

TARGET_S = 0.05


@given(st.lists(st.floats(1e-4, 10.0), max_size=400))
def test_the_price_stays_in_bounds(tpots: list[float]) -> None:
    pressure = SloPressure(TARGET_S)
    for tpot_s in tpots:
        pressure.observe_tpot(tpot_s)
        assert LOWEST * 0.999 <= pressure.price <= HIGHEST * 1.001


def test_it_rises_while_answers_miss_and_falls_while_they_keep_the_target() -> None:
    pressure = SloPressure(TARGET_S)
    assert pressure.price == 1.0
    for _ in range(500):
        pressure.observe_tpot(2 * TARGET_S)
    assert pressure.price == pytest.approx(HIGHEST)
    for _ in range(2000):
        pressure.observe_tpot(TARGET_S / 2)
    assert pressure.price == pytest.approx(LOWEST)


def test_it_rests_where_a_tenth_misses() -> None:
    pressure = SloPressure(TARGET_S)
    for i in range(1000):
        pressure.observe_tpot(TARGET_S * (2 if i % round(1 / MISS_RATIO) == 0 else 0.5))
    assert pressure.price == pytest.approx(1.0, rel=0.05)
