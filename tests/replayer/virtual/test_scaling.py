"""Instances that come and go while the load runs: no stream is cut, each second is paid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.types import RouterConfig
from replayer.virtual.fleet import simulate
from replayer.virtual.requests import VirtualOptions
from replayer.virtual.scaling import (
    LOOK_S,
    ScaledFleet,
    ScaledRun,
    ScalingOptions,
    StartUp,
    simulate_scaled,
)
from replayer.virtual.seen import Scaler, Schedule, Seen, Wish
from tests.replayer.virtual.test_fleet_losses import BLOCK, ENGINE, load
from tests.support.examples import examples

CONFIG = RouterConfig(prefill_throughput=20_000)
PROBED_S = 2.0
"""The proxy uses what has come within a scrape at most."""
Orders = list[tuple[float, int]]


def run(
    orders: Orders,
    initial: int = 2,
    start: StartUp | None = None,
    requests: int = 60,
    grace_s: float = math.inf,
    limit: int = 0,
) -> ScaledRun:
    scaling = ScalingOptions(ENGINE, start or StartUp(3.0), 2, grace_s)
    return play(Schedule(orders), initial, scaling, requests, limit)


def play(
    scaler: Scaler, initial: int, scaling: ScalingOptions, requests: int = 60, limit: int = 0
) -> ScaledRun:
    router = Router(FleetState(CONFIG))
    options = VirtualOptions((ENGINE,) * initial, BLOCK, migration_limit=limit)
    found = simulate_scaled(load(requests), router, options, scaling, scaler)
    assert (found.run.drift, router.known.ledger.live) == (0, 0)
    return found


def test_a_fleet_that_nobody_scales_is_the_fixed_one() -> None:
    fixed = simulate(load(60), Router(FleetState(CONFIG)), VirtualOptions((ENGINE,) * 3, BLOCK))
    found = run([], initial=3)
    assert found.run == fixed
    assert found.gpu_h == pytest.approx(2 * 3 * fixed.makespan_s / 3600)
    assert (found.changes, found.ready) == (0, [(0.0, 3)])


def test_what_is_ordered_serves_after_its_start_and_is_paid_from_the_order() -> None:
    found = run([(4.0, 3)])
    life = found.lives[2]
    assert (life.ordered_s, life.ready_s, life.left_s) == (4.0, 7.0, None)
    assert life.paid_s(found.run.makespan_s) == found.run.makespan_s - 4.0
    first_s = min(row.arrival_s for row in found.run.rows if row.decode == "e2")
    assert 7.0 < first_s < 7.0 + PROBED_S + 1.0
    assert found.ready == [(0.0, 2), (7.0, 3)]


def test_what_drains_ends_its_streams_and_gets_none() -> None:
    found = run([(9.0, 2)], initial=3)
    (life,) = [one for one in found.lives if one.drained_s is not None]
    rows = [row for row in found.run.rows if row.decode == life.name]
    assert life.streams > 0
    assert life.broken == 0
    assert max(row.arrival_s for row in rows) <= 9.0
    last_s = max(row.end_s or 0.0 for row in rows)
    assert life.left_s is not None
    assert last_s > 9.0
    assert last_s <= life.left_s <= last_s + LOOK_S + 1e-9
    assert all(row.outcome == "ok" for row in found.run.rows)
    assert life.lost_tokens > 0


@pytest.mark.parametrize("limit", [0, 1])
def test_streams_that_are_there_when_the_grace_is_over_are_cut_or_move(limit: int) -> None:
    found = run([(9.0, 2)], initial=3, grace_s=0.2, limit=limit)
    (life,) = [one for one in found.lives if one.drained_s is not None]
    assert life.left_s == pytest.approx(9.2)
    assert 0 < life.broken <= life.streams
    cut = [row for row in found.run.rows if row.outcome == "failed"]
    moved = [row for row in found.run.rows if row.moves]
    assert (bool(cut), bool(moved)) == (not limit, bool(limit))
    assert all(row.decode == life.name and row.ttft_s is not None for row in cut)


def test_the_one_with_the_least_to_lose_goes() -> None:
    found = run([(10.0, 3), (14.0, 2)], start=StartUp(0.0))
    later = [one.name for one in found.lives if one.drained_s == 14.0]
    assert later == ["e2"], "its cache is the emptiest"


def test_orders_that_are_not_there_yet_are_cancelled_first() -> None:
    found = run([(1.0, 4), (2.0, 3), (5.0, 2)])
    assert [(one.ready_s, one.left_s) for one in found.lives] == [
        *((0.0, None), (0.0, None)),
        *((4.0, found.lives[2].left_s), (None, 2.0)),
    ]
    assert found.lives[3].paid_s(99.0) == 1.0
    assert found.changes == 3


def test_one_replica_is_left_whatever_is_wanted() -> None:
    found = run([(3.0, 0)])
    assert sum(one.drained_s is None for one in found.lives) == 1


@dataclass
class Looks:
    """Looks every so often, and wants nothing."""

    every_s: float
    first_s: float = 1.0
    seen: list[Seen] = field(default_factory=list)

    def tick(self, look: Callable[[], Seen], now_s: float) -> Wish:
        self.seen.append(look())
        return Wish(next_s=now_s + self.every_s)


def test_what_is_seen_is_what_counters_would_tell() -> None:
    watch = Looks(0.5)
    rows = play(watch, 2, ScalingOptions(ENGINE)).run.rows
    last = watch.seen[-1]
    before = [row for row in rows if row.end_s is not None and row.end_s <= last.now_s]
    assert last.told.ended == len(before)
    assert last.told.prompt_tokens == sum(row.prompt_tokens for row in before)
    assert last.told.output_tokens == sum(row.output_tokens for row in before)
    assert last.told.cached_tokens == sum(row.cached_tokens for row in before)
    assert last.told.offered == sum(row.arrival_s <= last.now_s for row in rows)
    for one in last.instances:
        assert 0.008 < one.gap_s / one.gaps < 0.1, "a step of the preset, some with a prompt"
        assert one.iterations > 0
    told = [seen.told.offered for seen in watch.seen]
    assert told == sorted(told)


def test_who_looks_changes_no_request() -> None:
    """Looking cuts runs of decode steps in two: times are equal but for their last digits."""
    plain, watched = run([]).run, play(Looks(0.5), 2, ScalingOptions(ENGINE)).run
    for one, other in zip(plain.rows, watched.rows, strict=True):
        assert (one.decode, one.cached_tokens) == (other.decode, other.cached_tokens)
        assert one.e2e_s == pytest.approx(other.e2e_s)


def test_a_start_up_is_drawn_by_the_name() -> None:
    start = StartUp(120.0, 180.0)
    drawn = sorted(start.delay_s(f"e{n}") for n in range(1000))
    assert drawn[500] == pytest.approx(120.0, rel=0.05)
    assert drawn[900] == pytest.approx(180.0, rel=0.05)
    assert start.delay_s("e1") == StartUp(120.0, 180.0).delay_s("e1")
    assert start.delay_s("e1") != StartUp(120.0, 180.0, seed=1).delay_s("e1")
    assert StartUp(30.0).delay_s("e1") == 30.0


@given(
    st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 5)), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.integers(0, 2),
)
@settings(max_examples=examples(8))
def test_whatever_a_grace_cuts_every_lease_closes(
    orders: Orders, grace_s: float, limit: int
) -> None:
    found = run(orders, 3, StartUp(0.5), requests=24, grace_s=grace_s, limit=limit)
    assert {row.outcome for row in found.run.rows} <= {"ok", "failed"}
    failed = sum(row.outcome == "failed" for row in found.run.rows)
    assert failed <= sum(life.broken for life in found.lives)


ORDERS = st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 6)), max_size=6)


@given(ORDERS, st.integers(1, 3), st.sampled_from([0.0, 0.5, 4.0, 60.0]))
@settings(max_examples=examples(12))
def test_whoever_comes_and_goes_no_stream_breaks_and_every_second_is_paid(
    orders: Orders, initial: int, startup_s: float
) -> None:
    start = StartUp(startup_s, 2 * startup_s)
    found = run(orders, initial, start, requests=24)
    assert all(row.outcome == "ok" for row in found.run.rows)
    assert not any(life.broken for life in found.lives)
    end_s = found.run.makespan_s
    for life in found.lives:
        assert life.ready_s is None or life.ready_s >= life.ordered_s
        assert life.left_s is None or life.drained_s is not None
        served = [row for row in found.run.rows if row.decode == life.name]
        ends_s = [row.end_s or math.inf for row in served]
        assert max(ends_s, default=0.0) <= (end_s if life.left_s is None else life.left_s)
    paid_s = sum(life.paid_s(end_s) for life in found.lives)
    assert found.gpu_h == pytest.approx(2 * paid_s / 3600)
    again = run(orders, initial, start, requests=24)
    assert (again.run, again.lives) == (found.run, found.lives)


def test_wanted_replicas_are_those_that_serve_or_come() -> None:
    scaler = Looks(1.0)
    router = Router(FleetState(CONFIG))
    fleet = ScaledFleet(
        load(30),
        router,
        VirtualOptions((ENGINE,) * 3, BLOCK),
        ScalingOptions(ENGINE, StartUp(5.0)),
        scaler,
    )
    fleet.scale_to(5, 0.0)
    fleet.scale_to(2, 0.0)
    fleet.scale_to(3, 0.0)
    fleet.run()
    first = scaler.seen[0]
    assert (first.wanted, first.ordered, len(first.instances)) == (3, 1, 2)
    assert [seen.wanted for seen in scaler.seen] == [3] * len(scaler.seen)
