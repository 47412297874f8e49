"""What no proposal gets past: fewest replicas, and the GPUs that there are."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.core.budget import HOLD, RECONCILE, Limits, bounded, ceiling, floor, within_step

ONE = Limits({"c": 2}, {"c": 1}, max_gpus=9)
TWO = Limits({"p": 2, "d": 1}, {"p": 1, "d": 1}, max_gpus=10)


@pytest.mark.parametrize(
    ("current", "wanted", "found", "reason"),
    [
        (3, 4, 4, ""),
        (3, 6, 4, RECONCILE),
        (4, 6, 4, HOLD),
        (3, 0, 1, ""),
        (6, 5, 4, RECONCILE),
    ],
)
def test_one_component(current: int, wanted: int, found: int, reason: str) -> None:
    got = bounded({"c": current}, {"c": wanted}, ONE)
    assert (got.targets, got.reason) == ({"c": found}, reason)


@pytest.mark.parametrize(
    ("current", "wanted", "found"),
    [
        ((2, 6), (3, 6), (2, 6)),  # full: nothing grows unless another shrinks
        ((2, 6), (3, 4), (3, 4)),
        ((2, 4), (4, 6), (2, 6)),  # the nearest that there is room for
        ((2, 6), (4, 5), (2, 6)),  # opposed: both move or none, and 3 with 5 is one too many
        ((1, 1), (9, 1), (4, 1)),
    ],
)
def test_two_components(
    current: tuple[int, int], wanted: tuple[int, int], found: tuple[int, int]
) -> None:
    got = bounded({"p": current[0], "d": current[1]}, {"p": wanted[0], "d": wanted[1]}, TWO)
    assert got.targets == {"p": found[0], "d": found[1]}


def test_the_ceiling_by_hand() -> None:
    """40 GPUs are wanted and 20 there are: half of each, and what is left to the last."""
    limits = Limits({"p": 2, "d": 4}, {"p": 1, "d": 1}, max_gpus=20)
    assert ceiling({"p": 8, "d": 6}, limits) == {"p": 4, "d": 3}
    assert ceiling({"p": 8, "d": 6}, Limits({"p": 2, "d": 4}, {"p": 3, "d": 4}, max_gpus=20)) == {
        "p": 0,
        "d": 0,
    }


def test_the_floor_by_hand() -> None:
    limits = Limits({"p": 1, "d": 1}, {}, max_gpus=12, min_gpus=12)
    assert floor({"p": 2, "d": 4}, limits) == {"p": 4, "d": 8}
    assert floor({"p": 1, "d": 4}, limits) == {"p": 1, "d": 4}, "3 and 10 would break the ceiling"


COUNTS = st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(COUNTS, COUNTS, st.tuples(st.integers(1, 4), st.integers(1, 4)), COUNTS, st.integers(1, 30))
def test_what_always_holds(
    current: tuple[int, int],
    wanted: tuple[int, int],
    gpus: tuple[int, int],
    fewest: tuple[int, int],
    most: int,
) -> None:
    """Within the budget, never below the fewest, and no component against its wish."""
    names = ("p", "d")
    limits = Limits(
        dict(zip(names, gpus, strict=True)), dict(zip(names, fewest, strict=True)), most
    )
    now, wish = dict(zip(names, current, strict=True)), dict(zip(names, wanted, strict=True))
    assume(not limits.is_over(limits.min_replicas))
    assume(all(now[name] >= limits.min_replicas[name] for name in names))
    got = bounded(now, wish, limits).targets
    assert not limits.is_over(got)
    assert all(got[name] >= limits.min_replicas[name] for name in names)
    if not limits.is_over(now):
        for name in names:
            low, high = sorted((now[name], max(wish[name], limits.min_replicas[name])))
            assert low <= got[name] <= high
        assert bounded(got, wish, limits).targets == got


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 10))
def test_a_step_is_no_larger_than_allowed(current: int, wanted: int, most: int) -> None:
    got = within_step({"c": current}, {"c": wanted}, most)["c"]
    assert abs(got - current) <= most
    assert got == wanted or abs(got - current) == most


@pytest.mark.parametrize("limits", [ONE, TWO])
def test_no_wish_is_too_large(limits: Limits) -> None:
    current = dict.fromkeys(limits.gpus, 1)
    found = bounded(current, dict.fromkeys(limits.gpus, 10**12), limits)
    assert limits.max_gpus - max(limits.gpus.values()) < limits.used(found.targets)
    assert not limits.is_over(found.targets)
