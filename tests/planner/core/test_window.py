"""Growth of counters, whatever their processes do."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from planner.core.window import Counters, mean, total


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


def test_sums_over_sources_and_their_means() -> None:
    grown = total([{"isl_sum": 30.0, "isl_count": 2.0}, {"isl_sum": 10.0, "isl_count": 2.0}])
    assert mean(grown, "isl") == 10.0
    assert mean(grown, "osl") is None
