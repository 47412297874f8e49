"""What one event of an instance costs, beside many others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest

from proxy.config.in_force import OptionsInForce, router_config
from proxy.config.options import Settings
from proxy.config.values import InstanceSpec
from proxy.core.accounts.lease import Phase
from proxy.core.known.fleet_state import FleetState
from proxy.core.types import FailureKind
from proxy.fleet.instances import Instances
from proxy.fleet.probes import Probes
from proxy.net.timeouts import Clock
from proxy.net.upstream.client import Upstream
from proxy.net.upstream.pool import ConnectOptions
from proxy.protocol.errors import UpstreamFailure

OPTIONS = Settings(instances=["z=127.0.0.1:9"])
MANY = 200
REFUSED = UpstreamFailure(FailureKind.CONNECT, "Connection refused")


def beside(others: int) -> Instances:
    """Instances `i0`, `i1` and others, each of which has answered a probe."""
    known = FleetState(router_config(OPTIONS))
    instances = Instances(known, Clock(), ConnectOptions(), lambda: None, lambda name: None)
    for n in range(others + 2):
        instances.add(InstanceSpec.parse(f"i{n}=127.0.0.1:{n + 11}"), 1.0)
        instances.probe_answered(f"i{n}")
    return instances


def calls(done: Callable[[], None]) -> int:
    """The calls of Python functions that something takes: its cost, on any machine."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        done()
    finally:
        sys.setprofile(before)
    return count


async def test_a_failed_probe_costs_the_same_beside_many_instances() -> None:
    costs = []
    for others in (0, MANY):
        instances = beside(others)
        await asyncio.sleep(0)

        def fails(instances: Instances = instances) -> None:
            instances.probe_failed("i0", REFUSED)

        costs.append([calls(fails) for _ in range(4)])
    assert all(many < few + MANY / 2 for few, many in zip(*costs, strict=True)), costs


async def test_many_that_go_in_one_turn_are_one_look_at_the_fleet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    instances = beside(4)
    for _ in range(2):
        for n in range(6):
            instances.probe_failed(f"i{n}", REFUSED)
    told = [instances.fleet_warning]
    await asyncio.sleep(0)
    told.append(instances.fleet_warning)
    assert told[0] is None
    assert told[1] is not None
    assert "no instance is up" in told[1][0]
    assert [text for text in caplog.messages if "more than half" in text] == []


async def test_who_has_drained_is_not_asked_any_more() -> None:
    instances, asked = beside(2), list[str]()

    async def ask(upstream: Upstream) -> None:
        asked.append(upstream.instance.name)

    for name in ("i0", "i1"):
        member = instances.known.fleet.get(name)
        assert member is not None
        member.is_draining = True
    request = instances.known.ledger.open(instances.known.ledger.charge("i1", Phase.DECODE, 10))
    probes = asyncio.create_task(Probes(instances, OptionsInForce(OPTIONS))._every(9.0, ask))
    for _ in range(3):
        await asyncio.sleep(0)
    assert asked == ["i1", "i2", "i3"]
    assert instances.has_drained("i0")
    assert not instances.has_drained("i1"), "it has a request"
    request.close()
    assert instances.has_drained("i1")
    probes.cancel()


async def test_all_connections_are_closed_in_one_turn() -> None:
    instances = beside(2)
    async with asyncio.TaskGroup() as group:
        group.create_task(instances.close())
        await asyncio.sleep(0)
        assert all(upstream._pool._is_closed for upstream in instances.all())


async def test_models_that_are_read_again_cost_the_same_beside_many_instances() -> None:
    costs = []
    for others in (0, MANY):
        instances = beside(others)
        known = instances.known
        for upstream in instances.all():
            known.observe_models(upstream.instance.name, ["m"], {}, {"m": 1})

        def read(known: FleetState = known) -> None:
            known.observe_models("i0", ["m"], {}, {"m": 1})

        costs.append(calls(read))
        known.observe_models("i0", ["m"], {}, {"m": 2})
        assert known.fleet.uneven == {"m"}
    assert costs[1] < costs[0] + MANY / 2


def card(model: str, length: int) -> dict[str, object]:
    return {"id": model, "max_model_len": length}


async def differing(instances: Instances) -> dict[str, str]:
    """What is said of the cards, by instance, once they are compared."""
    await instances.compare_cards()
    told = {name: of.get("model cards", "") for name, of in instances.warnings.items()}
    return {name: text for name, text in told.items() if text}


async def test_cards_are_compared_with_the_first_that_serves_the_model() -> None:
    instances, said = beside(1), "its model cards differ: max_model_len of "
    instances.observe_cards("i2", [card("m", 3), card("n", 3)])
    instances.observe_cards("i1", [card("m", 2), card("n", 2)])
    assert instances.cards_changed.is_set()
    of_n = "max_model_len of n is 3, at i1 2"
    assert await differing(instances) == {"i2": f"{said}m is 3, at i1 2; {of_n}"}
    assert not instances.cards_changed.is_set()
    instances.observe_cards("i0", [card("m", 1)])
    assert instances.cards_changed.is_set()
    of_both = {"i1": f"{said}m is 2, at i0 1", "i2": f"{said}m is 3, at i0 1; {of_n}"}
    assert await differing(instances) == of_both
    instances.observe_cards("i0", [card("m", 1)])
    assert not instances.cards_changed.is_set(), "nothing is new"
    instances.remove("i0")
    instances.remove("i1")
    assert instances.cards_changed.is_set()
    assert await differing(instances) == {}


async def test_cards_of_many_cost_each_little_and_are_compared_in_turns() -> None:
    costs, turns = [], []
    for others in (0, MANY):
        instances = beside(others)
        for upstream in instances.all():
            instances.observe_cards(upstream.instance.name, [card(f"m{n}", 1) for n in range(10)])

        def tells(instances: Instances = instances) -> None:
            instances.observe_cards("i0", [card(f"m{n}", 2) for n in range(10)])

        costs.append(calls(tells))
        compares, count = asyncio.create_task(instances.compare_cards()), 0
        while not compares.done():
            await asyncio.sleep(0)
            count += 1
        turns.append(count)
        assert "of m9 is 1, at i0 2" not in instances.warnings["i1"]["model cards"]
        assert "of m2 is 1, at i0 2 and 7 more" in instances.warnings["i1"]["model cards"]
    assert costs[1] < costs[0] + MANY / 2
    assert turns[0] == 1
    assert turns[1] > MANY * 10 / 256
