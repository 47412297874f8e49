"""A tiny engine for tests: streams numbered words, or misbehaves as the request's model says."""

import asyncio
import threading
from typing import Any

import orjson
from aiohttp import web

from tests.support.told_engine import ToldEngine

BUSY = {
    "message": "Service temporarily unavailable: All workers are busy, please retry later",
    "type": "service_unavailable",
    "code": 503,
    "error": {"message": "busy"},
}


class Engine(ToldEngine):
    """What the server saw, and how it behaves: `plan` maps a trace request id to a behaviour."""

    def __init__(
        self,
        plan: dict[str, str] | None = None,
        rejections: dict[str, int] | None = None,
        refusal: bytes = b"",
        port: int = 0,
    ) -> None:
        super().__init__("tiny")
        self.port = port
        self._plan, self.rejections, self._refusal = plan or {}, rejections or {}, refusal
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.arrived, self.news = asyncio.Event(), threading.Event()

    async def answered(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.seen.append((dict(request.headers), body))
        self.arrived.set()
        self.news.set()
        name = request.headers["X-Request-ID"].rsplit(".", 1)[0]
        behaviour = self._plan.get(name, "ok")
        if behaviour == "busy" or self.rejections.get(name, 0) > 0:
            self.rejections[name] = self.rejections.get(name, 0) - 1
            return web.json_response(BUSY, status=503, headers={"Retry-After": "0.01"})
        if behaviour == "http_error":
            return web.json_response({"error": {"message": "broken"}}, status=500)
        if behaviour == "refuse":
            return web.Response(body=self._refusal, status=404)
        if behaviour == "unavailable":
            return web.json_response({"error": {"message": "no instance"}}, status=503)
        if behaviour == "hang":
            await asyncio.Event().wait()
        if behaviour == "close_before":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return await self._stream(request, body, behaviour)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], behaviour: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Cache-Proxy-Route": "WARM"}
        )
        await response.prepare(request)
        chat = "messages" in body
        text = orjson.dumps(body.get("messages") or body.get("prompt")).decode()
        words = len(text.split())
        if chat:
            await response.write(event({"delta": {"role": "assistant", "content": ""}}))
        for index in range(body["max_tokens"]):
            piece = f"w{words + index} "
            said: dict[str, Any] = {"delta": {"content": piece}} if chat else {"text": piece}
            await response.write(event(said | {"finish_reason": None}))
            if behaviour == "close_mid":
                assert request.transport is not None
                request.transport.abort()
                return response
        if behaviour == "odd_event":
            await response.write(sse({"choices": [], "usage": {"completion_tokens": "x"}}))
            return response
        if behaviour == "error_event":
            await response.write(b'data: {"error":{"message":"engine died"}}\n\n')
            return response
        if behaviour != "truncated":
            choice: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            await response.write(event(choice | {"finish_reason": "length"}))
            usage = {
                "prompt_tokens": words,
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 16},
            }
            await response.write(sse({"choices": [], "usage": usage}))
            await response.write(b"data: [DONE]\n\n")
        return response


def event(choice: dict[str, Any]) -> bytes:
    return sse({"choices": [{"index": 0, **choice}]})


def sse(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
