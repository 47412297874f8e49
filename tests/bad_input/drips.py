"""A thousand heads and a thousand bodies that drip, against a proxy with its defaults.

Each sends a byte a second and never comes to its end. Said is when the last of them was given up,
and what became of ordinary requests meanwhile.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from tests.bad_input.run import OPTIONS, rig
from tests.support.harness import (
    ServedProxy,
    chat,
    is_set_within,
    spend,
)

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: proxy\r\n"
BODY_HEAD = HEAD + b"Content-Length: 100000\r\n\r\n"
DRIP_S = 1.0
TOO_LONG_S = 60.0
SPREAD_S = 0.004
"""Between the beginnings of two: one process plays all of them."""
FILES = 16384


@dataclass(slots=True)
class Drips:
    """Seconds until each was given up, and the statuses of what was asked beside them."""

    head_s: list[float] = field(default_factory=list)
    body_s: list[float] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        lost = sum(status != 200 for status in self.beside)
        return (
            f"header drips {len(self.head_s)}: last closed after {max(self.head_s):.1f} s; "
            f"body drips {len(self.body_s)}: after {max(self.body_s):.1f} s; "
            f"beside them {len(self.beside)} requests, {lost} failed"
        )


def raise_file_limit() -> None:
    """Both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


async def run(count: int, directory: Path, **options: float) -> Drips:
    """`count` drips of each kind; `options` as of the proxy."""
    found = Drips()
    async with rig(directory / "log", OPTIONS | options) as (proxy, _):
        port = int(proxy.server.url.rpartition(":")[2])
        healthy = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(_beside(proxy, found, healthy))
            async with asyncio.TaskGroup() as drips:
                for _ in range(count):
                    await spend(SPREAD_S)  # in another phase of the tick each
                    drips.create_task(_drip(port, HEAD, found.head_s))
                    drips.create_task(_drip(port, BODY_HEAD, found.body_s))
            healthy.set()
            await beside
        await proxy.at_rest()
    return found


async def _beside(proxy: ServedProxy, found: Drips, over: asyncio.Event) -> None:
    body = orjson.dumps(chat("hi", stream=False, max_tokens=2))
    while not await is_set_within(over, 0.05):
        found.beside.append((await proxy.post(body)).status)


async def _drip(port: int, head: bytes, took_s: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    writer.write(head)
    closed = asyncio.ensure_future(reader.read())
    while not closed.done() and loop.time() - began_s < TOO_LONG_S:
        await asyncio.wait([closed], timeout=DRIP_S)
        if not closed.done() and not writer.is_closing():
            writer.write(b"X")
    took_s.append(loop.time() - began_s)
    closed.cancel()
    await asyncio.gather(closed, return_exceptions=True)
    writer.close()
