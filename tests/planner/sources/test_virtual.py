"""The context that the planner sees of a virtual fleet, and what it orders there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.core.observe import traffic_between
from planner.core.perf.capacity import Slo
from planner.core.propose.load import LoadDecision
from planner.core.propose.reserve import ReserveDecision
from planner.core.rules import Rules, Strategy
from planner.core.types import COMPONENT, Capabilities, Context, Traffic
from planner.sources.virtual import VirtualPlanner, VirtualSite, totals_of
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.types import Load, RouterConfig
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import Planned
from replayer.virtual.load import TraceTurn
from replayer.virtual.requests import VirtualOptions
from replayer.virtual.scaling import ScaledRun, ScalingOptions, StartUp, simulate_scaled
from replayer.virtual.seen import Seen, SeenInstance, Told

BLOCK = 512
ENGINE = EngineOptions(block_size=BLOCK, num_blocks=300, max_model_len=300 * BLOCK)
OF = Capabilities(1, ENGINE.max_num_batched_tokens, ENGINE.max_num_seqs, 300 * BLOCK)
SITE = VirtualSite(OF, initial=1, min_replicas=1, max_replicas=6)
RULES = Rules(Slo(1.0, 0.03), throughput_interval_s=20.0, predictor="constant")


def loaded(prefill: int, decode: int, requests: int) -> Load:
    return Load(prefill, 1, 0, 0, decode, requests, 0, 0, 0, 0, 0)


class Reads(VirtualPlanner):
    """Shows the context of the last tick."""

    def read(self, seen: Seen) -> Context:
        self.tick(lambda: seen, seen.now_s)
        return self._last

    def _context(self, seen: Seen) -> Context:
        self._last = super()._context(seen)
        return self._last


FIRST = SeenInstance("e0", loaded(0, 2000, 4), 1000, 50_000, 400, 8.0)
LATER = SeenInstance("e0", loaded(700, 4000, 8), 1200, 90_000, 900, 20.0)


def test_an_instance_is_the_growth_of_its_counters_and_the_mean_of_its_loads() -> None:
    planner = Reads(SITE, RULES)
    first = planner.read(Seen(5.0, 0, 0, 0, Told(), (FIRST,)))
    assert first.engines[COMPONENT][0].wall_s is None, "it may have counted for days"
    context = planner.read(Seen(10.0, 2, 1, 0, Told(), (LATER,)))
    (engine,) = context.engines[COMPONENT]
    assert engine.wall_s == pytest.approx(12.0 / 500)
    assert engine.prefill_tokens == pytest.approx(40_000 / 200)
    assert (engine.decode_requests, engine.decode_kv_tokens) == (6.0, 3000.0)
    assert engine.queued_prefill_tokens == 700.0
    replicas = context.replicas[COMPONENT]
    assert (replicas.ready, replicas.pending, replicas.expected) == (1, 3, 1)


def test_another_instance_of_a_name_has_counters_of_its_own() -> None:
    planner = Reads(SITE, RULES)
    planner.read(Seen(5.0, 0, 0, 0, Told(), (FIRST,)))
    planner.read(Seen(10.0, 0, 0, 0, Told(), ()))
    context = planner.read(Seen(15.0, 0, 0, 0, Told(), (LATER,)))
    assert context.engines[COMPONENT][0].wall_s is None


def test_traffic_is_told_once_the_window_is_whole_and_the_queue_is_shared() -> None:
    planner = Reads(SITE, RULES)
    tolds = [Told(10 * n, 8 * n, 8000 * n, 800 * n, 2000 * n) for n in range(6)]
    contexts = [planner.read(Seen(5.0 * n, 0, 0, 6, tolds[n], (FIRST,) * 2)) for n in range(1, 6)]
    assert [one.traffic for one in contexts[:3]] == [None] * 3
    assert contexts[4].traffic == Traffic(20.0, 40, 1000.0, 100.0, 0.25, ended=32)
    assert contexts[4].recent == Traffic(5.0, 10, 1000.0, 100.0, 0.25, ended=8)
    assert contexts[4].engines[COMPONENT][0].queued_prefill_tokens == 6 * 1000.0 / 2


def test_a_window_in_which_nothing_ended_tells_no_lengths() -> None:
    before = Told(5, 5, 500, 50, 5)
    now = totals_of(replace(before, offered=9))
    assert traffic_between(totals_of(before), now, 5.0) == Traffic(5.0, 4)


def load(rates: list[tuple[float, float]]) -> list[Planned]:
    """Single requests: so many per second, for so many seconds each."""
    planned: list[Planned] = []
    begin_s = 0.0
    for rate, seconds in rates:
        for n in range(round(rate * seconds)):
            blocks = tuple(range(1 + 8 * len(planned), 9 + 8 * len(planned)))
            name = f"s{len(planned)}"
            turn = TraceTurn(name, 8 * BLOCK, 60, 8 * BLOCK, blocks, 0, (), 0.0, 0.0)
            planned.append(Planned(turn, name, begin_s + n / rate, 0.0, ()))
        begin_s += seconds
    return planned


def play(planner: VirtualPlanner, rates: list[tuple[float, float]], initial: int = 1) -> ScaledRun:
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000)))
    options = VirtualOptions((ENGINE,) * initial, BLOCK)
    scaling = ScalingOptions(ENGINE, StartUp(5.0))
    found = simulate_scaled(load(rates), router, options, scaling, planner)
    assert (found.run.drift, router.known.ledger.live) == (0, 0)
    return found


RISE = [(2.0, 40.0), (9.0, 60.0), (0.5, 80.0)]


@pytest.mark.long
def test_the_fleet_grows_with_the_load_and_shrinks_behind_it() -> None:
    planner = VirtualPlanner(SITE, RULES)
    found = play(planner, RISE)
    most = max(count for _, count in found.ready)
    assert 2 <= most <= 6
    assert found.ready[-1][1] < most
    assert not any(life.broken for life in found.lives)
    assert all(row.outcome == "ok" for row in found.run.rows)
    model = planner.builtin.state.model(COMPONENT)
    assert model is not None
    assert 0.005 < model(0.0, 0.0) < 0.02, "a step of the preset takes 8 ms"


@pytest.mark.long
def test_a_reserve_follows_the_load_too_and_measures_how_long_a_start_takes() -> None:
    planner = VirtualPlanner(SITE, replace(RULES, strategy=Strategy.RESERVE))
    found = play(planner, RISE)
    assert 2 <= max(count for _, count in found.ready) <= 6
    assert not any(life.broken for life in found.lives)
    assert planner.builtin.reserve.decisions == {COMPONENT: ReserveDecision.SCALE}
    assert planner.builtin.reserve.delay_s(COMPONENT) == 10.0, "5 s, seen at the next tick"


@pytest.mark.long
def test_equal_runs_are_equal() -> None:
    one, other = (play(VirtualPlanner(SITE, RULES), RISE[:2]) for _ in range(2))
    assert (one.run, one.lives) == (other.run, other.lives)


def test_a_planner_that_has_seen_too_little_orders_nothing() -> None:
    planner = VirtualPlanner(SITE, replace(RULES, min_observations=10_000))
    found = play(planner, [(2.0, 30.0)])
    assert (found.changes, len(found.lives)) == (0, 1)
    assert planner.builtin.load.decisions == {COMPONENT: LoadDecision.INSUFFICIENT}
    assert planner.first_s == 5.0
    assert math.isfinite(found.gpu_h)
