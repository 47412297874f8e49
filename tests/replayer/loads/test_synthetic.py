"""Synthetic loads: the seed draws them, and their rates are those that are said."""

from __future__ import annotations

import random

import pytest

from replayer.loads import SYNTHETIC, synthetic
from replayer.loads.load import Load


def rate_rps(load: Load, begin_s: float, end_s: float) -> float:
    inside = sum(begin_s <= one.at_s < end_s for one in load.requests)
    return inside / (end_s - begin_s)


@pytest.mark.long
@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_seed_gives_the_same_load_and_another_one_another(name: str) -> None:
    make = SYNTHETIC[name]
    first, again, other = make(1), make(1), make(2)
    assert first == again
    assert [one.at_s for one in first.requests] != [one.at_s for one in other.requests]
    assert sorted(one.at_s for one in first.requests) == [one.at_s for one in first.requests]
    assert first.requests[-1].at_s < first.end_s


def test_the_ramp_has_its_stages_to_the_second() -> None:
    load = synthetic.ramp(1)
    assert load.end_s == 2430
    assert list(load.rises_s) == [330, 690, 1050, 1410]
    assert len(load.requests) == sum(round(1.45 * rate * s) for rate, s in synthetic.RAMP)
    assert rate_rps(load, 0, 330) == pytest.approx(2.9, rel=0.01)
    assert rate_rps(load, 1410, 1770) == pytest.approx(14.5, rel=0.01)
    tokens = [one.input_tokens for one in load.requests]
    assert 3500 <= min(tokens) <= max(tokens) <= 4500


def test_the_step_is_three_times_the_rate() -> None:
    load = synthetic.step(1)
    assert rate_rps(load, 0, 600) == pytest.approx(6, rel=0.05)
    assert rate_rps(load, 600, 1500) == pytest.approx(18, rel=0.05)


def test_spikes_are_short() -> None:
    load = synthetic.spike(1)
    assert list(load.rises_s) == [480, 1080, 1800]
    assert rate_rps(load, 1080, 1260) == pytest.approx(24, rel=0.05)
    assert rate_rps(load, 1260, 1800) == pytest.approx(6, rel=0.1)


def test_a_late_load_begins_after_ten_minutes() -> None:
    load = synthetic.late(1)
    assert load.requests[0].at_s >= 600.0 == load.rises_s[0]
    assert rate_rps(load, 600, 1500) == pytest.approx(6, rel=0.05)
    assert rate_rps(load, 1500, 2400) == pytest.approx(18, rel=0.05)


def test_the_day_never_passes_the_peak_that_it_is_drawn_with() -> None:
    rates = [synthetic.day_rps(float(at_s)) for at_s in range(int(synthetic.DAY_S))]
    assert max(rates) < synthetic.DAY_PEAK_RPS
    assert min(rates) > 1.5
    assert rates[1440] < 0.75 * max(rates)  # lunch


def test_thinning_keeps_a_rate() -> None:
    times = list(synthetic.arrivals(random.Random(1), lambda _: 5.0, 1000.0, 20.0))
    assert len(times) == pytest.approx(5000, rel=0.05)
