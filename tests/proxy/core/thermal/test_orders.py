"""Operators' orders: who leaves first, how a cap follows a temperature."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.thermal.orders import (
    FRESH_S,
    STEP_S,
    VICTIMS,
    BatchOrder,
    RunningRequest,
    StandingOrder,
    hottest_celsius,
    victims,
)
from proxy.core.thermal.readings import GpuReading

OLD = RunningRequest("old", 100, 1.0, 2.0)
BIG = RunningRequest("big", 9000, 2.0, 9.0, remaining_tokens=10)
LOW = RunningRequest("low", 500, 3.0, 9.0, priority=2, tokens_per_s=50.0)
LONG = RunningRequest("long", 5000, 4.0, 9.0, remaining_tokens=4000, tokens_per_s=40.0)
SLOW = RunningRequest("slow", 600, 5.0, 9.0, remaining_tokens=99, tokens_per_s=0.1)
ALL = [
    replace(
        one, tokens_per_s=one.tokens_per_s or 30.0, remaining_tokens=min(one.remaining_tokens, 50)
    )
    if one is not LONG and one is not SLOW
    else one
    for one in (OLD, BIG, LOW, LONG, SLOW)
]


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        ("lru", "old"),
        ("largest_kv", "big"),
        ("lowest_priority", "low"),
        ("longest_remaining", "long"),
        ("least_qps", "slow"),
        ("max_relief", "long"),
    ],
)
def test_who_leaves_first(policy: str, first: str) -> None:
    assert victims(ALL, policy, 1)[0].request_id == first


@given(st.sampled_from(sorted(VICTIMS)), st.integers(-2, 9))
def test_as_many_leave_as_asked_and_nobody_twice(policy: str, count: int) -> None:
    found = victims(ALL, policy, count)
    assert len(found) == min(max(0, count), len(ALL))
    assert len({one.request_id for one in found}) == len(found)


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
    found = [(standing.step(*one), standing.cap, standing.is_reached) for one in steps]
    assert found == [
        (0, None, False),
        (5, 11, False),
        (0, 11, False),
        (1, 10, False),
        (0, 10, True),
        (1, 1, False),
    ]


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
