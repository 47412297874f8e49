"""The plants: how warm work makes GPUs, and what broken sensors say of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.engine.heat import (
    FirstOrderPlant,
    HarnessFormula,
    HarnessPlant,
    Plant,
    PlantOptions,
    SensorFaults,
    Sensors,
    clock_ratio,
    make_plant,
)

CONTEXT = 4096
"""Tokens per sequence at which the founding document measured 3.2 W."""


def _run(plant: Plant, seconds: int, running: int) -> None:
    for _ in range(seconds):
        plant.step(1.0, running, running * CONTEXT, 0.0)


def test_a_sequence_draws_what_the_founding_document_measured() -> None:
    plant = FirstOrderPlant()
    more = plant.power_of(100, 100 * CONTEXT, 0.0) - plant.power_of(69, 69 * CONTEXT, 0.0)
    assert more == pytest.approx(31 * 3.2)


def test_the_first_order_plant_ends_at_power_times_resistance() -> None:
    plant = FirstOrderPlant()
    _run(plant, 400, 128)
    watts = 120 + 3.2 * 128
    assert plant.watts == pytest.approx(watts)
    assert plant.celsius == pytest.approx(32 + 0.08 * watts)


@given(st.lists(st.floats(0.01, 30.0), min_size=1, max_size=20), st.integers(0, 300))
def test_the_length_of_steps_does_not_matter(steps_s: list[float], running: int) -> None:
    once, often = FirstOrderPlant(), FirstOrderPlant()
    for step_s in steps_s:
        often.step(step_s, running, 0, 100.0)
    once.step(math.fsum(steps_s), running, 0, 100.0)
    assert often.celsius == pytest.approx(once.celsius)


def test_a_group_shares_the_power_and_has_one_hot_gpu() -> None:
    plant = FirstOrderPlant(PlantOptions(gpus=8, hot_gpu=3, hot_celsius=5.0))
    _run(plant, 400, 256)
    assert plant.gpu_watts(0) == pytest.approx(120 + 3.2 * 256 / 8)
    assert plant.watts == pytest.approx(8 * plant.gpu_watts(0))
    assert plant.celsius == plant.gpu_celsius(3) == pytest.approx(plant.gpu_celsius(0) + 5.0)


def test_no_gpu_draws_more_than_its_limit() -> None:
    plant = make_plant("first-order", PlantOptions(watts_limit=300.0))
    _run(plant, 1, 10_000)
    assert plant.watts == 300.0


def test_the_harness_step_is_its_formula() -> None:
    quiet = HarnessFormula(noise_celsius=0.0)
    plant = HarnessPlant(formula=quiet)
    plant.press(1.0, 1.6, 256)
    assert plant.celsius == pytest.approx(0.82 * 72 + 0.18 * (32 + 1.6 * 1.7 * 24 - 0.4))
    plant.is_relieved = True
    before = plant.celsius
    plant.press(1.0, 1.6, 256)
    assert plant.celsius == pytest.approx(0.82 * before + 0.18 * (32 + 1.6 * 40.8 - 0.4 - 2.0))
    assert plant.pressure_of(10.5, 256, 1.0) == 1.6


def test_an_engines_work_warms_the_harness_plant_too() -> None:
    cool, warm = make_plant("harness"), make_plant("harness")
    _run(cool, 60, 16)
    _run(warm, 60, 256)
    assert warm.celsius > cool.celsius + 15
    assert warm.watts == 700.0


def test_equal_seeds_give_equal_readings() -> None:
    def said(seed: int) -> list[float | None]:
        faults = SensorFaults(noise_celsius=0.5, dropout_ratio=0.2, seed=seed)
        sensors = Sensors(FirstOrderPlant(), faults=faults)
        return [r.celsius for now in range(50) for r in sensors.read(float(now))]

    assert said(1) == said(1) != said(2)
    assert 25 < len(said(1)) < 50


def test_a_frozen_sensor_repeats_its_last_reading_with_its_time() -> None:
    plant = FirstOrderPlant()
    sensors = Sensors(plant, faults=SensorFaults(frozen_from_s=2.0, frozen_until_s=4.0))
    times = []
    for now in range(6):
        plant.step(1.0, 100, 0, 0.0)
        times.append(sensors.read(float(now))[0].at_s)
    assert times == [0.0, 1.0, 1.0, 1.0, 4.0, 5.0]


def test_a_stuck_sensor_says_the_old_temperature_as_new() -> None:
    plant = FirstOrderPlant(PlantOptions(gpus=2))
    sensors = Sensors(plant, faults=SensorFaults(frozen_from_s=1.0, stuck_gpu=1))
    first = sensors.read(0.0)
    plant.step(30.0, 200, 0, 0.0)
    free, stuck = sensors.read(1.0)
    assert (stuck.celsius, stuck.at_s) == (first[1].celsius, 1.0)
    assert free.celsius is not None
    assert first[0].celsius is not None
    assert free.celsius > first[0].celsius + 5


def test_readings_name_the_gpu_its_memory_and_its_slowdown() -> None:
    options = PlantOptions(initial_celsius=93.0, memory_offset_celsius=4.0)
    reading = Sensors(FirstOrderPlant(options), host="a").read(0.0)[0]
    assert (reading.gpu, reading.celsius, reading.memory_celsius) == ("a:0", 93.0, 97.0)
    assert reading.is_slowed


def test_hardware_that_slows_itself_is_slower() -> None:
    assert clock_ratio(92.0, 92.0) == 1.0
    assert clock_ratio(97.0, 92.0) == pytest.approx(0.7)
    assert clock_ratio(130.0, 92.0) == 0.35


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"tau_s": 0.0}, {"hot_gpu": 1}])
def test_impossible_plants_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PlantOptions(**wrong)  # type: ignore[arg-type]
