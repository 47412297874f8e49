"""Owners take turns, each in its own order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission.turns import Turns


def test_the_owner_that_waits_longest_is_next() -> None:
    turns: Turns[str] = Turns()
    assert not turns
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        turns.add(item[0], item)
    turns.remove("a", "a2")
    turns.remove("x", "none")
    assert [turns.next() for _ in range(2)] == ["a1", "b1"]
    turns.add("d", "d1")
    assert [turns.next() for _ in range(4)] == ["c1", "a3", "b2", "d1"]
    assert not turns


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_each_gets_its_turn_and_its_order(owners: list[str]) -> None:
    turns: Turns[tuple[str, int]] = Turns()
    for number, owner in enumerate(owners):
        turns.add(owner, (owner, number))
    order = [turns.next() for _ in owners]
    for owner in "abc":
        own = [number for whose, number in order if whose == owner]
        assert own == sorted(own)
        others = len(set(owners) - {owner})
        places = [place for place, (whose, _) in enumerate(order) if whose == owner]
        assert all(place <= turn * (others + 1) + others for turn, place in enumerate(places))
