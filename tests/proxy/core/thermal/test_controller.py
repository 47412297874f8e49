"""The controller: states, what binds a change and what does not, the ladder, an operator's word."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.thermal.controller import Controller, ThermalState
from proxy.core.thermal.laws import LAWS
from proxy.core.thermal.options import ThermalOptions
from proxy.core.thermal.policy import Scheduler
from proxy.core.thermal.readings import COOL, GpuReading, HeatLimits, InstanceWork
from proxy.core.thermal.victims import Victim
from tests.support.examples import examples

OPTIONS = ThermalOptions()
BUSY = InstanceWork(running=200, kv_tokens=200_000, waiting=50)


def _tick(
    controller: Controller, now_s: float, celsius: float | None, work: InstanceWork = BUSY
) -> HeatLimits:
    said = [] if celsius is None else [GpuReading("a:0", now_s, celsius, watts=500.0)]
    return controller.tick(said, work, now_s)


def _run(controller: Controller, begin_s: int, seconds: int, celsius: float | None) -> HeatLimits:
    """200 requests want to run, as far as the cap lets them."""
    for second in range(begin_s, begin_s + seconds):
        running = min(200, OPTIONS.max_running if controller.cap is None else controller.cap)
        work = InstanceWork(running, 1000 * running, 0.0, 200 - running)
        _tick(controller, float(second), celsius, work)
    return controller.limits


def _state(controller: Controller) -> str:
    return controller.state.value


def test_a_cool_instance_has_no_limit_at_all() -> None:
    controller = Controller(OPTIONS)
    for second in range(120):
        assert _tick(controller, float(second), 70.0 + second % 2) == COOL
    assert (controller.state, controller.actions) == (ThermalState.NORMAL, {})


def test_hysteresis_on_at_the_target_off_three_below() -> None:
    controller = Controller(OPTIONS)
    _run(controller, 0, 30, 81.9)
    assert _state(controller) == ThermalState.NORMAL
    _run(controller, 30, 20, 82.0)
    assert _state(controller) == ThermalState.THROTTLE
    _run(controller, 50, 60, 79.1)
    assert _state(controller) == ThermalState.THROTTLE
    _run(controller, 110, 20, 78.0)
    assert _state(controller) != ThermalState.THROTTLE


def test_recovery_gives_the_cap_back_and_ends_in_no_limit() -> None:
    controller = Controller(OPTIONS)
    assert _run(controller, 0, 40, 86.0).cap is not None
    _run(controller, 40, 300, 60.0)
    assert _state(controller) == ThermalState.NORMAL
    assert controller.limits == COOL


def test_the_ladder_in_the_order_of_what_costs_least() -> None:
    warm = _run(Controller(OPTIONS), 0, 60, 79.6)
    assert warm.weight == 0.8
    assert (warm.helps, warm.prefill_factor, warm.cap) == (True, 1.0, None)
    warmer = _run(Controller(OPTIONS), 0, 60, 81.0)
    assert warmer.weight == 0.3
    assert not warmer.helps
    assert warmer.prefill_factor > 1.0
    assert warmer.cap is None
    hot = _run(Controller(OPTIONS), 0, 60, 84.0)
    assert hot.cap is not None
    assert hot.prefill_factor > warmer.prefill_factor
    assert (hot.weight, hot.evict, hot.is_drained) == (0.1, 0, False)
    critical = _tick(Controller(OPTIONS), 0.0, 91.0)
    assert (critical.cap, critical.evict) == (100, 100)
    assert not critical.is_drained
    assert _run(Controller(OPTIONS), 0, 40, 91.0).is_drained


def test_running_requests_are_evicted_when_they_would_end_too_late() -> None:
    controller, celsius = Controller(OPTIONS), 76.0
    evicted = 0
    for second in range(30):
        # Rising half a degree per second, and nothing ends by itself.
        celsius = min(89.5, celsius + 0.5)
        evicted = max(evicted, _tick(controller, float(second), celsius).evict)
    assert evicted == 200 - (controller.cap or 0)


def test_nobody_is_evicted_while_enough_requests_end_by_themselves() -> None:
    controller, celsius, running = Controller(OPTIONS), 76.0, 240
    for second in range(30):
        celsius = min(86.0, celsius + 0.5)
        limits = _tick(controller, float(second), celsius, InstanceWork(running, 1000, 0.0, 50))
        assert not limits.evict
        if limits.cap is not None:
            running = max(limits.cap, running - 40)


@pytest.mark.parametrize("law", [*LAWS])
@pytest.mark.parametrize("is_slowed", [False, True])
def test_an_emergency_acts_within_one_tick_whatever_binds(law: str, *, is_slowed: bool) -> None:
    controller = Controller(ThermalOptions(law=law, dwell_s=100, budget_changes=1))
    _run(controller, 0, 40, 85.0)
    before = controller.cap or OPTIONS.max_running
    reading = GpuReading("a:0", 40.0, 85.0 if is_slowed else 90.0, is_slowed=is_slowed)
    limits = controller.tick([reading], BUSY, 40.0)
    assert _state(controller) == ThermalState.EMERGENCY
    assert limits.cap is not None
    assert limits.cap <= min(before, BUSY.running) // 2
    assert limits.evict == BUSY.running - limits.cap


def test_an_emergency_ends_below_the_critical_temperature_and_its_hysteresis() -> None:
    controller = Controller(OPTIONS)
    _run(controller, 0, 10, 91.0)
    _run(controller, 10, 20, 88.0)
    assert _state(controller) == ThermalState.EMERGENCY
    _run(controller, 30, 20, 86.5)
    assert _state(controller) == ThermalState.THROTTLE


def test_stale_holds_then_takes_the_safe_cap_and_ends_by_itself() -> None:
    controller = Controller(OPTIONS)
    before = _run(controller, 0, 20, 83.0)
    held = _run(controller, 20, 30, None)
    assert _state(controller) == ThermalState.STALE
    assert held == replace(before, evict=0)
    assert _run(controller, 50, 10, None).cap == OPTIONS.safe_cap
    assert controller.sensor_age_s == 40.0
    assert _run(controller, 60, 5, None).cap == OPTIONS.safe_cap
    _run(controller, 65, 30, 70.0)
    assert controller.state in (ThermalState.RECOVER, ThermalState.NORMAL)


def test_requests_that_wait_in_the_engine_do_not_hide_that_it_is_hot() -> None:
    controller, running = Controller(OPTIONS), 400
    for second in range(40):
        celsius = 80.0 + second / 10
        work = InstanceWork(running, 200_000)
        limits = _tick(controller, float(second), celsius, work)
        assert not limits.evict or limits.cap is not None
    assert (controller.cap or OPTIONS.max_running) < OPTIONS.max_running


def test_an_emergency_cuts_again_only_when_the_last_cut_was_obeyed() -> None:
    controller = Controller(OPTIONS)
    for second in range(20):
        # Nothing can be evicted, and nothing ends.
        assert _tick(controller, float(second), 91.0).cap == 100
    assert (_run(controller, 20, 20, 91.0).cap or 0) < 20


def test_nothing_is_given_back_above_the_target() -> None:
    controller = Controller(ThermalOptions(law="p"))
    _run(controller, 0, 3, 91.0)
    cap = controller.cap
    assert cap == 100
    assert _run(controller, 3, 120, 82.2).cap == cap
    assert (_run(controller, 123, 60, 80.0).cap or 256) == 256


def test_sensors_that_never_answer_are_stale_too() -> None:
    controller = Controller(OPTIONS)
    assert _run(controller, 0, 3, None) == COOL
    assert _state(controller) == ThermalState.NORMAL
    assert controller.headroom_celsius is controller.celsius is None
    assert _run(controller, 3, 60, None).cap == OPTIONS.safe_cap
    assert _state(controller) == ThermalState.STALE


def test_a_sensor_that_says_the_same_while_the_power_changes_is_not_believed() -> None:
    controller = Controller(OPTIONS)
    for second in range(120):
        running, watts = (20, 200.0) if second < 20 else (200, 700.0)
        said = [GpuReading("a:0", float(second), 70.0, watts=watts)]
        controller.tick(said, InstanceWork(running), float(second))
    assert _state(controller) == ThermalState.STALE
    assert controller.reason == "stuck"
    assert controller.cap == OPTIONS.safe_cap


def test_a_dead_actuator_is_probed_ever_less_often_and_the_first_success_ends_it() -> None:
    controller, tried = Controller(OPTIONS), []
    for second in range(300):
        _tick(controller, float(second), 84.0)
        if controller.is_due:
            tried.append(second)
            controller.actuator_failed(float(second))
    assert _state(controller) == ThermalState.DEGRADED
    gaps = [b - a for a, b in pairwise(tried)]
    assert gaps == [1, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    _tick(controller, 310.0, 84.0)
    controller.actuator_worked()
    _tick(controller, 311.0, 84.0)
    assert _state(controller) == ThermalState.THROTTLE
    assert controller.is_due


def test_an_operators_cap_holds_until_its_time_and_only_an_emergency_goes_below() -> None:
    controller = Controller(OPTIONS)
    controller.override(40, until_s=100.0)
    assert _run(controller, 0, 10, 70.0).cap == 40
    assert _state(controller) == ThermalState.MANUAL
    assert _run(controller, 10, 50, 85.0).cap == 40
    assert (_run(controller, 60, 2, 91.0).cap or 99) < 40
    _run(controller, 62, 40, 60.0)
    assert _state(controller) != ThermalState.MANUAL
    assert not controller.has_override


def test_an_override_is_cleared_and_versions_grow() -> None:
    controller = Controller(OPTIONS)
    versions = [controller.version]
    controller.override(40, math.inf)
    versions.append(controller.version)
    _run(controller, 0, 5, 60.0)
    versions.append(controller.version)
    controller.clear_override()
    versions.append(controller.version)
    assert versions == sorted(set(versions))
    _run(controller, 5, 120, 60.0)
    assert controller.limits == COOL


@pytest.mark.parametrize("cap", [0, 257])
def test_an_impossible_override_is_one_line(cap: int) -> None:
    with pytest.raises(ValueError, match=f"max_num_seqs must be 1 to 256, not {cap}"):
        Controller(OPTIONS).override(cap, 1.0)


def test_an_operators_target_is_held_until_its_time() -> None:
    controller = Controller(OPTIONS)
    _run(controller, 0, 20, 80.5)
    assert controller.cap is None
    controller.aim(75.0, until_s=60.0)
    assert _run(controller, 20, 20, 80.5).cap is not None
    assert _state(controller) == ThermalState.THROTTLE
    _run(controller, 40, 200, 70.0)
    assert _state(controller) == ThermalState.NORMAL
    controller.aim(95.0, until_s=1000.0)
    # It counts as 89, one below the critical temperature.
    _run(controller, 240, 30, 88.0)
    assert controller.headroom_celsius == pytest.approx(1.0, abs=0.1)
    with pytest.raises(ValueError, match=r"target_temp_c must be 30 to 95, not 96"):
        controller.aim(96.0, 1.0)


class _Failing:
    def get_max_running_seqs(self, scheduler: Scheduler) -> int:
        raise ZeroDivisionError("of an operator")

    def select_victims(self, running: list[Victim], num_to_evict: int) -> list[Victim]:
        return []

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        raise KeyError(gpu_idx)


def test_an_operators_policy_that_fails_leaves_the_founding_law() -> None:
    controller = Controller(OPTIONS, _Failing())
    limits = _run(controller, 0, 30, 88.0)
    assert limits.cap == 253
    assert "ZeroDivisionError: of an operator" in controller.mistake
    assert controller.actions["hold", "policy_failed"] > 30


def test_another_process_begins_without_readings_but_with_its_cap() -> None:
    controller = Controller(OPTIONS)
    cap = _run(controller, 0, 30, 85.0).cap
    controller.reset()
    assert controller.tick([], BUSY, 31.0).cap == cap
    assert controller.heat is None


def test_what_telemetry_is_told() -> None:
    controller = Controller(OPTIONS)
    _run(controller, 0, 40, 85.0)
    assert controller.celsius == pytest.approx(85.0)
    assert controller.headroom_celsius == pytest.approx(-3.0)
    assert controller.sensor_age_s == 0.0
    assert controller.watts_per_seq > 0.0
    assert controller.watts_per_seq_spread > 0.0
    assert controller.watts_of([1000, 1000]) > 0.0
    assert controller.actions["lower", "hot"] >= 1
    assert controller.oscillations == 0


EVENT = st.tuples(
    st.sampled_from(["read"] * 8 + ["silent", "silent", "fail", "slow"]),
    st.floats(40.0, 100.0),
    st.integers(0, 256),
    st.floats(0.2, 5.0),
)


@settings(max_examples=examples(60))
@given(st.sampled_from([*LAWS]), st.lists(EVENT, max_size=120))
def test_what_always_holds(law: str, events: list[tuple[str, float, int, float]]) -> None:
    options = ThermalOptions(law=law, min_cap=2, max_running=200, safe_cap=20)
    controller = Controller(options)
    now_s, last_s, caps = 0.0, -math.inf, Caps(options)
    for kind, celsius, running, passed_s in events:
        now_s += passed_s
        said = [GpuReading("a:0", now_s, celsius, watts=3.0 * running, is_slowed=kind == "slow")]
        work = InstanceWork(running, running * 1000, 0.0, 10)
        limits = controller.tick([] if kind == "silent" else said, work, now_s)
        last_s = last_s if kind == "silent" else now_s
        if kind == "fail":
            controller.actuator_failed(now_s)
        else:
            controller.actuator_worked()
        assert 0.1 <= limits.weight <= 1.0
        assert 1.0 <= limits.prefill_factor <= options.prefill_factor
        if kind == "slow" or (kind != "silent" and celsius >= options.critical_celsius):
            assert controller.state is ThermalState.EMERGENCY
        if controller.state is ThermalState.STALE:
            assert limits.evict == 0
            assert now_s - last_s > options.stale_s or controller.reason == "stuck"
        caps.now(controller, now_s)


class Caps:
    """The caps of a run, and what binds their changes."""

    def __init__(self, options: ThermalOptions) -> None:
        self.options = options
        self.cap = options.max_running
        self.changed_s = -math.inf
        self.changes: list[float] = []

    def now(self, controller: Controller, now_s: float) -> None:
        options, before = self.options, self.cap
        self.cap = options.max_running if controller.cap is None else controller.cap
        assert options.min_cap <= self.cap <= options.max_running
        if controller.state in (
            ThermalState.STALE,
            ThermalState.EMERGENCY,
            ThermalState.DEGRADED,
        ):
            assert self.cap <= before
        if self.cap == before:
            return
        if controller.state in (ThermalState.THROTTLE, ThermalState.RECOVER):
            since_s = now_s - self.changed_s
            assert since_s >= (options.dwell_s if self.cap < before else options.cooldown_s)
            recent = [at_s for at_s in self.changes if now_s - at_s < options.budget_window_s]
            assert len(recent) < options.budget_changes
            self.changes.append(now_s)
        self.changed_s = now_s
