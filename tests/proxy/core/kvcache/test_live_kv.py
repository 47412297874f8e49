"""The KV of sessions that may come back: the curve of their return, and the sums per instance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.kvcache.live_kv import BINS, LONGEST_S, STARTS_S, LiveKv, ReturnCurve, bin_of

NEVER_IDLE: list[LiveKv] = []


def curve_of(gaps_s: list[float], still_idle_s: list[float] | None = None) -> ReturnCurve:
    """The curve after sessions that came back after `gaps_s`, while others are still idle."""
    curve, live = ReturnCurve(), LiveKv()
    for gap_s in gaps_s:
        curve.returned(gap_s)
    for idle_s in sorted(still_idle_s or [], reverse=True):
        live.becomes_idle(1, 10_000.0 - idle_s)
    curve.renew([live], 10_000.0)
    return curve


@given(st.floats(0.0, 1e9), st.floats(0.0, 1e9))
def test_bins_are_in_the_order_of_their_times(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= bin_of(low) <= bin_of(high) < BINS


def test_bins_begin_where_they_are_said_to() -> None:
    assert [bin_of(start_s) for start_s in STARTS_S] == list(range(BINS))


def test_the_last_bin_has_no_end() -> None:
    assert bin_of(LONGEST_S - 0.1) == BINS - 2
    assert bin_of(LONGEST_S) == bin_of(float("inf")) == BINS - 1


def test_who_always_comes_back_within_ten_seconds_does_not_after_a_minute() -> None:
    """Four fifths of the sessions come back in 2 to 8 s; the others have ended, unannounced."""
    draw = random.Random(1)
    curve = curve_of([draw.uniform(2.0, 8.0) for _ in range(400)], [600.0] * 100)
    assert curve.chance(0.0) == pytest.approx(0.8, abs=0.03)
    assert curve.chance(1.0) == pytest.approx(0.8, abs=0.03)
    assert curve.chance(20.0) < 0.15


def test_idle_sessions_count_for_as_long_as_they_were_seen() -> None:
    """Those that are idle for a second say nothing of what comes after it."""
    gaps_s = [5.0] * 200
    fresh, old = curve_of(gaps_s, [1.0] * 200), curve_of(gaps_s, [900.0] * 200)
    assert fresh.chance(1.5) > 0.9
    assert old.chance(1.5) == pytest.approx(0.5, abs=0.05)


@given(st.lists(st.floats(0.0, 5000.0), max_size=50), st.lists(st.floats(0.0, 5000.0), max_size=50))
def test_a_chance_is_one(gaps_s: list[float], idle_s: list[float]) -> None:
    curve = curve_of(gaps_s, idle_s)
    assert all(0.0 <= curve.chance(at_s) <= 1.0 for at_s in (0.0, 0.7, 3.0, 60.0, 1e4, 1e9))


def test_the_curve_follows_sessions_that_change() -> None:
    curve = ReturnCurve()
    for gap_s in (2.0, 200.0):
        for _ in range(10_000):
            curve.returned(gap_s)
            curve.renew(NEVER_IDLE, 0.0)
    assert curve.chance(4.0) > 0.9


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 1000), st.sampled_from([0.0, 0.3, 2.0, 90.0])),
        max_size=60,
    )
)
def test_what_has_come_leaves_again(steps: list[tuple[int, int, float]]) -> None:
    """Any order of coming and going, buckets merged in between: no token stays, none goes amiss."""
    live, curve, now_s = LiveKv(), ReturnCurve(), 0.0
    idle: dict[int, tuple[int, float]] = {}
    for session, tokens, passed_s in steps:
        now_s += passed_s
        if session in idle:
            live.leaves_idle(*idle.pop(session))
        else:
            idle[session] = tokens, live.becomes_idle(tokens, now_s)
        assert live.idle_tokens == sum(t for t, _ in idle.values())
        assert 0.0 <= live.tokens(curve, now_s) <= live.idle_tokens
    for tokens, since_s in idle.values():
        live.leaves_idle(tokens, since_s)
    assert live.idle_tokens == 0
    assert live.tokens(curve, now_s) == 0.0


def test_many_sessions_take_few_buckets() -> None:
    live, curve = LiveKv(), ReturnCurve()
    for second in range(20_000):
        live.becomes_idle(1, float(second))
        if second % 100 == 0:
            live.tokens(curve, float(second))
    live.tokens(curve, 20_000.0)
    assert live.idle_tokens == 20_000
    assert len(live._buckets) < 150
    whole = sum(curve.chance(20_000.0 - second) for second in range(20_000))
    assert live.tokens(curve, 20_000.0) == pytest.approx(whole, rel=0.05)


def test_a_clock_that_goes_back_loses_nothing() -> None:
    live = LiveKv()
    live.becomes_idle(3, 100.0)
    since_s = live.becomes_idle(5, 90.0)
    live.leaves_idle(5, since_s)
    assert live.idle_tokens == 3
