"""Access to admin paths: the token, cross-origin requests, the limit on bodies, the audit line."""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable
from hmac import compare_digest

import orjson
from aiohttp import web

from proxy.config.in_force import OptionsInForce
from proxy.config.options import Settings
from proxy.net.server.origin import foreign_origin, forged_host
from proxy.net.server.responses import error_response
from proxy.net.timeouts import Clock, Limit
from proxy.telemetry.log import Throttle

NO_QUESTION = frozenset({"text/plain", "multipart/form-data", "application/x-www-form-urlencoded"})
"""Content types that a browser sends to another site without asking first."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY_BYTES = 64 << 10
BASIC = 'Basic realm="cache-proxy: any name, the admin token as the password", charset="UTF-8"'
_BASIC = b"basic "
_REPLACED = "a hot restart is under way: ask again, on a new connection"
_NO_JSON = "Content-Type must be application/json"
_OVER = f"body over {BODY_BYTES} bytes"
_log = logging.getLogger(__name__)


class Denials:
    """Requests with a wrong token: counted by `on_denied`, and logged in throttled lines."""

    def __init__(self, clock: Clock, on_denied: Callable[[], None]) -> None:
        self._clock, self._on_denied = clock, on_denied
        self._throttle = Throttle()

    def note(self, request: web.Request) -> None:
        """Count one denied request."""
        self._on_denied()
        suppressed = self._throttle.turn(None, self._clock.now_s())
        if suppressed is not None:
            _log.warning("admin: %d denied, the last from %s", suppressed + 1, request.remote)


def audited(
    options: OptionsInForce,
    denials: Denials,
    is_replaced: Callable[[], bool],
    handler: Handler,
    *,
    is_page: bool = False,
) -> Handler:
    """The handler behind the admin token, which is compared in constant time.

    Every request but a GET is logged, and refused while another process takes over
    (`is_replaced`): it has a copy of what was ordered before. `is_page`: browsers look at it, and
    may give the token as the password of HTTP Basic. A browser adds that to requests that another
    site has it send, so no other path takes it.
    """
    challenge = BASIC if is_page else "Bearer"

    async def checked(request: web.Request) -> web.StreamResponse:
        response: web.StreamResponse
        if (why := _is_foreign(request, options.settings)) is not None:
            denials.note(request)
            response = error_response(403, why)
        elif not _may(request, options, is_page=is_page):
            denials.note(request)
            response = error_response(401, "Authorization: Bearer with the admin token is needed")
            response.headers["WWW-Authenticate"] = challenge
        else:
            return await answered(request)
        return response

    async def answered(request: web.Request) -> web.StreamResponse:
        response = await _carried_out(request, handler, is_replaced)
        if request.method != "GET":
            what = f"{request.method} {request.raw_path.partition('?')[0]}"[:200]
            _log.info("admin: %s from %s: %d", what, request.remote, response.status)
        return response

    return checked


async def _carried_out(
    request: web.Request, handler: Handler, is_replaced: Callable[[], bool]
) -> web.StreamResponse:
    """The handler's answer. An order is refused that a hot restart's copy may not have."""
    is_order = request.method not in ("GET", "HEAD")
    if is_order and is_replaced():
        return _replaced()
    try:
        response = await handler(request)
    except BodyError as error:
        return error_response(error.status, str(error))
    if is_order and response.status < 400 and is_replaced():
        return _replaced()  # the copy was made while its body came, or its address was looked up
    return response


def _replaced() -> web.Response:
    return error_response(503, _REPLACED, {"Retry-After": "1"})


def _may(request: web.Request, options: OptionsInForce, *, is_page: bool) -> bool:
    token = options.settings.admin_token
    if token is None:
        return True
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    wanted = token.get_secret_value().encode()
    if is_page and given[: len(_BASIC)].lower() == _BASIC:
        return compare_digest(_password(given), wanted)
    return compare_digest(given, b"Bearer " + wanted)


def _password(given: bytes) -> bytes:
    """The password of HTTP Basic, whatever the user's name is; empty where there is none."""
    try:
        return b64decode(given[len(_BASIC) :], validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _is_foreign(request: web.Request, settings: Settings) -> str | None:
    """Why a request may be that of a web page of somebody else; None where it cannot be."""
    if (why := foreign_origin(request)) is not None:
        return why
    if settings.admin_token or settings.tls_client_ca or settings.tls_cert:
        return None
    return forged_host(request, (settings.host, settings.admin_host), "--admin-token")


def refuse_unasked(request: web.Request) -> None:
    """Raise BodyError for a POST without a body that any web page may have a browser send.

    Those with a body need JSON (`small_object`).
    """
    if request.headers.get("Content-Type") and request.content_type in NO_QUESTION:
        raise BodyError(415, _NO_JSON)


class BodyError(Exception):
    """The body of a request to an admin path is wrong; the request has changed nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def small_object(request: web.Request, seconds: float) -> dict[str, object]:
    """The JSON object of a body of at most `BODY_BYTES`; raises BodyError.

    The content type must be JSON. A browser sends it to another site only after a preflight
    request, so a web page cannot make an operator's browser send a valid request.
    """
    if request.content_type != "application/json":
        raise BodyError(415, _NO_JSON)
    try:
        body = orjson.loads(await _small_body(request, seconds))
    except orjson.JSONDecodeError as error:
        raise BodyError(400, f"body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BodyError(422, "body must be an object")
    return body


async def _small_body(request: web.Request, seconds: float) -> bytes:
    """The body; raises BodyError at the latest with the piece that exceeds `BODY_BYTES`."""
    if (request.content_length or 0) > BODY_BYTES:
        raise BodyError(413, _OVER)
    data = b""
    try:
        with Limit(seconds):
            async for piece in request.content.iter_any():
                data += piece
                if len(data) > BODY_BYTES:
                    raise BodyError(413, _OVER)
    except TimeoutError as error:
        raise BodyError(408, f"body not complete in {seconds:g} s") from error
    return data
