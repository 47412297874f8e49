"""Who is first at each moment, as a look at all of them finds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission import order
from proxy.core.admission.order import Order
from tests.support.work import lines_of

STEP = st.tuples(
    st.sampled_from(["add", "add", "add", "remove", "reweigh", "rank", "wait"]),
    st.sampled_from("abc"),
    st.integers(0, 20),
    st.integers(-1, 8),
    st.floats(0, 3),
)


class LooksAtAll:
    """The same items in an order, and here, where each look is at all of them."""

    def __init__(self) -> None:
        self.order: Order[int] = Order()
        self.there: dict[int, tuple[str, int, float]] = {}
        self.ranks = dict.fromkeys("abc", 0)
        self.now_s, self.count = 0.0, 0

    def step(self, what: str, owner: str, which: int, rate: int, seconds: float) -> None:
        since_s = self.now_s - seconds
        if what == "add":
            self.count += 1
            self.there[self.count] = owner, rate, since_s
            self.order.add(self.count, owner, self.ranks[owner], rate, since_s)
        elif what == "rank":
            self.ranks[owner] = which % 3
            self.order.rank(owner, self.ranks[owner])
        elif what == "wait":
            self.now_s += seconds
        elif self.there:
            self.change(what, list(self.there)[which % len(self.there)], rate, since_s)

    def change(self, what: str, item: int, rate: int, since_s: float) -> None:
        owner, _, _ = self.there[item]
        if what == "remove":
            del self.there[item]
            self.order.remove(item, owner)
            self.order.remove(item, owner)
        else:
            self.there[item] = owner, rate, since_s
            self.order.reweigh(item, owner, rate, since_s)

    def weight(self, item: int) -> tuple[int, float]:
        owner, rate, since_s = self.there[item]
        return self.ranks[owner], rate * (self.now_s - since_s)

    def check(self) -> None:
        assert len(self.order) == len(self.there)
        first, best = self.order.first(self.now_s), min(self.there, key=self.weight, default=None)
        if first is None or best is None:
            assert first == best
            return
        (rank, weight), (best_rank, least) = self.weight(first), self.weight(best)
        assert rank == best_rank
        assert abs(weight - least) < 1e-6


@given(st.lists(STEP, max_size=80))
def test_the_first_is_the_one_that_a_look_at_all_finds(
    steps: list[tuple[str, str, int, int, float]],
) -> None:
    looks = LooksAtAll()
    for step in steps:
        looks.step(*step)
        looks.check()


def test_equal_ones_go_in_their_order() -> None:
    found: Order[int] = Order()
    for number in range(9):
        found.add(number, "ab"[number % 2], 0, 3, 1.0)
    gone = []
    while (first := found.first(2.0)) is not None:
        gone.append(first)
        found.remove(first, "ab"[first % 2])
    assert gone == list(range(9))


def test_an_earlier_moment_has_its_own_first() -> None:
    found: Order[str] = Order()
    found.add("large and young", "a", 0, 4, 10.0)
    found.add("small and old", "a", 0, 1, 0.0)
    assert [found.first(at_s) for at_s in (11.0, 20.0, 11.0)] == [
        "large and young",
        "small and old",
        "large and young",
    ]


def work(count: int, owners: int) -> float:
    """Lines for each of so many that come, go by and by, and overtake each other."""
    found: Order[int] = Order()
    with lines_of(order) as lines:
        for number in range(count):
            owner = str(number % owners)
            found.add(number, owner, count // owners, 1 + number * 7919 % 1000, number / 100)
            found.first(number / 100)
        for number in range(count):
            found.remove(number, str(number % owners))
            found.first(count / 100 + number / 100)
    return lines.count / count


@pytest.mark.long
def test_a_step_grows_with_the_logarithm_of_those_that_are_there() -> None:
    for is_of_one in (True, False):
        few, many = (work(count, 1 if is_of_one else count) for count in (100, 1600))
        assert many <= 2 * few, (few, many)
