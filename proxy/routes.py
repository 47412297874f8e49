"""Which path leads where, per listener; any other path is a 404, another method of one a 405."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from proxy.admin import Admin
from proxy.departure import closing
from proxy.handler import Exchange
from proxy.net.server.responses import SERVER, error_response
from proxy.operators import Denials, Handler, audited
from proxy.state.proxy_state import Service
from proxy.thresholds import BusyThreshold


def application(service: Service, *, admin: bool = True, public: bool = True) -> web.Application:
    """The routes of one listener. No middleware: every request would pay for it."""
    app = web.Application(client_max_size=service.settings.max_body_bytes)
    app.on_response_prepare.append(_sign)
    app.on_response_prepare.append(closing(service))
    app.add_routes(_probes(service))
    if admin:
        app.add_routes(_admin(service))
    if public:
        app.add_routes(_relayed(service))
    app.add_routes([web.route("*", "/{tail:.*}", _not_found)])
    return app


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    """Routed answers: in aiohttp's name otherwise."""
    del request
    response.headers["Server"] = SERVER


def _probes(service: Service) -> list[web.RouteDef]:
    """What load balancers and Prometheus ask, on every listener."""
    admin = Admin(service)
    rows = (
        ("/live", admin.live),
        ("/ready", admin.ready),
        ("/health", admin.health),
        ("/metrics", admin.metrics),
    )
    looks = [web.get(path, handler) for path, handler in rows]
    return looks + [web.route("*", path, _only(("GET", "HEAD"))) for path, _ in rows]


def _admin(service: Service) -> list[web.RouteDef]:
    """What changes or shows the fleet: for operators, behind the token where there is one."""
    admin, thresholds, denials = Admin(service), BusyThreshold(service), Denials(service)
    rows: dict[str, dict[str, Handler]] = {
        "/instances": {"GET": admin.instances, "POST": admin.add_instance},
        "/instances/{name}": {"DELETE": admin.remove_instance},
        "/sessions/{id}/end": {"POST": admin.end_session},
        "/decisions": {"GET": admin.decisions},
        "/busy_threshold": {
            "GET": thresholds.get,
            "POST": thresholds.post,
            "DELETE": thresholds.delete,
        },
    }
    return [
        web.route(method, path, audited(service, denials, handler))
        for path, handlers in rows.items()
        for method, handler in (handlers | {"*": _only(handlers)}).items()
    ]


def _only(methods: Iterable[str]) -> Handler:
    """For every other method."""
    allowed = ", ".join(methods)

    async def refuse(request: web.Request) -> web.Response:
        message = f"method: {request.method} is not for this path; allowed: {allowed}"
        response = error_response(405, message)
        response.headers["Allow"] = allowed
        return response

    return refuse


def _relayed(service: Service) -> list[web.RouteDef]:
    async def relay(request: web.Request) -> web.StreamResponse:
        return await Exchange(service, request).run()

    return [
        web.get("/v1/models", Admin(service).models),
        web.route("*", "/v1/{tail:.+}", relay),
        web.post("/tokenize", relay),
        web.post("/detokenize", relay),
    ]


async def _not_found(request: web.Request) -> web.Response:
    """An allow-list: an engine's other paths (sleep, reset, abort) are not for clients."""
    del request
    return error_response(404, "no such path, or not with this method")
