"""The laws of the cap, and an operator's own policy as the founding document writes it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.thermal.laws import LAWS, Law, LawView, OperatorLaw, PowerLaw
from proxy.core.thermal.options import ThermalOptions
from proxy.core.thermal.policy import Scheduler
from proxy.core.thermal.readings import GpuReading, InstanceWork
from proxy.core.thermal.victims import Victim

OPTIONS = ThermalOptions(min_cap=4)


def _view(excess: float, cap: int = 256, running: int = 200, now_s: float = 0.0) -> LawView:
    work = InstanceWork(running, running * 4096)
    return LawView(now_s, excess, excess, 0.0, work, None, 1, cap, 100.0)


@pytest.mark.parametrize(
    ("k_p", "celsius", "cap"),
    [(0.5, 82.0, 256), (0.5, 84.0, 255), (0.5, 91.0, 252), (0.1, 91.0, 256), (0.1, 92.0, 255)],
)
def test_p_is_the_founding_formula_with_either_of_its_constants(
    k_p: float, celsius: float, cap: int
) -> None:
    law = LAWS["p"](ThermalOptions(k_p=k_p))
    assert cap == max(1, 256 - int(k_p * (celsius - 82.0)))
    assert law.wanted(_view(celsius - 82.0)) == cap


def test_aimd_halves_and_adds_a_twentieth() -> None:
    law = LAWS["aimd"](OPTIONS)
    assert law.wanted(_view(0.0, cap=200, running=150)) == 75
    assert law.wanted(_view(0.0, cap=6, running=6)) == 4
    assert law.wanted(_view(-0.5, cap=100)) == 100
    assert law.wanted(_view(-4.0, cap=100)) == 105
    assert law.wanted(_view(-4.0, cap=8)) == 9


def test_pi_adds_up_and_never_winds_up() -> None:
    law = LAWS["pi"](OPTIONS)
    for second in range(600):
        law.observe(_view(10.0, cap=4, running=4, now_s=float(second)))
    assert law.wanted(_view(10.0, cap=4, running=4, now_s=600.0)) == 4
    # Ten minutes at the least cap do not delay the first step up.
    cool = _view(-5.0, cap=4, running=4, now_s=601.0)
    law.observe(cool)
    law.restart()
    law.observe(cool)
    assert law.wanted(cool) > 4


def _learned(watts_per_sequence: float = 3.2, celsius_per_watt: float = 0.08) -> PowerLaw:
    """A power law that has watched an instance whose load goes up and down."""
    law, celsius = PowerLaw(OPTIONS), 60.0
    for second in range(900):
        running = 60 + 60 * (second // 60 % 2)
        watts = 120.0 + watts_per_sequence * running
        celsius += (celsius_per_watt * watts + 30.0 - celsius) / 20.0
        work = InstanceWork(running)
        law.observe(LawView(second, celsius - 82.0, 0.0, 0.0, work, watts, 1, 256, 100.0))
    return law


@pytest.mark.parametrize(("watts", "rth"), [(3.2, 0.08), (1.5, 0.08), (3.2, 0.16)])
def test_power_finds_the_batch_at_which_the_temperature_would_end_at_the_target(
    watts: float, rth: float
) -> None:
    law = _learned(watts, rth)
    assert law.watts_per_seq == pytest.approx(watts, rel=0.1)
    assert law.celsius_per_watt == pytest.approx(rth, rel=0.2)
    celsius, running = 60.0, 240
    for second in range(900, 1500):
        drawn = 120.0 + watts * running
        celsius += (rth * drawn + 30.0 - celsius) / 20.0
        work = InstanceWork(running)
        excess = celsius - 82.0
        view = LawView(second, excess, excess, 0.0, work, drawn, 1, running, 100.0)
        law.observe(view)
        if second % 10 == 0:
            running = law.wanted(view)
    assert 80.5 <= rth * (120.0 + watts * running) + 30.0 <= 83.5 or running == 256


def test_power_sheds_31_sequences_for_100_watts_before_anything_was_learned() -> None:
    law = PowerLaw(ThermalOptions())
    # 8.25 degrees above what is held are 103 W at 0.08 degrees per watt; GAIN of it is 19 of 32.
    view = _view(8.0, running=200)
    law.observe(view)
    assert law.wanted(view) == 200 - round(0.6 * 8.25 / 0.08 / 3.2)


def test_power_learns_without_a_reading_of_watts() -> None:
    law = PowerLaw(OPTIONS)
    for second in range(60):
        law.observe(_view(5.0, running=150, now_s=float(second)))
    assert law.wanted(_view(5.0, running=150, now_s=60.0)) < 150
    assert law.watts_of([4096, 4096]) == pytest.approx(6.4)


@given(
    st.sampled_from([*LAWS]),
    st.lists(
        st.tuples(
            st.floats(-60.0, 60.0),
            st.integers(0, 400),
            st.none() | st.floats(0.0, 10_000.0),
            st.floats(0.0, 60.0),
        ),
        max_size=40,
    ),
)
def test_every_cap_is_within_its_bounds(
    name: str, ticks: list[tuple[float, int, float | None, float]]
) -> None:
    law: Law = LAWS[name](OPTIONS)
    cap, now_s, changed_s = 256, 0.0, 0.0
    for excess, running, watts, passed_s in ticks:
        now_s += passed_s
        work = InstanceWork(running, running * 1000, 100.0 * running)
        since_s = now_s - changed_s
        view = LawView(now_s, excess, excess, 0.0, work, watts, 8, cap, since_s)
        law.observe(view)
        wanted = law.wanted(view)
        assert OPTIONS.min_cap <= wanted <= OPTIONS.max_running
        if wanted != cap:
            cap, changed_s = wanted, now_s


class FoundingPolicy:
    """The founding document's example, section 6: its arithmetic and its names."""

    def __init__(self, target_temp_c: float = 82.0, k_p: float = 0.5) -> None:
        self.target = target_temp_c
        self.k_p = k_p
        self._last_temp = 80.0
        self.told: list[tuple[int, float]] = []

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        self._last_temp = temp_c
        self.told.append((gpu_idx, temp_c))

    def get_max_running_seqs(self, scheduler: Scheduler) -> int:
        error = self._last_temp - self.target
        if error <= 0:
            return scheduler.scheduler_config.max_num_seqs
        return max(1, scheduler.scheduler_config.max_num_seqs - int(error * self.k_p))

    def select_victims(self, running: list[Victim], num_to_evict: int) -> list[Victim]:
        return sorted(running, key=lambda sg: sg.get_num_kv_blocks(), reverse=True)[:num_to_evict]


