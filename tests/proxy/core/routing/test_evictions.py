"""Who leaves a hot instance, for where: bound by the wait, the minute and the bandwidth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.evictions import (
    BYTES_PER_TOKEN,
    FLEET_BYTES_PER_S,
    NO_BANDWIDTH,
    NO_PLACE,
    SHORT_WAIT,
    Evictions,
    Running,
    Wanted,
)
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.readings import HeatLimits, InstanceWork
from proxy.core.thermal.victims import Victim
from proxy.core.types import Instance, RequestFacts, RouterConfig
from tests.support.heat import Scripted

NOW_S = 1000.0
FORCED = Wanted(100, "largest_kv", is_forced=True)
FREE = Wanted(100, "largest_kv", is_forced=False)


def facts(tokens: int) -> RequestFacts:
    return RequestFacts("m", None, tokens, [], float(tokens))


class Scene:
    """Streams on the hot one of some instances; `sizes`: their tokens."""

    def __init__(self, sizes: list[int], others: int = 1) -> None:
        self.router = Router(FleetState(RouterConfig(prefill_throughput=20_000)))
        self.router.known.add(Instance("hot", "http://hot"))
        self.policy = Scripted()
        self.control = FleetControl(lambda own: self.policy)
        self.evictions = Evictions(self.router, self.control)
        self.running = []
        for at, tokens in enumerate(sizes):
            route = self.router.admit(facts(tokens), 0.0)
            assert isinstance(route, Route)
            self.router.first_token(route, facts(tokens), 0.0)
            self.running.append(Running(Victim(f"r{at}", kv_tokens=tokens), facts(tokens), None))
        for number in range(others):
            self.router.known.add(Instance(f"cool{number}", f"http://cool{number}"))

    def plan(self, wanted: Wanted = FORCED) -> list[tuple[str | None, str | None]]:
        rows = self.evictions.plan("hot", self.running, wanted, NOW_S)
        return [(row.target, row.why_not) for row in rows]


def test_it_goes_where_the_next_of_its_prompts_would() -> None:
    scene = Scene([900], others=3)
    placed = scene.router.admit(facts(50_000), NOW_S)  # the others are not alike any more
    assert isinstance(placed, Route)
    ((target, why),) = scene.plan()
    assert target not in ("hot", placed.decode.name)
    assert why is None
    assert scene.router.known.ledger.load(str(target)).running_requests == 0, "nothing is charged"


def test_without_another_instance_everybody_stays() -> None:
    assert Scene([900, 800], others=0).plan() == [(None, NO_PLACE)] * 2


def test_an_open_breaker_is_no_place() -> None:
    scene = Scene([900])
    for _ in range(3):
        scene.router.known.events.probe_failed("cool0", "refused", NOW_S, is_refused=True)
    assert scene.plan() == [(None, NO_PLACE)]


def test_nobody_moves_for_a_wait_that_is_shorter() -> None:
    scene = Scene([900])
    assert scene.plan(FREE) == [("cool0", SHORT_WAIT)]
    scene.router.known.limit_heat("hot", HeatLimits(cap=1))
    assert scene.plan(FREE) == [("cool0", None)]


def test_what_cannot_move_stays_or_is_ended() -> None:
    scene = Scene([900])
    scene.running = [Running(Victim("r0", is_movable=False), facts(900), "tools")]
    assert scene.plan() == [(None, "tools")]
    scene.evictions.may_abort = True
    (row,) = scene.evictions.plan("hot", scene.running, FORCED, NOW_S)
    assert row.is_end
    assert scene.evictions.take(row, NOW_S)


def test_control_asks_for_a_tenth_in_a_minute_and_an_emergency_for_all() -> None:
    scene = Scene([500] * 30)
    scene.policy.limits, scene.policy.state = HeatLimits(cap=1, evict=30), "THROTTLE"
    scene.router.known.limit_heat("hot", scene.policy.limits)
    limits = scene.control.tick("hot", (), InstanceWork(30, 15_000, 0.0, 0), NOW_S)
    assert scene.evictions.wanted("hot", limits, NOW_S) == Wanted(3, None, is_forced=False)
    rows = scene.evictions.plan("hot", scene.running, Wanted(3, None, is_forced=False), NOW_S)
    assert [scene.evictions.take(row, NOW_S) for row in rows] == [True] * 3
    assert scene.evictions.wanted("hot", limits, NOW_S + 59.0).most == 0
    assert scene.evictions.wanted("hot", limits, NOW_S + 60.0).most == 3
    scene.policy.state = "EMERGENCY"
    assert scene.evictions.wanted("hot", limits, NOW_S) == Wanted(30, None, is_forced=True)
    scene.evictions.keep(["other"])
    scene.policy.state = "THROTTLE"
    assert scene.evictions.wanted("hot", limits, NOW_S).most == 3, "forgotten with its instance"


@given(
    sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=12),
    gaps_s=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=8),
)
def test_moves_never_take_more_than_the_fleets_bandwidth(
    sizes: list[int], gaps_s: list[float]
) -> None:
    scene = Scene(sizes)
    moved, now_s = 0.0, NOW_S
    for gap_s in gaps_s:
        now_s += gap_s
        for row in scene.evictions.plan("hot", scene.running, FORCED, now_s):
            if scene.evictions.take(row, now_s):
                moved += row.victim.kv_tokens * BYTES_PER_TOKEN
            else:
                assert row.why_not == NO_BANDWIDTH
    # A second's worth is there at first, and a last move may be as large as it is.
    most = FLEET_BYTES_PER_S * (1.0 + now_s - NOW_S) + max(sizes) * BYTES_PER_TOKEN
    assert moved <= most or math.isclose(moved, most)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_no_more_than_is_wanted(count: int) -> None:
    scene = Scene([10, 20, 30])
    rows = scene.evictions.plan(
        "hot", scene.running, Wanted(count, "largest_kv", is_forced=True), NOW_S
    )
    assert [row.victim.request_id for row in rows] == ["r2", "r1"][:count]
