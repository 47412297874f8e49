"""Checks an answer's status and first event: pass it on, or retry unseen by the client."""

from __future__ import annotations

import re
from typing import Any

from proxy.core.types import FailureKind
from proxy.net.upstream.response import HOLD_BYTES, UpstreamResponse
from proxy.protocol.endpoints import OTHER, Endpoint
from proxy.protocol.errors import STATUS_OF_KIND, UpstreamFailure
from proxy.protocol.streams.hollow import why_hollow, why_hollow_stream
from proxy.protocol.streams.sse import (
    CARRY_BYTES,
    FirstEvent,
    first_event,
    is_error_event,
    object_of,
)

BUSY_STATUSES = frozenset({429, 503, 529})
KEY_STATUSES = frozenset({401, 403})
ERROR_BODY_BYTES = 65536
A_HOLLOW = "a hollow answer: "
"""Begins the detail of a hollow answer; why it is hollow follows."""
_OK, _REDIRECTIONS, _NOT_MODIFIED, _NOT_FOUND = 200, 300, 304, 404
_UNASKED, _NO_STREAM = "it is a stream, which was not asked for", "a stream was asked for"
TOO_LONG_STATUSES = frozenset({400, 413, 422})
_TOO_LONG = re.compile(
    rb"context[ _](?:length|size|window)|max_model_len|maximum model length|input_tokens|"
    rb"prompt is too long",
    re.IGNORECASE,
)
"""Words of vLLM, SGLang, llama.cpp and others on a prompt or an output that is too long."""
_ANSWERS = frozenset({501, 505})
"""Server errors that are answers: any other instance would give the same."""


def is_plainly_good(reply: UpstreamResponse) -> bool:
    """Whether no further check is needed: a success that is not a stream."""
    return reply.status < 300 and not reply.is_stream


async def look_at(
    reply: UpstreamResponse, most_bytes: int = CARRY_BYTES, *, needs_event: bool = True
) -> None:
    """Check an answer's status and first event; raises UpstreamFailure if it is to be replaced.

    A first event of more than `most_bytes` is not waited for. `needs_event`: a stream without any
    is broken.
    """
    await _look_at_status(reply)
    if not reply.is_stream:
        return
    search, event, size, known = FirstEvent(), None, 0, 0
    while True:
        new = b"".join(reply.body[known:])
        size, known = size + len(new), len(reply.body)
        event = search.feed(new)
        if event is not None or size >= most_bytes:
            break
        if not await reply.more():
            if not needs_event:
                return
            raise UpstreamFailure(FailureKind.RESET, "the stream ended before its first event")
    if event is not None and is_error_event(event):
        failure = in_band_error(event)
        if failure.kind is FailureKind.BUSY or (failure.status or 0) >= 500:
            raise failure.again()  # a client error is the answer


def hollow(
    row: Endpoint,
    reply: UpstreamResponse,
    *,
    has_key: bool,
    may_move: bool = False,
    streams: bool | None = None,
) -> UpstreamFailure | None:
    """Why an answer that has begun is hollow; None where it may be of use.

    `has_key`: the instance was sent the proxy's own key; `may_move`: a stream may migrate.
    `streams`: whether a stream was asked for; None: it does not matter.
    """
    status = reply.status
    if status != _OK:
        return _other_status(row, status, has_key=has_key)
    if row.teaches and streams is not None and streams is not reply.is_stream:
        why: str | None = _UNASKED if reply.is_stream else _NO_STREAM
    elif reply.head.is_packed or reply.held_bytes > HOLD_BYTES or row is OTHER:
        return None
    elif reply.is_stream:
        body = b"".join(reply.body)
        if b"error" in body and begins_with_error(reply):
            failure = in_band_error(first_event(body) or b"")
            return UpstreamFailure(FailureKind.HOLLOW, failure.detail, status=failure.status)
        is_whole = reply.is_over and reply.failure is None
        why = why_hollow_stream(row.dialect, body, is_over=is_whole, may_move=may_move)
    else:
        why = _why_whole(row, reply)
    if why is None:
        return None
    return UpstreamFailure(FailureKind.HOLLOW, f"{A_HOLLOW}{why}", status=status)


