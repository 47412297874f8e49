"""The line of a step's time: found again, and kept over the whole range."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.perf.regression import LEAST, SAMPLES, Inputs, Line, Observation, Observations


@given(
    st.tuples(st.floats(0.001, 0.1), st.floats(0, 1e-4), st.floats(0, 1e-6)),
    st.integers(0, 99),
)
def test_a_line_is_found_again(told: tuple[float, float, float], seed: int) -> None:
    line, dice = Line(2), Random(seed)
    for _ in range(40):
        inputs = dice.uniform(0, 8192), dice.uniform(0, 400_000)
        line.observe(inputs, told[0] + told[1] * inputs[0] + told[2] * inputs[1])
    assert line(4096, 200_000) == pytest.approx(
        told[0] + told[1] * 4096 + told[2] * 200_000, rel=1e-6
    )


def test_it_is_not_ready_before_it_has_seen_enough() -> None:
    line = Line(1)
    for _ in range(2 * LEAST):
        line.observe((100.0,), 0.02)
    assert line.coefficients is None, "all of one place"
    line.observe((200.0,), 0.0)
    assert line.coefficients is None, "an iteration without a duration is none"
    with pytest.raises(ValueError, match="too few observations"):
        line(100.0)
    line.observe((200.0,), 0.03)
    assert line(150.0) == pytest.approx(0.025)


def test_no_coefficient_is_negative() -> None:
    """The constant of least relative errors is the sum of 1 / t over that of 1 / t^2."""
    line = Line(1)
    for i in range(10):
        line.observe((100.0 * i,), 1.0 - 0.05 * i)
    took = [1.0 - 0.05 * i for i in range(10)]
    constant = sum(1 / t for t in took) / sum(1 / t**2 for t in took)
    assert line.coefficients == pytest.approx((constant, 0.0))


def test_a_profile_gives_way_to_what_is_seen() -> None:
    line = Line(1, priors=[((0.0,), 0.01), ((1000.0,), 0.02)])
    assert line(1000.0) == pytest.approx(0.02)
    for i in range(60):
        line.observe((10.0 * i,), 0.05)
    assert line(300.0) == pytest.approx(0.05, rel=0.1)


def test_a_rare_load_is_not_forgotten() -> None:
    held = Observations(1)
    held.add((1000.0,), 1.0)
    for i in range(10 * SAMPLES):
        held.add((float(i % 50),), 0.1)
    assert len(held) == SAMPLES
    assert Observation((1000.0,), 1.0) in held.rows()


def test_priors_and_observations_are_one_fit() -> None:
    """Two priors at 0.01 s, n observations at 0.04 s: with least 2 a prior counts as 2 / (2 + n).

    n = 2: (2 / 2 x 0.01 + 2 x 0.04) / (2 / 2 + 2) = 0.03. n = 6: (0.5 x 0.01 + 6 x 0.04) / 6.5.
    """
    line = Line(1, priors=[((0.0,), 0.01), ((0.0,), 0.01)], least=2)
    for count, seconds in ((0, 0.01), (2, 0.03), (6, 0.245 / 6.5)):
        while len(line.observations) < count:
            line.observe((0.0,), 0.04)
        assert line(0.0) == pytest.approx(seconds)


def test_a_profile_of_a_faster_instance_gives_way() -> None:
    """It has seen loads that never come, and still the times of those that do are right."""
    priors = [((100.0 * i, 0.0), 0.005 + 2e-5 * 100 * i) for i in range(40)]
    priors += [((0.0, 10_000.0 * i), 0.005 + 2e-8 * 10_000 * i) for i in range(40)]
    line, dice = Line(2, priors), Random(1)
    for _ in range(SAMPLES):
        prefill, kv = dice.uniform(50, 400), dice.uniform(20_000, 60_000)
        line.observe((prefill, kv), 0.01 + 4e-5 * prefill + 4e-8 * kv)
    assert line(200, 40_000) == pytest.approx(0.01 + 4e-5 * 200 + 4e-8 * 40_000, rel=0.1)
    assert line(4000, 0) > 0.005 + 2e-5 * 4000


def test_of_priors_the_relative_error_counts() -> None:
    """Every second prompt was measured 30 % too slow; what a decode step takes is still seen.

    By seconds alone KV would cost nothing, and an empty step 18 % too much.
    """
    priors = [((0.0, 1000.0 * i), 0.01 + 1e-7 * 1000 * i) for i in range(20)]
    slow = [1.3 if i % 2 else 1.0 for i in range(17)]
    priors += [((500.0 * i, 0.0), (0.01 + 5e-5 * 500 * i) * slow[i]) for i in range(1, 17)]
    found = Line(2, priors).coefficients
    assert found is not None
    assert (found[0], found[2]) == pytest.approx((0.01, 1e-7), rel=0.05)


def test_an_overload_does_not_drown_the_usual_steps() -> None:
    """Every fifth long step takes twice the time; by seconds alone KV would cost nothing."""
    line, usual = Line(2), (0.008, 4e-5, 5e-8)

    def observe(prompt: float, kv: float, times: float = 1.0) -> None:
        line.observe((prompt, kv), times * (usual[0] + usual[1] * prompt + usual[2] * kv))

    for i in range(40):
        observe(50.0 + 10 * (i % 7), 10_000.0 + 5_000 * (i % 9))
    for i in range(30):
        observe(1000.0 + 200 * (i % 11), 50_000.0 + 10_000 * i, 1.0 if i % 5 else 2.0)
    for i in range(40):
        observe(50.0 + 10 * (i % 7), 10_000.0 + 5_000 * (i % 9))
    assert line.coefficients == pytest.approx(usual, rel=0.2)


IMPOSSIBLE = [
    ((1.0, 1.0), 1e-200),
    ((1.0, 1.0), 0.0),
    ((1.0, 1.0), 1e17),
    ((1.0, 1.0), float("nan")),
    ((1e300, 1.0), 0.01),
    ((float("nan"), 1.0), 0.01),
    ((-1.0, 1.0), 0.01),
    ((1.0, float("inf")), 0.01),
]


@pytest.mark.parametrize(("inputs", "seconds"), IMPOSSIBLE)
def test_what_no_iteration_can_be_teaches_nothing(inputs: Inputs, seconds: float) -> None:
    line = Line(2, least=1)
    line.observe(inputs, seconds)
    assert len(line.observations) == 0
    assert line.coefficients is None
