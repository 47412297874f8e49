"""The engines' request log: one JSON line per request, with tokens computed, hit and transferred.

A prefill leg's line is written when its KV has been pulled or has timed out, so that `sent_tokens`
is final. Lines are collected on the event loop and written by a thread.
"""

import asyncio
from pathlib import Path
from typing import Any

import orjson

from replayer.engine.types import SimRequest
from replayer.simulator.driver import EngineDriver

_FLUSH_S = 0.2


def record(engine: str, driver: EngineDriver, request: SimRequest) -> dict[str, Any]:
    """Describe a request: lengths in tokens, times in unix seconds (None: did not happen)."""

    def unix_s(engine_s: float | None) -> float | None:
        return None if engine_s is None else round(driver.unix_s(engine_s), 6)

    return {
        "request_id": request.job.request_id,
        "engine": engine,
        "transfer_id": request.job.send_as or (request.job.fetch and request.job.fetch.transfer_id),
        "prompt_tokens": request.job.prompt_tokens,
        "local_hit_tokens": request.local_hit_tokens,
        "external_tokens": request.external_tokens,
        "computed_tokens": request.prompt_computed_tokens
        if request.first_token_s is not None
        else 0,
        "sent_tokens": request.sent_tokens,
        "output_tokens": request.output_tokens,
        "preemptions": request.preemptions,
        "finish_reason": request.finish_reason,
        "t_arrived": unix_s(request.arrived_s),
        "t_scheduled": unix_s(request.scheduled_s),
        "t_first_token": unix_s(request.first_token_s),
        "t_done": unix_s(request.finished_s),
    }


class EngineRequestLog:
    """Appends records to one file; engines of a process share it."""

    def __init__(self, path: Path) -> None:
        _append(path, b"")  # A path that cannot be written fails at the start.
        self._path = path
        self._lines: list[bytes] = []
        self._stop = asyncio.Event()

    def add(self, entry: dict[str, Any]) -> None:
        """Queue one record."""
        self._lines.append(orjson.dumps(entry) + b"\n")

    def stop(self) -> None:
        """Make `run` write the queued records and return."""
        self._stop.set()

    async def run(self) -> None:
        """Write queued records every 0.2 s until stopped."""
        stopped = False
        while not stopped:
            try:
                async with asyncio.timeout(_FLUSH_S):
                    await self._stop.wait()
                stopped = True
            except TimeoutError:
                stopped = False
            lines, self._lines = self._lines, []
            if lines:
                await asyncio.to_thread(_append, self._path, b"".join(lines))


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
