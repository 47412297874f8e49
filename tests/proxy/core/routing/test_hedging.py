"""When D computes beside a late P, what that is charged, and that every end takes it back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.accounts.engine_reports import EngineKv
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import (
    Fallback,
    Instance,
    Load,
    Reason,
    RequestFacts,
    RouteClass,
    RouterConfig,
)

FACTS = RequestFacts("m", "s", 20_000, list(range(20)), 1000.0)


def router(n: int = 2, **options: Any) -> Router:
    made = Router(
        FleetState(RouterConfig(prefill_throughput=20_000, offload_policy="always", **options))
    )
    for i in range(n):
        made.known.add(Instance(f"i{i}", f"http://i{i}", f"http://i{i}:8998"))
    return made


def offloaded(r: Router, facts: RequestFacts = FACTS) -> Route:
    route = r.admit(facts, 0.0)
    assert isinstance(route, Route)
    assert route.prefill is not None
    return route


def other(number: int) -> RequestFacts:
    return replace(FACTS, session_id=None, block_hashes=[number * 100 + i for i in range(20)])


def loads(r: Router, route: Route) -> tuple[Load, Load]:
    assert route.prefill is not None
    return r.known.ledger.load(route.prefill.name), r.known.ledger.load(route.decode.name)


def at_rest(r: Router) -> bool:
    names = [m.instance.name for m in r.known.fleet.members()]
    idle = all(
        r.known.ledger.load(n) == Load() and r.known.latency.wait_s(n, 9.0) == 0 for n in names
    )
    return idle and r.known.reuse.is_at_rest and r.hedges.live == 0 and r.known.ledger.drift() == 0


def test_late_is_past_the_bound_of_the_prediction() -> None:
    r = router()
    route = offloaded(r)
    assert route.prefill is not None
    bound_s = r.known.latency.prefill_bound_s(route.prefill.name, route.predicted_prefill_s)
    assert r.hedges.due_s(route) == bound_s > route.predicted_prefill_s >= 1.0


@pytest.mark.parametrize("options", [{"hedge": False}, {"kv_connector": "none"}])
def test_never(options: dict[str, Any]) -> None:
    r = router(**options)
    route = r.admit(FACTS, 0.0)
    assert isinstance(route, Route)
    assert r.hedges.due_s(route) == math.inf
    assert not r.hedges.start(route, FACTS, 3.0)


def test_both_are_charged_while_both_compute() -> None:
    r = router()
    route = offloaded(r)
    assert r.hedges.start(route, FACTS, 2.0)
    for load in loads(r, route):
        assert (load.prefill_tokens, load.inbound_tokens) == (20_000, 0)
    alone_s = r.known.latency.prefill_s(route.decode.name, 20_000, 0, 0, 0)
    way_s = r.known.latency.way_s(20_000)
    assert r.known.latency.wait_s(route.decode.name, 2.0) == pytest.approx(way_s + alone_s)
    assert not r.hedges.start(route, FACTS, 2.0)
    r.finish(route, 3.0)
    assert at_rest(r)


def test_p_wins() -> None:
    r = router()
    route = offloaded(r)
    r.hedges.start(route, FACTS, 2.0)
    r.prefill_done(route, FACTS, 2.5)
    p, d = loads(r, route)
    assert (p.pinned_tokens, d.inbound_tokens, d.prefill_tokens) == (20_000, 20_000, 0)
    assert r.known.latency.wait_s(route.decode.name, 2.5) == 0.0
    r.first_token(route, FACTS, 2.7)
    assert route.route_class is RouteClass.HEAVY_P2P
    r.finish(route, 3.0)
    assert at_rest(r)


@pytest.mark.parametrize("why", [Fallback.P_LATE, Fallback.P_ERROR])
def test_d_goes_on_alone(why: Fallback) -> None:
    """Its first token came, or P failed: what it has computed so far counts."""
    r = router()
    route = offloaded(r)
    name = route.decode.name
    r.hedges.start(route, FACTS, 2.0)
    hedged_s = r.known.latency.wait_s(name, 2.0)
    r.fall_back(route, FACTS, why, 2.4)
    assert (route.prefill, route.fallback, route.reason) == (None, why, Reason.PREFILL_FAILED)
    assert r.known.latency.wait_s(name, 2.4) == pytest.approx(hedged_s - 0.4)
    assert route.reserved_s == 2.0
    assert r.known.ledger.load(name).prefill_tokens == 20_000
    assert sum(r.known.ledger.load(f"i{i}").ongoing_tokens for i in range(2)) == 20_000
    r.first_token(route, FACTS, 3.0)
    r.completed(route, FACTS, 0.0)
    r.finish(route, 4.0)
    assert at_rest(r)


def test_d_fails_and_p_goes_on() -> None:
    r = router()
    route = offloaded(r)
    r.hedges.start(route, FACTS, 2.0)
    r.hedges.drop(route, 2.1)
    p, d = loads(r, route)
    assert (p.prefill_tokens, d.inbound_tokens, d.prefill_tokens) == (20_000, 20_000, 0)
    r.hedges.drop(route, 2.1)
    r.finish(route, 3.0)
    assert at_rest(r)


def test_a_budget() -> None:
    """One in ten offloads, and one in any case: what slows a fleet must not double its work."""
    r = router(3)
    few = [offloaded(r, other(i)) for i in range(3)]
    assert [r.hedges.start(route, FACTS, 2.0) for route in few] == [True, False, False]
    many = [offloaded(r, other(i)) for i in range(3, 33)]
    assert sum(r.hedges.start(route, FACTS, 2.0) for route in many) == 3
    for route in few + many:
        r.finish(route, 3.0)
    assert at_rest(r)


def test_not_once_p_has_answered_nor_on_a_dead_d() -> None:
    r = router()
    route = offloaded(r)
    for _ in range(2):
        r.known.events.probe_failed(route.decode.name, "x", 0.0, is_refused=True)
    assert not r.hedges.start(route, FACTS, 2.0)
    for _ in range(2):
        r.known.events.probe_answered(route.decode.name, 0.0)
    r.prefill_done(route, FACTS, 1.0)
    assert not r.hedges.start(route, FACTS, 2.0)


@pytest.mark.parametrize("why", [Fallback.P_LATE, Fallback.P_ERROR])
def test_what_d_took_is_learned_from_when_it_began(why: Fallback) -> None:
    """Not from when P was given up, which where D wins is a moment before its first token."""
    r, work_s = router(hedge=True), 2.2
    for i in range(60):
        now_s = 100.0 * i
        facts = other(i)
        route = r.admit(facts, now_s)
        assert isinstance(route, Route)
        assert route.prefill is not None
        assert r.hedges.start(route, facts, now_s + 1.0)
        given_up_s = 0.0005 if why is Fallback.P_LATE else 0.4
        r.fall_back(route, facts, why, now_s + 1.0 + work_s - given_up_s)
        r.first_token(route, facts, now_s + 1.0 + work_s)
        r.finish(route, now_s + 10.0)
    for name in ("i0", "i1"):
        assert r.known.latency.prefill_s(name, 20_000, 0, 0, 0) == pytest.approx(work_s, rel=0.15)


@pytest.mark.parametrize("is_hedged", [False, True])
def test_its_own_kv_is_not_in_its_way(is_hedged: bool) -> None:
    """D expected the prompt from P: that it now computes it there needs no more room."""
    r = router()
    for i in range(2):
        r.known.gate.observe_engine(f"i{i}", EngineKv(30_000, 0.0), 0.0)
    route = offloaded(r)
    if is_hedged:
        assert r.hedges.start(route, FACTS, 0.0)
    r.fall_back(route, FACTS, Fallback.P_REFUSED, 0.0)
    assert not route.waited_for_room
    work_s = r.known.latency.prefill_s(route.decode.name, 20_000, 0, 0, 0)
    assert route.predicted_prefill_s == pytest.approx(r.known.latency.way_s(20_000) + work_s)
    r.finish(route, 1.0)
    assert at_rest(r)
