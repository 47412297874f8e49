"""Operators' orders: how a cap follows a temperature."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.thermal.orders import (
    FRESH_S,
    STEP_S,
    BatchOrder,
    StandingOrder,
    hottest_celsius,
)
from proxy.core.thermal.readings import GpuReading


@pytest.mark.parametrize(
    ("order", "running", "cap"),
    [
        (BatchOrder(max_num_seqs=4), 9, 4),
        (BatchOrder(max_num_seqs=4, force_evict=2), 9, 4),
        (BatchOrder(force_evict=2), 9, 7),
        (BatchOrder(force_evict=9), 9, 1),
        (BatchOrder(force_evict=2), 0, None),
        (BatchOrder(target_celsius=80.0), 9, None),
    ],
)
def test_an_eviction_caps_at_what_is_left(order: BatchOrder, running: int, cap: int | None) -> None:
    assert order.cap(running) == cap


def test_a_target_lowers_the_cap_until_it_is_reached() -> None:
    standing = StandingOrder(BatchOrder(target_celsius=80.0), 16, "d", 0.0)
    steps = [
        (None, 16, 0.0),  # no reading, no change
        (90.0, 16, 0.0),  # half a request per degree
        (90.0, 16, STEP_S - 0.1),  # the step before does not show yet
        (80.5, 11, STEP_S),  # one at least
        (80.0, 10, 3 * STEP_S),
        (81.0, 2, 4 * STEP_S),  # it is hotter again
    ]
    assert [(standing.step(*one), standing.cap) for one in steps] == [
        *((0, None), (5, 11), (0, 11), (1, 10), (0, 10), (1, 1)),
    ]


def test_it_is_reached_while_the_gpus_are_no_hotter() -> None:
    standing = StandingOrder(BatchOrder(target_celsius=80.0), 16, "d", 0.0)
    seen = []
    for celsius in (81.0, 80.0, None, 80.1):
        standing.look(celsius)
        seen.append(standing.is_reached)
    assert seen == [False, True, True, False]


@given(st.lists(st.floats(20.0, 120.0) | st.none(), max_size=40), st.integers(1, 99))
def test_a_target_never_raises_the_cap_nor_ends_below_one(
    temperatures: list[float | None], running: int
) -> None:
    standing, last = StandingOrder(BatchOrder(target_celsius=80.0), running, "d", 0.0), math.inf
    for tick, celsius in enumerate(temperatures):
        standing.step(celsius, running, float(tick))
        cap = math.inf if standing.cap is None else standing.cap
        assert 1 <= cap <= last
        last = cap


def test_the_hottest_fresh_gpu_counts() -> None:
    readings = [
        GpuReading("h:0", 10.0, celsius=70.0),
        GpuReading("h:1", 10.0, celsius=85.0),
        GpuReading("h:2", 10.0 - FRESH_S - 1, celsius=99.0),
        GpuReading("h:3", 10.0),
    ]
    assert hottest_celsius(readings, 10.0) == 85.0
    assert hottest_celsius(readings, 99.0) is None
