"""The answers that the proxy gives itself: busy, an error, or an instance's own refusal."""

from __future__ import annotations

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.core.admission.retry_after import milliseconds
from proxy.core.fleet.retries import busy_s
from proxy.core.types import FailureKind, Reject, RejectReason
from proxy.protocol.errors import (
    BadUpstreamError,
    MethodNotAllowedError,
    NoRoomError,
    ProxyError,
    UpstreamFailure,
    UpstreamLostError,
    UpstreamTimeoutError,
)

BUSY_MESSAGE = "Service temporarily unavailable: All workers are busy, please retry later"
NO_INSTANCE_MESSAGE = "Service temporarily unavailable: no instance is up"
MESSAGES = {
    RejectReason.NO_INSTANCE: NO_INSTANCE_MESSAGE,
    RejectReason.DRAINING: "Service temporarily unavailable: the proxy is stopping",
    RejectReason.MEMORY: "Service temporarily unavailable: the proxy is short of memory",
}
"""What is no overload of the instances, and a 503 whatever the status for that is."""
Headers = CIMultiDict[str]
SERVER = "cache-proxy"
"""Of every answer that is not an instance's: what it is made with is nobody's business."""


def busy(reject: Reject, overload_status: int, headers: Headers) -> web.Response:
    """The busy answer: `message`, `type`, `code`, and an OpenAI error beside them."""
    status = 503 if reject.reason in MESSAGES else overload_status
    message = MESSAGES.get(reject.reason, BUSY_MESSAGE)
    plain = {"message": message, "type": "service_unavailable", "code": status}
    headers["Retry-After"] = str(reject.retry_after_s)
    headers["Retry-After-Ms"] = str(milliseconds(reject))
    return _json(status, {**plain, "error": {**plain, "param": None}}, headers)


def error(failed: ProxyError, headers: Headers) -> web.Response:
    """An OpenAI error object under the error's status."""
    if failed.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(failed, MethodNotAllowedError):
        headers["Allow"] = "POST"
    if failed.retry_after_s is not None:
        headers["Retry-After"] = str(failed.retry_after_s)
    return _json(failed.status, failed.body(), headers)


def refusal(failure: UpstreamFailure, headers: Headers, unix_now_s: float) -> web.Response:
    """Nobody could answer: the last instance's own words; raises ProxyError if it had none."""
    if failure.status is None and failure.kind in (FailureKind.TIMEOUT, FailureKind.LATE):
        late = f"upstream: {failure.detail} (--ttft-timeout)"
        raise UpstreamTimeoutError(late, code="ttft_timeout")
    if failure.kind is FailureKind.NO_ROOM:
        raise NoRoomError(f"no connection to an instance can be made ({failure.detail})")
    if failure.kind is FailureKind.MALFORMED:
        raise BadUpstreamError(f"upstream: {failure.detail}")
    if failure.status is None:
        raise UpstreamLostError(f"upstream: no instance could answer ({failure.detail})")
    for key in ("Content-Type", "Retry-After"):
        if key in failure.headers:
            headers[key] = failure.headers[key]
    if failure.kind is FailureKind.BUSY:
        headers["Retry-After"] = str(busy_s(failure.headers.get("Retry-After"), unix_now_s))
    headers["Server"] = SERVER
    return web.Response(status=failure.status, body=failure.body, headers=headers)


def _json(status: int, body: object, headers: Headers) -> web.Response:
    headers["Content-Type"] = "application/json"
    headers["Server"] = SERVER
    return web.Response(status=status, body=orjson.dumps(body), headers=headers)
