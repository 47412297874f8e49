"""What no proposal gets past: fewest replicas, and the GPUs that there are."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.core.budget import (
    HOLD,
    HOLD_S,
    LOW,
    RECONCILE,
    Claim,
    Limits,
    SharedBudget,
    bounded,
    ceiling,
    floor,
    shares,
    within_step,
)

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


def claim(wanted: int, rate: float = 1.0, **more: float) -> Claim:
    """A deployment that needs all that it wants, for `rate` requests a second, and has one."""
    usual = {"target": 1, "there": 1, "least": 1, "gpus": 1, "sure": float(wanted)}
    return Claim(wanted=wanted, rate=rate / wanted, **(usual | more))  # type: ignore[arg-type]


def test_a_replica_is_worth_the_requests_that_it_serves() -> None:
    one = Claim(4, 1, 1, 1, gpus=2, rate=4.0, sure=1.5, spare=1.0)
    each = 4.0 / 2
    assert one.worth(1) == pytest.approx(each)
    first_half, second_half = (LOW * 0.5 * share for share in (0.75, 0.25))
    assert one.worth(2) == pytest.approx(each * (0.5 + first_half))
    assert one.worth(3) == pytest.approx(each * second_half)
    assert one.worth(4) == 0.0, "it is only held"
    assert Claim(4, 1, 1, 1, 1).worth(1) == 0.0, "nothing is known of its load"


@pytest.mark.parametrize(
    ("claims", "max_gpus", "found"),
    [
        ({"a": claim(3), "b": claim(4)}, 8, (3, 4)),
        ({"a": claim(6), "b": claim(6)}, 8, (6, 2)),  # equal: by name
        ({"a": claim(6, 6.0), "b": claim(6, 12.0)}, 8, (2, 6)),  # 1 and 2 requests per replica
        ({"a": claim(6, 6.0), "b": claim(6, 12.0, gpus=4)}, 8, (4, 1)),  # per GPU
        ({"a": claim(6, 6.0, target=6), "b": claim(6, 8.0)}, 8, (6, 2)),  # a has them
        ({"a": claim(6, 6.0, target=6), "b": claim(6, 12.0)}, 8, (2, 6)),  # not for so much more
        ({"a": claim(6, 6.0, least=5), "b": claim(6, 12.0)}, 8, (5, 3)),  # a floor
        ({"a": claim(4, 9.0, gpus=3), "b": claim(4, 1.0)}, 8, (2, 2)),  # what is left is too small
        ({"a": claim(5, 4.0, sure=2.0, spare=3.0), "b": claim(2, 2.0)}, 4, (2, 2)),  # or in reserve
        ({"a": claim(5, 0.0), "b": claim(5, 0.0, target=3)}, 4, (1, 3)),  # nobody knows: as it is
    ],
)
def test_shares(claims: dict[str, Claim], max_gpus: int, found: tuple[int, int]) -> None:
    assert tuple(shares(claims, max_gpus).values()) == found


def budget_of(max_gpus: int, *floors: int) -> SharedBudget:
    made = SharedBudget(max_gpus)
    for name, floor_of in zip("ab", floors, strict=True):
        made.join(name, 1, {"c": floor_of})
    return made


def test_nobody_grows_until_all_have_asked() -> None:
    shared = budget_of(8, 1, 1)
    assert shared.granted("a", claim(6, target=2, there=2), 0.0) == 2
    assert shared.granted("b", claim(2, target=4, there=4), 0.0) == 2
    assert shared.granted("a", claim(6, target=2, there=2), 5.0) == 4, "two of b have yet to leave"
    shared = budget_of(8, 1, 1)
    shared.remember("b", claim(2, target=2, there=2))
    assert shared.granted("a", claim(6, target=2, there=2), 0.0) == 6


A_HAS, B_HAS = claim(6, 6.0, target=6, there=6), claim(6, 60.0, target=2, there=2)
"""Six and two of eight, and those of b are worth more."""


def test_gpus_go_over_after_a_while_and_are_free_once_instances_have_left() -> None:
    shared = budget_of(8, 1, 1)
    for now_s in (0.0, HOLD_S - 1.0):
        assert shared.granted("b", B_HAS, now_s) == 2, "a has them"
        assert shared.granted("a", A_HAS, now_s) == 6, "it may be for a moment only"
    assert shared.granted("a", A_HAS, HOLD_S) == 2
    for leaving, found in ((4, 2), (3, 3), (0, 6)):
        shared.granted("a", claim(6, 6.0, target=2, there=2 + leaving), HOLD_S)
        assert shared.granted("b", B_HAS, HOLD_S) == found


def test_a_need_that_comes_and_goes_moves_nothing() -> None:
    shared = budget_of(8, 1, 1)
    for tick in range(100):
        rate = 60.0 if tick % 20 else 6.0
        assert shared.granted("b", claim(6, rate, target=2, there=2), 5.0 * tick) == 2
        assert shared.granted("a", A_HAS, 5.0 * tick) == 6


def test_a_floor_is_made_room_for_at_once() -> None:
    shared = budget_of(8, 1, 4)
    shared.granted("a", A_HAS, 0.0)
    assert shared.granted("b", claim(4, 1.0, target=2, there=2, least=4), 0.0) == 4
    assert shared.granted("a", A_HAS, 0.0) == 4


def test_floors_of_others_bound_an_own_one() -> None:
    floors = {"c": 1}
    shared = SharedBudget(9)
    shared.join("a", 2, floors)
    shared.join("b", 1, {"c": 3})
    assert shared.most("a") == 3
    floors["c"] = 3
    assert shared.most("b") == 3


ASKED = st.tuples(
    *(st.integers(0, 2), st.integers(0, 12)),
    *(st.floats(0, 50), st.floats(0, 9), st.floats(0, 4), st.floats(0, 2 * HOLD_S)),
)


@given(
    st.lists(ASKED, max_size=60),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=3, max_size=3),
    st.integers(0, 12),
)
def test_what_always_holds_of_a_shared_budget(
    asked: list[tuple[int, int, float, float, float, float]], of: list[tuple[int, int]], more: int
) -> None:
    """Each tick the instances of one deployment are those that it has ordered, one after the other.

    All begin at their floors.
    """
    max_gpus = more + sum(gpus * least for gpus, least in of)
    shared = SharedBudget(max_gpus)
    targets = [least for _, least in of]
    there = list(targets)
    for at, (gpus, least) in enumerate(of):
        shared.join(str(at), gpus, {"c": least})
    now_s = 0.0
    for at, wanted, rate, sure, spare, pause_s in asked:
        gpus, least = of[at]
        there[at] = max(targets[at], there[at] - 1)
        own = Claim(max(least, wanted), targets[at], there[at], least, gpus, rate, sure, spare)
        now_s += pause_s
        targets[at] = shared.granted(str(at), own, now_s)
        assert least <= targets[at] <= max(least, wanted)
        there[at] = max(there[at], targets[at])
        assert sum(g * count for (g, _), count in zip(of, there, strict=True)) <= max_gpus
