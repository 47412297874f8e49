"""Answers and error events that the proxy makes itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

import orjson
from aiohttp import web
from multidict import CIMultiDict, istr

from proxy.core.admission.retry_after import milliseconds
from proxy.core.fleet.retries import busy_s
from proxy.core.types import FailureKind, Outcome, Reject, RejectReason
from proxy.protocol.endpoints import Dialect, dialect_of
from proxy.protocol.errors import (
    BadRequestError,
    BadUpstreamError,
    NoRoomError,
    ProxyError,
    UpstreamFailure,
    UpstreamLostError,
    UpstreamTimeoutError,
    error_body,
    messages_error,
    openai_error,
    overloaded,
)
from proxy.protocol.headers import NOSNIFF
from proxy.protocol.streams.sse import object_of

BUSY_MESSAGE = "Service temporarily unavailable: All workers are busy, please retry later"
NO_INSTANCE_MESSAGE = "Service temporarily unavailable: no instance is up"
ASLEEP_MESSAGE = (
    "Service temporarily unavailable: every instance that could serve it is asleep or paused"
)
HOLDER_DOWN_MESSAGE = (
    "Service temporarily unavailable: the instance that holds this response cannot be used now"
)
MESSAGES = {
    RejectReason.NO_INSTANCE: NO_INSTANCE_MESSAGE,
    RejectReason.ASLEEP: ASLEEP_MESSAGE,
    RejectReason.HOLDER_DOWN: HOLDER_DOWN_MESSAGE,
    RejectReason.DRAINING: "Service temporarily unavailable: the proxy is stopping",
    RejectReason.MEMORY: "Service temporarily unavailable: the proxy is short of memory",
}
"""Messages of refusals that are not the instances' overload: always a 503."""
Headers = CIMultiDict[str]
REQUEST_ID = istr("X-Request-Id")
REASON = "X-Cache-Proxy-Reason"
ENGINE_ID_DIGITS = 12
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
SERVER = "cache-proxy"
"""Server header of every answer, so that the libraries in use are not disclosed."""


def _new_ids() -> Iterator[str]:
    """Random ids without a system call for each."""
    while True:
        pool = os.urandom(16 * 256).hex()
        for start in range(0, len(pool), 32):
            yield pool[start : start + 32]


