"""One budget for what waits for its end: its largest holder pays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission.largest_pays import LargestPays


def test_within_the_budget_nobody_pays() -> None:
    pays: LargestPays[str] = LargestPays(10)
    assert [pays.hold(name, "a", 5) for name in "xy"] == [None, None]


def test_the_owner_that_has_most_pays_with_its_largest() -> None:
    pays: LargestPays[str] = LargestPays(20)
    for name in ("a1", "a2", "a3"):
        assert pays.hold(name, "a", 4) is None
    assert pays.hold("a2", "a", 5) is None
    assert pays.hold("b", "b", 8) == "a2", "the newest is larger, its owner is not"
    pays.drop("a2")
    assert pays.held_bytes == 16
    pays.drop("a2")
    assert (pays.held_bytes, len(pays)) == (16, 3)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.booleans()), max_size=40))
def test_sums_are_right_after_any_history(steps: list[tuple[str, int, bool]]) -> None:
    pays: LargestPays[str] = LargestPays(25)
    known: dict[str, int] = {}
    for holder, size, is_over in steps:
        if is_over:
            pays.drop(holder)
            known.pop(holder, None)
            continue
        known[holder] = size
        largest = pays.hold(holder, "one", size)
        assert (largest is not None) == (sum(known.values()) > 25)
        if largest is not None:
            assert known[largest] == max(known.values())
    assert pays.held_bytes == sum(known.values())
