"""The instances' key changes while requests run: what is sent later has the new one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from proxy.config.options import Settings
from proxy.config.secrets import SecretStr
from tests.proxy.request.test_kv_release import ALWAYS, LENGTH, TEXT, released
from tests.scenarios.test_disconnect import leave, send
from tests.scenarios.test_migration import CHAT, DONE, FIRST, asked, stream, streams, text, told
from tests.support.harness import (
    GOOD,
    STREAM_HEAD,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    chunk,
    plain,
    says,
    until,
)

NEW = b"Bearer sk-new"
Rotate = Callable[[], Awaitable[None]]


@asynccontextmanager
async def keyed(
    tmp_path: Path, instances: list[str], key: str | None, **options: Any
) -> AsyncIterator[tuple[ServedProxy, Rotate]]:
    """A proxy with this key for its instances, and what gives it the new one."""

    def source() -> Settings:
        changed = copy(proxy.settings)
        vars(changed)["instance_api_key"] = SecretStr("sk-new")
        return changed

    async def rotate() -> None:
        assert await proxy.server.reloader.reload("test") == "applied"

    given = {"health_interval": 60, "instance_api_key": key} | options
    async with ServedProxy(tmp_path / "log", instances, source=source, **given) as proxy:
        proxy.http.headers["Authorization"] = "Bearer sk-client"
        yield proxy, rotate
        await proxy.at_rest()


def keys_of(*engines: RawEngine) -> list[list[bytes]]:
    """The keys of each POST that the engines got."""
    heads = [head for engine in engines for head in engine.post_heads]
    return [re.findall(rb"(?mi)^(?:authorization|x-api-key): (.*)\r$", head) for head in heads]


def after(event: asyncio.Event, script: Script) -> Script:
    """The script, once the event is there."""

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await event.wait()
        await script(reader, writer)

    return waits


@pytest.mark.parametrize(
    ("key", "first"), [("sk-old", b"Bearer sk-old"), (None, b"Bearer sk-client")]
)
async def test_a_move_has_the_key_of_now(tmp_path: Path, key: str | None, first: bytes) -> None:
    """Also where instances wanted none before, and got the client's."""
    rotated = asyncio.Event()
    rest = streams(text("b", [2], "stop"), DONE)

    async def in_turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(a.posts) + len(b.posts) > 1:
            await rest(reader, writer)
            return
        writer.write(STREAM_HEAD + chunk(FIRST))
        await rotated.wait()
        raise ConnectionError

    async with RawEngine(in_turn) as a, RawEngine(in_turn) as b:
        options = {"kv_connector": "none", "migration_limit": 1}
        async with keyed(tmp_path, [a.address, b.address], key, **options) as (proxy, rotate):
            sent = asyncio.create_task(stream(proxy, CHAT, asked(CHAT)))
            await until(lambda: proxy.server.state.in_flight.movable, "it may move")
            await rotate()
            rotated.set()
            got = told(await sent)
            assert (got.text, got.error) == ("ab", None)
            (record,) = await proxy.records(1)
            assert [row["ended"] for row in record["migrations"]] == ["moved"]
            assert sorted(keys_of(a, b)) == sorted([[first], [NEW]])


async def test_another_attempt_has_the_key_of_now(tmp_path: Path) -> None:
    rotated = asyncio.Event()
    fails = after(rotated, says(plain(b'{"error":{}}', "503 Service Unavailable")))

    async def in_turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (fails if len(a.posts) + len(b.posts) == 1 else GOOD)(reader, writer)

    async with RawEngine(in_turn) as a, RawEngine(in_turn) as b:
        given = tmp_path, [a.address, b.address], "sk-old"
        async with keyed(*given, kv_connector="none") as (proxy, rotate):
            sent = asyncio.create_task(proxy.post(chat("x")))
            await until(lambda: a.posts + b.posts, "an instance was asked")
            await rotate()
            rotated.set()
            assert (await sent).text == "fine"
            assert sorted(keys_of(a, b)) == [[NEW], [b"Bearer sk-old"]]


@pytest.mark.parametrize("leaves", [False, True])
async def test_the_rest_of_an_offload_has_the_key_of_now(tmp_path: Path, leaves: bool) -> None:
    """D's leg after P's, and the release of what P computed for a client that has left."""
    rotated = asyncio.Event()
    d_script = says(plain(b'{"error":{}}', "404 Not Found")) if leaves else GOOD
    async with RawEngine(after(rotated, says(LENGTH, close=True))) as p, RawEngine(d_script) as d:
        instances = [f"d={d.address}", f"p={p.address};bootstrap={p.port}"]
        async with keyed(tmp_path, instances, "sk-old", **ALWAYS) as (proxy, rotate):
            writer = await send(proxy, chat(TEXT))
            await until(lambda: p.posts, "P computes")
            if leaves:
                leave(writer, "FIN")
            await rotate()
            rotated.set()
            await until(lambda: d.posts, "D is asked")
            assert len(released(d)) == leaves
            assert (keys_of(p), keys_of(d)) == ([[b"Bearer sk-old"]], [[NEW]])
            if not leaves:
                leave(writer, "FIN")
