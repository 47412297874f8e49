"""Cross-origin resource sharing: the web origins that may use the API.

A browser asks first (a preflight: OPTIONS, without a key) and shows a page only answers that name
its origin. No cookies are used, so `Access-Control-Allow-Credentials` is never sent, and `*` means
that any page may use the API with a key of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from aiohttp import web

from proxy.net.server.responses import error_response

EXPOSED = (
    "X-Request-Id, X-Cache-Proxy-Instance, X-Cache-Proxy-Route, X-Cache-Proxy-Reason, "
    "Retry-After, Retry-After-Ms"
)
"""Headers of answers that a page may read, beside those that any page may."""
MAX_AGE_S = 3600
"""Time that a browser may cache a preflight's answer."""
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,4096}")
_OFF = "cross-origin requests are refused (--cors-allowed-origins)"
_NOT_AMONG = "the page's origin is not among --cors-allowed-origins"


def fields(origin: str | None, allowed: tuple[str, ...]) -> list[tuple[str, str]]:
    """Header fields of an answer to a page of this origin; at most Vary where it is not allowed.

    `origin` is the request's Origin header, `allowed` the option.
    """
    shared = [("Access-Control-Expose-Headers", EXPOSED)]
    if origin is not None and "*" in allowed:
        return [("Access-Control-Allow-Origin", "*"), *shared]
    # Also without an origin: a cache in between may keep that answer for a page.
    varies = [("Vary", "Origin")] if allowed and "*" not in allowed else []
    if origin is None or not _is_let_in(origin, allowed):
        return varies
    return [("Access-Control-Allow-Origin", origin), *varies, *shared]


def _is_let_in(origin: str | None, allowed: tuple[str, ...]) -> bool:
    return origin is not None and ("*" in allowed or origin.lower() in allowed)


def lines(origin: str | None, allowed: tuple[str, ...]) -> bytes:
    """The headers as lines, each with its end."""
    return "".join(f"{name}: {value}\r\n" for name, value in fields(origin, allowed)).encode()


def preflight(
    request: web.Request, methods: Iterable[str], allowed: tuple[str, ...]
) -> web.Response:
    """The answer to OPTIONS on a path with these methods: 204 to a page that is let in, else 405.

    The headers that the page wants to send are let in as they are: clients have some of their own.
    """
    named = ", ".join(methods)
    origin = request.headers.get("Origin")
    if not _is_let_in(origin, allowed):
        why = _NOT_AMONG if allowed else _OFF
        hint = f"; {why}" if origin is not None else ""
        text = f"method: OPTIONS is not allowed for this path; allowed: {named}{hint}"
        return error_response(405, text, {"Allow": named}, request.path)
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    told = {"Access-Control-Allow-Methods": named, "Access-Control-Max-Age": str(MAX_AGE_S)}
    if _HEADER_NAMES.fullmatch(wanted):
        told["Access-Control-Allow-Headers"] = wanted
    return web.Response(status=204, headers=told)
