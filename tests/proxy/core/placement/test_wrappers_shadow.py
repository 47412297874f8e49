"""A policy that only looks sees everything and changes nothing."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.known.fleet_state import FleetState
from proxy.core.placement.decision import Choice, PlacementView
from proxy.core.placement.policies import POLICIES
from proxy.core.placement.wrappers import Shadow
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Fallback, Instance, Reject, RequestFacts, RouterConfig
from tests.support.examples import examples

NAMES = list(POLICIES)


def router(policy: str, shadow: str | None, n: int = 3) -> Router:
    config = RouterConfig(
        prefill_throughput=20_000, offload_policy=policy, shadow_policy=shadow, heavy_threshold=4000
    )
    made = Router(FleetState(config))
    for i in range(n):
        made.known.add(Instance(f"i{i}", f"http://i{i}", f"http://i{i}:8998"))
    return made


steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "prefill", "token", "back", "retry", "end"]),
        st.integers(0, 5),
        st.integers(1, 40_000),
    ),
    max_size=40,
)


@settings(max_examples=examples(60))
@given(st.sampled_from(NAMES), st.sampled_from(NAMES), steps)
def test_with_a_shadow_everything_goes_the_same_way(
    policy: str, shadow: str, plan: list[tuple[str, int, int]]
) -> None:
    assert lived(router(policy, None), plan) == lived(router(policy, shadow), plan)


def lived(r: Router, plan: list[tuple[str, int, int]]) -> list[Any]:
    """Go through a plan; all that can be seen of it, and of the router at the end."""
    live: list[tuple[Route, RequestFacts]] = []
    seen: list[Any] = []
    for number, (step, pick, tokens) in enumerate(plan):
        now_s = 0.3 * number
        if step == "admit":
            facts = RequestFacts("m", f"s{pick}", tokens, list(range(pick)), 500.0)
            got = r.admit(facts, now_s)
            if isinstance(got, Reject):
                seen.append(got)
            else:
                live.append((got, facts))
        elif live:
            follow(r, step, *live[pick % len(live)], now_s)
    seen += [{**vars_of(route), "charges": charges(route)} for route, _ in live]
    seen += [route.options.rows() for route, _ in live if route.options]
    for i in range(3):
        seen += [
            r.known.ledger.load(f"i{i}"),
            r.known.fleet.states.of(f"i{i}").cache.sessions,
            r.known.fleet.states.of(f"i{i}").cache.blocks,
        ]
        seen += [r.known.latency.wait_s(f"i{i}", 0.0), r.known.latency.prefill_tps(f"i{i}")]
    return [*seen, r.known.ledger.live, len(r.known.sessions)]


def vars_of(route: Route) -> dict[str, Any]:
    hidden = {"lease", "options", "shadow", "times", "use", "hedge", "stay", "measured"}
    return {f.name: getattr(route, f.name) for f in fields(route) if f.name not in hidden}


def charges(route: Route) -> list[tuple[Any, ...]]:
    return [(c.account.name, c.phase, c.tokens) for c in route.lease.charges]


def follow(r: Router, step: str, route: Route, facts: RequestFacts, now_s: float) -> None:
    if step == "prefill":
        r.prefill_done(route, facts, now_s)
    elif step == "token":
        r.first_token(route, facts, now_s)
    elif step == "back" and route.prefill is not None:
        r.fall_back(route, facts, Fallback.P_TIMEOUT, now_s)
    elif step == "retry":
        r.retry(route, facts, now_s)
    elif step == "end":
        r.finish(route, now_s)


def first(r: Router, tokens: int = 20_000) -> Route:
    route = r.admit(RequestFacts("m", "s", tokens, [], 1.0), 0.0)
    assert isinstance(route, Route)
    return route


@pytest.mark.parametrize("name", NAMES)
def test_what_it_would_have_done_is_what_it_does(name: str) -> None:
    """In the same place, the shadow says what the policy does when it decides."""
    shadow, real = first(router("never", name)).shadow, first(router(name, None))
    assert shadow is not None
    assert (shadow.policy, shadow.error) == (name, None)
    p = real.prefill.name if real.prefill else None
    assert (shadow.decode_instance, shadow.prefill_instance) == (real.decode.name, p)
    assert (shadow.route_class, shadow.reason) == (real.route_class, real.reason)
    assert shadow.predicted_ttft_s == real.predicted_ttft_s
    assert shadow.agrees is (p is None and real.decode.name == "i0")


def test_its_failure_is_written_down_and_felt_by_nobody() -> None:
    def fails(scene: PlacementView) -> Choice:
        raise ZeroDivisionError(scene.facts.model)

    r = router("never", None)
    r._shadow = Shadow("broken", fails)
    shadow = first(r).shadow
    assert shadow is not None
    assert (shadow.error, shadow.agrees) == ("ZeroDivisionError: m", None)


def test_without_one_there_is_none() -> None:
    assert first(router("never", None)).shadow is None
