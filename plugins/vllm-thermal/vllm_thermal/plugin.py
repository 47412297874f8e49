"""The plugin's two ends in vLLM: methods of the engine, and a path of its API server.

`register` is called in every process of vLLM; the path exists where VLLM_PLUGINS names `thermal`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from vllm_thermal.control import WishError
from vllm_thermal.endpoint import METHODS, MOST_BODY_BYTES, PATH, Call, Door, answered, error


def register() -> None:
    """Add `thermal_set` and `thermal_get` to the engine: a message to it names a method."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.thermal_set = _thermal_set
    EngineCore.thermal_get = _thermal_get


def _thermal_set(core: Any, body: Any) -> dict[str, Any]:
    """In the engine. A refusal is an answer: vLLM logs what is raised as the engine's fault."""
    if not hasattr(core.scheduler, "thermal_set"):
        return _NO_SCHEDULER
    try:
        return dict(core.scheduler.thermal_set(body))
    except WishError as why:
        return {"refused": 400, "why": str(why)}


def _thermal_get(core: Any) -> dict[str, Any]:
    if not hasattr(core.scheduler, "thermal_get"):
        return _NO_SCHEDULER
    return dict(core.scheduler.thermal_get())


_NO_SCHEDULER = {
    "refused": 501,
    "why": "the engine runs without --scheduler-cls vllm_thermal.scheduler.ThermalScheduler",
}


class ThermalEndpoint:
    """What vLLM 0.26 and newer load by the entry point `vllm.endpoint_plugins`."""

    name = "thermal"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add the path; raises AccessError, which ends the server's start."""
        from starlette.routing import Route

        path = _Path(Door(os.environ))
        app.router.routes.append(Route(PATH, path.answer, methods=list(METHODS)))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Nothing: a request finds the engine in the app's state."""


Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class ThermalMiddleware:
    """The same for older ones: `--middleware vllm_thermal.plugin.ThermalMiddleware`."""

    def __init__(self, app: Asgi) -> None:
        self._app = app
        self._path = _Path(Door(os.environ))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer requests of the path; pass on all others."""
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        if scope["method"] in METHODS:
            response = await self._path.answer(Request(scope, receive))
        else:
            response = PlainTextResponse("GET or PUT", 405, {"Allow": ", ".join(METHODS)})
        await response(scope, receive, send)


class _Path:
    """The path's handler."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def answer(self, request: Any) -> Any:
        """The response to a request; its body is read once it is let in."""
        from starlette.responses import JSONResponse

        if not self._door.lets_in(request.headers.get("authorization", "")):
            status, answer = error(401, "the token is missing or wrong: Authorization: Bearer")
            return JSONResponse(answer, status, {"WWW-Authenticate": "Bearer"})
        status, answer = await answered(_engines(request), request.method, await _body(request))
        return JSONResponse(answer, status)


async def _body(request: Any) -> bytes:
    """The body, or as much of it as shows that it is too long."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BODY_BYTES:
            break
    return body


def _engines(request: Any) -> Call:
    """How to call every engine behind this server."""
    client = getattr(request.app.state, "engine_client", None)
    core = getattr(client, "engine_core", None)

    async def call(method: str, *arguments: Any) -> list[dict[str, Any]]:
        if core is None:
            return [{"refused": 503, "why": "this server has no engine"}]
        if hasattr(core, "call_utility_all_async"):
            return list(await core.call_utility_all_async(method, *arguments))
        return [await core.call_utility_async(method, *arguments)]

    return call
