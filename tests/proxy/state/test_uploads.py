"""Bodies on their way in: they wait for room, honest ones are served, others pay for themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.admission import order, upload_room
from proxy.state import uploads as uploads_module
from proxy.state.uploads import Uploads
from tests.chaos.client import Connection, Got, connect, exchange, request
from tests.support.harness import ServedProxy, chat, proxied, until
from tests.support.work import lines_of

MIB = 1 << 20
KEYS = {"hog": "sk-hog-0123456789abcdef", "few": "sk-few-0123456789abcdef"}


def uploads_of(proxy: ServedProxy, max_bytes: int = 4 * MIB) -> Uploads:
    bodies = proxy.server._large_bodies
    assert bodies is not None
    bodies.uploads.room.max_bytes = max_bytes
    return bodies.uploads


@asynccontextmanager
async def begun(
    proxy: ServedProxy, size: int, count: int, tenant: str = ""
) -> AsyncIterator[list[Connection]]:
    """So many bodies of this size, of which the last byte does not come."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEYS[tenant]}\r\n" if tenant else ""
    data = f"{head}Content-Length: {size}\r\n\r\n".encode() + b" " * (size - 1)
    sent = [await connect(proxy.server.url) for _ in range(count)]
    try:
        for connection in sent:
            connection.send(data)
        yield sent
    finally:
        for connection in sent:
            connection.writer.transport.abort()


async def ask(proxy: ServedProxy, size: int, tenant: str = "") -> Got:
    head = {"Authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
    body = orjson.dumps(chat("x", max_tokens=2)) + b" " * size
    return await exchange(proxy.server.url, request(body, head))


@pytest.mark.long
async def test_many_large_bodies_at_once_are_all_served(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        uploads = uploads_of(proxy)
        answers = await asyncio.gather(*(ask(proxy, 900_000 + 10_000 * i) for i in range(16)))
        assert [got.status for got in answers] == [200] * 16
        assert uploads.room.held_bytes == len(uploads.room) == 0
        await proxy.at_rest()


async def test_the_largest_and_slowest_ends_with_a_503(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        uploads = uploads_of(proxy)
        async with begun(proxy, 3 * MIB, 3) as (first, *_):
            await until(lambda: len(uploads.room) == 3, "all have begun")
            got = await first.get()
            assert got.status == 503
            assert int(got.headers["retry-after"]) >= 1
            assert "largest or slowest" in got.error["message"]
        await until(lambda: not len(uploads.room), "they have left")
        assert uploads.room.held_bytes == 0
        await proxy.at_rest()


async def test_one_tenants_bodies_cost_no_other_tenant(tmp_path: Path) -> None:
    options: dict[str, Any] = {"api_key": ",".join(f"{t}:{key}" for t, key in KEYS.items())}
    async with proxied(tmp_path, 1, **options) as (proxy, _):
        uploads = uploads_of(proxy)
        async with begun(proxy, 600_000, 40, "hog"):
            await until(lambda: bool(uploads._waits), "there is no room")
            answers = await asyncio.gather(*(ask(proxy, 900_000, "few") for _ in range(3)))
            assert [got.status for got in answers] == [200] * 3
        await proxy.at_rest()


async def test_while_memory_is_short_bodies_that_are_not_complete_end_first(
    tmp_path: Path,
) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        uploads = uploads_of(proxy, 40 * MIB)
        async with begun(proxy, 2 * MIB, 4) as sent:
            await until(lambda: uploads.room.held_bytes >= 8 * MIB, "all have room")
            uploads.shed()
            assert 0 < uploads.room.held_bytes <= 4 * MIB
            uploads.shed()
            uploads.shed()
            assert [(await connection.get()).status for connection in sent] == [503] * 4
            assert (await ask(proxy, 1000)).status == 200


async def test_a_client_that_leaves_while_it_waits_takes_no_room(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        uploads = uploads_of(proxy)
        async with begun(proxy, 3 * MIB, 1), begun(proxy, 3 * MIB, 1) as (second,):
            await until(lambda: bool(uploads._waits), "one waits")
            second.close("RST")
        await until(lambda: not len(uploads.room), "both have left")
        assert (uploads.room.held_bytes, uploads._waits) == (0, {})
        assert (await ask(proxy, 2 * MIB)).status == 200
        await proxy.at_rest()


async def work(count: int) -> float:
    """Lines for each of so many bodies of one owner that come in one turn and then leave."""
    uploads = Uploads(4 * MIB)

    async def body() -> None:
        with uploads.holding("a", lambda: 6) as holding:
            if not holding.has(MIB):
                await holding.wait()
            await asyncio.sleep(60)

    with lines_of(order, upload_room, uploads_module) as lines:
        bodies = [asyncio.create_task(body()) for _ in range(count)]
        await asyncio.sleep(0)
        assert len(uploads._waits) == count - 4
        for task in bodies:
            task.cancel()
        await asyncio.wait(bodies)
    assert (len(uploads.room), uploads._waits) == (0, {})
    return lines.count / count


@pytest.mark.long
async def test_a_body_that_waits_costs_the_same_beside_many() -> None:
    few, many = await work(100), await work(1600)
    assert many <= 2 * few, (few, many)
