"""Bodies of requests without an answer: who has room, and who has to go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.admission.memory import Level
from proxy.state import held_bodies
from proxy.state.held_bodies import LARGE_BYTES, MOST_BYTES, SHORT_BYTES, HeldBodies, room_bytes
from proxy.telemetry.metrics import Metrics
from tests.support.harness import (
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

    def __init__(self) -> None:
        self.is_ended = False

    def give_way(self) -> None:
        self.is_ended = True


def bodies(max_bytes: int) -> HeldBodies:
    found = HeldBodies(lambda: 0.0, Metrics())
    found.room.max_bytes = max_bytes
    return found


@pytest.mark.parametrize(
    ("limit_bytes", "max_body_bytes", "room"),
    [(None, 32 << 20, MOST_BYTES), (400 << 20, 32 << 20, 100 << 20), (64 << 20, 1 << 25, 1 << 25)],
)
def test_the_room(limit_bytes: int | None, max_body_bytes: int, room: int) -> None:
    assert room_bytes(limit_bytes, max_body_bytes) == room


def test_a_fleet_of_agents_has_room_by_default() -> None:
    held = bodies(room_bytes(400 << 20, 32 << 20))
    assert all(held.take(Request(), "all", 400_000) for _ in range(200))


def test_the_owner_that_has_most_pays_and_first_with_the_new_one() -> None:
    held = bodies(1000 * KIB)
    first, second = Request(), Request()
    assert held.take(first, "hog", 400 * KIB)
    assert held.take(second, "hog", 400 * KIB)
    assert not held.take(Request(), "hog", 400 * KIB), "no work of an engine is thrown away"
    few = Request()
    assert held.take(few, "few", 300 * KIB)
    assert [r.is_ended for r in (first, second, few)] == [False, True, False]
    assert held.room.held_bytes == 700 * KIB
    for request in (first, second, few, few):
        held.free(request)
    assert (held.room.held_bytes, len(held.room)) == (0, 0)


def test_one_new_body_may_end_several() -> None:
    held = bodies(1000 * KIB)
    small = [Request() for _ in range(10)]
    assert all(held.take(one, "hog", 100 * KIB) for one in small)
    assert held.take(Request(), "few", 350 * KIB)
    assert sum(one.is_ended for one in small) == 4


def test_short_bodies_are_not_counted() -> None:
    held = bodies(0)
    assert held.take(Request(), "any", SHORT_BYTES - 1)
    assert not held.take(Request(), "any", SHORT_BYTES)
    assert held.room.held_bytes == 0


def test_what_is_large_while_memory_is_short() -> None:
    held = bodies(16 << 20)
    assert held.take(Request(), "few", 500 * KIB)
    assert not held.is_large("few", 500 * KIB)
    assert held.is_large("few", LARGE_BYTES)
    for _ in range(5):
        assert held.take(Request(), "hog", 500 * KIB)
    assert held.is_large("hog", 500 * KIB), "it has more than its part of the room"
    assert not held.is_large("hog", SHORT_BYTES - 1)
    assert not held.is_large("few", 500 * KIB)


def long(size: int, **fields: Any) -> bytes:
    return orjson.dumps(chat("x", **fields) | {"junk": "A" * size})


@contextlib.asynccontextmanager
async def before(tmp_path: Path, script: Script) -> AsyncIterator[ServedProxy]:
    """A proxy before an engine that answers like this."""
    async with RawEngine(script) as engine:
        async with ServedProxy(tmp_path / "log.jsonl", [engine.address]) as proxy:
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
        assert state.bodies.take(Request(), "another", 90_000)
        got = await asked
        assert (got.status, got.json["message"][-15:]) == (503, "short of memory")
        assert int(got.headers["Retry-After"]) >= 1
        await proxy.at_rest()
        assert state.bodies.room.held_bytes == 90_000
        assert proxy.rejected("memory") == 1


async def test_while_memory_is_short_large_bodies_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they cost hardly a token."""
    monkeypatch.setattr(held_bodies, "LARGE_BYTES", 200_000)
    async with proxied(tmp_path, 1) as (proxy, _):
        await until(lambda: proxy.server.state.memory.used_bytes)
        proxy.server.state.memory.level = Level.NO_HEAVY
        assert (await proxy.post(long(100_000))).status == 200
        assert (await proxy.post(long(200_000))).status == 503
        await proxy.at_rest()
        assert proxy.server.state.bodies.room.held_bytes == 0
