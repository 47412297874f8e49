"""What a decision keeps of what it could have done."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest

from proxy.core.known.fleet_state import FleetState
from proxy.core.placement.alternatives import (
    COLOCATIONS_KEPT,
    OFFLOADS_KEPT,
    Alternatives,
    PricedOption,
    Terms,
)
from proxy.core.placement.candidates import Candidate
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Instance, Load, RequestFacts, RouterConfig
from tests.support.scenes import PACE


def router(n: int, policy: str, **options: Any) -> Router:
    made = Router(
        FleetState(RouterConfig(prefill_throughput=20_000, offload_policy=policy, **options))
    )
    for i in range(n):
        made.known.add(Instance(f"i{i}", f"http://i{i}", f"http://i{i}:8998"))
    return made


def rows(r: Router, tokens: int = 40_000, session: str = "s") -> tuple[Route, list[dict[str, Any]]]:
    route = r.admit(RequestFacts("m", session, tokens, [], 1.0), 0.0)
    assert isinstance(route, Route)
    assert route.options is not None
    found: list[dict[str, Any]] = route.options.rows()
    assert orjson.loads(orjson.dumps(found)) == found
    return route, found


def test_the_cost_policy_keeps_what_it_priced() -> None:
    r = router(3, "cost")
    for i in range(6):
        busy = r.admit(RequestFacts("m", f"b{i}", 30_000, [], 1.0), 0.0)
        assert isinstance(busy, Route)
        if i % 2:
            r.first_token(busy, RequestFacts("m", None, 30_000, [], 1.0), 0.0)
    route, found = rows(r)
    colocated = [row for row in found if row["prefill"] is None]
    offloads = [row for row in found if row["prefill"] is not None]
    assert {row["instance"] for row in colocated} == {"i0", "i1", "i2"}
    assert offloads
    for kind in (colocated, offloads):
        assert kind == sorted(kind, key=lambda row: row["cost_s"])
    for row in found:
        names = ("ttft_s", "harm_s", "behind_s", "decode_s", "next_s", "memory_s")
        terms = sum(row[name] for name in names)
        assert row["cost_s"] == pytest.approx(terms, abs=1e-3)
    p = route.prefill.name if route.prefill else None
    (chosen,) = [r for r in found if (r["instance"], r["prefill"]) == (route.decode.name, p)]
    assert chosen["ttft_s"] == pytest.approx(route.predicted_ttft_s, abs=1e-3)


@pytest.mark.parametrize("policy", ["seed-heuristic", "never"])
def test_a_rule_keeps_what_each_place_would_take(policy: str) -> None:
    route, found = rows(router(4, policy))
    assert {row["instance"] for row in found} == {f"i{i}" for i in range(4)}
    assert all(row["cost_s"] is None for row in found)
    (ttft_s,) = {row["ttft_s"] for row in found}
    assert ttft_s > 2.0, "40,000 tokens at 20,000 tokens/s, attention beside it"
    assert route.predicted_ttft_s == pytest.approx(ttft_s, abs=1e-3)


@pytest.mark.parametrize("policy", ["cost", "seed-heuristic"])
def test_what_is_kept_is_bounded_and_has_what_was_chosen(policy: str) -> None:
    r = router(100, policy)
    for i in range(110):
        route, found = rows(r, 20_000, session=f"s{i}")
        assert len(found) <= COLOCATIONS_KEPT + OFFLOADS_KEPT
        assert route.decode.name in {row["instance"] for row in found}


def test_a_number_that_is_not_there_is_null() -> None:
    _, found = rows(router(1, "always"))
    assert not [v for v in found[0].values() if isinstance(v, float) and math.isnan(v)]


PLACES = [Instance(f"i{i}", f"http://i{i}", None) for i in range(3)]


def priced(d: int, p: int | None) -> PricedOption:
    at_p = None if p is None else priced(p, None)
    terms = Terms(0.1, 0, 0, 0, 0, 0, 0, 0)
    return PricedOption(Candidate(PLACES[d], Load(), 0, 9, PACE), at_p, 1.0, terms)


@pytest.mark.parametrize("taken", [(0, None), (2, None), (1, 0), (2, 0), (0, 2)])
def test_fewer_are_the_first_and_the_one_taken(taken: tuple[int, int | None]) -> None:
    pairs = [(0, None), (1, None), (2, None), (1, 0), (2, 0)]
    d, p = taken
    made = Alternatives(
        [priced(*pair) for pair in pairs], PLACES[d], None if p is None else PLACES[p]
    )
    found = made.rows()
    at = pairs.index(taken) if taken in pairs else pairs.index((d, None))
    for most in range(len(found) + 2):
        first = found[:most]
        if 0 < most <= at:
            first[-1] = found[at]
        assert made.rows(most) == first


def test_home_is_kept_where_many_are_as_cheap() -> None:
    """A session stays where that costs hardly more, whatever the rank."""
    r = router(40, "cost")
    for i in range(60):
        route, _ = rows(r, 3000, session=f"s{i % 20}")
        assert route.options is not None
        (only,) = route.options.rows(1)
        assert only["instance"] == route.decode.name
        r.finish(route, 0.0)


ALONE = {name: Instance(name, "") for name in "ab"}


def option(name: str, cost_s: float, prefill: PricedOption | None = None) -> PricedOption:
    nan = math.nan
    d = Candidate(ALONE[name], Load(), 0, 10, PACE)
    terms = Terms(2 * cost_s if math.isfinite(cost_s) else 3.0, nan, nan, nan, nan, nan, nan, nan)
    return PricedOption(d, prefill, cost_s, terms)


def test_the_gain_is_over_the_best_of_one_instance_alone() -> None:
    a, b = option("a", 2.0), option("b", 3.0)
    pair = option("a", 1.5, b)
    offload = Alternatives([a, b, pair], a.decode.instance, b.decode.instance)
    assert offload.gain_s() == 0.5
    assert offload.gain_s("b") == 1.5
    assert offload.gain_s("c") is None
    alone = Alternatives([a, b, pair], a.decode.instance, None)
    assert alone.gain_s() == 1.0, "not over itself"
    assert Alternatives([], a.decode.instance, None).gain_s() is None


def test_without_prices_the_gain_is_in_the_first_token() -> None:
    a, b = option("a", math.nan), option("b", math.nan)
    a.terms.ttft_s = 1.0
    assert Alternatives([a, b], a.decode.instance, None).gain_s() == 2.0
    assert Alternatives([a, b], a.decode.instance, b.decode.instance).gain_s() is None
