"""What is learned of watts and degrees."""

import random

import pytest

from proxy.core.thermal.power import Observer, PowerLine, Resistance, Smoothed, sequences_of


def test_a_hundred_watts_are_31_sequences() -> None:
    assert sequences_of(100.0, 3.2) == 31


def test_the_line_begins_at_the_founding_figure_and_learns_the_real_one() -> None:
    line, drawn = PowerLine(3.2), random.Random(1)
    assert line.of_sequence(4096.0) == pytest.approx(3.2)
    before = line.spread_watts
    for _ in range(400):
        running, tokens = drawn.randrange(1, 200), drawn.randrange(500, 4000)
        prefill = drawn.uniform(0.0, 20_000.0)
        watts = 110 + 1.5 * running + 0.0004 * running * tokens + 0.01 * prefill
        line.observe(running, running * tokens, prefill, watts + drawn.uniform(-5.0, 5.0))
    assert line.watts(100, 200_000, 5_000.0) == pytest.approx(110 + 150 + 80 + 50, rel=0.02)
    assert line.of_sequence(2000.0) == pytest.approx(1.5 + 0.8, rel=0.05)
    assert line.spread_watts < before / 10


@pytest.mark.long
def test_after_hours_of_work_the_line_is_as_good() -> None:
    """Rounding once put a difference between the halves of the covariance, which grew."""
    line, drawn = PowerLine(3.2), random.Random(5)
    for second in range(25_000):
        running = max(1, 60 + drawn.randint(-50, 50))
        kv, prefill = running * drawn.randrange(500, 4000), drawn.uniform(0.0, 20_000.0)
        watts = 110 + 2.8 * running + 0.0001 * kv + 0.002 * prefill + drawn.gauss(0.0, 10.0)
        line.observe(running, kv, prefill, watts)
        if second > 10_000 and not second % 1000:
            assert line.watts(60, 120_000, 5_000.0) == pytest.approx(110 + 168 + 12 + 10, rel=0.03)
    assert 0.0 < line.spread_watts < 1.0


def test_watts_of_a_sequence_stay_near_where_they_began() -> None:
    line = PowerLine(3.2)
    for number in range(100):
        line.observe(number, 0, 0.0, 100.0 - 5.0 * number)
    assert line.of_sequence(0.0) == pytest.approx(0.2 * 3.2)


def test_no_news_does_not_make_the_line_uncertain_for_ever() -> None:
    line = PowerLine(3.2)
    for _ in range(20_000):
        line.observe(50, 50_000, 0.0, 300.0)
    assert line.watts(50, 50_000, 0.0) == pytest.approx(300.0)
    line.observe(60, 60_000, 0.0, 340.0)
    assert line.watts(60, 60_000, 0.0) == pytest.approx(340.0, rel=0.05)


@pytest.mark.parametrize("rth", [0.05, 0.08, 0.2])
def test_degrees_per_watt_are_learned_from_changes(rth: float) -> None:
    tau_s, air, celsius = 20.0, 35.0, 60.0
    resistance, watts = Resistance(0.08, tau_s), 300.0
    for second in range(1200):
        watts = 300.0 + 200.0 * (second // 60 % 2)
        celsius += (rth * watts + air - celsius) / tau_s
        resistance.observe(float(second), watts, celsius)
    assert resistance.celsius_per_watt == pytest.approx(rth, rel=0.1)


def test_degrees_per_watt_stay_where_they_began_without_changes() -> None:
    resistance = Resistance(0.08, 20.0)
    for second in range(300):
        resistance.observe(float(second), 400.0, 70.0 + second % 2)
    assert resistance.celsius_per_watt == 0.08


def test_sparse_readings_teach_nothing() -> None:
    resistance = Resistance(0.08, 20.0)
    for number in range(20):
        resistance.observe(15.0 * number, 300.0 + 200 * (number % 2), 90.0 * (number % 2))
    assert resistance.celsius_per_watt == 0.08


@pytest.mark.parametrize("tau_s", [10.0, 20.0, 40.0])
def test_the_observer_sees_where_a_temperature_ends_whatever_the_air_is(tau_s: float) -> None:
    observer, celsius = Observer(20.0), 50.0
    for second in range(400):
        air = 30.0 if second < 200 else 45.0
        celsius += (0.08 * 500.0 + air - celsius) / tau_s
        observer.observe(float(second), celsius, 0.08 * 500.0)
        if second in (199, 399):
            assert observer.steady(40.0) == pytest.approx(air + 40.0, abs=0.3)


def test_a_long_gap_begins_the_observer_anew() -> None:
    observer = Observer(20.0)
    observer.observe(0.0, 50.0, 10.0)
    observer.observe(1000.0, 80.0, 10.0)
    assert observer.steady(10.0) == 80.0


def test_power_and_work_are_smoothed_alike() -> None:
    now = Smoothed()
    for second in range(4):
        now.observe(float(second), 10.0 * second, 1000.0 * second, 0.0, 30.0 * second)
    assert now.watts == pytest.approx(3.0 * now.running)
    assert now.mean_kv_tokens == pytest.approx(100.0)
    assert Smoothed().mean_kv_tokens == 0.0
