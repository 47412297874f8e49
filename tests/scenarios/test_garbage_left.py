"""A request that has failed leaves no reference cycle: it would hold the body until a collection.

Collections are rare, since they hold the event loop, and a body may have 32 MiB.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import pytest

import proxy
from tests.support.harness import (
    DONE,
    STREAM_HEAD,
    RawEngine,
    Script,
    ServedProxy,
    chat,
    chunk,
    event,
    plain,
    resets,
    says,
    stalls,
    until,
    words,
)

OURS = str(Path(proxy.__file__).parent)
ERROR = b'data: {"error":{"message":"x","code":%d}}\n\n'
BUSY = plain(b'{"error":{"message":"busy","code":503}}', "503 Service Unavailable")
ANSWERS: dict[str, Script] = {
    "hollow": says(plain(b"{}")),
    "hollow stream": says(STREAM_HEAD + DONE),
    "error event": says(STREAM_HEAD + chunk(ERROR % 500) + DONE),
    "busy event": says(STREAM_HEAD + chunk(ERROR % 503) + DONE),
    "client error event": says(STREAM_HEAD + chunk(ERROR % 400) + DONE),
    "refused": says(plain(b'{"error":{"message":"no","code":400}}', "400 Bad Request")),
    "too long": says(plain(b'{"error":{"message":"maximum context length"}}', "400 Bad Request")),
    "failed": says(plain(b"oops", "500 Internal Server Error")),
    "busy": says(BUSY),
    "no HTTP": says(b"what?\r\n\r\n", close=True),
    "reset": resets(),
    "cut": resets(STREAM_HEAD + chunk(event("a few words"))),
    "redirection": says(plain(b"", "307 Temporary Redirect", "Location: /x\r\n")),
    "silent": stalls(),
    "silent after an event": stalls(STREAM_HEAD + chunk(event("a few words"))),
}


@contextmanager
def kept() -> Iterator[list[str]]:
    """Where frames of the proxy stand that only a collection would free, once it is over."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        frames = [one for one in gc.garbage if isinstance(one, FrameType)]
        names = [(one.f_code.co_filename, one.f_code.co_qualname) for one in frames]
        found += sorted({f"{path}: {name}" for path, name in names if path.startswith(OURS)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def ask(served: ServedProxy, body: dict[str, Any], number: int) -> None:
    with suppress(aiohttp.ClientError, TimeoutError):
        await served.post(body, headers={"X-Session-ID": f"s{number}"})


OFFLOADS = {"warm_threshold": 10, "heavy_threshold": 20, "offload_policy": "always"}


@pytest.mark.parametrize(
    "options", [{}, {"migration_limit": 2}, OFFLOADS], ids=["plain", "migrates", "offloads"]
)
@pytest.mark.parametrize("way", ANSWERS)
async def test_a_failed_request_is_freed_at_once(
    tmp_path: Path, way: str, options: dict[str, Any]
) -> None:
    limits = {"ttft_timeout": 0.3, "idle_timeout": 0.3, "total_timeout": 2.0}
    async with RawEngine(ANSWERS[way]) as a, RawEngine(ANSWERS[way]) as b:
        given = [f"{n}={e.address};bootstrap={e.address}" for n, e in (("a", a), ("b", b))]
        async with ServedProxy(tmp_path / "log", given, **limits, **options) as served:
            await served.up()
            with kept() as found:
                for number, stream in enumerate((True, False, True)):
                    await ask(served, chat(words(50), stream=stream), number)
                await until(lambda: served.server.state.in_flight.count == 0, "all is over")
    assert not found


@pytest.mark.parametrize("body", [b'{"messages": [' + b'"x",' * 240_000 + b"}", b"[" * 900_000])
async def test_a_large_body_that_is_refused_is_freed_at_once(tmp_path: Path, body: bytes) -> None:
    async with RawEngine() as engine, ServedProxy(tmp_path / "log", [engine.address]) as served:
        await served.up()
        with kept() as found:
            answer = await served.post(body)
            await until(lambda: served.server.state.in_flight.count == 0, "all is over")
    assert answer.status in (400, 413)
    assert not found
