"""Requests that wait for a free instance: let in, refused, gone, sent elsewhere; real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.core.admission.queue import Priority, QueueLimits
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.routing.waiting import TRIAL_S, TRIALS
from proxy.core.types import Instance, Reject, RequestFacts, RouterConfig, Thresholds
from proxy.net.timeouts import Clock
from proxy.state.queue import Ticket, WaitingRoom, priority_of
from proxy.telemetry.metrics import Metrics
from tests.scenarios.test_disconnect import leave, send
from tests.support.harness import (
    ANSWER,
    WAIT_S,
    Answer,
    RawEngine,
    ServedProxy,
    chat,
    until,
)

ONE_AT_A_TIME: dict[str, Any] = {
    "active_prefill_tokens_threshold": 0,
    "kv_connector": "none",
    "health_interval": 60,
    "scrape_interval": 60,
}
A, B = ({"Authorization": f"Bearer sk-{name}-0123456789"} for name in "ab")


class HeldEngine(RawEngine):
    """Answers one request whenever it is told to; until then they are being computed."""

    def __init__(self) -> None:
        super().__init__(self._hold)
        self._go = asyncio.Semaphore(0)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._go.acquire()
        writer.write(ANSWER)

    def answer(self, count: int = 1) -> None:
        for _ in range(count):
            self._go.release()


@asynccontextmanager
async def held(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[ServedProxy, HeldEngine]]:
    """A proxy whose one instance is busy with a first request until the engine answers."""
    async with HeldEngine() as engine, asyncio.TaskGroup() as group:
        instances = [f"i={engine.address}"]
        async with ServedProxy(tmp_path / "log", instances, **(ONE_AT_A_TIME | options)) as proxy:
            first = group.create_task(proxy.post(chat("first"), headers=A))
            await until(lambda: engine.posts, "the instance is busy")
            yield proxy, engine
            engine.answer(100)
            assert (await first).status == 200
            await proxy.at_rest()
            assert proxy.metric("queued_requests") == 0
            assert proxy.router.known.ledger.on_freed is None, "nobody waits, nothing is watched"


async def queued(proxy: ServedProxy, count: int = 1) -> None:
    await until(lambda: proxy.metric("queued_requests") == count, f"{count} queued")


def refused(answer: Answer, proxy: ServedProxy, reason: str) -> None:
    """A refusal as the contract has it, with an honest time to come again."""
    assert answer.status == 503
    assert answer.json["type"] == "service_unavailable"
    assert answer.json["error"]["code"] == 503
    seconds = int(answer.headers["Retry-After"])
    assert 1 <= seconds <= 30
    assert 50 <= int(answer.headers["retry-after-ms"]) <= seconds * 1000
    assert proxy.rejected(reason) == 1


async def test_a_turn_comes_when_the_instance_is_free(tmp_path: Path) -> None:
    async with held(tmp_path) as (proxy, engine), asyncio.TaskGroup() as group:
        second = group.create_task(proxy.post(chat("second")))
        await queued(proxy)
        assert proxy.metric("queued_bytes") > 0
        engine.answer(2)
        assert ((await second).status, (await second).text) == (200, "fine")
        first, record = await proxy.records(2)
        assert first["t_queued"] is None
        times = ("t_proxy_recv", "t_queued", "t_decided", "t_decode_sent", "t_first_token")
        moments = [record[key] for key in times]
        assert moments == sorted(moments)
        assert proxy.metric("queue_wait_seconds_count", end="admitted") == 1
        assert proxy.metric("issued_total") == 2
        assert proxy.rejected("prefill_tokens") == 0


async def test_the_end_of_a_cool_down_wakes(tmp_path: Path) -> None:
    """No event tells of it: the engine itself said for how long it is busy."""
    async with held(tmp_path, active_prefill_tokens_threshold=None) as (proxy, engine):
        proxy.router.known.gate.mark_busy("i", proxy.server.state.clock.now_s() + 0.5)
        engine.answer(2)
        assert (await proxy.post(chat("x"))).status == 200
        assert proxy.metric("queue_wait_seconds_count", end="admitted") == 1


async def test_a_cool_down_that_ends_during_a_look_is_seen_by_the_next(metrics: Metrics) -> None:
    """A timer may come a moment early: the look refuses, and the end has passed right after it."""
    readings = [100.0]
    clock = Clock()
    clock.now_s = lambda: readings.pop(0) if len(readings) > 1 else readings[0]
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000)))
    router.known.add(Instance("i", "http://i"))
    router.known.gate.mark_busy("i", 100.02)
    room = WaitingRoom(router, clock, metrics, QueueLimits(8, 1000, WAIT_S), {})
    facts = RequestFacts("m", None, 100, [], 1.0)
    busy = room.admit(facts)
    assert isinstance(busy, Reject)
    turn = room.enter(facts, busy, Priority.NORMAL, 10)
    assert isinstance(turn, Ticket)
    readings[:] = [100.0199, 100.0201]
    assert isinstance(await room.wait(turn), Route)


async def test_another_limit_or_another_instance_wakes(tmp_path: Path) -> None:
    async with held(tmp_path) as (proxy, engine), asyncio.TaskGroup() as group:
        waiting = [group.create_task(proxy.post(chat(f"x{i}"))) for i in range(2)]
        await queued(proxy, 2)
        async with HeldEngine() as other:
            async with proxy.http.post("/instances", json={"instance": f"j={other.address}"}) as r:
                assert r.status == 201
            await queued(proxy, 1)
            await until(lambda: other.posts)
            async with proxy.http.delete("/busy_threshold?model=*") as r:
                assert r.status == 200
            await queued(proxy, 0)
            engine.answer(2)
            other.answer(2)
            assert [(await task).status for task in waiting] == [200, 200]


async def test_refusals_each_for_its_reason(tmp_path: Path) -> None:
    options = {"max_queue": 1, "max_queue_seconds": 1.0}
    async with held(tmp_path, **options) as (proxy, _), asyncio.TaskGroup() as group:
        late = group.create_task(proxy.post(chat("late")))
        await queued(proxy)
        refused(await proxy.post(chat("full")), proxy, "queue_full")
        refused(await late, proxy, "queue_timeout")
        proxy.router.known.gate.mark_busy("i", proxy.server.state.clock.now_s() + 50)
        deadline = await proxy.post(chat("too late"))
        refused(deadline, proxy, "queue_deadline")
        assert deadline.headers["Retry-After"] == "30"
        assert proxy.metric("queue_wait_seconds_count", end="refused") == 1
        records = {record["error"]: record for record in await proxy.records(3)}
        assert records["queue_timeout"]["t_queued"] is not None
        assert records["queue_full"]["t_queued"] is records["queue_deadline"]["t_queued"] is None
        proxy.router.known.fleet.process_came("i")


async def test_with_no_queue_a_refusal_is_immediate(tmp_path: Path) -> None:
    async with held(tmp_path, max_queue=0) as (proxy, _):
        refused(await proxy.post(chat("x")), proxy, "prefill_tokens")


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_client_that_leaves_leaves_the_queue(tmp_path: Path, how: str) -> None:
    async with held(tmp_path) as (proxy, engine), asyncio.TaskGroup() as group:
        writer = await send(proxy, chat("leaves"))
        await queued(proxy, 1)
        stays = group.create_task(proxy.post(chat("stays")))
        await queued(proxy, 2)
        leave(writer, how)
        await queued(proxy, 1)
        engine.answer(2)
        assert (await stays).status == 200
        assert len(engine.posts) == 2
        assert proxy.metric("client_disconnects_total", phase="queue") == 1
        assert proxy.metric("queue_wait_seconds_count", end="gone") == 1
        outcomes = {record["outcome"] for record in await proxy.records(3)}
        assert outcomes == {"ok", "client_gone"}


async def test_a_drain_sends_the_waiting_elsewhere(tmp_path: Path) -> None:
    async with held(tmp_path) as (proxy, engine), asyncio.TaskGroup() as group:
        waiting = group.create_task(proxy.post(chat("x")))
        await queued(proxy)
        draining = group.create_task(proxy.server.drain())
        answer = await waiting
        refused(answer, proxy, "draining")
        assert answer.headers["Connection"] == "close"
        refused(await proxy.post(chat("new")), proxy, "prefill_tokens")
        engine.answer()
        await draining


async def test_without_instances_nobody_waits(tmp_path: Path) -> None:
    async with held(tmp_path) as (proxy, engine), asyncio.TaskGroup() as group:
        waiting = group.create_task(proxy.post(chat("x")))
        await queued(proxy)
        async with proxy.http.delete("/instances/i?drain=true") as response:
            assert response.status in (200, 202)
        engine.answer()
        answer = await waiting
        assert (answer.status, answer.json["message"][-17:]) == (503, "no instance is up")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("a:sk-a-0123456789,b:sk-b-0123456789", ["high", "a1", "b1", "a2", "low"]),
        (None, ["high", "a1", "a2", "b1", "low"]),
    ],
)
async def test_priorities_and_tenants_take_their_turns(
    tmp_path: Path, keys: str | None, expected: list[str]
) -> None:
    """A key that nobody has checked makes no tenant."""
    async with held(tmp_path, api_key=keys) as (proxy, engine), asyncio.TaskGroup() as group:
        requests: tuple[tuple[str, dict[str, str], dict[str, Any]], ...] = (
            ("low", A, {"priority": 5}),
            ("a1", A, {}),
            ("a2", A, {}),
            ("b1", B, {}),
            ("high", {"X-Request-Priority": "high"} | B, {"priority": 5}),
        )
        for text, headers, more in requests:
            before = proxy.metric("queued_requests")
            group.create_task(proxy.post(chat(text, **more), headers=headers))
            await queued(proxy, int(before) + 1)
        engine.answer(6)
        await until(lambda: len(engine.posts) == 6)
        order = [
            next(word for word in ("low", "a1", "a2", "b1", "high") if f'"{word}"'.encode() in post)
            for post in engine.posts[1:]
        ]
        assert order == expected


@pytest.mark.parametrize(
    ("header", "body", "expected"),
    [
        ("", {}, Priority.NORMAL),
        (" High ", {"priority": 9}, Priority.HIGH),
        ("urgent", {"priority": 1}, Priority.LOW),
        ("", {"priority": -3}, Priority.HIGH),
        ("", {"priority": 0}, Priority.NORMAL),
        ("", {"priority": "1"}, Priority.LOW),
        ("", {"priority": " -1.0"}, Priority.HIGH),
        ("", {"priority": "first"}, Priority.NORMAL),
    ],
)
def test_where_a_priority_comes_from(header: str, body: dict[str, Any], expected: Priority) -> None:
    assert priority_of({"X-Request-Priority": header}, body) is expected


@pytest.fixture
def metrics() -> Metrics:
    """Made before the loop runs: it reads its own version from disk."""
    return Metrics()


async def test_a_turn_given_to_who_just_left_is_given_back(metrics: Metrics) -> None:
    """Both happen before the request runs again: its lease must not stay open."""
    router = Router(
        FleetState(RouterConfig(prefill_throughput=20_000, thresholds=Thresholds(None, 0, None)))
    )
    router.known.add(Instance("i", "http://i"))
    room = WaitingRoom(router, Clock(), metrics, QueueLimits(8, 1000, 10.0), {})
    facts = RequestFacts("m", None, 100, [], 1.0)
    first, busy = room.admit(facts), room.admit(facts)
    assert isinstance(first, Route)
    assert isinstance(busy, Reject)
    turn = room.enter(facts, busy, Priority.NORMAL, 10)
    assert isinstance(turn, Ticket)
    waiting = asyncio.ensure_future(room.wait(turn))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(leaves))

    def leaves() -> None:
        assert router.known.ledger.live == 1, "it has its turn"
        assert not len(room.queue)
        waiting.cancel()

    router.finish(first, 0.0)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert router.known.ledger.live == 0
    assert router.known.ledger.on_freed is None


async def test_after_an_engines_own_word_a_few_at_a_time(metrics: Metrics) -> None:
    """A hundred would be a hundred refusals if it still cannot."""
    now_s = 100.0
    clock = Clock()
    clock.now_s = lambda: now_s
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000)))
    router.known.add(Instance("i", "http://i"))
    room = WaitingRoom(router, clock, metrics, QueueLimits(64, 10_000, 10.0), {})
    facts = RequestFacts("m", None, 100, [], 1.0)

    async def after(seconds: float) -> int:
        """How many more are let in when this much has passed."""
        nonlocal now_s
        now_s += seconds
        before = len(room.queue)
        room.look_again()
        await asyncio.sleep(0)
        return before - len(room.queue)

    router.known.gate.mark_busy("i", now_s + 1.0)
    for _ in range(10 * TRIALS):
        busy = room.admit(facts)
        assert isinstance(busy, Reject)
        assert isinstance(room.enter(facts, busy, Priority.NORMAL, 10), Ticket)
    assert await after(0.5) == 0
    assert await after(0.5 + TRIAL_S) == TRIALS
    assert await after(TRIAL_S / 2) == 0
    assert await after(TRIAL_S) == 2 * TRIALS
    router.known.gate.mark_busy("i", now_s + 1.0)
    assert await after(TRIAL_S) == 0
    assert await after(1.0 + TRIAL_S) == TRIALS
    room.close()
    assert not len(room.queue)
    assert router.known.ledger.on_freed is None


async def test_invented_models_share_a_turn(metrics: Metrics) -> None:
    """Each would have one of its own, before all who are served, and be tried at each look."""
    now_s = 100.0
    clock = Clock()
    clock.now_s = lambda: now_s
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000)))
    router.known.add(Instance("i", "http://i"))
    router.known.fleet.observe_models("i", ["m"])
    router.known.gate.set("Own", Thresholds(active_prefill_tokens_threshold=10**6))
    room = WaitingRoom(router, clock, metrics, QueueLimits(640, 100_000, 10.0), {})
    router.known.gate.mark_busy("i", now_s + 1.0)
    models = [*(f"invented {n}" for n in range(100)), "m", "own", "OWN"]
    for model in models:
        facts = RequestFacts(model, None, 100, [], 1.0)
        busy = room.admit(facts)
        assert isinstance(busy, Reject)
        assert isinstance(room.enter(facts, busy, Priority.NORMAL, 10), Ticket)
    lanes = [router.known.lane(model) for model in models]
    assert lanes == [*["unserved *"] * 100, "m", "unserved Own", "unserved Own"]
    assert all(map(room.queue.has, set(lanes)))
    now_s += 1.5
    room.look_again()
    await asyncio.sleep(0)
    assert len(room.queue) == 100 - TRIALS
    router.known.gate.mark_busy("i", now_s + 1.0)
    router.known.fleet.observe_models("i", ["m", "invented 99"])
    room.look_again()
    await asyncio.sleep(0)
    assert room.queue.has("invented 99"), "no more behind those that nobody serves"
    now_s += 1.5
    room.look_again()
    await asyncio.sleep(0)
    assert len(room.queue) == 100 - 3 * TRIALS - 1, "of the others twice as many as at first"
    room.close()


async def test_who_comes_behind_the_waiting_holds_nobody_up(metrics: Metrics) -> None:
    """What is repeated to a newcomer is not the engine's word anew, nor another model's."""
    now_s = 100.0
    clock = Clock()
    clock.now_s = lambda: now_s
    router = Router(FleetState(RouterConfig(prefill_throughput=20_000)))
    for name, models in (("i", ["m"]), ("j", ["n"])):
        router.known.add(Instance(name, f"http://{name}"))
        router.known.fleet.observe_models(name, models)
    room = WaitingRoom(router, clock, metrics, QueueLimits(640, 100_000, 10.0), {})

    def waits(model: str) -> bool:
        facts = RequestFacts(model, None, 100, [], 1.0)
        busy = room.admit(facts)
        return isinstance(busy, Reject) and isinstance(
            room.enter(facts, busy, Priority.NORMAL, 10), Ticket
        )

    router.known.gate.mark_busy("i", now_s + 1.0)
    assert all(waits("m") for _ in range(50 * TRIALS))
    router.known.gate.mark_busy("j", now_s + 0.5)
    assert waits("n")
    now_s += 0.6
    room.look_again()
    await asyncio.sleep(0)
    assert not room.queue.has("n"), "its own engine is free"
    now_s += 0.5
    left = []
    for _ in range(4):
        room.look_again()
        await asyncio.sleep(0)
        assert all(waits("m") for _ in range(TRIALS))
        left.append(len(room.queue))
        now_s += TRIAL_S
    assert left == [50 * TRIALS, 49 * TRIALS, 46 * TRIALS, 39 * TRIALS]
    # Another model's next one is refused again and again meanwhile, for a reason of its own.
    router.known.gate.set("n", Thresholds(active_prefill_tokens_threshold=0))
    assert waits("n")
    for _ in range(9):
        room.look_again()
        await asyncio.sleep(0)
        now_s += TRIAL_S
    assert not room.queue.has("m")
    assert room.queue.has("n")
    room.close()
