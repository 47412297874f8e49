"""The clairvoyant: its dynamic programming, its orders, and a search in a toy world."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from analysis.plan.clairvoyant import (
    EPOCH_S,
    Counts,
    Misses,
    Orders,
    Search,
    World,
    arriving_work,
    cheapest,
    in_proportion,
    missed_per_epoch,
    neighbours,
    orders,
    when_needed,
)
from analysis.plan.measured import CLAIRVOYANT, UNWARNED, Played, Record
from tests.analysis.plan.runs_for_tests import load, record, run


def work_s(_one: Record) -> float:
    return 0.25


MISSED = {1: [0, 0, 50, 50, 0, 0], 2: [0, 0, 9, 9, 0, 0], 3: [0, 0, 0, 0, 0, 0]}
HOUR = EPOCH_S / 3600


def cost(counts: Counts, price: float, startup_s: float) -> float:
    rises = sum(max(0, b - a) for a, b in pairwise(counts))
    missed = sum(MISSED[n][at] for at, n in enumerate(counts))
    return HOUR * sum(counts) + price * missed + rises * startup_s / 3600


@pytest.mark.parametrize("price", [1e-5, 2e-4, 1e-3, 0.1])
@pytest.mark.parametrize("startup_s", [0.0, 60.0, 120.0])
def test_the_cheapest_schedule_is_the_cheapest_of_all(price: float, startup_s: float) -> None:
    first = int(startup_s // EPOCH_S)
    possible = [
        counts
        for counts in product(MISSED, repeat=6)
        if all(b <= a for a, b in pairwise(counts[:first]))
    ]
    found = cheapest(MISSED, price, startup_s)
    assert found in possible
    best = min(cost(counts, price, startup_s) for counts in possible)
    assert cost(found, price, startup_s) == pytest.approx(best)


def test_a_free_miss_buys_nothing_and_a_dear_one_all() -> None:
    assert cheapest(MISSED, 0.0, 0.0) == (1,) * 6
    assert cheapest(MISSED, 1.0, 0.0) == (1, 1, 3, 3, 1, 1)
    assert cheapest(MISSED, 1.0, 90.0)[:4] == (3, 3, 3, 3)  # it cannot rise in time


def test_orders_are_given_one_start_up_ahead() -> None:
    counts = (1, 1, 1, 1, 3, 3, 1, 1, 1)
    assert when_needed(counts) == [(0.0, 1), (120.0, 3), (180.0, 1)]
    assert orders(counts, 60.0) == [(0.0, 1), (59.0, 3), (179.0, 1)]
    assert orders(counts, 0.0) == [(0.0, 1), (119.0, 3), (179.0, 1)]


def test_what_is_needed_again_within_a_delay_is_kept() -> None:
    assert orders((3, 1, 3, 3), 60.0) == [(0.0, 3)]


def test_a_row_of_more_engines_never_misses_more() -> None:
    misses = Misses({1: [4, 8], 2: [6, 1], 3: [5, 2]})
    assert misses.table == {1: [4, 8], 2: [4, 1], 3: [4, 1]}
    misses.learn(0, 2, 0)
    assert [row[0] for row in misses.table.values()] == [4, 0, 0]
    misses.learn(1, 2, 21)
    assert [row[1] for row in misses.table.values()] == [11, 11, 1]  # half of the news


def test_misses_are_counted_by_arrival() -> None:
    made = load(0.0, 40.0, 999.0)
    records = [record(0.0), record(40.0, ttft_s=9.0), record(999.0, ttft_s=None)]
    assert missed_per_epoch(made, records, 4) == [0, 1, 0, 1]


def test_work_is_what_arrives_around_an_epoch() -> None:
    records = [record(15.0), record(15.5)]
    each_s = 0.25
    assert arriving_work(work_s, records, 30.0, 3) == pytest.approx([2 * each_s / 30, 0.0, 0.0])
    assert arriving_work(work_s, records, 120.0, 3)[1] == pytest.approx(2 * each_s / 91)


def world(startup_s: float = 0.0, end_s: float = 240.0) -> World:
    """Two requests in each epoch; those of the epochs 3 to 5 keep the SLO with 3 engines."""
    epochs = int(end_s / EPOCH_S)
    made = load(*(at * EPOCH_S for at in range(epochs) for _ in range(2)), end_s=end_s)

    def play(name: str, given: Orders, initial: int) -> Played:
        def wanted(moment_s: float) -> int:
            return ([initial] + [n for at_s, n in given if at_s <= max(0.0, moment_s)])[-1]

        def ready(moment_s: float) -> int:
            """What was wanted for the whole of a start-up delay, or from the start."""
            begin = int(moment_s - startup_s)
            return min(wanted(at) if at >= 0 else initial for at in range(begin, int(moment_s) + 1))

        counts = [ready((at + 0.5) * EPOCH_S) for at in range(epochs)]
        needed = [3 if 3 <= at <= 5 else 1 for at in range(epochs)]
        good = [n >= least for n, least in zip(counts, needed, strict=True)]
        records = [record(at * EPOCH_S, 0.1 if good[at] else 9.0) for at in range(epochs)] * 2
        made_run = run(name, HOUR * sum(counts), sum(good) / epochs)
        return Played(made_run, records, [(at * EPOCH_S, n) for at, n in enumerate(counts)])

    return World(made, work_s, startup_s, play)


@pytest.mark.parametrize("startup_s", [0.0, 60.0])
def test_a_search_finds_the_toy_s_optimum(startup_s: float) -> None:
    toy = world(startup_s)
    fleets = {n: toy.play(f"static:{n}", [(0.0, n)], n) for n in (1, 2, 3, 4)}
    runs = Search(toy, fleets, effort=30).runs()
    (best,) = [one for one in runs if one.is_best]
    assert best.attainment_ratio == 1.0
    assert best.gpu_h == pytest.approx(HOUR * (5 * 1 + 3 * 3))
    assert [one.policy for one in runs] == [CLAIRVOYANT] * (len(runs) - 1) + [UNWARNED]
    attained = [one.attainment_ratio for one in runs[:-1]]
    assert attained == sorted(attained)
    if startup_s:
        assert runs[-1].attainment_ratio < 1.0


def test_a_fleet_that_rises_too_soon_begins_larger() -> None:
    toy = world(startup_s=60.0)
    assert in_proportion([0.5, 0.5, 1.4, 0.5], 0.5, toy) == (3, 3, 3, 1)
    assert in_proportion([0.5, 0.5, 0.5, 1.4], 0.5, toy) == (1, 1, 1, 3)
    assert in_proportion([99.0, 0.0], 0.5, world()) == (10, 1)


def test_neighbours_are_all_cheaper() -> None:
    counts = (1, 1, 3, 3, 1, 1)
    found = list(neighbours(counts, 1))
    assert (1, 1, 1, 3, 1, 1) in found  # rises later
    assert (1, 1, 3, 1, 1, 1) in found  # falls earlier
    assert (1, 1, 2, 2, 1, 1) in found  # a piece lower
    assert all(len(one) == 6 and sum(one) < sum(counts) for one in found)
