"""The search for the highest load, on shares that fall with the load and are noisy."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.league.capacity.search import Search, crossing, falling

LEAST, MOST, SHARE = 0.05, 4.0, 0.95
Shares = Callable[[float], list[float]]


def steep(limit: float, steepness: float) -> Callable[[float], float]:
    """A share that is exactly SHARE at a limit."""

    def share(load: float) -> float:
        return math.pow(SHARE, math.pow(load / limit, steepness))

    return share


def searched(shares: Shares, **more: float) -> Search:
    search = Search(SHARE, LEAST, MOST, **{"width": 0.02, "tries": 20, **more})  # type: ignore[arg-type]
    tried = []
    while (load := search.next_load()) is not None:
        assert search.left() >= 1
        tried.append(load)
        search.told(load, shares(load))
    assert search.left() == 0
    assert len(set(tried)) == len(tried) <= search.tries
    assert all(LEAST <= load <= MOST for load in tried)
    return search


@given(st.floats(0.06, 3.9), st.floats(0.5, 20.0), st.sampled_from((0.005, 0.02, 0.2)))
def test_without_noise_the_bracket_has_the_limit(limit: float, steep_: float, width: float) -> None:
    search = searched(lambda load: [steep(limit, steep_)(load)], width=width)
    last, first = search.bracket()
    assert not search.is_cut
    assert last is not None
    assert first is not None
    assert last.load <= limit * (1 + 1e-9)
    assert limit <= first.load * (1 + 1e-9)
    assert first.load / last.load <= 1 + width + 1e-9
    assert last.load <= search.by_seed()[0] <= first.load


@given(
    st.floats(0.06, 3.9),
    st.floats(0.5, 20.0),
    st.floats(0.0, 0.04),
    st.integers(1, 4),
    st.integers(0, 1000),
    st.integers(1, 25),
)
def test_noise_moves_the_bracket_no_further_than_noise_can(
    limit: float, steep_: float, noise: float, seeds: int, drawn: int, tries: int
) -> None:
    share = steep(limit, steep_)

    def shares(load: float) -> list[float]:
        draw = random.Random(f"{drawn} {load}")
        return [share(load) + draw.uniform(-noise, noise) for _ in range(seeds)]

    search = searched(shares, tries=tries)
    last, first = search.bracket()
    loads = [one.load for one in search.points]
    assert loads == sorted(loads)
    if last is not None:
        assert share(last.load) >= SHARE - noise - 1e-9
    if first is not None:
        assert share(first.load) <= SHARE + noise + 1e-9
    if last is not None and first is not None:
        assert loads.index(first.load) == loads.index(last.load) + 1
        assert search.is_cut or first.load / last.load <= 1.02 + 1e-9
    elif not search.is_cut and tries > 8:
        assert LEAST in loads or MOST in loads
    limits = search.by_seed()
    assert len(limits) == seeds
    assert all(loads[0] <= one <= loads[-1] for one in limits)


@pytest.mark.parametrize(("share", "ends_at", "holds"), [(1.0, MOST, True), (0.5, LEAST, False)])
def test_what_always_holds_or_never_is_tried_to_the_end(
    share: float, ends_at: float, holds: bool
) -> None:
    search = searched(lambda _load: [share])
    last, first = search.bracket()
    end, none = (last, first) if holds else (first, last)
    assert none is None
    assert end is not None
    assert end.load == ends_at
    assert search.by_seed() == [ends_at]
    assert not search.is_cut
    assert len(search.points) <= 7


def test_a_range_without_the_saturation_rate_begins_within() -> None:
    assert Search(SHARE, 2.0, 8.0).next_load() == 4.0


def test_one_unlucky_load_does_not_end_the_search() -> None:
    """The first load is far below the limit and fails all the same; the one beyond finds that."""
    unlucky = 1.5
    search = searched(lambda load: [0.94 if load == unlucky else steep(1.6, 20.0)(load)])
    last, first = search.bracket()
    assert last is not None
    assert first is not None
    assert last.load > unlucky
    assert first.load < 1.6 * 1.02


def test_a_search_that_is_cut_says_so() -> None:
    search = searched(lambda load: [steep(0.9, 4.0)(load)], tries=3)
    last, first = search.bracket()
    assert search.is_cut
    assert last is not None
    assert first is not None
    assert last.load == pytest.approx(math.sqrt(0.5))
    assert first.load == 1.0


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30))
def test_smoothed_values_fall_and_keep_the_mean(values: list[float]) -> None:
    smooth = falling(values)
    assert all(before >= after for before, after in pairwise(smooth))
    assert math.fsum(smooth) == pytest.approx(math.fsum(values))
    assert falling(smooth) == pytest.approx(smooth)
    already = sorted(values, reverse=True)
    assert falling(already) == already


def test_neighbours_that_grow_are_pooled() -> None:
    assert falling([0.9, 1.0, 0.5]) == [0.95, 0.95, 0.5]


def test_where_falling_shares_cross_one() -> None:
    assert crossing([1.0, 4.0], [1.0, 0.9], 0.95) == pytest.approx(2.0)
    assert crossing([1.0, 4.0], [1.0, 0.96], 0.95) == 4.0
    assert crossing([1.0, 4.0], [0.9, 0.1], 0.95) == 1.0