def test_the_founding_document_s_policy_runs_as_it_is_written() -> None:
    policy = FoundingPolicy()
    law = OperatorLaw(ThermalOptions(), policy)
    law.read([GpuReading("a:3", 1.0, 90.0), GpuReading("odd", 1.0, 90.0), GpuReading("a:1", 1.0)])
    assert policy.told == [(3, 90.0), (0, 90.0)]
    assert law.wanted(_view(8.0)) == 252 == LAWS["p"](ThermalOptions()).wanted(_view(8.0))
    rows = [Victim("a", kv_tokens=10), Victim("b", kv_tokens=99)]
    assert policy.select_victims(rows, 1) == [rows[1]]


@pytest.mark.parametrize("said", [-5, 0, 10**9])
def test_a_policy_s_cap_is_kept_within_the_bounds(said: int) -> None:
    class Odd(FoundingPolicy):
        def get_max_running_seqs(self, scheduler: Any) -> int:
            return said

    assert OPTIONS.min_cap <= OperatorLaw(OPTIONS, Odd()).wanted(_view(math.inf)) <= 256


def _view_of(excess: float, slope: float, now_s: float, cap: int = 200) -> LawView:
    ahead = excess + 10.0 * max(0.0, slope)
    return LawView(now_s, excess, ahead, slope, InstanceWork(cap), None, 1, cap, 100.0)


def test_changes_that_were_not_enough_are_followed_by_larger_ones() -> None:
    law, cap, cuts = PowerLaw(OPTIONS), 200, []
    for second in range(60):
        view = _view_of(4.0, 0.0, float(second), cap)
        law.observe(view)
        if second % 10 == 9:
            cuts.append(cap - law.wanted(view))
            cap = law.wanted(view)
    # The temperature does not move at all, so each cut is larger until the least cap is near.
    assert cuts[:4] == sorted(cuts[:4])
    assert cuts[3] > 2 * cuts[0]


def test_what_rises_does_not_end_where_it_is_and_what_falls_ends_below() -> None:
    rising, falling = PowerLaw(OPTIONS), PowerLaw(OPTIONS)
    for second in range(5):
        rising.observe(_view_of(-2.0, 0.8, float(second)))
        falling.observe(_view_of(3.0, -0.8, float(second)))
    assert rising.wanted(_view_of(-2.0, 0.8, 5.0)) < 200
    assert falling.wanted(_view_of(0.3, -0.8, 5.0)) == 200
