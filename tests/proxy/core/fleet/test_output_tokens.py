"""An engine's count of output tokens is believed where as much has passed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.accounts.instances import InstanceStates
from proxy.core.fleet.output_tokens import OutputTokens


def fleet_of(*names: str) -> OutputTokens:
    states = InstanceStates()
    for name in names:
        states.add(name)
    return OutputTokens(states)


@pytest.mark.parametrize(
    ("believed", "told", "events", "asked"),
    [
        (100, 100, 102, None),
        (100, 100, 103, 100),
        (100, 120, 102, 128),
        (100, 100, 200, 128),
        (1, 1, 4, 16),
        (None, None, 100, 100),
        (None, 0, 40, 100),
        (None, 100_000_000, 102, None),
        (None, 160, 102, None),
        (None, 101, 103, 100),
        (None, 100, 5, 128),
        (None, 10, 102, 128),
        (None, 1, 0, None),
    ],
)
def test_what_is_believed(
    believed: int | None, told: int | None, events: int, asked: int | None
) -> None:
    output = fleet_of("a", "b", "c")
    for name in "abc":
        assert output.believed(name, 100, 102, None) == 100
    assert output.believed("a", told, events, asked) == believed
    assert output.believed("gone", told, events, asked) is None


def test_a_fleet_that_decodes_several_at_once() -> None:
    output = fleet_of("a", "b", "c")
    for name in "abc" * 10:
        output.believed(name, 250, 102, None)
    assert [output.believed(name, 250, 102, None) for name in "abc"] == [250] * 3
    assert output.believed("a", 700, 102, None) is None


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 500)), max_size=60))
def test_one_of_three_is_never_believed_more_than_the_others(lies: list[tuple[int, int]]) -> None:
    output = fleet_of("a", "b", "liar")
    for name in "ab":
        output.believed(name, 100, 102, None)
    for told, events in lies:
        found = output.believed("liar", told, events, None)
        assert found is None or found <= events
        assert output.believed("a", 100, 102, None) == 100
