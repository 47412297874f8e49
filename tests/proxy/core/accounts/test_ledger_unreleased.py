"""KV that may still be pinned counts against room, until the engine has let go of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.accounts.instances import InstanceStates
from proxy.core.accounts.ledger import UnreleasedKv
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Fallback, Instance, RequestFacts, RouterConfig


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), max_size=20), st.floats(0, 200))
def test_what_is_younger_than_the_hold_counts(
    booked: list[tuple[float, int]], later_s: float
) -> None:
    states = InstanceStates()
    states.add("p")
    unreleased = UnreleasedKv(60.0, states)
    booked = sorted(booked)
    for at_s, tokens in booked:
        unreleased.book("p", tokens, at_s)
    now_s = (booked[-1][0] if booked else 0.0) + later_s
    left = [tokens for at_s, tokens in booked if at_s + 60.0 > now_s]
    assert unreleased.on("p", now_s) == (len(left), sum(left))
    states.add("p")
    assert unreleased.on("p", now_s) == (0, 0)


def test_a_p_that_may_hold_too_many_is_left_alone_until_they_expire() -> None:
    config = RouterConfig(
        prefill_throughput=10_000, offload_policy="always", kv_pin_timeout_s=100.0
    )
    router = Router(FleetState(config))
    for name in "dp":
        router.known.add(Instance(name, f"http://{name}:1", f"http://{name}:2"))

    def place(now_s: float) -> Route:
        route = router.admit(RequestFacts("m", "s", 20_000, (), 300.0), now_s)
        assert isinstance(route, Route)
        return route

    for i in range(16):
        route = place(float(i))
        assert route.prefill is not None
        router.known.unreleased_kv.book(route.prefill.name, route.prompt_tokens, float(i))
        router.fall_back(route, RequestFacts("m", "s", 1, (), 1.0), Fallback.TRANSFER_TIMEOUT, i)
        router.finish(route, float(i))
    assert place(16.0).prefill is None
    assert place(200.0).prefill is not None
    assert router.known.ledger.drift() == 0
