"""Bodies of requests without an answer: who has room, and who has to go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core import is_compiled
from proxy.core.admission.memory import Level
from proxy.net.upstream.response import UpstreamResponse
from proxy.request.attempts import Attempts
from proxy.request.client_request import Outgoing
from proxy.state import held_for_clients
from proxy.state.held_for_clients import (
    HEADS_BYTES,
    LARGE_BYTES,
    MOST_BYTES,
    SHORT_BYTES,
    HeldBodies,
    Unread,
    heads_bytes,
    room_bytes,
)
from tests.support.harness import (
    ANSWER,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    plain,
    proxied,
    says,
    until,
)

KIB = 1 << 10


class Request:
    """Something whose body is held."""

    def __init__(self, held_bytes: int = 0) -> None:
        self.is_ended, self.held_bytes = False, held_bytes

    def give_way(self) -> None:
        self.is_ended = True


def takes(held: HeldBodies | Unread, request: Request, owner: str, size: int) -> bool:
    request.held_bytes = size
    return held.take(request, owner, size)


def bodies(max_bytes: int) -> HeldBodies:
    found = HeldBodies(lambda: 0.0)
    found.room.max_bytes = max_bytes
    return found


@pytest.mark.parametrize(
    ("limit_bytes", "max_body_bytes", "room"),
    [(None, 32 << 20, MOST_BYTES), (400 << 20, 32 << 20, 100 << 20), (64 << 20, 1 << 25, 1 << 25)],
)
def test_the_room(limit_bytes: int | None, max_body_bytes: int, room: int) -> None:
    assert room_bytes(limit_bytes, max_body_bytes) == room


@pytest.mark.parametrize(
    ("limit_bytes", "room"),
    [(None, HEADS_BYTES), (256 << 20, 32 << 20), (1 << 40, HEADS_BYTES)],
)
def test_the_room_of_long_heads_follows_the_limit(limit_bytes: int | None, room: int) -> None:
    assert heads_bytes(limit_bytes) == room


def test_a_fleet_of_agents_has_room_by_default() -> None:
    held = bodies(room_bytes(400 << 20, 32 << 20))
    assert all(takes(held, Request(), "all", 400_000) for _ in range(200))


def test_the_owner_that_has_most_pays_and_first_with_the_new_one() -> None:
    held = bodies(1000 * KIB)
    first, second = Request(), Request()
    assert takes(held, first, "hog", 400 * KIB)
    assert takes(held, second, "hog", 400 * KIB)
    assert not takes(held, Request(), "hog", 400 * KIB), "no work of an engine is thrown away"
    few = Request()
    assert takes(held, few, "few", 300 * KIB)
    assert [r.is_ended for r in (first, second, few)] == [False, True, False]
    assert held.room.held_bytes == 700 * KIB
    for request in (first, second, few, few):
        held.free(request)
    assert (held.room.held_bytes, len(held.room)) == (0, 0)


def test_one_new_body_may_end_several() -> None:
    held = bodies(1000 * KIB)
    small = [Request() for _ in range(10)]
    assert all(takes(held, one, "hog", 100 * KIB) for one in small)
    assert takes(held, Request(), "few", 350 * KIB)
    assert sum(one.is_ended for one in small) == 4


def test_short_bodies_are_not_counted() -> None:
    held = bodies(0)
    assert takes(held, Request(), "any", SHORT_BYTES - 1)
    assert not takes(held, Request(), "any", SHORT_BYTES)
    assert held.room.held_bytes == 0


def test_what_is_large_while_memory_is_short() -> None:
    held = bodies(16 << 20)
    assert takes(held, Request(), "few", 500 * KIB)
    assert not held.is_large("few", 500 * KIB)
    assert held.is_large("few", LARGE_BYTES)
    for _ in range(5):
        assert takes(held, Request(), "hog", 500 * KIB)
    assert held.is_large("hog", 500 * KIB), "it has more than its part of the room"
    assert not held.is_large("hog", SHORT_BYTES - 1)
    assert not held.is_large("few", 500 * KIB)


def test_of_unread_answers_the_one_that_stands_still_ends() -> None:
    """One that is read by and by is counted with what is left of it."""
    unread = Unread(lambda: 0.0)
    unread.room.max_bytes = 1000 * KIB
    still, slow, other, newest = (Request() for _ in range(4))
    assert takes(unread, slow, "hog", 500 * KIB)
    assert takes(unread, still, "hog", 400 * KIB)
    slow.held_bytes = 300 * KIB
    assert takes(unread, other, "few", 300 * KIB)
    assert unread.room.held_bytes == 1000 * KIB
    assert takes(unread, newest, "hog", 400 * KIB)
    assert [r.is_ended for r in (still, slow, other, newest)] == [True, False, False, False]
    assert unread.is_scarce("hog")
    assert not unread.is_scarce("few")


async def test_no_more_comes_for_an_owner_until_its_clients_read() -> None:
    unread, first, waiting, free = Unread(lambda: 0.0), Request(), Request(), Request()
    assert takes(unread, first, "hog", 20 << 20)
    waiting.held_bytes = free.held_bytes = 10 << 20
    assert unread.enter(free, "few", free.held_bytes)
    await unread.room_for(free, "few")
    assert unread.enter(waiting, "hog", waiting.held_bytes)
    waits = asyncio.create_task(unread.room_for(waiting, "hog"))
    await asyncio.sleep(0)
    unread.free(Request())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waits.done()
    unread.free(first)
    await waits
    assert (unread.room.held_bytes, len(unread._waiting)) == (0, 0), "nothing is left of it"


async def test_one_that_leaves_wakes_only_those_that_may_go_on() -> None:
    unread, first, second = Unread(lambda: 0.0), Request(), Request()
    assert takes(unread, first, "hog", 20 << 20)
    assert takes(unread, second, "hog", 1 << 20)
    waiting, waits = [Request() for _ in range(50)], []
    for one in waiting:
        assert unread.enter(one, "hog", 1)
        waits.append(asyncio.create_task(unread.room_for(one, "hog")))
    await asyncio.sleep(0)
    turns = list(unread._waiting["hog"].values())
    others = [Request() for _ in range(50)]
    for other in others:
        assert takes(unread, other, "few", 1)
        unread.free(other)
    unread.free(second)
    unread.free(waiting[0])
    assert [turn.done() for turn in turns] == [True] + [False] * 49
    assert takes(unread, first, "hog", 10 << 20), "its client has read some of it"
    await asyncio.gather(*waits)
    assert (len(unread._waiting), unread.room.held_bytes) == (0, 10 << 20)


@pytest.mark.parametrize(("size", "ends"), [(8 << 20, "unread"), (6 << 20, "waiting")])
async def test_one_that_waits_may_have_to_give_way(size: int, ends: str) -> None:
    """Where those that wait have more than is left unread."""
    unread, first = Unread(lambda: 0.0), Request()
    assert takes(unread, first, "hog", 17 << 20)
    waiting = [Request(size) for _ in range(2 if ends == "unread" else 3)]
    waits = []
    for one in waiting:
        assert unread.enter(one, "hog", size)
        waits.append(asyncio.create_task(unread.room_for(one, "hog")))
        await asyncio.sleep(0)
    assert first.is_ended == (ends == "unread")
    assert [one.is_ended for one in waiting] == [ends == "waiting", False, False][: len(waiting)]
    await waits[0]
    unread.free(first)
    await asyncio.gather(*waits)
    assert unread.room.held_bytes == 0


def long(size: int, **fields: Any) -> bytes:
    return orjson.dumps(chat("x", **fields) | {"junk": "A" * size})


@contextlib.asynccontextmanager
async def before(tmp_path: Path, script: Script, **options: Any) -> AsyncIterator[ServedProxy]:
    """A proxy before an engine that answers like this."""
    async with RawEngine(script) as engine:
        async with ServedProxy(tmp_path / "log.jsonl", [engine.address], **options) as proxy:
            await proxy.up()
            yield proxy


@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_is_held_until_its_answer(tmp_path: Path, stream: bool) -> None:
    may_answer = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await says(plain(b'{"choices":[{"message":{"content":"x"}}]}'))(reader, writer)

    async with before(tmp_path, late) as proxy:
        room = proxy.server.state.bodies.room
        asked = asyncio.create_task(proxy.post(long(100_000, stream=stream)))
        await until(lambda: room.held_bytes > 100_000)
        assert proxy.metric("held_bytes") > 100_000
        may_answer.set()
        assert (await asked).status == 200
        await proxy.at_rest()
        assert (room.held_bytes, len(room)) == (0, 0)


async def test_one_that_gives_way_is_told_and_gives_all_back(tmp_path: Path) -> None:
    """It waits for its engine; the next is larger than the room that is left."""

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        raise ConnectionError

    async with before(tmp_path, never) as proxy:
        state = proxy.server.state
        asked = asyncio.create_task(proxy.post(long(100_000)))
        await until(lambda: state.bodies.room.held_bytes > 100_000)
        await until(lambda: proxy.metric("issued_total") == 1)
        state.bodies.room.max_bytes = 150_000
        assert takes(state.bodies, Request(), "another", 90_000)
        got = await asked
        assert (got.status, got.json["message"][-15:]) == (503, "short of memory")
        assert int(got.headers["Retry-After"]) >= 1
        await proxy.at_rest()
        assert state.bodies.room.held_bytes == 90_000
        assert proxy.rejected("memory") == 1


async def test_one_that_waits_in_the_queue_may_have_to_give_way(tmp_path: Path) -> None:
    may_answer = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await says(ANSWER)(reader, writer)

    limits = {"active_prefill_tokens_threshold": 0, "max_queue_seconds": 60.0}
    async with before(tmp_path, late, **limits) as proxy:
        state = proxy.server.state
        first = asyncio.create_task(proxy.post(chat("x")))
        await until(lambda: state.in_flight.count == 1 and not len(state.waiting.queue))
        waits = asyncio.create_task(proxy.post(long(100_000)))
        await until(lambda: len(state.waiting.queue) == 1)
        state.bodies.room.max_bytes = 150_000
        assert takes(state.bodies, Request(), "another", 90_000)
        assert (await waits).status == 503
        assert not len(state.waiting.queue)
        may_answer.set()
        assert (await first).status == 200
        await proxy.at_rest()
        assert proxy.rejected("memory") == 1


@pytest.mark.skipif(is_compiled(), reason="it replaces a method of what is compiled")
@pytest.mark.parametrize(("stream", "status"), [(True, 503), (False, 200)])
async def test_one_whose_answer_comes_as_it_has_to_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, status: int
) -> None:
    """It has one answer: its engine's where that is whole, else the refusal."""
    run = Attempts.run

    async def and_gives_way(attempts: Attempts, out: Outgoing) -> UpstreamResponse:
        answer = await run(attempts, out)
        await until(lambda: answer.is_over)
        (holder,) = proxy.server.state.bodies.room._held
        holder.give_way()
        return answer

    monkeypatch.setattr(Attempts, "run", and_gives_way)
    script = says(ANSWER if stream else plain(b'{"choices":[{"message":{"content":"x"}}]}'))
    async with before(tmp_path, script) as proxy:
        assert (await proxy.post(long(100_000, stream=stream))).status == status
        await proxy.at_rest()
        assert proxy.server.state.bodies.room.held_bytes == 0


async def test_while_memory_is_short_large_bodies_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they cost hardly a token."""
    monkeypatch.setattr(held_for_clients, "LARGE_BYTES", 200_000)
    async with proxied(tmp_path, 1) as (proxy, _):
        await until(lambda: proxy.server.state.memory.used_bytes)
        proxy.server.state.memory.level = Level.NO_HEAVY
        assert (await proxy.post(long(100_000))).status == 200
        assert (await proxy.post(long(200_000))).status == 503
        await proxy.at_rest()
        assert proxy.server.state.bodies.room.held_bytes == 0
