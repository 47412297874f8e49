"""A policy that raises: placed by load, the reason says so, and the books stay in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.core.known.fleet_state import FleetState
from proxy.core.placement import rules
from proxy.core.placement.decision import Choice, Decide, PlacementView
from proxy.core.placement.wrappers import MISTAKES, failing_open
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Instance, Reason, RequestFacts, RouterConfig


def broken(*args: Any, **more: Any) -> Any:
    raise ZeroDivisionError


def facts(session: str | None = None, tokens: int = 9000) -> RequestFacts:
    return RequestFacts("m", session, tokens, (), 256.0)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    monkeypatch.setitem(rules.OFFLOAD_RULES, "threshold", broken)
    made = Router(FleetState(RouterConfig(prefill_throughput=20_000, offload_policy="threshold")))
    for name in "abc":
        made.known.add(Instance(name, f"http://{name}", f"http://{name}:8998"))
    return made


def admit(router: Router, session: str | None = None) -> Route:
    route = router.admit(facts(session), 0.0)
    assert isinstance(route, Route)
    return route


def test_the_least_loaded_takes_it_alone(router: Router) -> None:
    routes = [admit(router) for _ in range(3)]
    assert {route.decode.name for route in routes} == {"a", "b", "c"}
    assert {(route.prefill, route.reason) for route in routes} == {(None, Reason.POLICY_FAILED)}
    assert all((route.mistake or "").startswith("ZeroDivisionError: ") for route in routes)
    for route in routes:
        router.finish(route, 1.0)
    assert router.known.ledger.live == 0 == router.known.ledger.drift()


@pytest.mark.parametrize("kind", [*MISTAKES, KeyError, RecursionError, UnicodeError])
def test_whatever_a_mistake_raises(kind: type[Exception]) -> None:
    def mistaken(scene: PlacementView) -> Choice:
        raise kind

    assert asked(mistaken).reason is Reason.POLICY_FAILED


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt, asyncio.CancelledError])
def test_what_is_not_of_its_making_passes(kind: type[BaseException]) -> None:
    def disturbed(scene: PlacementView) -> Choice:
        raise kind

    with pytest.raises(kind):
        asked(disturbed)


def asked(decide: Decide) -> Route:
    made = Router(FleetState(RouterConfig(prefill_throughput=20_000)), failing_open(decide))
    made.known.add(Instance("a", "http://a", "http://a:8998"))
    route = admit(made)
    assert route.mistake is not None
    assert f"{Path(__file__).name}:" in route.mistake
    return route


def test_a_session_stays_at_home(router: Router) -> None:
    home = admit(router, "s").decode
    assert [admit(router, "s").decode for _ in range(3)] == [home] * 3


def test_also_after_a_reload(router: Router) -> None:
    router.reconfigure(router.known.config)
    assert admit(router).reason is Reason.POLICY_FAILED
