"""Time limits: never under their fixed part or over their cap, longer where more is expected."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.known.fleet_state import FleetState
from proxy.core.latency.model import Latency
from proxy.core.routing import time_limits
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Fallback, Instance, Load, RequestFacts, RouterConfig

CAP_S = 300.0
FACTS = RequestFacts("m", "s", 20_000, (), 300.0)


def placed(tokens: int) -> tuple[Router, Route]:
    router = Router(FleetState(RouterConfig(prefill_throughput=10_000, offload_policy="always")))
    for name in "dp":
        router.known.add(Instance(name, f"http://{name}:1", f"http://{name}:2"))
    route = router.admit(RequestFacts("m", "s", tokens, (), 300.0), 0.0)
    assert isinstance(route, Route)
    return router, route


def all_limits(latency: Latency, route: Route, load: Load, cap_s: float) -> list[float]:
    return [
        time_limits.first_token_limit_s(latency, route, cap_s),
        time_limits.prefill_limit_s(latency, route, cap_s, cap_s),
        time_limits.transfer_limit_s(latency, route, 0.0, cap_s),
        time_limits.idle_limit_s(latency, route, load, 0.0, cap_s),
    ]


FIXED = [
    time_limits.FIRST_TOKEN_FIXED_S,
    time_limits.LEG_FIXED_S,
    time_limits.LEG_FIXED_S,
    time_limits.IDLE_FIXED_S,
]


@given(st.integers(1, 2_000_000), st.integers(0, 10_000_000), st.floats(0.05, 3600))
def test_between_the_fixed_part_and_the_cap(tokens: int, kv_tokens: int, cap_s: float) -> None:
    router, route = placed(tokens)
    found = all_limits(router.known.latency, route, Load(decode_tokens=kv_tokens), cap_s)
    caps = [cap_s, cap_s / 2, cap_s, cap_s]
    for limit_s, fixed_s, most_s in zip(found, FIXED, caps, strict=True):
        assert min(fixed_s, most_s) <= limit_s <= most_s


@given(st.integers(8192, 1_000_000), st.integers(8192, 1_000_000))
def test_more_to_do_is_never_less_time(a: int, b: int) -> None:
    few, many = sorted((a, b))
    load = Load(decode_tokens=1000)
    short = all_limits(placed(few)[0].known.latency, placed(few)[1], load, CAP_S)
    long = all_limits(placed(many)[0].known.latency, placed(many)[1], load, CAP_S)
    assert all(s <= t + 1e-9 for s, t in zip(short, long, strict=True))


def test_the_queue_and_how_wrong_predictions_were_count() -> None:
    router, route = placed(20_000)
    alone_s = time_limits.first_token_limit_s(router.known.latency, route, CAP_S)
    behind = router.admit(RequestFacts("m", "s", 20_000, (), 300.0), 0.0)
    assert isinstance(behind, Route)
    assert time_limits.first_token_limit_s(router.known.latency, behind, CAP_S) > alone_s
    for _ in range(20):
        router.known.latency.of(route.decode.name).ready.observe(1.0, 9.0)
    assert time_limits.first_token_limit_s(router.known.latency, route, CAP_S) > 2 * alone_s


def test_what_was_given_up_for_being_late_makes_the_next_one_wait_longer() -> None:
    """And a place that was left is no longer occupied."""
    router, route = placed(20_000)
    router.fall_back(route, FACTS, Fallback.P_ERROR, 0.0)
    first, before_s = (
        route.decode.name,
        time_limits.first_token_limit_s(router.known.latency, route, CAP_S),
    )
    for turn in range(20):
        again = router.retry(route, FACTS, 100.0 * turn + before_s)
        assert isinstance(again, Route)
        route.tried.clear()
    router.finish(route, 3000.0)
    assert not any(router.known.latency.of(name).pending for name in "dp")
    assert router.known.latency.prefill_bound_s(first, 2.0) > 20.0
