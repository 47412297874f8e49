"""Whatever the clock says, also less than before: numbers stay finite and every lease closes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission.queue import DrainRate
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Instance, RequestFacts, RouterConfig

DAYS_S = 1e9
times = st.lists(st.floats(-DAYS_S, DAYS_S), min_size=4, max_size=12)


@given(times)
def test_a_router_decides(moments: list[float]) -> None:
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000.0)))
    for name in "ab":
        router.known.add(Instance(name, f"http://{name}"))
    facts = RequestFacts("m", "s", 30_000, [], 1.0)
    routes: list[Route] = []
    for at, now_s in enumerate(moments):
        if at % 4 < 2:
            route = router.admit(facts, now_s)
            assert isinstance(route, Route)
            assert route.predicted_ttft_s is not None
            assert math.isfinite(route.predicted_ttft_s)
            routes.append(route)
        elif at % 4 == 2:
            router.first_token(routes[-1], facts, now_s)
        else:
            router.finish(routes.pop(), now_s, 100)
    for route in routes:
        router.finish(route, moments[0])
    assert router.known.ledger.live == 0
    for name in "ab":
        assert 0.0 <= router.known.latency.of(name).pace().busy_ratio(max(moments)) < math.inf


@given(times)
def test_a_queue_knows_its_rate(moments: list[float]) -> None:
    rate = DrainRate()
    rate.began(moments[0])
    for now_s in moments[1:]:
        rate.served(1000, now_s)
        assert 0.0 <= rate.tps(20_000.0, now_s) < math.inf
