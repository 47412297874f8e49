"""Limits of hot instances, and that gate, fleet, placement and router obey them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.accounts.instances import InstanceStates
from proxy.core.admission.gate import Gate
from proxy.core.admission.retry_after import UNKNOWN_DRAIN_S
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.thermal.fleet_limits import HeatByInstance
from proxy.core.thermal.readings import COOL, HeatLimits
from proxy.core.types import (
    OFF,
    Instance,
    Load,
    Reason,
    Reject,
    RejectReason,
    RequestFacts,
    RouterConfig,
)
from tests.support.examples import examples

TOKENS = 1000


def facts(session: str | None = None, tokens: int = TOKENS) -> RequestFacts:
    return RequestFacts("m", session, tokens, [], float(tokens))


def router(n: int = 2, **options: Any) -> Router:
    made = Router(FleetState(RouterConfig(prefill_throughput=20_000, **options)))
    for i in range(n):
        made.known.add(Instance(f"i{i}", f"http://i{i}", f"http://i{i}:8998"))
    return made


def placed(r: Router, session: str | None = None, tokens: int = TOKENS) -> Route:
    route = r.admit(facts(session, tokens), 0.0)
    assert isinstance(route, Route)
    return route


def refused(r: Router) -> Reject:
    reject = r.admit(facts(), 0.0)
    assert isinstance(reject, Reject)
    return reject


class TestLimits:
    def test_only_what_is_limited_is_kept(self) -> None:
        heat = HeatByInstance()
        assert heat.limit("a", HeatLimits(cap=3))
        assert not heat.limit("a", HeatLimits(cap=3)), "no change"
        assert (heat.is_cool, heat.of("a").cap, heat.of("b")) == (False, 3, COOL)
        assert heat.limit("a", COOL)
        assert heat.is_cool

    def test_they_outlive_the_process_and_end_with_the_instance(self) -> None:
        r = router()
        r.known.limit_heat("i0", HeatLimits(cap=3))
        r.known.fleet.process_gone("i0")
        r.known.fleet.process_came("i0")
        assert r.known.heat.of("i0").cap == 3
        r.known.remove("i0")
        assert r.known.heat.is_cool
        r.known.limit_heat("i0", HeatLimits(cap=3))
        assert r.known.heat.is_cool, "nothing is kept of an instance that is not there"


class TestGate:
    def gate(self, limits: HeatLimits) -> Gate:
        heat, states = HeatByInstance(), InstanceStates()
        heat.limit("i", limits)
        for name in ("i", "other"):
            states.add(name)
        return Gate(OFF, 8192, 20_000.0, states, heat)

    @pytest.mark.parametrize(
        ("cap", "running", "is_busy"),
        [(None, 99, False), (3, 2, False), (3, 3, True), (3, 4, True), (0, 0, True)],
    )
    def test_a_cap_is_reached_when_so_many_are_in_flight(
        self, cap: int | None, running: int, is_busy: bool
    ) -> None:
        load = Load(prefill_requests=running % 2, decode_requests=running - running % 2)
        gate = self.gate(HeatLimits(weight=0.5, cap=cap))
        busy = gate.busy("i", "m", load, 0.0)
        assert (busy is not None) is is_busy
        assert gate.busy("other", "m", load, 0.0) is None
        if busy is not None:
            assert busy.check is RejectReason.HEAT_CAP
            assert not busy.may_prefill
            assert not busy.may_decode

    def test_kv_pinned_for_a_peer_is_no_request(self) -> None:
        gate = self.gate(HeatLimits(cap=1))
        assert gate.busy("i", "m", Load(pinned_requests=5, pinned_tokens=5), 0.0) is None

    def test_it_is_free_when_enough_streams_have_ended(self) -> None:
        gate = self.gate(HeatLimits(cap=2))
        load = Load(decode_requests=4, decode_tokens=4000)
        busy = gate.busy("i", "m", load, 0.0)
        assert busy is not None
        assert busy.free_in_s == UNKNOWN_DRAIN_S, "no stream has ended yet"
        for second in range(1, 11):
            gate.released("i", 500, float(second))
        busy = gate.busy("i", "m", load, 10.0)
        assert busy is not None
        assert 0 < busy.free_in_s < UNKNOWN_DRAIN_S

    def test_it_is_open_while_all_is_cool(self) -> None:
        assert self.gate(COOL).is_open("m", 0.0)
        assert not self.gate(HeatLimits(weight=0.5)).is_open("m", 0.0)

    def test_drained_takes_none_but_where_nothing_else_is(self) -> None:
        gate = self.gate(HeatLimits(is_drained=True, cap=1))
        idle, one = Load(), Load(decode_requests=1)
        assert gate.busy("i", "m", idle, 0.0) is not None
        assert gate.busy("i", "m", idle, 0.0, is_last=True) is None
        assert gate.busy("i", "m", one, 0.0, is_last=True) is not None, "the cap holds there too"


class TestRouter:
    def test_a_cap_everywhere_refuses_and_its_end_wakes_who_waits(self) -> None:
        r, woken = router(), []
        r.known.call_when_freed(lambda: woken.append(1))
        for name in ("i0", "i1"):
            r.known.limit_heat(name, HeatLimits(cap=1))
        assert {placed(r).decode.name, placed(r).decode.name} == {"i0", "i1"}
        reject = refused(r)
        assert reject.reason is RejectReason.HEAT_CAP
        assert reject.retry_after_s > 0
        assert r.known.busy_by_model("i0", 0.0)["*"] is not None
        woken.clear()
        r.known.limit_heat("i1", COOL)
        assert woken
        assert placed(r).decode.name == "i1"

    def test_a_drained_instance_gets_nothing_while_there_is_another(self) -> None:
        r = router()
        r.known.limit_heat("i0", HeatLimits(is_drained=True))
        assert {placed(r).decode.name for _ in range(9)} == {"i1"}
        r.known.limit_heat("i1", HeatLimits(is_drained=True))
        assert {placed(r).decode.name for _ in range(40)} == {"i0", "i1"}

    def test_a_home_that_is_drained_is_left(self) -> None:
        r = router()
        home = placed(r, "s").decode.name
        r.known.limit_heat(home, HeatLimits(is_drained=True))
        assert placed(r, "s").decode.name != home

    @pytest.mark.parametrize(("weight", "least", "most"), [(0.0, 0, 0), (0.25, 20, 26)])
    def test_its_weight_is_its_share_of_placements(
        self, weight: float, least: int, most: int
    ) -> None:
        r = router(placement="round-robin", offload_policy="never")
        r.known.limit_heat("i0", HeatLimits(weight=weight))
        counted = [placed(r).decode.name for _ in range(100)]
        assert least <= counted.count("i0") <= most

    @pytest.mark.parametrize("policy", ["always", "seed-heuristic", "threshold", "cost"])
    def test_it_computes_nothing_for_others(self, policy: str) -> None:
        r = router(3, offload_policy=policy)
        for name in ("i0", "i1"):
            r.known.limit_heat(name, HeatLimits(helps=False))
        for n in range(20):
            prefill = placed(r, f"s{n}", 30_000).prefill
            assert prefill is None or prefill.name == "i2"

    def test_nobody_helps(self) -> None:
        r = router(offload_policy="always")
        for name in ("i0", "i1"):
            r.known.limit_heat(name, HeatLimits(helps=False))
        route = placed(r, None, 30_000)
        assert (route.prefill, route.reason) == (None, Reason.NO_PEER)

    def test_its_own_prefill_has_a_price(self) -> None:
        """Idle instances are alike; the hot one is chosen no more, yet no rule forbids it."""
        r = router(kv_connector="none")
        r.known.limit_heat("i0", HeatLimits(prefill_factor=3.0))
        route = placed(r, None, 30_000)
        assert route.decode.name == "i1"
        assert route.options is not None
        rows = {row["instance"]: row for row in route.options.rows()}
        assert rows["i1"]["heat_s"] == 0
        assert rows["i0"]["heat_s"] == pytest.approx(
            2.0 * r.known.latency.of("i0").pace().alone_s(30_000, 0), abs=1e-3
        )
        assert rows["i0"]["ttft_s"] == pytest.approx(rows["i1"]["ttft_s"]), "no slower for that"
        r.known.limit_heat("i1", HeatLimits(cap=1))
        assert placed(r, None, 30_000).decode.name == "i0"

    def test_a_stored_response_is_served_by_its_holder(self) -> None:
        r = router()
        r.known.limit_heat("i0", HeatLimits(is_drained=True, cap=1))
        held = facts()
        held.holder = "i0"
        assert isinstance(r.admit(held, 0.0), Route)
        assert isinstance(r.admit(held, 0.0), Reject), "the cap holds"


limits = st.builds(
    HeatLimits,
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    helps=st.booleans(),
    prefill_factor=st.sampled_from([1.0, 4.0]),
    cap=st.none() | st.integers(0, 4),
    is_drained=st.booleans(),
)
steps = st.lists(
    st.tuples(st.sampled_from(["admit", "first", "end"]), st.integers(0, 9))
    | st.tuples(st.just("limit"), st.tuples(st.sampled_from(["i0", "i1", "i2"]), limits)),
    max_size=40,
)


class Driver:
    """A router under changing limits; each admission is checked against those in force."""

    def __init__(self, tokens: int) -> None:
        self.router, self.tokens = router(3), tokens
        self.names = [f"i{i}" for i in range(3)]
        self.routes: list[tuple[Route, RequestFacts]] = []

    def admit(self, session: int) -> None:
        r = self.router
        before = {name: r.known.ledger.load(name).running_requests for name in self.names}
        asked = facts(f"s{session}", self.tokens)
        route = r.admit(asked, 0.0)
        if isinstance(route, Reject):
            assert route.reason is RejectReason.HEAT_CAP
            return
        self.routes.append((route, asked))
        used = [one.name for one in (route.decode, route.prefill) if one is not None]
        for name in used:
            cap = r.known.heat.of(name).cap
            assert cap is None or before[name] < cap
        assert route.prefill is None or r.known.heat.of(route.prefill.name).helps
        if not all(r.known.heat.takes_none(name) for name in self.names):
            assert not any(r.known.heat.takes_none(name) for name in used)

    def first(self, which: int) -> None:
        if self.routes:
            self.router.first_token(*self.routes[which % len(self.routes)], 0.0)

    def end(self, which: int) -> None:
        if self.routes:
            self.router.finish(self.routes[which % len(self.routes)][0], 0.0)

    def limit(self, which: tuple[str, HeatLimits]) -> None:
        self.router.known.limit_heat(*which)


@settings(max_examples=examples(60))
@given(steps, st.sampled_from([TOKENS, 30_000]))
def test_no_cap_is_exceeded_and_nothing_is_lost(order: list[tuple[str, Any]], tokens: int) -> None:
    driver = Driver(tokens)
    for what, which in order:
        getattr(driver, what)(which)
        assert driver.router.known.ledger.drift() == 0
    for which in range(len(driver.routes)):
        driver.end(which)
    assert all(driver.router.known.ledger.load(name) == Load() for name in driver.names)
