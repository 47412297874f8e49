"""Is an answer good, or one to replace unseen? Judged by its status and its first event."""

from __future__ import annotations

import orjson

from proxy.answer import Reply
from proxy.core.sse import CARRY_BYTES, first_event, is_error_event
from proxy.core.types import FailureKind
from proxy.errors import UpstreamFailure

BUSY_STATUSES = frozenset({429, 503, 529})
ERROR_BODY_BYTES = 65536


def is_plainly_good(reply: Reply) -> bool:
    """Whether nothing more has to be looked at: an answer that is no stream and no refusal."""
    return reply.status < 500 and not reply.is_stream and reply.status not in BUSY_STATUSES


async def look_at(reply: Reply) -> None:
    """Judge an answer by its status and first event; raises UpstreamFailure for one to replace."""
    if reply.status in BUSY_STATUSES or reply.status >= 500:
        raise await _refusal(reply)
    if not reply.is_stream:
        return
    head = b"".join(reply.body)
    while (event := first_event(head)) is None and len(head) < CARRY_BYTES:
        if not await reply.more():
            raise UpstreamFailure(FailureKind.RESET, "the stream ended before its first event")
        head = b"".join(reply.body)
    if event is not None and is_error_event(event):
        raise in_band_error(event)


async def _refusal(reply: Reply) -> UpstreamFailure:
    kind = FailureKind.BUSY if reply.status in BUSY_STATUSES else FailureKind.SERVER_ERROR
    try:
        body = await reply.read(ERROR_BODY_BYTES)
    except UpstreamFailure:
        body = b""
    names = ((b"content-type", "Content-Type"), (b"retry-after", "Retry-After"))
    found = ((shown, reply.header(name)) for name, shown in names)
    return UpstreamFailure(
        kind,
        f"status {reply.status}",
        status=reply.status,
        body=body,
        headers={shown: value.decode("latin-1") for shown, value in found if value is not None},
    )


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
    headers = {"Content-Type": "application/json"}
    return UpstreamFailure(
        FailureKind.SERVER_ERROR,
        f"error event (code {status})",
        status=status,
        body=body,
        headers=headers,
    )
