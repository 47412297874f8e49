"""An engine that says of itself what a test wants it to: models, metrics, sleep, late health."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Self

import orjson
from aiohttp import web

from tests.support.harness import event

LATE_S = 30.0
"""Longer than any test waits for an answer."""


Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


def card(model: str, length: int | None = 131_072, **more: object) -> dict[str, object]:
    return {"id": model, "object": "model", "root": model, "max_model_len": length} | more


def _hi(body: Any) -> web.Response:
    """Of any API, in one piece or as a stream, as it was asked."""
    model = body.get("model")
    if not body.get("stream"):
        text = [{"type": "text", "text": "hi there"}]
        choices = [{"message": {"content": "hi there"}}]
        return web.json_response(
            {"model": model, "choices": choices, "content": text, "output": text}
        )
    delta = {"model": model, "choices": [{"index": 0, "delta": {"content": "hi there"}}]}
    events = b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(delta)
    return web.Response(body=events, content_type="text/event-stream")


def endless(piece: bytes, status: int = 200, first: bytes = b"") -> Route:
    """A route whose answer has no end."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        await response.write(first)
        with suppress(ConnectionError):
            while True:
                await response.write(piece)
        return response

    return answer


class ToldEngine:
    """`asked`: path, parsed body and headers of every request but probes, in their order."""

    def __init__(self, *models: str, cards: list[dict[str, object]] | None = None) -> None:
        self.cards = [card(model) for model in models or ("m",)] if cards is None else cards
        self.is_late = False
        self.is_stuck = False
        self.sleep_state: str | None = None
        """Its metrics' state; None: they tell none."""
        self.flags: dict[str, bool] = {}
        """Answers of its routes `is_sleeping` and `is_paused`; others are not there."""
        self.routes: dict[str, Route] = {}
        """Of paths that a test answers itself."""
        self.start_s = 1000.0
        self.answer: Callable[[Any], web.Response] = _hi
        self.streams: list[asyncio.Queue[str | None]] = []
        """Of each stream under way: its next words; None ends it."""
        self.asked: list[tuple[str, Any]] = []
        self.flags_asked: list[str] = []
        self.port = 0
        self._freed = asyncio.Event()
        self._runner: web.AppRunner

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._freed.set()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metrics(self) -> str:
        lines = [f"process_start_time_seconds {self.start_s}"]
        if self.sleep_state is not None:
            lines += [
                f'vllm:engine_sleep_state{{engine="0",sleep_state="{state}"}} '
                f"{int(state == self.sleep_state)}"
                for state in ("awake", "weights_offloaded", "discard_all")
            ]
        return "\n".join([*lines, ""])

    def free(self) -> None:
        """Have what hangs go on."""
        self.is_stuck = self.is_late = False
        self._freed.set()

    async def _hang(self) -> None:
        async with asyncio.timeout(LATE_S):
            await self._freed.wait()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if (route := self.routes.get(request.path)) is not None:
            return await route(request)
        name = request.path.removeprefix("/")
        if name == "health":
            if self.is_late:
                await self._hang()
            return web.Response()
        if name == "metrics":
            return web.Response(text=self.metrics())
        told: dict[str, object] = {
            "v1/models": {"object": "list", "data": self.cards},
            "version": {"version": str(self.port)},
        }
        if name in ("is_sleeping", "is_paused"):
            self.flags_asked.append(name)
            told |= {flag: {flag: value} for flag, value in self.flags.items()}
        if name in told:
            return web.json_response(told[name])
        if request.method == "GET":
            return web.json_response({"detail": "Not Found"}, status=404)
        return await self.answered(request)

    async def answered(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        is_json = request.content_type == "application/json"
        body = orjson.loads(raw) if raw and is_json else raw
        self.asked.append((request.path, body))
        if self.is_stuck:
            await self._hang()
        if not (isinstance(body, dict) and body.get("stream")):
            return self.answer(body)
        words: asyncio.Queue[str | None] = asyncio.Queue()
        self.streams.append(words)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event("first"))
        while (word := await words.get()) is not None:
            await response.write(event(word))
        await response.write(b"data: [DONE]\n\n")
        return response
