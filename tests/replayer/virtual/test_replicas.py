"""Several replicas over one fleet: who gets a request, what the bus does, what sharing brings."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.sharing.batch import Batch
from proxy.core.types import RouterConfig
from replayer.engine.types import EngineOptions
from replayer.virtual.arrivals import Planned
from replayer.virtual.fleet import simulate
from replayer.virtual.load import TraceTurn
from replayer.virtual.replicas import BusFaults, MemoryBus, Replicas
from replayer.virtual.requests import Loss, ReplicaOptions, VirtualOptions, VirtualRow

BLOCK = 512
ENGINE = EngineOptions(block_size=BLOCK, num_blocks=1000, max_model_len=1000 * BLOCK)


def router() -> Router:
    return Router(FleetState(RouterConfig(prefill_throughput=20_000, offload_policy="never")))


def planned(
    number: int, start_s: float, blocks: int = 20, wait_for: tuple[int, ...] = ()
) -> Planned:
    ids = tuple(number * 1000 + n for n in range(blocks))
    turn = TraceTurn(f"s{number}", blocks * BLOCK + 100, 20, 100, ids, 0, (), 0.0, 0.0)
    return Planned(turn, f"s{number}", start_s, 0.0, wait_for)


def run(load: list[Planned], replicas: ReplicaOptions, **values: Any) -> list[VirtualRow]:
    routers = [router() for _ in range(replicas.count)]
    options = VirtualOptions((ENGINE,) * 4, BLOCK, replicas=replicas, **values)
    others: list[tuple[Router, list[object]]] = [(one, []) for one in routers[1:]]
    found = simulate(load, routers[0], options, others=others)
    assert found.drift == 0
    for one in routers:
        assert one.known.ledger.live == 0
        assert one.known.reuse.is_at_rest or replicas.tick_s is not None
    return found.rows


def test_one_replica_ticks_never() -> None:
    assert Replicas(ReplicaOptions(1), [router()]).starts_s == []
    assert Replicas(ReplicaOptions(2, tick_s=None), [router(), router()]).starts_s == []
    two = Replicas(ReplicaOptions(2, tick_s=0.1), [router(), router()])
    assert two.starts_s == [0.0, 0.05]
    assert two.tick(1, 3.0) == 3.1


@pytest.mark.parametrize(("balance", "places"), [("session", 1), ("random", 4)])
def test_a_session_stays_at_one_replica_or_is_anywhere(balance: str, places: int) -> None:
    four = Replicas(ReplicaOptions(4, balance), [router() for _ in range(4)])
    assert len({four.place(planned(1, 0.0), index) for index in range(100)}) == places
    used = {four.place(planned(number, 0.0), number) for number in range(100)}
    assert used == {0, 1, 2, 3}


def test_simultaneous_requests_herd_until_they_are_told_of_each_other() -> None:
    """Eight prompts, one every 100 ms, for four engines that are idle at first."""
    load = [planned(number, 0.1 * number) for number in range(8)]
    alone, shared = (run(load, ReplicaOptions(4, tick_s=tick_s)) for tick_s in (None, 0.025))
    assert len({row.decode for row in shared[:4]}) == 4
    assert len({row.decode for row in alone[:4]}) < 4


def test_a_next_turn_at_another_replica_finds_its_prefix() -> None:
    load = [planned(n, 0.0) for n in range(8)]
    load += [planned(n, 0.0, blocks=24, wait_for=(n,)) for n in range(8)]
    for tick_s, most in ((0.025, 0), (None, 8)):
        rows = run(load, ReplicaOptions(4, tick_s=tick_s))
        lost = sum(row.cached_tokens < 20 * BLOCK for row in rows[8:])
        assert lost <= most
        assert bool(lost) == bool(most)


def test_an_engine_that_dies_is_used_again_by_every_replica() -> None:
    load = [planned(number, 0.5 * number) for number in range(80)]
    rows = run(load, ReplicaOptions(4), losses=(Loss(0, 5.0, 10.0),))
    assert {row.outcome for row in rows if row.arrival_s > 8.0} == {"ok"}
    assert any(row.decode == "e0" for row in rows if row.arrival_s > 30.0)


def batch(number: int) -> Batch:
    return Batch("w", number, (), (), (), False, (), ())


def test_the_bus_loses_nothing_unless_asked() -> None:
    bus = MemoryBus(["r", "w"])
    for number in range(3):
        bus.write(batch(number), 0.0)
    assert [one.number for one in bus.read("r", 0.0)] == [0, 1, 2]
    assert bus.read("r", 1.0) == []
    assert len(bus.read("w", 1.0)) == 3, "its own too"


def test_the_bus_loses_doubles_and_delays_on_request() -> None:
    faults = BusFaults(lost=0.3, doubled=0.3, delay_s=1.0)
    bus = MemoryBus(["r"], faults)
    for number in range(200):
        bus.write(batch(number), 0.01 * number)
    early = bus.read("r", 1.0)
    assert all(one.number <= 100 for one in early)
    numbers = [one.number for one in early + bus.read("r", 3.0)]
    assert numbers != sorted(numbers)
    assert 100 < len(set(numbers)) < 180
    assert len(numbers) > len(set(numbers))
    assert bus.read("r", 9.0) == []
