"""Times between the points of a profile, in numbers that were worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.perf.profile import (
    DecodePoint,
    Estimate,
    PrefillPoint,
    Profile,
    Surface,
    precision,
)
from planner.core.perf.regression import Line

PREFILL = [(100.0, 1000.0, 0.1), (300.0, 1500.0, 0.2), (500.0, 1000.0, 0.5)]
DECODE = [
    *((1000.0, 100.0, 0.010), (1000.0, 200.0, 0.020), (1000.0, 400.0, 0.060)),
    *((3000.0, 80.0, 0.012), (3000.0, 160.0, 0.050)),
]


@pytest.mark.parametrize(
    ("throughput", "isl", "seconds", "is_feasible", "is_edge"),
    [
        (0.0, 100.0, 0.1, True, False),
        (0.0, 200.0, 0.15, True, False),
        (1250.0, 200.0, 0.15, True, False),
        (1251.0, 200.0, 0.15, False, False),
        (1200.0, 400.0, 0.35, True, False),
        (900.0, 50.0, 0.1, True, True),
        (900.0, 501.0, 0.5, True, True),
        (1001.0, 501.0, 0.5, False, True),
    ],
)
def test_first_tokens(
    throughput: float, isl: float, seconds: float, is_feasible: bool, is_edge: bool
) -> None:
    """One throughput per length: time and largest throughput are linear in the length."""
    found = Surface(PREFILL).at(throughput, isl)
    assert found.seconds == pytest.approx(seconds)
    assert (found.is_feasible, found.is_edge) == (is_feasible, is_edge)


@pytest.mark.parametrize(
    ("throughput", "context", "seconds", "is_feasible", "is_edge"),
    [
        (100.0, 1000.0, 0.010, True, False),
        (150.0, 1000.0, 0.015, True, False),
        (300.0, 1000.0, 0.040, True, False),
        (10.0, 1000.0, 0.010, True, False),
        (401.0, 1000.0, 0.060, False, False),
        (120.0, 3000.0, 0.031, True, False),
        # Half way: at most (400 + 160) / 2 = 280. 210 is 3/4: 300 of 400 and 120 of 160.
        (210.0, 2000.0, (0.040 + 0.031) / 2, True, False),
        (280.0, 2000.0, 0.055, True, False),
        (281.0, 2000.0, 0.055, False, False),
        # A quarter of the way: at most 340. 85 is 1/4: 100 of 400, and 40 of 160 is below 80.
        (85.0, 1500.0, 0.75 * 0.010 + 0.25 * 0.012, True, False),
        (161.0, 9000.0, 0.050, False, True),
        (200.0, 1.0, 0.020, True, True),
    ],
)
def test_tokens_after_it(
    throughput: float, context: float, seconds: float, is_feasible: bool, is_edge: bool
) -> None:
    found = Surface(DECODE).at(throughput, context)
    assert found.seconds == pytest.approx(seconds)
    assert (found.is_feasible, found.is_edge) == (is_feasible, is_edge)


def test_a_point_that_another_one_beats_is_left_out() -> None:
    """A larger batch that is slower and yields less: nobody would choose it."""
    slower = (1000.0, 350.0, 0.080)
    assert Surface([*DECODE, slower]).at(350.0, 1000.0) == Surface(DECODE).at(350.0, 1000.0)


def test_one_length() -> None:
    assert Surface([(100.0, 10.0, 0.1)]).at(5.0, 100.0) == Estimate(0.1, True, False)


points = st.lists(
    st.tuples(st.integers(1, 9), st.floats(1, 1e4), st.floats(1e-3, 10)), min_size=1, max_size=20
)


@given(points, st.floats(0, 2e4), st.floats(0, 10))
def test_no_time_is_outside_of_what_was_measured(
    rows: list[tuple[float, float, float]], throughput: float, length: float
) -> None:
    seconds = [row[2] for row in rows]
    found = Surface(rows).at(throughput, length).seconds
    assert min(seconds) * 0.999 <= found <= max(seconds) * 1.001


@given(points, st.floats(0, 2e4), st.floats(0, 1e4), st.floats(0, 10))
def test_more_throughput_never_takes_less_time(
    rows: list[tuple[float, float, float]], throughput: float, more: float, length: float
) -> None:
    surface = Surface(rows)
    less, greater = surface.at(throughput, length), surface.at(throughput + more, length)
    assert less.seconds <= greater.seconds * (1 + 1e-9)
    assert less.is_feasible or not greater.is_feasible


def test_what_points_between_others_are_foretold_by() -> None:
    """300 tokens from 100 and 500: 0.3 s for 0.2 s, half too much. Ends are not foretold."""
    found = precision(PREFILL)
    assert found.points == 1
    assert [found.mean, found.worst] == pytest.approx([0.5, 0.5])


def test_of_streams_only_those_between_others_of_their_length() -> None:
    """200 a second from 100 and 400: 0.010 + 0.050 / 3 s for 0.020 s."""
    found = precision(DECODE)
    assert found.points == 1
    assert found.worst == pytest.approx((0.010 + 0.050 / 3 - 0.020) / 0.020)
    assert precision(PREFILL[:2]).mean is None


def profile(isl: list[float]) -> Profile:
    """Of an instance that takes 0.01 s a step, 1e-4 s a prompt's token, 1e-7 s a KV token."""

    def ttft_s(tokens: float) -> float:
        return 0.01 * -(-tokens // 1000) + 1e-4 * tokens

    prefill = tuple(PrefillPoint(one, ttft_s(one), one / ttft_s(one)) for one in isl)
    decode = tuple(
        DecodePoint(kv / 100_000, 1000.0, 0.01 + 1e-7 * kv, kv / 1000 / (0.01 + 1e-7 * kv))
        for kv in (1000.0, 20_000.0, 90_000.0)
    )
    return Profile(prefill, decode, 100_000)


@pytest.mark.parametrize("isl", [[100.0, 800.0, 9000.0], [800.0, 2500.0, 9000.0]])
def test_priors_are_steps(isl: list[float]) -> None:
    """A prompt longer than a step is the mean of its steps, where short ones are too few."""
    priors = profile(isl).priors(1000)
    assert len(priors) == 3 + (2 if isl[1] < 1000 else 3)
    assert max(inputs[0] for inputs, _ in priors) <= 1000
    line = Line(2, priors)
    assert line.coefficients == pytest.approx((0.01, 1e-4, 1e-7))