def _other_status(row: Endpoint, status: int, *, has_key: bool) -> UpstreamFailure | None:
    """A refusal, or a success that no client can be the cause of: engines answer with 200."""
    if status >= 400:
        refused = has_key and status in KEY_STATUSES
        kind = FailureKind.KEY_REFUSED if refused else FailureKind.HOLLOW
        own = " to the proxy's own key" if refused else ""
        return UpstreamFailure(kind, f"status {status}{own}", status=status)
    if not row.is_posted:
        return None
    detail = f"status {status}, which is no answer of this path"
    return UpstreamFailure(FailureKind.HOLLOW, detail, status=status)


def _why_whole(row: Endpoint, reply: UpstreamResponse) -> str | None:
    is_whole = reply.is_over and reply.failure is None
    return why_hollow(row, reply.head.kind, b"".join(reply.body)) if is_whole else None


def is_refusal(hollow: UpstreamFailure) -> bool:
    """Whether a hollow answer is a client's error, so that it may be right."""
    is_success = hollow.status is not None and hollow.status < _REDIRECTIONS
    return hollow.kind is FailureKind.HOLLOW and not is_success


def begins_with_error(reply: UpstreamResponse) -> bool:
    """Whether a stream that was looked at begins with an error event: the client's, as it is."""
    event = first_event(b"".join(reply.body)) if reply.is_stream else None
    return event is not None and is_error_event(event)


async def _look_at_status(reply: UpstreamResponse) -> None:
    status = reply.status
    if status in BUSY_STATUSES or (status >= 500 and status not in _ANSWERS):
        raise await _refusal(reply)
    if 300 <= status < 400 and status != _NOT_MODIFIED:
        detail = f"the engine redirects this path (status {status}), which is not followed"
        raise UpstreamFailure(FailureKind.REDIRECT, detail, status=status)
    if status == _NOT_FOUND:
        await _look_for_model(reply)


async def look_for_length(reply: UpstreamResponse) -> None:
    """Raise UpstreamFailure if a client's error seems to say that the context is too short."""
    body = await reply.read(ERROR_BODY_BYTES)
    if _TOO_LONG.search(body) is not None:
        raise UpstreamFailure(
            FailureKind.TOO_LONG,
            "it reports that its context is too short",
            status=reply.status,
            body=body,
            headers=_headers(reply),
        )


async def _look_for_model(reply: UpstreamResponse) -> None:
    """Raise UpstreamFailure if a 404 seems to deny the model; any other 404 is passed on.

    Its words may be the client's: engines quote what they do not know, such as a response's id.
    """
    body = await reply.read(ERROR_BODY_BYTES)
    if b"model" in body and b"does not exist" in body:
        raise UpstreamFailure(
            FailureKind.NO_MODEL,
            "it reports that it does not serve the model",
            status=reply.status,
            body=body,
            headers=_headers(reply),
        )


async def _refusal(reply: UpstreamResponse) -> UpstreamFailure:
    kind = FailureKind.BUSY if reply.status in BUSY_STATUSES else FailureKind.SERVER_ERROR
    try:
        body = await reply.read(ERROR_BODY_BYTES)
    except UpstreamFailure:
        body = b""
    return UpstreamFailure(
        kind,
        f"status {reply.status}",
        status=reply.status,
        body=body,
        headers=_headers(reply),
    )


def _headers(reply: UpstreamResponse) -> dict[str, str]:
    names = ((b"content-type", "Content-Type"), (b"retry-after", "Retry-After"))
    found = ((shown, reply.header(name)) for name, shown in names)
    return {shown: value.decode("latin-1") for shown, value in found if value is not None}


def in_band_error(event: bytes) -> UpstreamFailure:
    """An engine's error event in a 200; before any content it counts like an error status."""
    body = event[event.find(b"{") :]
    status = _status_of(_error_in(body))
    kind = FailureKind.BUSY if status in BUSY_STATUSES else FailureKind.SERVER_ERROR
    headers = {"Content-Type": "application/json"}
    detail = f"error event (code {status})"
    return UpstreamFailure(kind, detail, status=status, body=body, headers=headers)


def _error_in(body: bytes) -> dict[str, Any]:
    """The error object of an event: OpenAI's, Anthropic's, or one of the Responses API."""
    told = object_of(body)
    failed = told.get("response")
    inner = failed.get("error") if isinstance(failed, dict) else told.get("error")
    return inner if isinstance(inner, dict) else told


def _status_of(error: dict[str, Any]) -> int:
    """The status that an error's code or name stands for; 500 where neither is known."""
    code = error.get("code")
    if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600:
        return code
    named = [STATUS_OF_KIND.get(name) for name in (code, error.get("type")) if type(name) is str]
    return next((status for status in named if status is not None), 500)
