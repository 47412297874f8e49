"""The planner's own listener: decisions for other orchestrators, floors, metrics, the report."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from planner.config.plugins import PluginSpec, plugin_of
from planner.plugin_api.external import LEASE_S, RefusedError
from planner.run import Planner
from planner.scalers.base import Scaler
from planner.scalers.virtual import UnknownDecisionError, VirtualScaler
from proxy.config.secrets import SecretStr
from proxy.net.server.origin import foreign_origin, forged_host

POLL_S = 30.0
"""A poll for the next decision is answered by then."""
MOST_BODY = 1 << 16
MOST_REPLICAS = 10**5
NOT_KEPT = "the state file cannot be written; see the planner's log"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(planner: Planner, scaler: Scaler, token: SecretStr | None) -> web.Application:
    """The listener's paths. With a token all but `/live` need it."""
    told = _Control(planner, scaler if isinstance(scaler, VirtualScaler) else None)
    app = web.Application(client_max_size=MOST_BODY, middlewares=[_access(token), _one_line])
    app.add_routes(
        [
            web.get("/live", told.live),
            web.get("/metrics", told.metrics),
            web.get("/report", told.report),
            web.get("/v1/planner/decision", told.decision),
            web.post("/v1/planner/complete", told.complete),
            web.get("/v1/min-endpoints", told.floors),
            web.patch("/v1/min-endpoints", told.set_floors),
            web.get("/v1/planner/plugins", told.plugins),
            web.put("/v1/planner/plugins/{name}", told.register),
            web.delete("/v1/planner/plugins/{name}", told.unregister),
        ]
    )
    return app


