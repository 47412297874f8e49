"""Is an answer good, or one to replace unseen? Judged by its status and its first event."""

from __future__ import annotations

import orjson

from proxy.core.types import FailureKind
from proxy.net.upstream.response import UpstreamResponse
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.sse import CARRY_BYTES, first_event, is_error_event

BUSY_STATUSES = frozenset({429, 503, 529})
ERROR_BODY_BYTES = 65536
_NOT_MODIFIED, _NOT_FOUND = 304, 404
_ANSWERS = frozenset({501, 505})
"""Server errors that answer the request: any other instance would say the same."""


def is_plainly_good(reply: UpstreamResponse) -> bool:
    """Whether nothing more has to be looked at: an answer that is no stream and no refusal."""
    return reply.status < 300 and not reply.is_stream


async def look_at(reply: UpstreamResponse) -> None:
    """Judge an answer by its status and first event; raises UpstreamFailure for one to replace."""
    await _look_at_status(reply)
    if not reply.is_stream:
        return
    head = b"".join(reply.body)
    while (event := first_event(head)) is None and len(head) < CARRY_BYTES:
        if not await reply.more():
            raise UpstreamFailure(FailureKind.RESET, "the stream ended before its first event")
        head = b"".join(reply.body)
    if event is not None and is_error_event(event):
        failure = in_band_error(event)
        if failure.kind is FailureKind.BUSY or (failure.status or 0) >= 500:
            raise failure  # the client's own error is the answer, and stays as it is


async def _look_at_status(reply: UpstreamResponse) -> None:
    status = reply.status
    if status in BUSY_STATUSES or (status >= 500 and status not in _ANSWERS):
        raise await _refusal(reply)
    if 300 <= status < 400 and status != _NOT_MODIFIED:
        raise UpstreamFailure(FailureKind.MALFORMED, f"a redirection (status {status})")
    if status == _NOT_FOUND:
        await _look_for_model(reply)


async def _look_for_model(reply: UpstreamResponse) -> None:
    """Of a 404, whether it denies the model; what was read of any other one is passed on."""
    body = await reply.read(ERROR_BODY_BYTES)
    if b"model" in body and b"does not exist" in body:
        raise UpstreamFailure(
            FailureKind.NO_MODEL,
            "it does not serve the model",
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
    """An engine error inside a 200: before any content as good as an error status."""
    body = event[event.find(b"{") :]
    try:
        error = orjson.loads(body).get("error")
    except (orjson.JSONDecodeError, AttributeError):
        error = None
    code = error.get("code") if isinstance(error, dict) else None
    is_status = isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600
    status = code if is_status else 500
    kind = FailureKind.BUSY if status in BUSY_STATUSES else FailureKind.SERVER_ERROR
    headers = {"Content-Type": "application/json"}
    detail = f"error event (code {status})"
    return UpstreamFailure(kind, detail, status=status, body=body, headers=headers)
