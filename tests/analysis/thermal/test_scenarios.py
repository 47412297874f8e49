"""The closed loop in virtual time: it settles, does not overshoot, does not flap. Simulated."""

from itertools import pairwise

import pytest

from analysis.thermal.scenarios import (
    SCENARIOS,
    Tried,
    overshoots,
    settled_ratio,
    try_scenario,
)
from proxy.core.thermal.options import ThermalOptions
from replayer.engine.heat import SensorFaults
from replayer.virtual.heated import HeatedSecond

pytestmark = pytest.mark.figures

THERMAL = ThermalOptions()
HOT = [name for name in SCENARIOS if name not in ("cool", "soak")]
SHORT = ("quiet", "dropouts", "hot-gpu")
"""Nothing happens in these after the load has come: seven minutes say as much as ten."""


def _states(tried: Tried) -> list[str]:
    return [second.state for second in tried.run.seconds]


@pytest.mark.parametrize("name", HOT)
def test_it_settles_without_overshoot_and_without_flapping(name: str) -> None:
    tried = try_scenario(SCENARIOS[name], THERMAL, 1, 420 if name in SHORT else 600)
    found, states = tried.figures, _states(tried)
    assert found["settled_ratio"] == 1.0
    assert found["overshoots"] <= 2
    assert found["directions"] <= 6
    assert found["throughput_tps"] > 3500
    caps = [second.cap for second in tried.run.seconds if second.cap is not None]
    assert all(THERMAL.min_cap <= cap <= THERMAL.max_running for cap in caps)
    if name == "dead-actuator":
        assert "DEGRADED" in states
    if name in ("frozen", "stuck"):
        assert "STALE" in states
    assert states[-1] in ("THROTTLE", "RECOVER")


def test_without_control_the_same_load_makes_the_hardware_slow_itself_down() -> None:
    baseline = try_scenario(SCENARIOS["quiet"], None, seed=1, seconds=260).figures
    control = try_scenario(SCENARIOS["quiet"], THERMAL, seed=1, seconds=260).figures
    assert baseline["peak_celsius"] > 92.0
    assert control["peak_celsius"] < 84.0
    assert control["throughput_tps"] > baseline["throughput_tps"]


def test_a_soak_at_700_watts_is_held_at_a_target_of_80() -> None:
    baseline = try_scenario(SCENARIOS["soak"], None, seed=1, seconds=200)
    assert min(second.watts for second in baseline.run.seconds[-20:]) == 700.0
    at_80 = ThermalOptions(target_celsius=80.0)
    found = try_scenario(SCENARIOS["soak"], at_80, seed=1, seconds=600).figures
    assert found["settled_ratio"] == 1.0
    assert found["overshoots"] <= 2
    assert found["directions"] <= 6


def test_a_cool_instance_is_served_as_without_control() -> None:
    baseline = try_scenario(SCENARIOS["cool"], None, seed=1, seconds=200)
    control = try_scenario(SCENARIOS["cool"], THERMAL, seed=1, seconds=200)
    assert baseline.run.requests
    for without, under in zip(baseline.run.requests, control.run.requests, strict=True):
        assert (without.ttft_s, without.end_s) == (under.ttft_s, under.end_s)
    assert set(_states(control)) == {"NORMAL"}


def test_an_emergency_acts_in_the_next_tick() -> None:
    tried = try_scenario(SCENARIOS["dead-actuator"], THERMAL, seed=1, seconds=300)
    scenario = SCENARIOS["dead-actuator"]
    assert isinstance(scenario.faults, SensorFaults)
    for before, now in pairwise(tried.run.seconds):
        is_dead = scenario.load.dead_from_s <= now.at_s < scenario.load.dead_until_s
        # The sensors' noise is half a degree.
        is_critical = now.celsius >= THERMAL.critical_celsius + 0.5
        if is_critical and before.celsius < THERMAL.critical_celsius and not is_dead:
            assert now.state == "EMERGENCY"
            assert now.cap is not None
            assert now.cap <= (before.cap or THERMAL.max_running)


def test_equal_seeds_give_equal_runs() -> None:
    one, other = (try_scenario(SCENARIOS["noise"], THERMAL, 3, 150).run.seconds for _ in "ab")
    assert one == other


def _second(at_s: int, celsius: float) -> HeatedSecond:
    return HeatedSecond(float(at_s), celsius, 0.0, 0, 0, None, "", 0)


def test_what_is_settled_and_what_is_an_overshoot() -> None:
    up_and_down = [70.0] * 20 + [88.0] * 40 + [79.0] * 40 + [82.0] * 50
    seconds = [_second(at_s, celsius) for at_s, celsius in enumerate(up_and_down)]
    assert overshoots(seconds, 82.0) == 1
    assert overshoots(seconds * 2, 82.0) == 2
    assert settled_ratio(seconds, 82.0, 120.0) == 1.0
    assert settled_ratio(seconds, 82.0, 0.0) == pytest.approx(0.36, abs=0.15)
    assert settled_ratio(seconds, 82.0, 1e9) is None
