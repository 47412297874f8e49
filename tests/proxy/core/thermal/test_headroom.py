"""Headroom: smoothing, look-ahead, and which sensor of which GPU decides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.thermal.headroom import MOST_GPUS, MOST_SAMPLES, GroupHeat, Heat, Track
from proxy.core.thermal.options import ThermalOptions
from proxy.core.thermal.readings import GpuReading

OPTIONS = ThermalOptions()


def _heat(group: GroupHeat, now_s: float, target: float | None = None) -> Heat:
    heat = group.heat(now_s, target)
    assert heat is not None
    return heat


def _seen(*readings: GpuReading) -> GroupHeat:
    group = GroupHeat(OPTIONS)
    group.observe(readings)
    return group


def test_nothing_is_known_before_the_first_reading() -> None:
    assert GroupHeat(OPTIONS).heat(0.0) is None
    assert _seen(GpuReading("a:0", 1.0, watts=300.0)).heat(1.0) is None


@given(st.floats(-2.0, 2.0), st.floats(20.0, 100.0))
def test_a_straight_line_has_its_slope(slope: float, begin: float) -> None:
    track = Track(3.0, 15.0)
    for second in range(30):
        track.add(float(second), begin + slope * second)
    assert track.slope() == pytest.approx(slope, abs=1e-6)


def test_a_rising_temperature_is_looked_ahead_and_a_falling_one_is_not() -> None:
    rising, falling = GroupHeat(OPTIONS), GroupHeat(OPTIONS)
    for second in range(30):
        rising.observe([GpuReading("a:0", second, 60.0 + 0.5 * second)])
        falling.observe([GpuReading("a:0", second, 100.0 - 0.5 * second)])
    up, down = _heat(rising, 29.0), _heat(falling, 29.0)
    assert up.slope == pytest.approx(0.5)
    assert up.lookahead_celsius == pytest.approx(up.excess_celsius + OPTIONS.lead_s * 0.5)
    assert down.lookahead_celsius == down.excess_celsius == -down.headroom_celsius


def test_the_hottest_gpu_decides_for_its_group() -> None:
    heat = _heat(
        _seen(*[GpuReading(f"a:{gpu}", 1.0, 70.0 + gpu % 5, watts=100.0) for gpu in range(8)]), 1.0
    )
    assert (heat.gpu, heat.celsius, heat.gpus, heat.watts) == ("a:4", 74.0, 8, 800.0)


def test_memory_decides_where_it_is_nearer_to_its_own_target() -> None:
    heat = _heat(_seen(GpuReading("a:0", 1.0, 75.0, 88.0)), 1.0)
    assert heat.celsius == 88.0
    assert heat.headroom_celsius == pytest.approx(2.0)
    assert heat.to_critical_celsius == pytest.approx(10.0)


def test_a_target_of_an_operator_replaces_the_chips() -> None:
    assert _heat(_seen(GpuReading("a:0", 1.0, 75.0)), 1.0, 70.0).excess_celsius == 5.0


@pytest.mark.parametrize(
    ("reading", "is_critical"),
    [
        (GpuReading("a:0", 1.0, 89.9, 97.9), False),
        (GpuReading("a:0", 1.0, 90.0), True),
        (GpuReading("a:0", 1.0, 70.0, 98.0), True),
        (GpuReading("a:0", 1.0, 70.0, is_slowed=True), True),
    ],
)
def test_what_is_critical(reading: GpuReading, *, is_critical: bool) -> None:
    assert _heat(_seen(reading, GpuReading("a:1", 1.0, 50.0)), 1.0).is_critical is is_critical


def test_the_oldest_gpu_is_the_age_of_the_group() -> None:
    group = _seen(GpuReading("a:0", 1.0, 70.0), GpuReading("a:1", 1.0, 70.0))
    group.observe([GpuReading("a:0", 9.0, 71.0), GpuReading("a:1", 1.0, 99.0)])
    heat = _heat(group, 10.0)
    assert heat.age_s == 9.0
    assert heat.celsius < 99.0


def test_a_gpu_that_never_says_a_temperature_ages_from_its_first_reading() -> None:
    group = GroupHeat(ThermalOptions())
    for at_s in (0.0, 10.0):
        group.observe([GpuReading("a", at_s, 60.0), GpuReading("b", 0.0), GpuReading("c", at_s)])
    heat = group.heat(10.0)
    assert heat is not None
    assert (heat.age_s, heat.gpus) == (10.0, 3)


def test_watts_are_unknown_where_one_gpu_does_not_say_them() -> None:
    group = _seen(GpuReading("a:0", 1.0, 70.0, watts=100.0), GpuReading("a:1", 1.0, 70.0))
    assert _heat(group, 1.0).watts is None


def test_everything_is_bounded() -> None:
    group = _seen(*[GpuReading(f"a:{gpu}", 1.0, 50.0) for gpu in range(MOST_GPUS + 5)])
    assert _heat(group, 1.0).gpus == MOST_GPUS
    track = Track(3.0, 300.0)
    for number in range(2 * MOST_SAMPLES):
        track.add(number / 100, 50.0)
    assert len(track._samples) == MOST_SAMPLES
    group.forget()
    assert group.heat(2.0) is None


def test_power_that_changes_without_its_temperature_is_unexplained() -> None:
    group, steady = GroupHeat(OPTIONS), GroupHeat(OPTIONS)
    for second in range(60):
        watts = 200.0 if second < 10 else 600.0
        stuck = GpuReading("a:1", second, 70.0, watts=watts)
        group.observe([GpuReading("a:0", second, 60.0 + second / 10, watts=watts), stuck])
        steady.observe([GpuReading("a:0", second, 70.0, watts=200.0)])
    assert _heat(group, 60.0).unexplained_watts == pytest.approx(400.0, rel=0.05)
    assert _heat(steady, 60.0).unexplained_watts == 0.0
    # It is not believed again as soon as the power is what it was, but with its next change.
    for second in range(60, 120):
        group.observe([GpuReading("a:1", second, 70.0, watts=200.0)])
    assert _heat(group, 120.0).unexplained_watts == pytest.approx(400.0, rel=0.05)
    group.observe([GpuReading("a:1", 120.0, 71.0, watts=200.0)])
    assert _heat(group, 120.0).unexplained_watts == 0.0


def test_gpus_that_are_told_of_no_more_are_forgotten() -> None:
    """The instance was given others; a sensor that says nothing at all changes nothing."""
    group = _seen(GpuReading("h:0", 1.0, 70.0), GpuReading("h:1", 1.0, 60.0))
    group.observe(())
    assert _heat(group, 601.0).age_s == 600.0
    group.observe((GpuReading("h:4", 601.0, 50.0),))
    heat = _heat(group, 601.0)
    assert (heat.gpus, heat.age_s, heat.latest) == (1, 0.0, 50.0)
