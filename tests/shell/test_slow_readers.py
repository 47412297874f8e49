"""Clients that read nothing of a flood: what waits for each is bounded, and nobody else waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.relay import EVENT_BYTES
from proxy.wire import READ_BYTES
from tests.shell.harness import (
    ANSWER,
    STREAM_HEAD,
    Proxy,
    RawEngine,
    Script,
    chat,
    chunk,
    event,
    says,
    until,
)
from tests.shell.test_disconnect import send

READERS = 6
MOST = 256 << 10
HIGH_WATER = 64 << 10
EVENT = len(event("x" * 60_000))
"""The longest one here: what is held of it is written together with the read that ends it."""


def floods(piece: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(piece)
            await writer.drain()

    return script


@pytest.mark.parametrize(
    "piece", [chunk(event("x" * 200)) * 100, chunk(event("x" * 60_000)), chunk(event("x") * 9999)]
)
async def test_what_waits_for_a_stalled_reader(tmp_path: Path, piece: bytes) -> None:
    settings: dict[str, Any] = {"kv_connector": "none", "health_interval": 60}
    async with RawEngine(*[floods(piece)] * READERS, says(ANSWER)) as engine:
        async with Proxy(tmp_path / "log", [engine.address], **settings) as proxy:
            writers = [await send(proxy, chat("x")) for _ in range(READERS)]
            for writer in writers:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
            pool = proxy.server.service.upstreams[proxy.settings.instances[0].name]._pool

            def all_held() -> bool:
                return sum(c._is_paused for c in pool._open) == READERS

            await until(all_held, "every instance's connection is paused")
            replies = [c._reply for c in pool._open if c._reply is not None]
            relays: list[Any] = [getattr(reply.sink, "__self__", None) for reply in replies]
            assert len(relays) == READERS
            for relay in relays:
                buffered = relay.transport.get_write_buffer_size()
                kept = len(relay._held) + sum(map(len, relay.reply.body))
                assert buffered <= HIGH_WATER + READ_BYTES + EVENT + 1024
                assert buffered + kept <= MOST
            assert (await proxy.post(chat("x"))).text == "fine"
            for writer in writers:
                writer.transport.abort()
            await proxy.at_rest()
            await until(lambda: proxy.connections() == 0, "no upstream connection in use")


def test_the_bounds_fit() -> None:
    """A buffer that is full but for a byte, a read, and what a piece costs in chunks."""
    assert HIGH_WATER + 2 * READ_BYTES < MOST < EVENT_BYTES
