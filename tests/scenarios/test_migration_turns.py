"""Many streams of one instance that is lost or drains: they go on in turns, and nobody is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.config.options import Settings
from proxy.request import moves
from proxy.state.move_turns import MoveTurns
from proxy.state.proxy_state import ProxyState
from tests.scenarios.test_migration import (
    CHAT,
    DONE,
    FIRST,
    asked,
    said,
    stream,
    streams,
    text,
    told,
)
from tests.support.harness import (
    GOOD,
    STREAM_HEAD,
    WAIT_S,
    RawEngine,
    ServedProxy,
    chunk,
    stands_still,
    until,
)

STREAMS = 4
_REST = streams(text("b", [2], "stop"), DONE)


class Floor:
    """Streams on one engine, which all end when it is `lost`; the other one waits for `may_go`."""

    def __init__(self) -> None:
        self.lost, self.may_go = asyncio.Event(), asyncio.Event()
        self.resumed: list[str] = []
        """Whose streams another engine was asked to go on with, in their order."""
        self.at_once = self.most_at_once = 0
        self.engines: list[RawEngine] = []
        self.proxy: ServedProxy
        self.clients: dict[str, asyncio.Task[bytes]] = {}

    async def serve(
        self, at: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """The one engine or the other."""
        body = orjson.loads(self.engines[at].posts[-1])
        if "user" not in body:
            await GOOD(reader, writer)  # a trial of an engine that was lost
            return
        if "prompt" not in body:
            await self._serve_first(writer)
            return
        self.resumed.append(body["user"])
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.may_go.wait()
        self.at_once -= 1
        await _REST(reader, writer)

    async def _serve_first(self, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(FIRST))
        while not (self.lost.is_set() or writer.is_closing()):
            await asyncio.sleep(0.02)
            writer.write(chunk(said("a", [3])))
        raise ConnectionError

    async def all_streaming(self) -> None:
        """Have all clients ask, and wait until each stream may migrate."""
        for user in "wxyz"[:STREAMS]:
            body = asked(CHAT, 400, user=user)
            self.clients[user] = asyncio.create_task(stream(self.proxy, CHAT, body))
        scopes = self.proxy.server.state.in_flight.scopes
        fixed = lambda: [it.why_fixed for it in scopes.values() if it is not None]  # noqa: E731
        await until(lambda: fixed() == [None] * STREAMS, "all may migrate")

    async def answers(self) -> list[bytes]:
        """What the clients got, to the end."""
        async with asyncio.timeout(WAIT_S):
            return await asyncio.gather(*self.clients.values())

    async def ended(self) -> Counter[str]:
        """What has become of the moves, once all streams have ended and nothing is left."""
        in_flight = self.proxy.server.state.in_flight
        records = await self.proxy.records(STREAMS)
        await self.proxy.at_rest()
        await until(lambda: self.proxy.connections() == 0, "no upstream connection in use")
        assert (in_flight.turns.taken_bytes, in_flight.trails.taken_bytes) == (0, 0)
        assert not in_flight.turns._waiting
        return Counter(row["ended"] for record in records for row in record["migrations"])


@asynccontextmanager
async def floor(tmp_path: Path, **options: Any) -> AsyncIterator[Floor]:
    """STREAMS streams that run on one engine, whose bodies have room for one at once."""
    it = Floor()
    async with RawEngine(partial(it.serve, 0)) as a, RawEngine(partial(it.serve, 1)) as b:
        it.engines = [a, b]
        given = {"kv_connector": "none", "health_interval": 60, "migration_limit": 1} | options
        async with ServedProxy(tmp_path / "log", [f"a={a.address}"], **given) as proxy:
            it.proxy = proxy
            proxy.server.state.in_flight.turns.most_bytes = 1
            await it.all_streaming()
            assert (await proxy.post({"instance": f"b={b.address}"}, "/instances")).status == 201
            await proxy.up()
            try:
                yield it
            finally:
                it.lost.set()
                it.may_go.set()
                for task in it.clients.values():
                    task.cancel()


async def first_of_all_lost(it: Floor) -> MoveTurns:
    """All streams are lost; the first one goes on, and the others wait."""
    it.lost.set()
    turns = it.proxy.server.state.in_flight.turns
    await until(lambda: len(turns._waiting) == STREAMS - 1, "the others wait for their turn")
    await until(lambda: it.resumed, "the first one goes on")
    return turns


async def test_streams_lost_at_once_go_on_one_after_the_other(tmp_path: Path) -> None:
    async with floor(tmp_path) as it:
        turns = await first_of_all_lost(it)
        await stands_still(lambda: len(it.resumed))
        assert len(it.resumed) == 1
        left = next(user for user in it.clients if user not in it.resumed)
        it.clients.pop(left).cancel()
        await until(lambda: len(turns._waiting) == STREAMS - 2, "its place is free")
        it.may_go.set()
        for got in await it.answers():
            whole = told(got)
            assert (set(whole.text), whole.text[-1], whole.error) == ({"a", "b"}, "b", None)
        assert await it.ended() == {"moved": STREAMS - 1, "left": 1}
        assert it.most_at_once == 1


async def test_one_that_begins_and_is_left_makes_room(tmp_path: Path) -> None:
    async with floor(tmp_path) as it:
        await first_of_all_lost(it)
        it.clients.pop(it.resumed[0]).cancel()
        await until(lambda: len(it.resumed) == 2, "the next one's turn")
        it.may_go.set()
        await it.answers()
        assert await it.ended() == {"moved": STREAMS - 1, "left": 1}


async def test_who_waits_too_long_for_a_turn_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "TURN_S", 0.1)
    async with floor(tmp_path) as it:
        it.lost.set()
        rows = it.proxy.metric
        late = {"reason": "lost", "outcome": "time"}
        await until(lambda: rows("migrations_total", **late) == STREAMS - 1, "they end")
        it.may_go.set()
        ends = [told(got).error for got in await it.answers()]
        assert Counter(ends) == {None: 1, "engine_lost": STREAMS - 1}
        assert await it.ended() == {"moved": 1, "time": STREAMS - 1}


@pytest.mark.parametrize("options", [{}, {"prefill_throughput": 1.0}])
async def test_streams_that_are_to_leave_run_on_until_their_turn(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    async with floor(tmp_path, **options) as it:
        async with it.proxy.http.delete("/instances/a?drain=true&mode=migrate") as order:
            assert order.status == 202
        await until(lambda: it.resumed, "the first one goes on")
        in_flight = it.proxy.server.state.in_flight
        before = {served: served.output_events for served in in_flight.scopes.values() if served}
        waiting = lambda: [  # noqa: E731
            served.output_events > events + 3 for served, events in before.items()
        ]
        await until(lambda: sum(waiting()) >= STREAMS - 1, "the others run on")
        assert it.at_once == 1
        it.may_go.set()
        ends = [told(got) for got in await it.answers()]
        assert all((end.error, end.text[-1]) == (None, "b") for end in ends)
        assert await it.ended() == {"moved": STREAMS}
        assert it.most_at_once == 1


def test_with_a_memory_limit_less_is_kept() -> None:
    trails = ProxyState.start(
        Settings(instances=["a=http://127.0.0.1:1"]), 128 << 20
    ).in_flight.trails
    assert trails.most_bytes == 16 << 20
