"""Who is moved from a hot instance, and who stays: for the wait, the bandwidth, or no way to go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.evictions import NO_BANDWIDTH, NO_PLACE
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.orders import BatchOrder
from proxy.core.thermal.readings import GpuReading, HeatLimits
from proxy.core.types import Instance, RequestFacts, RouterConfig
from proxy.fleet.sensors.readings import GpuReadings
from proxy.net.timeouts import Clock, Limit
from proxy.state.in_flight import InFlight
from proxy.state.thermal import ThermalControl
from proxy.telemetry.metrics import Metrics
from tests.support.heat import Scripted

START_S = 1000.0


@dataclass(eq=False)
class Request:
    """A stream, as far as thermal control may look at it."""

    request_id: str
    route: Route | None
    facts: RequestFacts
    priority: int = 1
    output_events: int = 10
    most_output_tokens: int | None = None
    why_fixed: str | None = None
    is_ended: bool = False
    on_leave: Callable[[str], None] = lambda request_id: None

    def leave_hot(self) -> None:
        self.on_leave(self.request_id)

    def end_hot(self) -> None:
        self.is_ended = True


class Scene:
    """Streams on the first of two instances, which a scripted policy controls."""

    def __init__(self, *tokens: int) -> None:
        self.now_s = START_S
        clock = Clock()
        clock.now_s = lambda: self.now_s
        self.router = Router(FleetState(RouterConfig(prefill_throughput=20_000)))
        self.router.known.add(Instance("hot", "http://hot"))
        self.in_flight, self.metrics, gpus = InFlight(), Metrics(), GpuReadings()
        gpus.watch("hot", (), 0.0)
        gpus.observe("hot", [GpuReading("h:0", START_S, 90.0)], is_idle=False)
        self.policy = Scripted()
        self.moved: list[str] = []
        control = FleetControl(lambda own: self.policy)
        self.thermal = ThermalControl(
            control, self.router, self.in_flight, clock, self.metrics, gpus
        )
        self.requests = [self._streaming(f"r{at}", count) for at, count in enumerate(tokens)]
        self.router.known.add(Instance("cool", "http://cool"))
        self.now_s += 60.0

    def _streaming(self, request_id: str, tokens: int) -> Request:
        facts = RequestFacts("m", None, tokens, [], float(tokens))
        route = self.router.admit(facts, self.now_s)
        assert isinstance(route, Route)
        self.router.first_token(route, facts, self.now_s)
        request = Request(request_id, route, facts, on_leave=self.moved.append)
        self.in_flight.enter(Limit(1e9), request)
        return request

    def outcomes(self, policy: str) -> dict[str, int]:
        counted = {}
        for outcome in ("moved", "aborted", "skipped"):
            labels = {"policy": policy, "outcome": outcome}
            name = "cache_proxy_thermal_evictions_total"
            counted[outcome] = int(self.metrics.registry.get_sample_value(name, labels) or 0)
        return counted


async def test_an_order_moves_those_that_can_go_before_the_others() -> None:
    scene = Scene(500, 3000, 900)
    scene.requests[1].why_fixed = "tools"
    order = BatchOrder(force_evict=2, policy="largest_kv")
    dry = scene.thermal.order(["hot"], order, dry_run=True)
    assert not scene.moved
    decision = scene.thermal.order(["hot"], order, dry_run=False)
    assert decision.plan == dry.plan
    assert scene.moved == ["r2", "r0"]
    (result,) = decision.results
    assert (result.previous_running, result.new_running) == (3, 1)
    assert result.evicted_request_ids == ["r2", "r0"]
    assert result.estimated_watts_saved == pytest.approx(6.4)
    assert scene.router.known.heat.of("hot").cap == 1
    assert scene.outcomes("largest_kv") == {"moved": 2, "aborted": 0, "skipped": 0}


async def test_the_cap_is_in_force_before_anyone_is_asked_to_leave() -> None:
    scene = Scene(500, 600)
    caps = []
    for request in scene.requests:
        request.on_leave = lambda request_id: caps.append(scene.router.known.heat.of("hot").cap)
    scene.thermal.order(["hot"], BatchOrder(max_num_seqs=1, force_evict=1), dry_run=False)
    assert caps == [1]


@pytest.mark.parametrize("may_abort", [False, True])
async def test_who_cannot_go_is_ended_only_with_leave(may_abort: bool) -> None:
    scene = Scene(500, 600)
    for request in scene.requests:
        request.why_fixed = "migration is off"
    scene.thermal.evictions.may_abort = may_abort
    decision = scene.thermal.order(["hot"], BatchOrder(force_evict=1), dry_run=False)
    assert [row.skip_reason for row in decision.plan] == [None if may_abort else "migration is off"]
    assert [one.is_ended for one in scene.requests].count(True) == may_abort


async def test_a_plan_says_where_each_would_go_on() -> None:
    scene = Scene(500)
    for tokens in (10_000, 100_000) * 20:
        scene.router.known.latency.observe_transfer("hot", "cool", tokens, 0.01 + tokens / 1e5)
    order = BatchOrder(force_evict=1)
    (row,) = scene.thermal.order(["hot"], order, dry_run=True).plan
    assert (row.target, row.skip_reason) == ("cool", None)
    assert row.est_move_s == pytest.approx(
        scene.router.known.latency.transfer_s("hot", "cool", 510)
    )
    scene.router.known.remove("cool")
    (row,) = scene.thermal.order(["hot"], order, dry_run=False).plan
    assert (row.target, row.est_move_s, row.skip_reason) == (None, None, NO_PLACE)
    assert not scene.moved


async def test_control_moves_nobody_where_the_wait_is_shorter_than_the_move() -> None:
    scene = Scene(500, 600)
    scene.policy.state, scene.policy.limits = "THROTTLE", HeatLimits(cap=9, evict=1)
    scene.thermal.tick()
    assert scene.outcomes("control") == {"moved": 0, "aborted": 0, "skipped": 1}
    scene.policy.limits = HeatLimits(cap=2, evict=1)  # full: a new request would wait for seconds
    scene.thermal.tick()
    assert scene.outcomes("control") == {"moved": 1, "aborted": 0, "skipped": 1}


async def test_control_moves_a_tenth_of_them_in_a_minute() -> None:
    scene = Scene(*(500 for _ in range(20)))
    scene.policy.state, scene.policy.limits = "THROTTLE", HeatLimits(cap=2, evict=18)
    scene.thermal.tick()
    assert len(scene.moved) == 2
    scene.now_s += 30.0
    scene.thermal.tick()
    assert len(scene.moved) == 2
    scene.now_s += 31.0
    scene.thermal.tick()
    assert len(scene.moved) == 4
    scene.policy.state = "EMERGENCY"
    scene.thermal.tick()
    assert len(scene.moved) > 4, "an emergency is bound by nothing"


async def test_what_moves_stays_within_the_bandwidth() -> None:
    scene = Scene(130_000, 120_000)  # 17 and 16 GB
    decision = scene.thermal.order(["hot"], BatchOrder(force_evict=2), dry_run=False)
    assert sorted(row.skip_reason or "" for row in decision.plan) == ["", NO_BANDWIDTH]
    (result,) = decision.results
    assert result.evicted_request_ids == scene.moved
    assert (len(scene.moved), result.new_running) == (1, 1)
    scene.now_s += 1.0
    scene.thermal.order(["hot"], BatchOrder(force_evict=2), dry_run=False)
    assert sorted(scene.moved) == ["r0", "r1"], "a second later there is room, for the other one"


async def test_a_move_takes_half_of_a_learned_link() -> None:
    """Of 100,000 tokens (13 GB) per second."""
    scene = Scene(30_000, 30_000)
    for tokens in (10_000, 100_000) * 20:
        scene.router.known.latency.observe_transfer("hot", "cool", tokens, 0.01 + tokens / 1e5)
    decision = scene.thermal.order(["hot"], BatchOrder(force_evict=2), dry_run=False)
    assert sorted(row.skip_reason or "" for row in decision.plan) == ["", NO_BANDWIDTH]
    assert len(scene.moved) == 1


async def test_who_brought_nothing_for_longest_leaves_first() -> None:
    scene = Scene(500, 500, 500)
    for events in ((10, 10, 10), (10, 12, 11), (10, 12, 15)):
        for request, count in zip(scene.requests, events, strict=True):
            request.output_events = count
        scene.thermal.tick()
        scene.now_s += 1.0
    scene.thermal.order(["hot"], BatchOrder(force_evict=3), dry_run=False)
    assert scene.moved == ["r0", "r1", "r2"]


async def test_what_an_instance_computes_is_told_to_its_controller() -> None:
    scene = Scene(500)
    scene.thermal.waiting = lambda: 7
    scene.router.known.remove("cool")
    scene.thermal.tick()
    facts = RequestFacts("m", None, 4000, [], 4000.0)
    route = scene.router.admit(facts, scene.now_s)
    assert isinstance(route, Route)
    scene.now_s += 2.0
    scene.router.first_token(route, facts, scene.now_s)
    scene.thermal.tick()
    seen = scene.policy.seen[-1]
    assert (seen.waiting, seen.running, seen.prefill_tps) == (7, 2, 2000.0)
