"""What readings of counters and accounts come to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.observe import (
    Account,
    Counters,
    EngineWindows,
    Totals,
    TrafficWindow,
    Work,
    total,
)
from planner.core.types import Traffic


def test_traffic_is_the_growth_over_the_window_once_it_is_whole() -> None:
    window, totals = TrafficWindow(20.0), Totals()
    grown = Totals(10, 8, 8000, 4, 400, 8000, 2000)
    seen = []
    for n in range(6):
        seen.append(window.add(5.0 * n, totals))
        totals = totals + grown
    assert seen[:4] == [None] * 4
    assert seen[4] == seen[5] == Traffic(20.0, 40, 1000.0, 100.0, 0.25, ended=16)


def test_a_late_reading_makes_the_window_longer_and_loses_nothing() -> None:
    window = TrafficWindow(10.0)
    assert window.add(0.0, Totals()) is None
    assert window.add(13.0, Totals(26)) == Traffic(13.0, 26)
    assert window.add(24.0, Totals(37)) == Traffic(11.0, 11)


def test_an_instance_is_its_growth_and_the_mean_of_two_accounts() -> None:
    windows = EngineWindows()
    (first,) = windows.look(0.0, {"a": Account(0, 2, 100)}, {"a": Work(100, 5000, 50, 1.0)})
    assert (first.wall_s, first.decode_kv_tokens) == (None, 100)
    (second,) = windows.look(5.0, {"a": Account(70, 4, 300)}, {"a": Work(110, 6000, 90, 2.0)}, 5.0)
    assert second.wall_s == pytest.approx(1.0 / 40)
    assert second.prefill_tokens == 100.0
    assert (second.decode_requests, second.decode_kv_tokens) == (3, 200)
    assert second.queued_prefill_tokens == 75.0


@pytest.mark.parametrize(
    ("gap_s", "steps", "wall_s"),
    [(4.0, 200.0, 0.02), (40.0, 200.0, 0.025), (4.0, 0.0, 0.02), (40.0, 100.0, 0.05)],
)
def test_a_step_is_no_longer_than_the_window_by_its_steps(
    gap_s: float, steps: float, wall_s: float
) -> None:
    """Pauses of preempted streams are in their gaps, and in no step."""
    windows = EngineWindows()
    windows.look(0.0, {"a": Account()}, {"a": Work()})
    windows.look(3.0, {"a": Account()}, {})
    now = Work(steps, 0.0, 200.0, gap_s)
    (seen,) = windows.look(5.0, {"a": Account()}, {"a": now})
    assert seen.wall_s == pytest.approx(wall_s), "over the 5 s since it was read"


@pytest.mark.parametrize("lie", [Work(drafts=1e9, accepted=1e15), Work(drafts=1e9), Work()])
def test_tokens_per_step_are_those_of_the_median_instance_that_drafts(lie: Work) -> None:
    windows = EngineWindows()
    names = {"a": Account(), "b": Account(), "c": Account(), "d": Account()}
    windows.look(0.0, names, {name: Work() for name in names})
    own = Work(drafts=10, accepted=12), Work(drafts=30, accepted=15)
    work = dict(zip(names, (*own, Work(drafts=4, accepted=4), lie), strict=True))
    windows.look(5.0, names, work)
    first = windows.accept_length
    windows.look(10.0, names, work)
    assert first in (1.5, 2.0), "one of those that tell the truth"
    assert windows.accept_length is None, "nothing was drafted since"


def test_an_engine_that_cannot_be_read_shows_no_iteration_and_one_that_left_is_forgotten() -> None:
    windows = EngineWindows()
    windows.look(0.0, {"a": Account()}, {"a": Work(100, 5000, 50, 1.0)})
    (silent,) = windows.look(5.0, {"a": Account()}, {})
    assert (silent.wall_s, silent.prefill_tokens) == (None, 0.0)
    (again,) = windows.look(10.0, {"a": Account()}, {"a": Work(110, 6000, 90, 2.0)})
    assert again.wall_s == pytest.approx(1.0 / 40), "its counters are those of the same engine"
    windows.look(15.0, {}, {})
    (anew,) = windows.look(20.0, {"a": Account()}, {"a": Work(200, 9000, 190, 9.0)})
    assert anew.wall_s is None


def test_the_first_reading_has_grown_by_nothing() -> None:
    counters = Counters()
    assert counters.grown("a", {"n": 500.0}) == {}
    assert counters.grown("a", {"n": 520.0, "new": 3.0}) == {"n": 20.0, "new": 3.0}


def test_a_restart_counts_from_zero() -> None:
    counters = Counters()
    counters.grown("a", {"n": 500.0})
    assert counters.grown("a", {"n": 30.0}) == {"n": 30.0}
    counters.forget("a")
    assert counters.grown("a", {"n": 40.0}) == {}


def test_what_is_no_number_is_not_there() -> None:
    counters = Counters()
    counters.grown("a", {"n": 1.0})
    assert counters.grown("a", {"n": math.nan, "m": math.inf}) == {}


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6))
def test_all_growth_is_found_over_restarts(lives: list[list[int]]) -> None:
    """Of a process that is read at its start and at its end nothing is lost."""
    counters, seen = Counters(), 0.0
    counters.grown("a", {"n": 0.0})
    for life in lives:
        value = 0
        for more in [0, *life]:
            value += more
            seen += counters.grown("a", {"n": float(value)})["n"] if value or more else 0.0
            counters.grown("a", {"n": float(value)})
    assert seen == sum(map(sum, lives)) or any(not life or 0 in life for life in lives)


def test_sums_over_sources() -> None:
    assert total([{"n": 30.0, "m": 2.0}, {"n": 10.0}]) == {"n": 40.0, "m": 2.0}