class _BadInputError(Exception):
    """A request that cannot be used: its status and a line that says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Control:
    def __init__(self, planner: Planner, virtual: VirtualScaler | None) -> None:
        self._planner, self._virtual = planner, virtual
        self._reporting = asyncio.Lock()

    async def live(self, request: web.Request) -> web.Response:
        """Answer 200 while the process runs."""
        del request
        return _json({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        """The metrics, for Prometheus."""
        del request
        text = self._planner.metrics.text()
        return web.Response(body=text, content_type="text/plain", charset="utf-8")

    async def report(self, request: web.Request) -> web.Response:
        """The report of the ticks so far; one is made at a time, beside the loop."""
        del request
        async with self._reporting:
            page = await asyncio.to_thread(self._planner.page)
        return web.Response(text=page, content_type="text/html", charset="utf-8")

    async def decision(self, request: web.Request) -> web.Response:
        """The current decision once its id is larger than ?after=; 204 where there is none yet."""
        virtual = self._of_virtual()
        text = request.query.get("after", "-1")
        if not text.removeprefix("-").isdecimal() or len(text) > 12 or int(text) < -1:
            raise _BadInputError(400, "after: a whole number, -1 or more")
        found = await virtual.after(int(text), POLL_S)
        return web.Response(status=204) if found is None else _json(asdict(found))

    async def complete(self, request: web.Request) -> web.Response:
        """Take the current decision for carried out; kept before it is answered."""
        virtual = self._of_virtual()
        body = await _object(request, {"decision_id", "ok", "observed"})
        decision_id = body.get("decision_id")
        if not isinstance(decision_id, int) or isinstance(decision_id, bool):
            raise _BadInputError(422, "decision_id: a whole number")
        if body.get("ok", True) is not True:
            raise _BadInputError(422, "ok: true; a decision that failed is not complete")
        try:
            virtual.acknowledge(decision_id)
        except UnknownDecisionError as error:
            raise _BadInputError(409, str(error)) from error
        if not self._planner.save():
            raise _BadInputError(503, NOT_KEPT)
        return _json({"decision_id": decision_id})

    async def floors(self, request: web.Request) -> web.Response:
        """Fewest replicas by component."""
        del request
        return _json(self._planner.floors)

    async def set_floors(self, request: web.Request) -> web.Response:
        """Set fewest replicas; all of them, or none where one is wrong."""
        floors = self._planner.floors
        body = await _object(request, set(floors))
        if not body:
            raise _BadInputError(400, f"an object of {', '.join(floors)}")
        for name, count in body.items():
            is_whole = isinstance(count, int) and not isinstance(count, bool)
            most = min(MOST_REPLICAS, self._planner.most_replicas(name))
            if not is_whole or not 1 <= count <= most:
                raise _BadInputError(422, f"{name}: a whole number, 1 to {most}")
        before = dict(floors)
        floors.update(body)
        if not self._planner.save():
            floors.update(before)
            raise _BadInputError(503, NOT_KEPT)
        return _json(floors)

    async def plugins(self, request: web.Request) -> web.Response:
        """The plugins of other processes."""
        del request
        return _json(self._planner.externals.shown())

    async def register(self, request: web.Request) -> web.Response:
        """Take a plugin on, or for a while longer: it says so again before the time is over."""
        self._check_registration()
        body = await _object(request, set(PluginSpec.model_fields) - {"name"})
        if str(body.get("token", "")).startswith("@"):
            raise _BadInputError(422, "token: the text itself, and no file")
        try:
            spec = plugin_of({**body, "name": request.match_info["name"]}, self._planner.tick_s)
            self._planner.externals.register(spec)
        except ValueError as error:
            raise _BadInputError(422, str(error)) from error
        except RefusedError as error:
            raise _BadInputError(409, str(error)) from error
        return _json({"lease_seconds": LEASE_S})

    async def unregister(self, request: web.Request) -> web.Response:
        """Let a plugin go that has registered itself."""
        self._check_registration()
        if not self._planner.externals.unregister(request.match_info["name"]):
            raise _BadInputError(404, "no plugin has registered itself by that name")
        return web.Response(status=204)

    def _check_registration(self) -> None:
        if not self._planner.takes_plugins:
            raise _BadInputError(403, "plugin_registration is off")

    def _of_virtual(self) -> VirtualScaler:
        if self._virtual is None:
            raise _BadInputError(404, "decisions are published with the scaler virtual alone")
        return self._virtual


async def _object(request: web.Request, known: set[str]) -> dict[str, Any]:
    """The members of a small JSON object, all of them known.

    A browser sends one of another content type to another site without asking first.
    """
    if request.content_type != "application/json":
        raise _BadInputError(415, "Content-Type must be application/json")
    try:
        async with asyncio.timeout(POLL_S):
            body = orjson.loads(await request.read() or b"null")
    except TimeoutError:
        raise _BadInputError(408, f"the body did not come within {POLL_S:g} s") from None
    except ValueError as error:
        raise _BadInputError(400, "the body is not JSON") from error
    if not isinstance(body, dict):
        raise _BadInputError(400, "the body is not an object")
    if unknown := sorted(body.keys() - known):
        raise _BadInputError(400, f"{unknown[0][:64]!r} is not known; there are {sorted(known)}")
    return body


def _json(document: Any, status: int = 200) -> web.Response:
    body = orjson.dumps(document)
    return web.Response(body=body, status=status, content_type="application/json")


def _access(token: SecretStr | None) -> Any:
    """Let in whoever has the token; without one, nobody whom a foreign web page can send."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        why = foreign_origin(request)
        if why is None and token is None:
            why = forged_host(request, (), "control_token")
        if why is not None:
            return _json({"error": why}, 403)
        if token is not None and request.path != "/live":
            sent = request.headers.get("Authorization", "").encode(errors="replace")
            wanted = f"Bearer {token.get_secret_value()}".encode()
            if not hmac.compare_digest(sent, wanted):
                return _json({"error": "the token is missing or wrong"}, 401)
        return await handler(request)

    return checked


@web.middleware
async def _one_line(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _BadInputError as error:
        return _json({"error": str(error)}, error.status)
    except web.HTTPException as error:
        return _json({"error": error.reason}, error.status)
