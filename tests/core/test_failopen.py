"""A policy that raises: placed by load, the reason says so, and the books stay in order."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core import offload
from proxy.core.route import Route
from proxy.core.router import Router, RouterConfig
from proxy.core.types import Instance, Reason, RequestFacts


def broken(*args: Any, **more: Any) -> Any:
    raise ZeroDivisionError


def facts(session: str | None = None, tokens: int = 9000) -> RequestFacts:
    return RequestFacts("m", session, tokens, (), 256.0)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    monkeypatch.setitem(offload.POLICIES, "threshold", broken)
    made = Router(RouterConfig(prefill_throughput=20_000, offload_policy="threshold"))
    for name in "abc":
        made.add(Instance(name, f"http://{name}", f"http://{name}:8998"))
    return made


def admit(router: Router, session: str | None = None) -> Route:
    route = router.admit(facts(session), 0.0)
    assert isinstance(route, Route)
    return route


def test_the_least_loaded_takes_it_alone(router: Router) -> None:
    routes = [admit(router) for _ in range(3)]
    assert {route.decode.name for route in routes} == {"a", "b", "c"}
    assert {(route.prefill, route.reason) for route in routes} == {(None, Reason.POLICY_FAILED)}
    for route in routes:
        router.finish(route, 1.0)
    assert router.ledger.live == 0 == router.ledger.drift()


def test_a_session_stays_at_home(router: Router) -> None:
    home = admit(router, "s").decode
    assert [admit(router, "s").decode for _ in range(3)] == [home] * 3


def test_also_after_a_reload(router: Router) -> None:
    router.reconfigure(router.config)
    assert admit(router).reason is Reason.POLICY_FAILED
