"""A request that one instance only can serve, as it holds the response that it is about."""

from __future__ import annotations

import pytest

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import (
    OFF,
    Instance,
    Reject,
    RejectReason,
    RequestFacts,
    RouterConfig,
    Thresholds,
)


def router(thresholds: Thresholds = OFF) -> Router:
    made = Router(FleetState(RouterConfig(prefill_throughput=20_000, thresholds=thresholds)))
    for name in ("a", "b", "c"):
        made.known.add(Instance(name, f"http://{name}"))
    return made


def about(holder: str) -> RequestFacts:
    return RequestFacts("m", None, 10, [], 10.0, offloadable=False, holder=holder)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_it_goes_to_its_holder_and_nowhere_else(name: str) -> None:
    r, facts = router(), about(name)
    routes = [r.admit(facts, 0.0) for _ in range(3)]
    assert [isinstance(at, Route) and at.decode.name for at in routes] == [name] * 3
    route = routes[0]
    assert isinstance(route, Route)
    assert not r.has_other(route, facts, 0.0)
    assert isinstance(r.elsewhere(route, facts, 0.0), Reject)
    assert isinstance(r.retry(route, facts, 0.0), Reject)


def test_a_holder_that_drains_still_serves() -> None:
    r = router()
    member = r.known.fleet.get("b")
    assert member is not None
    member.is_draining = True
    assert isinstance(r.admit(about("b"), 0.0), Route)


def test_a_wait_for_the_holder_is_advised_within_bounds() -> None:
    """In both headers: clients take the one in milliseconds, and no longer ones."""
    r = router(Thresholds(None, 5, None))
    long = RequestFacts("m", None, 10_000_000, [], 10.0, offloadable=False, holder="a")
    assert isinstance(r.admit(long, 0.0), Route)
    busy = r.admit(about("a"), 0.0)
    assert isinstance(busy, Reject)
    assert (busy.retry_after_s, busy.wait_s) == (30, 30.0)


def test_a_holder_that_is_away_or_busy_is_not_replaced() -> None:
    r = router(Thresholds(None, 5, None))
    assert isinstance(r.admit(about("a"), 0.0), Route)
    busy = r.admit(about("a"), 0.0)
    assert isinstance(busy, Reject)
    assert busy.reason is RejectReason.PREFILL_TOKENS
    assert busy.retry_after_s >= 1
    r.known.remove("c")
    away = r.admit(about("c"), 0.0)
    assert isinstance(away, Reject)
    assert (away.reason, away.retry_after_s >= 1) == (RejectReason.HOLDER_DOWN, True)
