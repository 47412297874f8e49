"""The exchange of replicas over a bus in memory, tick by tick, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
import uvloop

from proxy.core.accounts.lease import Phase
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.sharing.apply import SILENT_S
from proxy.core.sharing.batch import MOST_EVENTS, Batch, Course, Event, Prompt
from proxy.core.types import Instance, RouterConfig
from proxy.net.bus.base import READ_AT_ONCE
from proxy.net.bus.form import BatchForm
from proxy.net.bus.memory import MemoryBus
from proxy.net.timeouts import Clock
from proxy.state import replicas
from proxy.state.replicas import QUIET_TICK_S, RETRY_MOST_S, TICK_S, Replicas, State

ENGINE = "e0"


class World:
    """One clock, one log, and the replicas over them."""

    def __init__(self, name: str) -> None:
        self.now_s = 1000.0
        self.url = name
        self.replicas: list[Replicas] = []
        self.known: list[FleetState] = []
        MemoryBus.logs.clear()

    def add(self, key: bytes = b"") -> Replicas:
        known = FleetState(RouterConfig(prefill_throughput=20_000))
        known.add(Instance(ENGINE, f"http://{ENGINE}:8000"))
        clock = Clock()
        clock.now_s = lambda: self.now_s
        bus = MemoryBus(self.url, "s")
        self.replicas.append(Replicas(bus, BatchForm(key, "me"), Router(known), clock))
        self.known.append(known)
        return self.replicas[-1]

    @property
    def log(self) -> list[bytes]:
        return MemoryBus(self.url, "s").log.batches

    def foreign(self, number: int) -> int:
        """Decode tokens that a replica takes the others to have."""
        return self.known[number].ledger.load(ENGINE).decode_tokens

    async def go_on(self, seconds: float, *only: Replicas) -> None:
        for _ in range(max(1, round(seconds / TICK_S))):
            self.now_s += TICK_S
            for replica in only or self.replicas:
                await replica.tick()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    return World(request.node.name)


def result(replica: Replicas, name: str) -> float:
    (family,) = [f for f in replica.collect() if f.name == "cache_proxy_share_batches"]
    return sum(s.value for s in family.samples if s.labels == {"result": name})


async def test_what_one_has_the_other_sees_until_it_ends(world: World) -> None:
    world.add(), world.add()
    ledger = world.known[0].ledger
    lease = ledger.open(ledger.charge(ENGINE, Phase.DECODE, 500))
    await world.go_on(2 * TICK_S)
    assert (world.foreign(0), world.foreign(1)) == (500, 500)
    assert [r.state for r in world.replicas] == [State.SHARED] * 2
    lease.close()
    await world.go_on(2 * TICK_S)
    assert world.foreign(1) == 0


async def test_who_falls_silent_is_dropped_and_who_ends_at_once(world: World) -> None:
    first, second, third = world.add(), world.add(), world.add()
    for known in world.known[1:]:
        known.ledger.open(known.ledger.charge(ENGINE, Phase.DECODE, 100))
    await world.go_on(1.0)
    assert world.foreign(0) == 200
    await third.close()
    await world.go_on(TICK_S, first, second)
    assert world.foreign(0) == 100
    await world.go_on(SILENT_S + 1.0, first)
    assert world.foreign(0) == 0
    assert first.told()["others"] == []


async def test_without_a_bus_a_replica_is_alone_and_whole_once_it_is_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, _ = world.add(), world.add()
    await world.go_on(1.0)
    log = MemoryBus(world.url, "s").log
    log.error = "gone away"
    await world.go_on(0.1)
    lease = world.known[1].ledger.open(world.known[1].ledger.charge(ENGINE, Phase.DECODE, 70))
    await world.go_on(SILENT_S + 0.5)
    assert (first.state, world.foreign(0)) == (State.ALONE, 0)
    assert (first.fault or ("",))[0] == "share: alone: gone away"
    log.error = ""
    await world.go_on(0.1)
    assert (first.state, world.foreign(0), first.fault) == (State.SHARED, 70, None)
    lease.close()
    said = [r.message for r in caplog.records if r.name == "proxy.state.replicas"]
    assert [line for line in said if "alone" in line] == ["share: alone: gone away"] * 2
    assert len(said) == 6, "a line for each change of state, of both"


async def test_events_of_the_time_without_a_bus_are_told_after_it(world: World) -> None:
    first, _ = world.add(), world.add()
    await world.go_on(0.5)
    log = MemoryBus(world.url, "s").log
    log.error = "gone away"
    await world.go_on(0.2)
    home = world.known[0].fleet.states[ENGINE].cache
    stay = world.known[0].sessions.assign("session", home, world.now_s, 100)
    assert stay is not None
    first._journal.placed(world.known[0].ledger.open(()), stay, "")
    await world.go_on(0.2)
    log.error = ""
    await world.go_on(0.2)
    assert world.known[1].sessions.home("session", world.now_s) == ENGINE


class Odd(list[bytes]):
    """A log that fails in a way that no bus may."""

    def append(self, batch: bytes) -> None:
        raise MemoryError


async def test_a_defect_is_said_once_and_heals(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first = world.add()
    await world.go_on(0.5)
    log = MemoryBus(world.url, "s").log
    whole, log.batches = log.batches, Odd(log.batches)
    await world.go_on(SILENT_S + 0.5)
    assert first.fault is not None
    log.batches = whole
    await world.go_on(1.0)
    assert first.state is State.SHARED
    assert sum("an exchange failed" in r.message for r in caplog.records) == 1


def test_other_tasks_have_turns_while_much_is_taken_in(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SLICE_S", 0.0)
    turns = 0

    async def goes_on() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def takes_in() -> None:
        world.add(), world.add()
        other = asyncio.create_task(goes_on())
        prompt = Prompt(ENGINE, [1], 256.0, 256, "")
        begun = tuple(Event(Course.BEGUN, number, prompt, 0.0) for number in range(MOST_EVENTS))
        first = world.replicas[0]
        batch = Batch("00000000000000aa", 1, (), begun, (), False, (), ())
        world.log.append(BatchForm().encode(batch, first._places()))
        await first.tick()
        other.cancel()

    uvloop.run(takes_in())  # the loop that serves; its clock stands still within a turn
    assert turns >= MOST_EVENTS


@pytest.mark.parametrize("first", [1, 10**6])
async def test_an_emptied_log_is_noticed_by_the_own_echo(world: World, first: int) -> None:
    world.add(), world.add()
    world.known[1].ledger.open(world.known[1].ledger.charge(ENGINE, Phase.DECODE, 50))
    await world.go_on(1.0)
    MemoryBus(world.url, "s").log.empty(first)
    await world.go_on(0.6)
    assert [r.state for r in world.replicas] == [State.SHARED] * 2
    assert [r.resets for r in world.replicas] == ([1, 1] if first == 1 else [0, 0])
    assert world.foreign(0) == 50


async def test_a_stopped_process_drops_what_it_heard_before(world: World) -> None:
    stopped, goes_on = world.add(), world.add()
    ledger = world.known[1].ledger
    lease = ledger.open(ledger.charge(ENGINE, Phase.DECODE, 50))
    await world.go_on(0.5)
    assert world.foreign(0) == 50
    lease.close()
    await world.go_on(30.0, goes_on)
    await world.go_on(TICK_S, stopped)
    assert world.foreign(0) == 0
    await world.go_on(0.5)
    assert stopped.state is State.SHARED


async def test_rows_of_a_backlog_are_over_and_its_sessions_are_not(world: World) -> None:
    first = world.add()
    ledger = world.known[0].ledger
    home = world.known[0].fleet.states[ENGINE].cache
    stay = world.known[0].sessions.assign("session", home, world.now_s, 100)
    assert stay is not None
    first._journal.placed(ledger.open(()), stay, "")
    for _ in range(READ_AT_ONCE):
        ledger.open(ledger.charge(ENGINE, Phase.DECODE, 1))
        await world.go_on(TICK_S)
    late = world.add()
    assert await late.tick(), "there is more at once"
    assert world.foreign(1) == 0
    assert world.known[1].sessions.home("session", world.now_s) == ENGINE
    await late.tick()
    assert world.foreign(1) == READ_AT_ONCE or world.foreign(1) == 0
    await world.go_on(0.6)
    assert world.foreign(1) == READ_AT_ONCE


async def test_rows_of_many_at_once_all_count(world: World) -> None:
    count = READ_AT_ONCE + 4
    for _ in range(count):
        world.add()
    for round_ in range(8):
        world.now_s += TICK_S
        if round_ == 7:
            for known in world.known[1:]:
                known.ledger.open(known.ledger.charge(ENGINE, Phase.DECODE, 10))
        for replica in reversed(world.replicas):
            while await replica.tick():
                pass
    assert world.foreign(0) == 10 * (count - 1)


async def test_who_is_behind_tells_no_more_than_a_batch_a_tick(world: World) -> None:
    """What it tells, all others have to read: with more than READ_AT_ONCE it would never end."""
    replica = world.add()
    await world.go_on(2 * TICK_S)
    world.log.extend([b"\x81\xa1f\x01"] * (8 * READ_AT_ONCE))
    ledger, told = world.known[0].ledger, result(replica, "sent")
    for _ in range(4):
        ledger.open(ledger.charge(ENGINE, Phase.DECODE, 500))
        await replica.tick()
    assert result(replica, "sent") == told + 1
    world.now_s += 1.5 * TICK_S
    await replica.tick()
    assert result(replica, "sent") == told + 2


async def test_what_cannot_be_read_is_counted_and_said_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = world.add(), world.add(b"another key of 16 bytes")
    log = world.log
    for _ in range(3):
        log += [b"\xc1", msgspec.msgpack.encode({"f": 2}), msgspec.msgpack.encode({"f": 1})]
    world.known[1].ledger.open(world.known[1].ledger.charge(ENGINE, Phase.DECODE, 50))
    await world.go_on(1.0)
    assert [result(first, kind) for kind in ("torn", "form", "range")] == [3, 3, 3]
    assert result(first, "rows_only") > 1
    assert world.foreign(0) == 50, "rows need no key"
    lines = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert sum("--share-key" in line for line in lines) == 2, "one of each"
    assert len(lines) == 2 * 4


async def test_the_tick_is_slow_while_nothing_changes_and_after_failures(world: World) -> None:
    first = world.add()
    await world.go_on(0.5)
    assert first._pause_s() == TICK_S
    await world.go_on(3.0)
    assert first._pause_s() == QUIET_TICK_S
    MemoryBus(world.url, "s").log.error = "gone"
    await first.tick()
    assert first._pause_s() <= 0.05
    for _ in range(20):
        await first.tick()
    assert RETRY_MOST_S / 2 <= first._pause_s() <= RETRY_MOST_S