new_id = _new_ids().__next__
"""A request id of ours, 32 hexadecimal digits."""


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own id where it is printable and of sane length, else a new one."""
    given = headers.get(REQUEST_ID)
    return given if given and _REQUEST_ID.fullmatch(given) else new_id()


def engine_id(request_id: str) -> str:
    """The id under which one engine gets a request, or a leg of it: the request's with own digits.

    A client's id is another client's too, by chance or on purpose, and engines abort requests by
    id.
    """
    return f"{request_id}-{new_id()[:ENGINE_ID_DIGITS]}"


def busy(
    path: str, reject: Reject, overload_status: int, headers: Headers, *, says_why: bool = True
) -> web.Response:
    """The answer to a request that no instance can take now, in the form of its path.

    `says_why`: it has the reason, and the check of an instance behind it.
    """
    status = 503 if reject.reason in MESSAGES else overload_status
    message = MESSAGES.get(reject.reason, BUSY_MESSAGE)
    headers["Retry-After"] = str(reject.retry_after_s)
    headers["Retry-After-Ms"] = str(milliseconds(reject))
    is_messages = dialect_of(path) is Dialect.MESSAGES
    body = messages_error(message, status) if is_messages else overloaded(message, status)
    if says_why:
        headers[REASON] = reject.why
        detail = body["error"]
        assert isinstance(detail, dict)
        detail |= {"reason": reject.reason, "check": reject.check}
    return _json(status, body, headers)


def error(path: str, failed: ProxyError, headers: Headers) -> web.Response:
    """An error in the form of its path, under its status."""
    headers.update(failed.fields)
    if failed.retry_after_s is not None:
        headers["Retry-After"] = str(failed.retry_after_s)
    return _json(failed.status, failed.body(dialect_of(path)), headers)


_NO_ANSWER = (
    FailureKind.NO_ROOM,
    FailureKind.MALFORMED,
    FailureKind.REDIRECT,
    FailureKind.HOLLOW,
    FailureKind.KEY_REFUSED,
)


def _unanswered(failure: UpstreamFailure) -> ProxyError:
    """The error of a request that has no answer which may be passed on."""
    if failure.kind is FailureKind.NO_ROOM:
        return NoRoomError(f"no connection to an instance can be made ({failure.detail})")
    if failure.kind in _NO_ANSWER:
        return BadUpstreamError(f"upstream: {failure.detail}")
    if failure.kind in (FailureKind.TIMEOUT, FailureKind.LATE):
        late = f"upstream: {failure.detail} (--{failure.limit}-timeout)"
        return UpstreamTimeoutError(late, code=f"{failure.limit}_timeout")
    return UpstreamLostError(f"upstream: no instance could answer ({failure.detail})")


def refusal(
    path: str, failure: UpstreamFailure, headers: Headers, unix_now_s: float
) -> web.Response:
    """The last instance's own answer if all have failed; raises ProxyError if there is none.

    What is no error of Anthropic's form is put into one where the path is of that API.
    """
    if failure.status is None or failure.kind in _NO_ANSWER:
        raise _unanswered(failure)
    for key in ("Content-Type", "Retry-After"):
        if key in failure.headers:
            headers[key] = failure.headers[key]
    if failure.kind is FailureKind.BUSY:
        headers["Retry-After"] = str(busy_s(failure.headers.get("Retry-After"), unix_now_s))
    headers["Server"] = SERVER
    headers.update(NOSNIFF)
    body = failure.body
    if dialect_of(path) is Dialect.MESSAGES and not _is_of_messages(body):
        headers["Content-Type"] = "application/json"
        body = orjson.dumps(messages_error(_message_in(body, failure.detail), failure.status))
    return web.Response(status=failure.status, body=body, headers=headers)


def _is_of_messages(body: bytes) -> bool:
    told = object_of(body)
    return told.get("type") == "error" and isinstance(told.get("error"), dict)


def _message_in(body: bytes, otherwise: str) -> str:
    """The message of an engine's error in OpenAI's form, or in one like it."""
    told = object_of(body)
    error = told.get("error", told)
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else f"upstream: {otherwise}"


def _json(status: int, body: object, headers: Headers) -> web.Response:
    headers["Content-Type"] = "application/json"
    headers["Server"] = SERVER
    return web.Response(status=status, body=orjson.dumps(body), headers=headers)


_STATUS_OF_OUTCOME = {str(Outcome.UPSTREAM_TIMEOUT): 504, str(Outcome.PROXY_STOPPED): 503}
"""The status that an outcome would have had before the stream began, where it is not a 500."""


def error_event(
    path: str, *, message: str, type_: str, code: str, request_id: str, events: int
) -> bytes:
    """The event that ends a stream of this path early; `events`: how many the client got before."""
    dialect = dialect_of(path)
    error = {**openai_error(message, type_, code), "request_id": request_id}
    if dialect is Dialect.MESSAGES:
        status = _STATUS_OF_OUTCOME.get(type_, 500)
        body = messages_error(message, status, code, request_id)
        return b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"
    if dialect is Dialect.RESPONSES:
        own = {"type": "error", "code": code, "message": message, "param": None}
        whole = own | {"sequence_number": events, "error": error}
        return b"event: error\ndata: " + orjson.dumps(whole) + b"\n\n"
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"


def json_response(body: object, status: int = 200) -> web.Response:
    """A JSON answer, encoded without a detour over str."""
    return web.Response(
        status=status, body=orjson.dumps(body), content_type="application/json", charset="utf-8"
    )


def unavailable(body: object, retry_after_s: float) -> web.Response:
    """A 503 with a JSON body and Retry-After."""
    response = json_response(body, 503)
    response.headers["Retry-After"] = str(round(retry_after_s))
    return response


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None, path: str = ""
) -> web.Response:
    """An error of a request that no instance gets, in the form of its path.

    `headers`: further fields.
    """
    body = error_body(dialect_of(path), status, message, BadRequestError.type)
    response = json_response(body, status)
    response.headers.update(headers or {})
    return response
